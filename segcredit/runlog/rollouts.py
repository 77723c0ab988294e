"""rollouts/step-000012.jsonl: every response of a step, with its tokens and their credit."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from segcredit.runlog.files import (
    read_some_lines,
    replacing,
    revived,
    to_line,
    write_bytes_atomically,
)
from segcredit.runlog.folder import step_name

COLUMNS: Mapping[str, str] = {
    "prompt_id": "which prompt",
    "prompt": "its text, as the model reads it",
    "messages": "the same as role and content, with <image> where a picture stands",
    "images": "its pictures: paths in the run folder",
    "response": "the response's text",
    "tokens": "token ids",
    "pieces": "text of each token",
    "entropy": "H_t of each token under π_old",
    "segment": "m(t): which segment each token belongs to, −1 for none",
    "value": "V before each token",
    "advantage": "credit of each token",
    "ratio": "π_θ / π_old of each token's unit after the step, as the method computes it",
    "logp_old": "log π_old of each token",
    "reward": "outcome reward",
    "reason": "why",
    "correct": "whether the answer was right, null if the reward does not say",
    "truncated": "cut off at the length limit",
    "answer": "the verifiable answer",
}
"""What a row holds where it is known; other columns are kept as they are."""

_NUMBERS = frozenset({"entropy", "value", "advantage", "ratio", "logp_old", "reward"})
"""Columns in which the string "NaN" is a number, not what a model wrote."""


def write_rollouts(folder: Path, step: int, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write one step's responses, all or none, in place of an earlier file of that step."""
    path = folder / f"{step_name(step)}.jsonl"
    with replacing(path) as file:
        for row in rows:
            file.write(to_line(row))
    return path


def read_rollouts(path: Path) -> list[dict[str, Any]]:
    """The rows of one such file."""
    return sample_rollouts(path, None)[0]


def sample_rollouts(path: Path, count: int | None) -> tuple[list[dict[str, Any]], int]:
    """At most ``count`` rows, evenly spread over the file, and how many it has."""
    rows, total = read_some_lines(path, count)
    return [
        {key: revived(x) if key in _NUMBERS else x for key, x in row.items()} for row in rows
    ], total


def evenly(steps: list[int], count: int | None) -> list[int]:
    """The first, the last, and others evenly between: at most ``count`` of them."""
    if count is None or len(steps) <= count:
        return steps
    if count == 1:
        return steps[-1:]
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]


_KINDS = {
    b"\x89PNG": "png",
    b"\xff\xd8\xff": "jpg",
    b"GIF8": "gif",
    b"BM": "bmp",
    b"II*\0": "tif",
    b"MM\0*": "tif",
    b"RIFF": "webp",
}
"""How a picture's bytes begin, and what its file is called."""


def keep_picture(folder: Path, picture: bytes | Path) -> str:
    """Its path in the run folder; a file that is no longer there leaves an empty one."""
    try:
        data = picture if isinstance(picture, bytes) else picture.read_bytes()
    except OSError:
        return ""
    kind = next((kind for begins, kind in _KINDS.items() if data.startswith(begins)), "bin")
    path = folder / f"{hashlib.sha256(data).hexdigest()[:24]}.{kind}"
    if not path.exists():
        write_bytes_atomically(path, data)
    return f"{folder.name}/{path.name}"
