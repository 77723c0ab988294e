"""Bring studies into the documents: their pages, curves and figures, and the tables of results.md.

    segcredit study table1 fig4 --scale mini --jobs 12    # what is to be told
    python docs/make_results.py studies               # docs/results/NAME/, and results.md's tables
    python docs/make_results.py held-out --suffix=-held-out    # other seeds
    python docs/make_results.py fifth --suffix=-fifth          # a round beside another one's
    python docs/make_results.py sixth --prefix=chain- --only two    # one study of a folder
    python docs/make_results.py                       # only update marks and tables

What stands in results.md between ``<!-- NAME -->`` and ``<!-- end -->`` is replaced by that study's
table of results, the rest of the page stays as it was written. ``NAME cost`` is its second table,
``NAME lift`` its last; ``NAME rounds`` puts the differences of ``NAME-first``, ``-second``, … and
``NAME`` side by side; ``NAME NAME … beside``, ``steady`` and ``rates`` are side_by_side.py's.
The block ``corrections`` lists the entries of segcredit/study/corrections.yaml that apply. Rows of
arms that were run before a correction are marked † until they are run again.
"""

import argparse
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from side_by_side import MARK, beside, pending, rates, rows_of, steady

from segcredit_lab.study import load_study
from segcredit_lab.study.definition import corrections
from segcredit_lab.study.summary import estimate
from segcredit_lab.study.tables import Table, markdown, percent_text

HERE = Path(__file__).resolve().parent
KEPT = ("study.csv", "runs.csv", "curves.csv", "times.csv", "study.tex")
BLOCK = re.compile(
    r"(<!-- (?P<names>[\w-]+(?: [\w-]+)*?)"
    r"(?P<what> cost| lift| rounds| beside| steady| rates)? -->\n)"
    r".*?(<!-- end -->)",
    re.DOTALL,
)
ROUNDS = ("first", "second", "third", "fourth", "fifth", "sixth")
"""Of a study that was made more than once; in ``NAME-first``, … but for one of them:"""
MAIN = {"table1": "fifth"}
"""The round that is in ``NAME`` itself."""
SIDE_BY_SIDE = {"beside": beside, "steady": steady, "rates": rates}
TABLE = re.compile(r"(?:^\|.*\|\n)+", re.MULTILINE)
NOTE = f"{MARK} Run before a [correction]({{}}#corrected-since) of the method, not repeated yet."
NOTED = re.compile(rf"^{MARK} .*\n\n?", re.MULTILINE)
MARKED = re.compile(rf" {MARK}(?= (?:\||&))|\$\^\\dagger\$(?= &)")


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


def mark_rows(table: str, labels: Iterable[str]) -> str:
    """Add a mark after these labels in the rows of a Markdown or LaTeX table."""
    for label in labels:
        escaped = re.escape(label.replace("|", "\\|"))
        table = re.sub(rf"^(\| {escaped}) \|", rf"\1 {MARK} |", table, flags=re.MULTILINE)
        table = re.sub(rf"^({re.escape(label)}) &", r"\1$^\\dagger$ &", table, flags=re.MULTILINE)
    return table


def mark_pages(place: Path) -> None:
    """Mark arms that were run before a correction in a study's page and LaTeX."""
    labels = pending(place.name)
    tex = MARKED.sub("", (place / "study.tex").read_text())
    (place / "study.tex").write_text(mark_rows(tex, labels))
    page = MARKED.sub("", NOTED.sub("", (place / "study.md").read_text()))
    if labels:
        note = NOTE.format("../../results.md")
        page = TABLE.sub(lambda table: f"{table[0]}\n{note}\n", mark_rows(page, labels), count=1)
        page = page.replace("## Figures\n\n", f"## Figures\n\n{note} Figures have no mark.\n\n", 1)
    (place / "study.md").write_text(page)


def corrected() -> str:
    """Make the table of corrections that published results do not include yet."""
    rows = []
    for correction in corrections():
        found = []
        for place in sorted((HERE / "results").glob("*/study.csv")):
            name = place.parent.name
            arms = [label for label, x in pending(name).items() if correction in x]
            if arms:
                found.append(f"[{name}](results/{name}/study.md): {', '.join(arms)}")
        if found:
            rows.append((correction.what, "; ".join(found), correction.since))
    if not rows:
        return "Every result here includes every correction.\n"
    return markdown(Table(("what is different now", "run before it", "since commit"), tuple(rows)))


def rounds(name: str) -> str:
    """Differences paired by seed in each round, over the pairs of all, and over rounds.

    To the reference; and from one horizon to another, where a study has both (``x_long``, ``x``).
    """
    made = {x: HERE / "results" / (name if MAIN.get(name) == x else f"{name}-{x}") for x in ROUNDS}
    places = {x: place for x, place in made.items() if place.is_dir()}
    labels: dict[str, str] = {}
    areas: list[dict[str, dict[int, float]]] = []
    for place in places.values():
        labels |= {row["arm"]: row["label"] for row in rows_of(place / "study.csv")}
        areas.append({})
        for row in rows_of(place / "runs.csv"):
            areas[-1].setdefault(row["arm"], {})[int(row["seed"])] = float(row["area"])
    reference = load_study(name).reference
    asked = [(arm, reference) for arm in labels if arm != reference]
    asked += [(f"{arm}_long", arm) for arm in labels if f"{arm}_long" in labels]
    rows = []
    for arm, other in asked:
        each = [
            [own[seed] - x[other][seed] for seed in own if seed in x[other]]
            for x in areas
            for own in [x.get(arm, {})]
        ]
        pairs = [value for values in each for value in values]
        found = [*map(estimate, each), estimate(pairs)]
        means = estimate([x.mean for x in found[:-1]])
        label = labels[arm] if other == reference else f"{labels[arm]} − {labels[other]}"
        texts = [percent_text(x, "+") for x in found]
        over = percent_text(means, "+") if means.num > 2 else "–"
        rows.append((label, *texts, str(len(pairs)), over))
    columns = ("", *places, "all pairs", "pairs", "rounds as the unit")
    old = {label for place in places.values() for label in pending(place.name)}
    return mark_rows(markdown(Table(columns, tuple(rows))), old)


def fill(text: str) -> str:
    """A page with every table between its marks as docs/results has it now."""

    def filled(block: re.Match[str]) -> str:
        names, what = block["names"].split(), (block["what"] or "").strip()
        if names == ["corrections"]:
            return f"{block[1]}{corrected()}{block[4]}"
        pages = [HERE / "results" / name / "study.md" for name in names]
        if not all(page.is_file() for page in pages):
            return block[0]
        if what in SIDE_BY_SIDE:
            table = SIDE_BY_SIDE[what](names)
        elif what == "rounds":
            table = rounds(names[0])
        else:
            table = TABLE.findall(pages[0].read_text())[{"": 0, "cost": 1, "lift": -1}[what]]
        note = f"\n{NOTE.format('')}\n" if MARK in table else ""
        return f"{block[1]}{table}{note}{block[4]}"

    return BLOCK.sub(filled, text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("studies", type=Path, nargs="?", help="the folder of segcredit study")
    parser.add_argument("--scale", default="mini")
    parser.add_argument("--suffix", default="", help="of the names, to tell two folders apart")
    parser.add_argument("--prefix", default="", help="likewise, before the name")
    parser.add_argument("--only", action="append", default=[], help="a study of the folder")
    asked = parser.parse_args()
    if asked.studies is not None:
        found = sorted(asked.studies.glob(f"*-{asked.scale}/study.md"))
        if asked.only:
            found = [asked.studies / f"{x}-{asked.scale}" / "study.md" for x in asked.only]
        if not found or not all(page.is_file() for page in found):
            parser.error(f"no such study of scale {asked.scale} in {asked.studies}")
        for page in found:
            own = page.parent.name.removesuffix(f"-{asked.scale}")
            name = f"{asked.prefix}{own}{asked.suffix}"
            bring(page.parent, HERE / "results" / name)
            print(f"docs/results/{name}")
    for place in sorted((HERE / "results").glob("*/study.csv")):
        mark_pages(place.parent)
    results = HERE / "results.md"
    results.write_text(fill(results.read_text()))
    print(results)


if __name__ == "__main__":
    main()
