"""Select the responses for the report page, with their segments and images, as JSON."""

import base64
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image

from segcredit.models.images import ImageError, open_image
from segcredit.partition import PARTITIONS, Partition
from segcredit.report.segments import column_names
from segcredit.runlog import Run
from segcredit.runlog.folder import file_inside
from segcredit.runlog.reader import as_number
from segcredit.runlog.records import evenly, sample_rollouts
from segcredit.types import Rollouts

Kind = Literal["rollouts", "watched"]
Progress = Callable[[str], None]
DIGITS = 4
"""Significant digits of the numbers on the page."""
MAX_STEP = 10**9
"""File names can contain any number; larger steps are ignored."""
MAX_NUMBER = 1e30
"""Larger numbers are not finite in float32, which the partitions use."""
MAX_CHARACTERS = 2000
"""Maximum length of a token's text; ten times as long for a message or a response."""
MAX_NAME = 200
"""Maximum length of a prompt's id or of a message's role."""
MAX_SIDE = 360
"""Maximum width and height of an image, in pixels."""
PER_TOKEN = ("entropy", "value", "image_kl", "advantage", "ratio", "logp_old")
NEEDED = ("pieces", "entropy", "logp_old")
"""Columns of a row that the partitions on the page read."""


@dataclass(frozen=True)
class Limits:
    """Limits on the part of a run that the page holds."""

    steps: int = 20
    """Recorded steps of each run, evenly spaced."""
    responses: int = 24
    """Responses of each such step, evenly spaced."""
    megabytes: float = 18.0
    """Size of all responses; above it, fewer responses per step are shown, or fewer steps."""
    picture_megabytes: float = 6.0
    """Size of all images; above it, fewer images per step are shown."""


@dataclass(frozen=True)
class Rows:
    """Some responses of one file."""

    run: int
    kind: Kind
    step: int
    shown: int
    total: int
    ids: tuple[str, ...]
    """Ids of their prompts."""
    json: str
    images: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"rows-{self.run}-{self.kind}-{self.step}"

    def listed(self) -> dict[str, Any]:
        """Return the facts that the page needs before it reads the rows."""
        names = ("run", "kind", "step", "shown", "total", "ids")
        return {name: getattr(self, name) for name in names}


def files(run: Run, kind: Kind) -> dict[int, Path]:
    """Step → file."""
    found = run.rollout_files if kind == "rollouts" else run.watched_files
    return {step: path for step, path in found.items() if step < MAX_STEP}


def gather_rows(
    runs: Sequence[Run], limits: Limits, progress: Progress = lambda _: None
) -> list[Rows]:
    """Read responses of evenly spaced steps of every run."""
    wanted: list[tuple[int, Kind, int]] = [
        (number, kind, step)
        for number, run in enumerate(runs)
        for kind in ("rollouts", "watched")
        for step in evenly(list(files(run, kind)), limits.steps)
    ]
    found: list[Rows] = []
    spent = 0
    for place, (number, kind, step) in enumerate(wanted, start=1):
        progress(f"{runs[number].path.name}, {kind}, step {step}")
        allowed = limits.megabytes * 1e6 * place / len(wanted) - spent
        rows = read_rows(runs[number], number, kind, step, limits.responses, allowed)
        if len(rows.json) <= allowed:  # else one response is too long; later steps use its share
            found.append(rows)
            spent += len(rows.json)
    return found


def read_rows(
    run: Run, number: int, kind: Kind, step: int, count: int, allowed: float = float("inf")
) -> Rows:
    """Read one file's responses; fewer if they need more than ``allowed`` bytes."""
    path = files(run, kind)[step]
    with limited_depth(path):
        sampled, total = sample_rollouts(path, count)
        made = to_json(page_rows(sampled))
        while len(made) > allowed and len(sampled) > 1:
            fewer = max(1, int(len(sampled) * max(allowed, 0) / len(made)))
            sampled, _ = sample_rollouts(path, fewer)
            made = to_json(page_rows(sampled))
    images = dict.fromkeys(str(x) for row in sampled for x in _list(row, "images") if x)
    ids = dict.fromkeys(prompt_id(row) for row in sampled)
    return Rows(number, kind, step, len(sampled), total, tuple(ids), made, tuple(images))


def page_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Convert rows for the page; each distinct token text is stored once, in ``texts``."""
    number: dict[str, int] = {}
    found = [_row(row, number) for row in rows]
    for row, ends in zip(found, cut_rows(rows), strict=True):
        row["cuts"] = ends
    return {"texts": list(number), "rows": found}


def _row(row: Mapping[str, Any], number: dict[str, int]) -> dict[str, Any]:
    pieces = [shortened(x) for x in _list(row, "pieces")]
    if not pieces and row.get("response"):
        pieces = [shortened(row["response"], 10 * MAX_CHARACTERS)]
    made: dict[str, Any] = {
        "id": prompt_id(row),
        "messages": _messages(row),
        "images": [str(x) for x in _list(row, "images")],
        "answer": None if row.get("answer") is None else shortened(row["answer"]),
        "pieces": [number.setdefault(x, len(number)) for x in pieces],
        "tokens": [plain_number(x) for x in _list(row, "tokens")],
        "segment": _segment(row, len(pieces)),
        "reward": plain_number(row.get("reward")),
        "reason": shortened(row.get("reason") or ""),
        "correct": row["correct"] if isinstance(row.get("correct"), bool) else None,
        "truncated": bool(row.get("truncated")),
        "length": len(_list(row, "tokens")) or len(pieces),
    }
    for name in PER_TOKEN:
        column = _list(row, name)
        if column and len(column) == len(pieces):
            made[name] = [plain_number(x) for x in column]
    return made


def prompt_id(row: Mapping[str, Any]) -> str:
    """Return the prompt's id."""
    return shortened(row.get("prompt_id", ""), MAX_NAME)


def _segment(row: Mapping[str, Any], count: int) -> list[int]:
    """Return the recorded m(t) of each token; empty if any is missing."""
    found = _list(row, "segment")
    whole = len(found) == count and all(type(m) is int and -1 <= m < 2**31 for m in found)
    return found if whole else []


def _messages(row: Mapping[str, Any]) -> list[list[str]]:
    """Return role and content of each message; older versions recorded a single text."""
    longest = 10 * MAX_CHARACTERS
    messages = _list(row, "messages")
    if not messages:
        return [["prompt", shortened(row.get("prompt", ""), longest)]]
    return [
        [shortened(x.get("role", ""), MAX_NAME), shortened(x.get("content", ""), longest)]
        for x in messages
        if isinstance(x, Mapping)
    ]


def _list(row: Mapping[str, Any], name: str) -> list[Any]:
    found = row.get(name)
    return found if isinstance(found, list) else []


def shortened(x: object, longest: int = MAX_CHARACTERS) -> str:
    """Return the beginning of a text, with the number of characters left out."""
    text = str(x)
    if len(text) <= longest:
        return text
    return f"{text[:longest]}… [{len(text) - longest:,} more characters]"


def plain_number(x: Any) -> float | int | str | None:
    """Round a number for the page; NaN and infinity become strings, since JSON has neither."""
    if isinstance(x, bool) or x is None:
        return None if x is None else int(x)
    if not isinstance(x, int | float):
        return str(x)[:40]
    if isinstance(x, int) and abs(x) < 2**53:
        return x
    x = as_number(x)
    if not math.isfinite(x):
        return "NaN" if math.isnan(x) else "∞" if x > 0 else "−∞"
    return float(f"{x:.{DIGITS}g}")


@cache
def shown_partitions() -> tuple[Partition, ...]:
    """Return the page's partitions with their example settings, entropy partitions first.

    A run need not record values, so partitions that need them are left out.
    """
    made = [kind(**settings) for kind in PARTITIONS.values() for settings in kind.examples]
    shown = [x for x in made if {*column_names(x)} <= {*NEEDED}]
    return tuple(sorted(shown, key=lambda x: "entropy" not in column_names(x)))


def cut_rows(rows: Sequence[Mapping[str, Any]]) -> list[list[list[int]]]:
    """Find the last token of each segment, for every row and every partition on the page.

    The result is empty for a row that lacks a column that the partitions need.
    """
    found: list[list[list[int]]] = [[[] for _ in shown_partitions()] for _ in rows]
    complete = [i for i, row in enumerate(rows) if _is_complete(row)]
    if not complete:
        return found
    rollouts = _rollouts([rows[i] for i in complete])
    for number, partition in enumerate(shown_partitions()):
        segments = partition(rollouts)
        for i, ends, mask in zip(complete, segments.end, segments.mask, strict=True):
            found[i][number] = ends[mask].tolist()
    return found


def _is_complete(row: Mapping[str, Any]) -> bool:
    """Whether every token has its text and finite numbers."""
    pieces, *columns = (_list(row, name) for name in NEEDED)
    return bool(pieces) and all(
        len(column) == len(pieces)
        and all(isinstance(x, int | float) and -MAX_NUMBER < x < MAX_NUMBER for x in column)
        for column in columns
    )


def _rollouts(rows: Sequence[Mapping[str, Any]]) -> Rollouts:
    """Convert rows to one batch, padded at the end."""
    lengths = [len(row["pieces"]) for row in rows]
    width = max(lengths)

    def padded(name: str, fill: Any) -> list[list[Any]]:
        return [[*map(type(fill), row[name]), *[fill] * (width - len(row[name]))] for row in rows]

    return Rollouts.from_columns(
        torch.arange(width) < torch.tensor(lengths)[:, None],
        logp_old=torch.tensor(padded("logp_old", 0.0)),
        entropy=torch.tensor(padded("entropy", 0.0)).clamp_min(0.0),
        pieces=padded("pieces", ""),
    )


def gather_images(
    runs: Sequence[Run], rows: Sequence[Rows], megabytes: float = float("inf")
) -> dict[str, str]:
    """Collect every image once: "run/path" → data URI."""
    found: dict[str, str] = {}
    spent = 0
    for place, part in enumerate(rows, start=1):
        allowed = megabytes * 1e6 * place / len(rows)
        for name in part.images:
            key = f"{part.run}/{name}"
            if key in found or (data := as_data_uri(runs[part.run].path, name)) is None:
                continue
            if spent + len(data) <= allowed:
                found[key] = data
                spent += len(data)
    return found


def as_data_uri(run: Path, name: str) -> str | None:
    """Encode an image again, as PNG or JPEG; None if it is no image inside the run directory."""
    path = file_inside(run, name)
    return None if path is None else picture_uri(path)


def picture_uri(source: bytes | Path) -> str | None:
    """Encode a small copy of an image as PNG or JPEG; None if it is no image."""
    try:
        picture = open_image(source)
    except (ImageError, OSError):
        return None
    picture.thumbnail((MAX_SIDE, MAX_SIDE), Image.Resampling.LANCZOS)
    few = picture.getcolors(512) is not None  # probably a drawing: PNG is smaller, and exact
    encoded = {kind: _encode(picture, kind) for kind in (("png", "jpeg") if few else ("jpeg",))}
    kind = min(encoded, key=lambda x: len(encoded[x]))
    return f"data:image/{kind};base64,{base64.b64encode(encoded[kind]).decode()}"


def _encode(picture: Image.Image, kind: str) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind)
    return file.getvalue()


@contextmanager
def limited_depth(path: Path) -> Iterator[None]:
    """Report values that are nested too deeply as a damaged file."""
    try:
        yield
    except RecursionError:
        raise ValueError(
            f"{path} holds values nested hundreds deep, which no run writes. It is damaged."
        ) from None


def to_json(x: Any) -> str:
    """Write JSON that is safe in a script element: it can neither close it nor open a tag."""
    text = json.dumps(x, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
