"""Write and read rollouts/step-000012.jsonl: the responses of a step with tokens and credit."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from segcredit.runlog.files import (
    read_some_lines,
    replacing,
    restore_nonfinite,
    to_line,
    write_bytes_atomically,
)
from segcredit.runlog.folder import step_name

COLUMNS: Mapping[str, str] = {
    "prompt_id": "id of the prompt",
    "prompt": "its text as the model reads it",
    "messages": "the same as role and content, with <image> for each image",
    "images": "paths of its images in the run folder",
    "response": "text of the response",
    "tokens": "token ids",
    "pieces": "text of each token",
    "entropy": "H_t of each token under π_old",
    "segment": "m(t): which segment each token belongs to, −1 for none",
    "value": "V before each token",
    "advantage": "credit of each token",
    "ratio": "π_θ / π_old of each token's unit after the step, as the method computes it",
    "logp_old": "log π_old of each token",
    "reward": "outcome reward",
    "reason": "reason for the reward",
    "correct": "whether the answer was right, null if the reward does not say",
    "truncated": "whether it reached the length limit",
    "answer": "expected answer",
}
"""Known columns of a row; other columns are kept unchanged."""

_NUMBERS = frozenset({"entropy", "value", "advantage", "ratio", "logp_old", "reward"})
"""Columns in which the string "NaN" is a number and not model output."""


def write_rollouts(folder: Path, step: int, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write the responses of one step, completely or not at all; an earlier file is replaced."""
    path = folder / f"{step_name(step)}.jsonl"
    with replacing(path) as file:
        for row in rows:
            file.write(to_line(row))
    return path


def read_rollouts(path: Path) -> list[dict[str, Any]]:
    """Read all rows of a file."""
    return sample_rollouts(path, None)[0]


def sample_rollouts(path: Path, count: int | None) -> tuple[list[dict[str, Any]], int]:
    """Read at most ``count`` evenly spaced rows; return them and the total number."""
    rows, total = read_some_lines(path, count)
    return [
        {key: restore_nonfinite(x) if key in _NUMBERS else x for key, x in row.items()}
        for row in rows
    ], total


def evenly(steps: list[int], count: int | None) -> list[int]:
    """Select at most ``count`` evenly spaced steps, including the first and the last."""
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
"""First bytes of image formats, and their file suffixes."""


def save_image(folder: Path, image: bytes | Path) -> str:
    """Copy an image into the run folder; return its path there, or "" if its file is gone."""
    try:
        data = image if isinstance(image, bytes) else image.read_bytes()
    except OSError:
        return ""
    kind = next((kind for begins, kind in _KINDS.items() if data.startswith(begins)), "bin")
    path = folder / f"{hashlib.sha256(data).hexdigest()[:24]}.{kind}"
    if not path.exists():
        write_bytes_atomically(path, data)
    return f"{folder.name}/{path.name}"
