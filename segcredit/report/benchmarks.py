"""Read what ``segcredit benchmark`` recorded in run directories, for the report page."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from segcredit.printable import printable
from segcredit.report.data import (
    MAX_CHARACTERS,
    MAX_NAME,
    as_data_uri,
    limited_depth,
    plain_number,
    shortened,
    to_json,
)
from segcredit.runlog import Run

MEGABYTES = 12.0
"""Size of all questions and answers; above it, fewer questions of each set are shown."""
PICTURE_MEGABYTES = 8.0
"""Size of all images; above it, later questions are shown without theirs."""
MAX_SAMPLES = 16
"""Responses to a question, images of a question, and metrics per question in the file."""
MAX_METRICS = 100
"""Maximum number of metrics of a set."""


@dataclass(frozen=True)
class Benchmarks:
    """Scores and answers of several checkpoints, ready for the page."""

    data: dict[str, Any] = field(default_factory=lambda: {"models": [], "settings": {}, "sets": []})
    images: dict[str, str] = field(default_factory=dict)


def gather_benchmarks(runs: Sequence[Run]) -> Benchmarks:
    """Collect the recorded sets of all checkpoints; questions with one id are one question."""
    files = list(_files(runs))
    sets: dict[str, dict[str, Any]] = {}
    settings: dict[str, str] = {}
    images: dict[str, str] = {}
    spent = pictures = 0
    for place, (number, model, path) in enumerate(files, start=1):
        content = _read(path)
        settings[model] = shortened(content.get("settings") or "", MAX_CHARACTERS)
        found = sets.setdefault(path.stem, {"title": "", "total": 0, "questions": {}, "scores": {}})
        found["title"] = shortened(content.get("title") or path.stem, MAX_NAME)
        found["total"] = plain_number(content.get("total"))
        found["scores"][model] = _scores(content.get("scores"))
        for row in _rows(content.get("questions")):
            question = _question(row, number)
            answers = [_answer(x) for x in _rows(row.get("answers"))[:MAX_SAMPLES]]
            spent += len(to_json([question, answers]))
            if spent > MEGABYTES * 1e6 * place / len(files):
                break
            known = found["questions"].setdefault(question["id"], question)
            known["answers"][model] = answers
            for key in (x for x in known["images"] if x not in images):
                uri = as_data_uri(runs[number].path, key.split("/", 1)[1])
                if uri is not None and pictures + len(uri) <= PICTURE_MEGABYTES * 1e6:
                    images[key] = uri
                    pictures += len(uri)
    shown = [{**x, "questions": list(x["questions"].values())} for x in sets.values()]
    return Benchmarks({"models": list(settings), "settings": settings, "sets": shown}, images)


def _files(runs: Sequence[Run]) -> Iterator[tuple[int, str, Path]]:
    """Yield every file of recorded answers, with its run's number and its checkpoint's label."""
    taken: set[str] = set()
    for number, run in enumerate(runs):
        folders = run.folder.benchmarks.iterdir() if run.folder.benchmarks.is_dir() else ()
        for folder in sorted(x for x in folders if x.is_dir()):
            files = sorted(folder.glob("*.json"))
            own = printable(folder.name, MAX_NAME)
            label = own if len(runs) == 1 else f"{printable(run.path.name, MAX_NAME)} {own}"
            while label in taken:
                label += "'"
            taken.add(label)
            yield from ((number, label, path) for path in files)


def _read(path: Path) -> Mapping[str, Any]:
    with limited_depth(path):
        try:
            content = json.loads(path.read_bytes())
        except ValueError as error:
            raise ValueError(
                f"{path} must be JSON; reading it failed: {printable(str(error), 200)}. Delete it, "
                f"and run segcredit benchmark again."
            ) from None
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} must contain an object; got a {type(content).__name__}. Delete it, and run "
            f"segcredit benchmark again."
        )
    return content


def _rows(x: Any) -> list[Mapping[str, Any]]:
    return [row for row in x if isinstance(row, Mapping)] if isinstance(x, list) else []


def _scores(x: Any) -> dict[str, dict[str, Any]]:
    names = ("value", "low", "high", "count")
    return {
        shortened(metric, MAX_NAME): {name: plain_number(score.get(name)) for name in names}
        for metric, score in list(x.items() if isinstance(x, Mapping) else ())[:MAX_METRICS]
        if isinstance(score, Mapping)
    }


def _question(row: Mapping[str, Any], run: int) -> dict[str, Any]:
    images = row.get("images")
    return {
        "id": shortened(row.get("id", ""), MAX_NAME),
        "text": shortened(row.get("text", ""), 10 * MAX_CHARACTERS),
        "expected": shortened(row.get("expected", "")),
        "images": [
            f"{run}/{name}"
            for name in (images if isinstance(images, list) else [])[:MAX_SAMPLES]
            if isinstance(name, str)
        ],
        "answers": {},
    }


def _answer(x: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "response": shortened(x.get("response", ""), 10 * MAX_CHARACTERS),
        "answer": None if x.get("answer") is None else shortened(x["answer"]),
        "correct": x.get("correct") is True,
        "reason": shortened(x.get("reason", "")),
        "tokens": plain_number(x.get("tokens")),
        "truncated": x.get("truncated") is True,
        "judged": x.get("judged") is True,
    }
