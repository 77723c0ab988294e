"""Everything the page shows, gathered from run folders and nothing else."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from segcredit.report.cuts import PARTITIONS
from segcredit.report.overview import overview
from segcredit.report.pictures import as_data_uri
from segcredit.report.rows import page_rows, prompt_id
from segcredit.runlog import Run
from segcredit.runlog.rollouts import evenly, sample_rollouts
from segcredit.version import __version__

Kind = Literal["rollouts", "watched"]
Progress = Callable[[str], None]
LAST_STEP = 10**9
"""Names of files may say anything; these steps a browser can count."""


@dataclass(frozen=True)
class Limits:
    """How much of a run comes onto the page."""

    steps: int = 20
    """Recorded steps of each run, evenly spread."""
    responses: int = 24
    """Responses of each such step, evenly spread."""
    megabytes: float = 18.0
    """Of responses in all; where they need more, fewer of each step are shown, or fewer steps."""
    picture_megabytes: float = 6.0
    """Of pictures in all; where they need more, fewer of each step's are shown."""


@dataclass(frozen=True)
class Rows:
    """Some responses of one file."""

    run: int
    kind: Kind
    step: int
    shown: int
    total: int
    ids: tuple[str, ...]
    """Of their prompts."""
    json: str
    images: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"rows-{self.run}-{self.kind}-{self.step}"

    def listed(self) -> dict[str, Any]:
        """What the page must know before it reads them."""
        return {
            "run": self.run,
            "kind": self.kind,
            "step": self.step,
            "shown": self.shown,
            "total": self.total,
            "ids": list(self.ids),
        }


def files(run: Run, kind: Kind) -> dict[int, Path]:
    """Step → file."""
    found = run.rollout_files if kind == "rollouts" else run.watched_files
    return {step: path for step, path in found.items() if step < LAST_STEP}


def gather_rows(
    runs: Sequence[Run], limits: Limits, progress: Progress = lambda _: None
) -> list[Rows]:
    """Responses of chosen steps of every run."""
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
        if len(rows.json) <= allowed:  # or a single response is too long, and its room goes on
            found.append(rows)
            spent += len(rows.json)
    return found


def read_rows(
    run: Run, number: int, kind: Kind, step: int, count: int, allowed: float = float("inf")
) -> Rows:
    """One file's responses, fewer where they would need more than ``allowed`` bytes."""
    path = files(run, kind)[step]
    with _not_too_deep(path):
        sampled, total = sample_rollouts(path, count)
        made = to_json(page_rows(sampled))
        while len(made) > allowed and len(sampled) > 1:
            fewer = max(1, int(len(sampled) * max(allowed, 0) / len(made)))
            sampled, _ = sample_rollouts(path, fewer)
            made = to_json(page_rows(sampled))
    listed = (row.get("images") for row in sampled)
    images = [str(x) for some in listed if isinstance(some, list) for x in some if x]
    ids = dict.fromkeys(prompt_id(row) for row in sampled)
    return Rows(
        number, kind, step, len(sampled), total, tuple(ids), made, tuple(dict.fromkeys(images))
    )


def gather_images(
    runs: Sequence[Run], rows: Sequence[Rows], megabytes: float = float("inf")
) -> dict[str, str]:
    """Every picture once: "run/path" → data."""
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


def gather_overview(runs: Sequence[Run], rows: Sequence[Rows]) -> dict[str, Any]:
    """What stands on the page before any response is looked at."""
    shown = []
    for run in runs:
        with _not_too_deep(run.path):
            shown.append(overview(run))
    return {
        "version": __version__,
        "runs": shown,
        "files": [part.listed() for part in rows],
        "partitions": [name for name, _ in PARTITIONS],
        "recorded": [
            {kind: len(files(run, kind)) for kind in ("rollouts", "watched")} for run in runs
        ],
    }


@contextmanager
def _not_too_deep(path: Path) -> Iterator[None]:
    """Lists in lists in lists, by the hundred, are no run's: say so."""
    try:
        yield
    except RecursionError:
        raise ValueError(
            f"{path} holds values nested hundreds deep, which no run writes. It is damaged."
        ) from None


def to_json(x: Any) -> str:
    """JSON that may stand inside a script element: nothing in it can close one or open a tag."""
    text = json.dumps(x, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
