"""Bring studies into the documents: their pages, curves and figures, and the tables of results.md.

    segcredit study table1 fig4 --scale mini --jobs 12    # what is to be told
    python docs/make_results.py studies               # docs/results/NAME/, and results.md's tables
    python docs/make_results.py held-out --suffix=-held-out

What stands in results.md between ``<!-- NAME -->`` and ``<!-- end -->`` is replaced by that study's
table of results, the rest of the page stays as it was written. ``NAME cost`` is its second table.
"""

import argparse
import re
import shutil
from pathlib import Path

HERE = Path(__file__).resolve().parent
KEPT = ("study.csv", "runs.csv", "curves.csv", "times.csv", "study.tex")
BLOCK = re.compile(r"(<!-- (?P<name>[\w-]+)(?P<cost> cost)? -->\n).*?(<!-- end -->)", re.DOTALL)
TABLE = re.compile(r"(?:^\|.*\|\n)+", re.MULTILINE)


def bring(study: Path, place: Path) -> None:
    """One study's folder: drawings as SVG alone, which show the same and are small."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    page = (study / "study.md").read_text()
    for drawn in sorted({*re.findall(r"\]\((\w+)\.png\)", page)}):
        shutil.copy(study / f"{drawn}.svg", place)
    (place / "study.md").write_text(page.replace(".png)", ".svg)"))
    for name in KEPT:
        shutil.copy(study / name, place)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("studies", type=Path, help="the folder of segcredit study")
    parser.add_argument("--scale", default="mini")
    parser.add_argument("--suffix", default="", help="of the names, to tell two folders apart")
    asked = parser.parse_args()
    found = sorted(asked.studies.glob(f"*-{asked.scale}/study.md"))
    if not found:
        parser.error(f"no study of scale {asked.scale} in {asked.studies}")
    for page in found:
        name = page.parent.name.removesuffix(f"-{asked.scale}") + asked.suffix
        bring(page.parent, HERE / "results" / name)
        print(f"docs/results/{name}")
    results = HERE / "results.md"

    def filled(block: re.Match[str]) -> str:
        page = HERE / "results" / block["name"] / "study.md"
        if not page.is_file():
            return block[0]
        tables = TABLE.findall(page.read_text())
        return f"{block[1]}{tables[1 if block['cost'] else 0]}{block[4]}"

    results.write_text(BLOCK.sub(filled, results.read_text()))
    print(results)


if __name__ == "__main__":
    main()
