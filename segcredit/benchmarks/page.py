"""Benchmark answers to look at: a page of its own, or a part of a run's report.

The page is one HTML file with the tables and the answers, without dependencies. In the directory of
the run that a checkpoint comes from, the same content is recorded for the run's report.
"""

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from segcredit.benchmarks.run import Answer, SetResult
from segcredit.benchmarks.table import Table
from segcredit.data.formats import MARK
from segcredit.report.data import picture_uri, to_json
from segcredit.report.page import (
    content_policy,
    data_element,
    fill_frame,
    in_one_scope,
    static_text,
)
from segcredit.runlog import RunFolder
from segcredit.runlog.files import write_json_atomically, write_text_atomically
from segcredit.runlog.folder import is_run, step_of
from segcredit.runlog.records import save_image

_STATIC = files("segcredit.benchmarks") / "static"

Results = Mapping[str, Mapping[str, SetResult]]
"""Results of each model by set."""


@dataclass(frozen=True)
class PageLimits:
    """Limits on the part of the answers that the page holds."""

    questions: int = 200
    """Questions of each set; those that some model answered wrong come first."""
    samples: int = 4
    """Responses of each model to a question."""
    characters: int = 12_000
    """Beginning and end of a response, together."""
    megabytes: float = 20.0
    """Size of all responses; above it, fewer questions are shown."""
    picture_megabytes: float = 20.0
    """Size of all images; later questions are shown without theirs."""


def write_page(
    path: Path, results: Results, tables: Sequence[Table], limits: PageLimits | None = None
) -> Path:
    """Write the page atomically and return its path."""
    limits = limits or PageLimits()
    sets = dict.fromkeys(name for found in results.values() for name in found)
    shown = [set_data(name, results, limits, limits.megabytes * 1e6 / len(sets)) for name in sets]
    images = embed_images(list(sets), shown, results, limits)
    data = {"models": list(results), "tables": [asdict(x) for x in tables], "sets": shown}
    title = "Benchmarks: " + (", ".join(results) if len(results) < 4 else f"{len(results)} models")
    code = in_one_scope(
        [
            static_text("base.js"),
            static_text("answers.js"),
            (_STATIC / "page.js").read_text("utf-8"),
        ]
    )
    page = fill_frame(
        (_STATIC / "page.html").read_text("utf-8"),
        {
            "POLICY": html.escape(content_policy(code)),
            "TITLE": html.escape(title),
            "STYLE": static_text("page.css"),
            "DATA": data_element("data", to_json(data)),
            "IMAGES": data_element("images", to_json(images)),
            "SCRIPT": f"<script>{code}</script>",
        },
    )
    write_text_atomically(path, page)
    return path


def record_in_run(
    source: str,
    results: Mapping[str, SetResult],
    settings: Mapping[str, Any],
    driver: str | None = None,
    limits: PageLimits | None = None,
) -> Path | None:
    """Write the answers to ``RUN/benchmarks``; return the run, or None if there is none.

    Args:
        source: Folder of the policy, as in ``RUN/checkpoints/step-000040/policy``.
        results: Results by set. A set that was recorded before is replaced, others are kept.
        settings: Settings of the sampling, to be shown beside the scores.
        driver: Name of the program that asked the questions, if it was not segcredit.
    """
    policy = Path(source)
    if len(policy.parents) < 3 or step_of(policy.parent.name) is None:
        return None
    run = RunFolder(policy.parents[2])
    if policy.parents[1] != run.checkpoints or not is_run(run.path):
        return None
    limits = limits or PageLimits()
    name = policy.parent.name if driver is None else f"{policy.parent.name}-{driver}"
    alone = {name: results}
    shown = [set_data(x, alone, limits, limits.megabytes * 1e6 / len(results)) for x in results]
    images = embed_images(list(results), shown, alone, limits)
    run.benchmarks.mkdir(exist_ok=True)
    (run.benchmarks / name).mkdir(exist_ok=True)
    (run.benchmarks / "images").mkdir(exist_ok=True)
    paths = {key: _save(uri, run.benchmarks / "images") for key, uri in images.items()}
    for key, content in zip(results, shown, strict=True):
        questions = [
            {
                **row,
                "images": [paths[x] for x in row["images"] if x in paths],
                "answers": row["answers"][name],
            }
            for row in content["questions"]
        ]
        write_json_atomically(
            run.benchmarks / name / f"{key}.json",
            {
                **content,
                "scores": content["scores"][name],
                "questions": questions,
                "settings": ", ".join(f"{key} {x}" for key, x in settings.items() if x is not None),
            },
        )
    return run.path


def _save(uri: str, folder: Path) -> str:
    """Save an embedded image; return its path in the run directory."""
    data = base64.b64decode(uri.partition(",")[2])
    return f"{folder.parent.name}/{save_image(folder, data)}"


def set_data(name: str, results: Results, limits: PageLimits, most: float) -> dict[str, Any]:
    """Select questions of one set, in their order, with all models' answers."""
    found = {model: sets[name] for model, sets in results.items() if name in sets}
    first = next(iter(found.values()))
    answers = {model: _by_question(x.answers) for model, x in found.items()}
    wrong = {x.id for result in found.values() for x in result.answers if not x.correct}
    order = sorted(first.questions, key=lambda x: x.id not in wrong)[: limits.questions]
    chosen: dict[str, dict[str, Any]] = {}
    spent = 0
    for question in order:
        text = question.messages[-1]["content"].replace(MARK, "")
        row = {
            "id": question.id,
            "text": _cut(text, limits.characters),
            "expected": question.answer or "",
            "images": [],
            "answers": {
                model: [_shown(x, limits.characters) for x in given[question.id][: limits.samples]]
                for model, given in answers.items()
            },
        }
        spent += len(to_json(row))
        if spent > most:
            break
        chosen[question.id] = row
    return {
        "title": first.benchmark.title,
        "total": len(first.questions),
        "questions": [chosen[x.id] for x in first.questions if x.id in chosen],
        "scores": {
            model: {metric: asdict(x) for metric, x in result.scores.items()}
            for model, result in found.items()
        },
    }


def embed_images(
    names: Sequence[str],
    shown: Sequence[Mapping[str, Any]],
    results: Results,
    limits: PageLimits,
) -> dict[str, str]:
    """Embed each image once and write its key into the questions that show it."""
    images: dict[str, str] = {}
    spent = 0
    for place, (name, part) in enumerate(zip(names, shown, strict=True), start=1):
        allowed = limits.picture_megabytes * 1e6 * place / len(names)
        result = next(sets[name] for sets in results.values() if name in sets)
        rows = {row["id"]: row for row in part["questions"]}
        for question in result.questions:
            for image in question.images if question.id in rows else ():
                data = image if isinstance(image, bytes) else image.read_bytes()
                key = sha256(data).hexdigest()[:24]
                rows[question.id]["images"].append(key)
                if key in images or spent > allowed:
                    continue
                uri = picture_uri(data)
                if uri is not None and spent + len(uri) <= allowed:
                    images[key] = uri
                    spent += len(uri)
    return images


def _by_question(answers: Sequence[Answer]) -> dict[str, list[Answer]]:
    found: dict[str, list[Answer]] = {}
    for x in answers:
        found.setdefault(x.id, []).append(x)
    return found


def _shown(x: Answer, characters: int) -> dict[str, Any]:
    return {
        "response": _cut(x.response, characters),
        "answer": None if x.answer is None else _cut(x.answer, 500),
        "correct": x.correct,
        "reason": x.reason,
        "tokens": x.num_tokens,
        "truncated": x.truncated,
        "judged": x.judged,
    }


def _cut(text: str, most: int) -> str:
    """Keep the beginning and the end of a long text."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}\n… {len(text) - most:,} characters …\n{text[-(most // 2) :]}"
