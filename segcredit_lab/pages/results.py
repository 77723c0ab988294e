"""Copy studies into the documentation, and update the tables of its result pages.

    segcredit study table1 fig4 --scale mini --jobs 12               # run the studies
    python -m segcredit_lab.pages.results studies                    # copy and update all pages
    python -m segcredit_lab.pages.results held-out --suffix=-held-out           # other seeds
    python -m segcredit_lab.pages.results fifth --suffix=-fifth                 # another round
    python -m segcredit_lab.pages.results seventh --suffix=-seventh --only table1
    python -m segcredit_lab.pages.results sixth --prefix=chain- --only two      # one study
    python -m segcredit_lab.pages.results                            # only update marks and tables

The pages are docs/results.md (the summary) and docs/results/*.md (one per study, and the appendix).
Text between ``<!-- NAME -->`` and ``<!-- end -->`` is replaced by that study's table of results;
the rest of a page is kept. ``NAME question`` is its question with its seeds and a link to its
page, ``NAME cost`` its second table, ``NAME lift`` its last. ``NAME rounds`` compares the
differences of ``NAME-first``, ``-second``, … and ``NAME``. ``NAME NAME … compared``, ``steady`` and
``rates`` compare several studies with the same arms. The block ``summary`` is the table of
COMPARED. The block ``corrections`` lists the entries of segcredit_lab/study/corrections.yaml that
apply. Rows of arms that were run before a correction, or their cells in the summary and in
``rounds``, are marked †. If another round has run such an arm again, its row is added to the table,
with the reference of that round.
"""

import argparse
import csv
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from segcredit.printable import number_text
from segcredit_lab.analysis.reading import Table
from segcredit_lab.study import load_study
from segcredit_lab.study.definition import Correction, corrections, corrections_of
from segcredit_lab.study.summary import Estimate, estimate
from segcredit_lab.study.tables import markdown, percent_text

DOCS = Path(__file__).resolve().parents[2] / "docs"
RESULTS = DOCS / "results"
MEASURES = {"area": "over the curve", "final": "at the end"}
MARK = "†"
"""Mark of arms that were run before a correction of their method."""
FALL = 0.2
"""Drop of accuracy between two evaluations above which a run is not steady."""
TASKS = ("images", "text", "text with choices")
OWN = "with their own settings"
MATCHED = "with λ matched to SAPO's"
SHORT = "SAPO with λ matched to PPO's"
COMPARED: list[tuple[str, str, tuple[str | None, str | None, str | None]]] = [
    (OWN, "PPO", ("table1 ppo", "fig4 ppo", "choices ppo")),
    (OWN, "VC-PPO", ("table1 vc_ppo", None, "choices-fifth vc_ppo")),
    (OWN, "GRPO, equally many responses", ("table1-seventh grpo", "fig4 grpo", "choices grpo")),
    (OWN, "GRPO, 8 × the responses", ("table1-seventh grpo_prompts", None, None)),
    (MATCHED, "PPO, λ = .997", ("table1 ppo_long", "lambda ppo_long", "choices ppo_long")),
    (MATCHED, "VC-PPO, λ = .997", ("table1 vc_ppo_long", None, "choices-fifth vc_ppo_long")),
    (
        MATCHED,
        "tokens as segments",
        ("table1 token_long", "lambda token_long", "choices token_long"),
    ),
    (SHORT, "SAPO, λ = .843", ("table1 sapo_short", "lambda segment_short", "choices sapo_short")),
]
"""Kind, label, and study and arm for each task; None: not run."""
RATES = {0.5: "half SAPO's learning rate", 1.0: "", 2.0: "twice SAPO's learning rate"}
"""Note on a difference, by the ratio of the method's tuned learning rate to SAPO's."""
TRIED = re.compile(r"^\| (?P<label>.+) \| (?P<rate>[\d.e-]+) \| (?P<area>[\d.]+) \| ", re.MULTILINE)
KEPT = ("study.csv", "runs.csv", "curves.csv", "times.csv", "study.tex")
BLOCK = re.compile(
    r"(<!-- (?P<names>[\w-]+(?: [\w-]+)*?)"
    r"(?P<what> question| cost| lift| rounds| compared| steady| rates)? -->\n)"
    r".*?(<!-- end -->)",
    re.DOTALL,
)
ROUNDS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh")
"""Rounds of a study that was repeated, in ``NAME-first``, …"""
MAIN = {"table1": "fifth", "fig4": "seventh"}
"""Round that is stored in ``NAME`` itself."""
TABLE = re.compile(r"(?:^\|.*\|\n)+", re.MULTILINE)
APPENDIX = "appendix.md"
INCLUDES = (
    f"{MARK} Includes runs before a [correction]({{}}{APPENDIX}#corrected-since) of the method."
)
NOTED = re.compile(rf"^{MARK} .*\n\n?", re.MULTILINE)
MARKED = re.compile(rf" {MARK}(?= (?:\||&))|\$\^\\dagger\$(?= &)")


def rows_of(path: Path) -> list[dict[str, str]]:
    """Read the rows of a CSV file."""
    return [*csv.DictReader(path.read_text().splitlines())]


def pending(name: str) -> dict[str, tuple[Correction, ...]]:
    """Return the corrections made after a study's results were computed, by label of the arm."""
    found = {}
    for row in rows_of(RESULTS / name / "study.csv"):
        included = (row.get("corrections") or "").split()
        of_arm = corrections_of(row["study"], row["arm"])
        if missing := tuple(x for x in of_arm if x.name not in included):
            found[row["label"]] = missing
    return found


def repetition(study: str, arm: str) -> str | None:
    """Return the results in which this arm includes every correction; None if there are none."""
    for path in sorted(RESULTS.glob(f"{study}*/study.csv")):
        for row in rows_of(path):
            if (row["study"], row["arm"]) == (study, arm) and row["label"] not in pending(
                path.parent.name
            ):
                return path.parent.name
    return None


def note(names: Iterable[str], folder: str = "") -> str:
    """Explain the marks of these studies, and where their arms were run again."""
    places = {
        repetition(row["study"], row["arm"])
        for name in names
        for row in rows_of(RESULTS / name / "study.csv")
        if row["label"] in pending(name)
    }
    links = [f"[{x}]({folder}{x}/study.md)" for x in sorted(x for x in places if x)]
    again = ["not repeated yet"] if None in places else []
    again += [f"repeated in {', '.join(links)}"] if links else []
    return (
        f"{MARK} Run before a [correction]({folder}{APPENDIX}#corrected-since) of the method, "
        f"{' or '.join(again)}."
    )


def with_repetitions(table: str, name: str, number: int) -> str:
    """Add to a study's table the rows of marked arms that were run again, and their reference.

    Args:
        number: Position of the table on the studies' pages.
    """
    places = defaultdict[str, list[str]](list)
    for row in rows_of(RESULTS / name / "study.csv"):
        place = repetition(row["study"], row["arm"]) if row["label"] in pending(name) else None
        if place is not None:
            places[place].append(row["label"])
    for place, labels in places.items():
        head, _, *rows = TABLE.findall((RESULTS / place / "study.md").read_text())[number].split(
            "\n"
        )
        if head != table.split("\n", 1)[0]:
            raise ValueError(f"{place} and {name} must have tables with the same columns")
        reference = _arms(place)[0]["label"]
        for label in (reference, *labels):
            (row,) = [x for x in rows if x.startswith(f"| {label} |")]
            table += row.replace(f"| {label} |", f"| {label}, {_round(place)} |", 1) + "\n"
    return table


def _round(place: str) -> str:
    """Name the round of a study's results."""
    return next((f"{x} round" for x in ROUNDS if place.endswith(f"-{x}")), "run again")


def arms_of(name: str) -> dict[str, dict[str, str]]:
    """Return the rows of a study's arms by name."""
    return {row["arm"]: row for row in rows_of(RESULTS / name / "study.csv")}


def estimated(row: dict[str, str], what: str, scale: float = 1.0) -> Estimate:
    """Read a number of an arm and its interval from its row."""
    mean, low, high = (scale * float(row[f"{what}{end}"]) for end in ("", "_low", "_high"))
    return Estimate(mean, low, high, len(row["seeds"].split()))


def difference(place: str) -> tuple[Estimate, str]:
    """Return an arm's difference to SAPO (mean over the curve, in points) and a note on its rate.

    ``place`` names the study and the arm: "table1 ppo".
    """
    study, arm = place.split()
    rows = arms_of(study)
    row, reference = rows[arm], rows[load_study(rows[arm]["study"]).reference]
    ratio = float(row["learning_rate"]) / float(reference["learning_rate"])
    return estimated(row, "area_difference", 100), RATES[ratio]


def is_pending(place: str) -> bool:
    """Whether the arm's method was corrected after its published results were computed."""
    study, arm = place.split()
    return arms_of(study)[arm]["label"] in pending(study)


def summary() -> str:
    """Make a table of differences to SAPO on the three tasks, with the number of seeds."""
    rows = []
    for _, label, places in COMPARED:
        cells = []
        for place in places:
            if place is None:
                cells.append("not run")
                continue
            found, note = difference(place)
            numbers = [number_text(x, "+.1f") for x in (found.mean, found.low, found.high)]
            text = f"{numbers[0]} ({numbers[1]} … {numbers[2]}), n={found.num}"
            text += f", {note}" if note else ""
            cells.append(f"{text} {MARK}" if is_pending(place) else text)
        rows.append((label, *cells))
    return markdown(Table(("", *TASKS), tuple(rows)))


def compared(names: list[str], folder: str = "") -> str:
    """Make a table with one study per row: starting accuracy, reference arm, differences."""
    rows = []
    for name in names:
        own, *others = _arms(name)
        rates = ", ".join(f"{float(x['learning_rate']):.3g}" for x in [own, *others])
        rows.append(
            (
                _link(name, folder),
                str(len(own["seeds"].split())),
                number_text(100 * float(own["start"]), ".1f"),
                number_text(float(own["explained_before"]), ".2f"),
                rates,
                percent_text(estimated(own, "area")),
                *(
                    percent_text(estimated(x, f"{what}_difference"), "+")
                    for x in others
                    for what in MEASURES
                ),
            )
        )
    first, *labels = _labels(names)
    heads = [f"{x}: {text}" for x in labels for text in MEASURES.values()]
    return markdown(Table(("", "seeds", "start", "critic", "rates", first, *heads), tuple(rows)))


def steady(names: list[str], folder: str = "") -> str:
    """Make a table of differences over the curve, without runs whose accuracy fell by FALL.

    A run is left out if its accuracy falls by that much from one evaluation to the next. The
    columns "pairs" count the pairs of runs with equal seeds that remain.
    """
    rows = []
    for name in names:
        curves = defaultdict[tuple[str, str], list[float]](list)
        for row in rows_of(RESULTS / name / "curves.csv"):
            curves[row["arm"], row["seed"]].append(float(row["accuracy"]))
        areas = defaultdict[str, dict[str, float]](dict)
        for row in rows_of(RESULTS / name / "runs.csv"):
            curve = curves[row["arm"], row["seed"]]
            if all(x - y < FALL for x, y in pairwise(curve)):
                areas[row["arm"]][row["seed"]] = float(row["area"])
        own, *others = (areas[x["arm"]] for x in _arms(name))
        each = [estimate([x[seed] - own[seed] for seed in x if seed in own]) for x in others]
        cells = [cell for x in each for cell in (percent_text(x, "+"), str(x.num))]
        rows.append((_link(name, folder), percent_text(estimate([*own.values()])), *cells))
    first, *labels = _labels(names)
    heads = [head for label in labels for head in (label, "pairs")]
    return markdown(Table(("", first, *heads), tuple(rows)))


def rates(names: list[str], folder: str = "") -> str:
    """Make a table of differences to the reference by learning rate, on the tuning seeds."""
    first, *labels = _labels(names)
    rows = []
    for name in names:
        page = (RESULTS / name / "study.md").read_text().partition("## Learning rates")[2]
        tried = {(x["label"], x["rate"]): float(x["area"]) for x in TRIED.finditer(page)}
        known = [rate for label, rate in tried if label == first]
        cells = [
            ", ".join(number_text(tried[x, rate] - tried[first, rate], "+.1f") for x in labels)
            for rate in known
        ]
        rows.append((_link(name, folder), *cells))
    return markdown(Table(("", *known), tuple(rows)))


def _arms(name: str) -> list[dict[str, str]]:
    """Return the arms of a study, the reference first (its difference to itself is 0)."""
    return sorted(arms_of(name).values(), key=lambda row: float(row["area_difference_high"]) != 0)


def _labels(names: list[str]) -> list[str]:
    each = [[row["label"] for row in _arms(name)] for name in names]
    if any(x != each[0] for x in each):
        raise ValueError(f"compared studies must have the same arms; got {each}")
    return each[0]


def _link(name: str, folder: str) -> str:
    """Link to a study's page; the text is the last part of the study's title."""
    title = (RESULTS / name / "study.md").read_text().splitlines()[0]
    return f"[{title.rpartition(', ')[2]}]({folder}{name}/study.md)"


def copy_study(study: Path, place: Path) -> None:
    """Copy one study's folder, with figures as SVG only."""
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
        said = note([place.name], "../")
        page = TABLE.sub(lambda table: f"{table[0]}\n{said}\n", mark_rows(page, labels), count=1)
        page = page.replace("## Figures\n\n", f"## Figures\n\n{said} Figures have no mark.\n\n", 1)
    (place / "study.md").write_text(page)


def question(name: str) -> str:
    """Return a study's question and seeds, and where its costs, rates and numbers are."""
    page = (RESULTS / name / "study.md").read_text()
    asked = page.split("\n\n")[1].replace(" Scale ", "\n\nScale ", 1).rstrip(".")
    files = f"[all tables and figures]({name}/study.md), [runs]({name}/runs.csv)"
    return f"{asked}: {files}, [curves]({name}/curves.csv).\n"


def corrected(folder: str = "") -> str:
    """Make a table of the corrections that published results do not include yet."""
    rows = []
    for correction in corrections():
        found = []
        for place in sorted(RESULTS.glob("*/study.csv")):
            name = place.parent.name
            arms = [label for label, x in pending(name).items() if correction in x]
            if arms:
                found.append(f"[{name}]({folder}{name}/study.md): {', '.join(arms)}")
        if found:
            pairs = [(study, arm) for study, arms in correction.arms.items() for arm in arms]
            again = sorted({x for x in (repetition(*pair) for pair in pairs) if x is not None})
            links = ", ".join(f"[{x}]({folder}{x}/study.md)" for x in again) or "–"
            rows.append((correction.what, "; ".join(found), links, correction.since))
    if not rows:
        return "Every result here includes every correction.\n"
    columns = ("what is different now", "run before it", "run since", "since commit")
    return markdown(Table(columns, tuple(rows)))


def rounds(name: str) -> str:
    """Make a table of paired differences in each round, over all pairs, and over rounds.

    Differences are to the reference, and between two horizons if a study has both (``x_long``,
    ``x``).
    """
    made = {x: RESULTS / (name if MAIN.get(name) == x else f"{name}-{x}") for x in ROUNDS}
    places = {x: place for x, place in made.items() if place.is_dir()}
    labels: dict[str, str] = {}
    areas: list[dict[str, dict[int, float]]] = []
    old = [
        {x["arm"] for x in rows_of(place / "study.csv") if x["label"] in pending(place.name)}
        for place in places.values()
    ]
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
        marks = [f" {MARK}" * (arm in arms) for arms in old]
        marks.append(f" {MARK}" * any(marks))
        texts = [percent_text(x, "+") + mark for x, mark in zip(found, marks, strict=True)]
        over = percent_text(means, "+") + marks[-1] if means.num > 2 else "–"
        rows.append((label, *texts, str(len(pairs)), over))
    columns = ("", *places, "all pairs", "pairs", "rounds as the unit")
    return markdown(Table(columns, tuple(rows)))


def fill(text: str, folder: str = "") -> str:
    """Replace every marked table of a page by the current one of docs/results.

    ``folder`` is the path from the page to docs/results: "" for a page in it, "results/" above it.
    """
    side_by_side = {"compared": compared, "steady": steady, "rates": rates}

    def filled(block: re.Match[str]) -> str:
        names, what = block["names"].split(), (block["what"] or "").strip()
        if names == ["corrections"]:
            return f"{block[1]}{corrected(folder)}{block[4]}"
        pages = [RESULTS / name / "study.md" for name in names]
        if names == ["summary"]:
            table = summary()
        elif not all(page.is_file() for page in pages):
            return block[0]
        elif what in side_by_side:
            table = side_by_side[what](names, folder)
        elif what == "rounds":
            table = rounds(names[0])
        elif what == "question":
            table = question(names[0])
        else:
            number = {"": 0, "cost": 1, "lift": -1}[what]
            table = TABLE.findall(pages[0].read_text())[number]
            if what != "lift":
                table = with_repetitions(table, names[0], number)
        said = ""
        if MARK in table:
            marked = names
            if names == ["summary"]:
                marked = [
                    x.split()[0] for *_, places in COMPARED for x in places if x and is_pending(x)
                ]
            said = f"\n{INCLUDES.format(folder) if what == 'rounds' else note(marked, folder)}\n"
        return f"{block[1]}{table}{said}{block[4]}"

    return BLOCK.sub(filled, text)


def written_pages() -> dict[Path, str]:
    """Return every page with generated tables, and its path to docs/results."""
    return {DOCS / "results.md": "results/"} | dict.fromkeys(sorted(RESULTS.glob("*.md")), "")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("studies", type=Path, nargs="?", help="folder of segcredit study")
    parser.add_argument("--scale", default="mini")
    parser.add_argument("--suffix", default="", help="suffix of the names in docs/results")
    parser.add_argument("--prefix", default="", help="prefix of the names in docs/results")
    parser.add_argument("--only", action="append", default=[], help="copy only this study")
    options = parser.parse_args()
    if options.studies is not None:
        found = sorted(options.studies.glob(f"*-{options.scale}/study.md"))
        if options.only:
            found = [options.studies / f"{x}-{options.scale}" / "study.md" for x in options.only]
        if not found or not all(page.is_file() for page in found):
            parser.error(f"no such study of scale {options.scale} in {options.studies}")
        for page in found:
            own = page.parent.name.removesuffix(f"-{options.scale}")
            name = f"{options.prefix}{own}{options.suffix}"
            copy_study(page.parent, RESULTS / name)
            print(f"docs/results/{name}")
    for place in sorted(RESULTS.glob("*/study.csv")):
        mark_pages(place.parent)
    for page, folder in written_pages().items():
        page.write_text(fill(page.read_text(), folder))
        print(page)


if __name__ == "__main__":
    main()
