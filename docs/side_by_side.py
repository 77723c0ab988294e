"""Tables of several studies that have the same arms, a row each: for docs/make_results.py."""

import csv
import re
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

from segcredit.printable import number_text
from segcredit_lab.study.definition import Correction, corrections_of
from segcredit_lab.study.summary import Estimate, estimate
from segcredit_lab.study.tables import Table, markdown, percent_text

RESULTS = Path(__file__).resolve().parent / "results"
MEASURES = {"area": "over the curve", "final": "at the end"}
MARK = "†"
"""Mark of arms that were run before a correction of their method."""
FALL = 0.2
"""Of accuracy, from one evaluation to the next: a run that falls so far is not steady."""
TRIED = re.compile(r"^\| (?P<label>.+) \| (?P<rate>[\d.e-]+) \| (?P<area>[\d.]+) \| ", re.MULTILINE)


def rows_of(path: Path) -> list[dict[str, str]]:
    """A CSV file's."""
    return [*csv.DictReader(path.read_text().splitlines())]


def pending(name: str) -> dict[str, tuple[Correction, ...]]:
    """Corrections that a study's results do not include yet, by label of the arm."""
    found = {}
    for row in rows_of(RESULTS / name / "study.csv"):
        included = (row.get("corrections") or "").split()
        of_arm = corrections_of(row["study"], row["arm"])
        if missing := tuple(x for x in of_arm if x.name not in included):
            found[row["label"]] = missing
    return found


def beside(names: list[str]) -> str:
    """How each study begins, the reference's accuracy, and the other arms' differences to it."""
    rows = []
    for name in names:
        own, *others = _arms(name)
        rates = ", ".join(f"{float(x['learning_rate']):.3g}" for x in [own, *others])
        rows.append(
            (
                _link(name),
                str(len(own["seeds"].split())),
                number_text(100 * float(own["start"]), ".1f"),
                number_text(float(own["explained_before"]), ".2f"),
                rates,
                _stated(own, "area"),
                *(_stated(x, f"{what}_difference", "+") for x in others for what in MEASURES),
            )
        )
    own, *others = _labels(names)
    heads = [f"{x}: {told}" for x in others for told in MEASURES.values()]
    return markdown(Table(("", "seeds", "start", "critic", "rates", own, *heads), tuple(rows)))


def steady(names: list[str]) -> str:
    """Differences over the curve without runs that fall, and how many pairs of seeds are left."""
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
        rows.append((_link(name), percent_text(estimate([*own.values()])), *cells))
    first, *labels = _labels(names)
    heads = [head for label in labels for head in (label, "pairs")]
    return markdown(Table(("", first, *heads), tuple(rows)))


def rates(names: list[str]) -> str:
    """Differences to the reference at each rate that was tried, on the tuning seeds."""
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
        rows.append((_link(name), *cells))
    return markdown(Table(("", *known), tuple(rows)))


def _arms(name: str) -> list[dict[str, str]]:
    """A study's, the reference first: it differs from itself by nothing."""
    found = rows_of(RESULTS / name / "study.csv")
    return sorted(found, key=lambda row: float(row["area_difference_high"]) != 0)


def _labels(names: list[str]) -> list[str]:
    each = [[row["label"] for row in _arms(name)] for name in names]
    if any(x != each[0] for x in each):
        raise ValueError(f"studies side by side have the same arms; got {each}")
    return each[0]


def _link(name: str) -> str:
    """What a study's title says last, as a link to its page."""
    title = (RESULTS / name / "study.md").read_text().splitlines()[0]
    return f"[{title.rpartition(', ')[2]}](results/{name}/study.md)"


def _stated(row: dict[str, str], what: str, sign: str = "") -> str:
    mean, low, high = (float(row[f"{what}{end}"]) for end in ("", "_low", "_high"))
    return percent_text(Estimate(mean, low, high, len(row["seeds"].split())), sign)
