"""Bring studies into the documents: their pages, curves and figures, and the tables of results.md.

    segcredit study table1 fig4 --scale mini --jobs 12    # what is to be told
    python docs/make_results.py studies               # docs/results/NAME/, and results.md's tables
    python docs/make_results.py held-out --suffix=-held-out

What stands in results.md between ``<!-- NAME -->`` and ``<!-- end -->`` is replaced by that study's
table of results, the rest of the page stays as it was written. ``NAME cost`` is its second table,
``NAME lift`` its last; ``NAME rounds`` puts the differences of ``NAME-first``, ``-second``, … and
``NAME`` side by side.
"""

import argparse
import csv
import re
import shutil
from pathlib import Path

from segcredit.study.summary import Estimate, estimate
from segcredit.study.tables import Table, markdown

HERE = Path(__file__).resolve().parent
KEPT = ("study.csv", "runs.csv", "curves.csv", "times.csv", "study.tex")
BLOCK = re.compile(
    r"(<!-- (?P<name>[\w-]+)(?P<what> cost| lift| rounds)? -->\n).*?(<!-- end -->)", re.DOTALL
)
ROUNDS = ("first", "second", "third")
"""Of a study that was made more than once; the last one has no such name."""
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


def rounds(name: str) -> str:
    """Differences to the reference in each round, paired by seed, and over the pairs of all."""
    labels: dict[str, str] = {}
    found: list[dict[str, list[float]]] = []
    for place in [*(HERE / "results" / f"{name}-{x}" for x in ROUNDS), HERE / "results" / name]:
        arms = [*csv.DictReader((place / "study.csv").open())]
        labels |= {row["arm"]: row["label"] for row in arms}
        areas: dict[str, dict[str, float]] = {}
        for row in csv.DictReader((place / "runs.csv").open()):
            areas.setdefault(row["arm"], {})[row["seed"]] = float(row["area"])
        reference = areas.pop(next(row["arm"] for row in arms if row["area_difference"] == "0"))
        found.append(
            {arm: [100 * (x - reference[s]) for s, x in own.items()] for arm, own in areas.items()}
        )

    def told(values: list[float]) -> str:
        return "–" if not values else difference(estimate(values))

    rows = []
    for arm, label in labels.items():
        each = [x.get(arm, []) for x in found]
        if pairs := [value for values in each for value in values]:
            rows.append((label, *map(told, each), told(pairs), str(len(pairs))))
    columns = ("", *(x for x in ROUNDS), "fourth", "all", "pairs")
    return markdown(Table(columns, tuple(rows)))


def difference(found: Estimate) -> str:
    """As the tables of results have it."""
    text = f"{found.mean:+.1f} ({found.low:+.1f} … {found.high:+.1f})"
    return text.replace("-", "−")


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
        if block["what"] == " rounds":
            return f"{block[1]}{rounds(block['name'])}{block[4]}"
        tables = TABLE.findall(page.read_text())
        place = {None: 0, " cost": 1, " lift": -1}[block["what"]]
        return f"{block[1]}{tables[place]}{block[4]}"

    results.write_text(BLOCK.sub(filled, results.read_text()))
    print(results)


if __name__ == "__main__":
    main()
