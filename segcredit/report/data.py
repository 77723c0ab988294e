"""The same responses cut in every way there is, for the eye to compare."""

import base64
import dataclasses
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from PIL import Image

from segcredit import __version__
from segcredit.algorithms import make_algorithm
from segcredit.models.images import PictureError, open_image
from segcredit.partition import Partition, make_partition
from segcredit.printable import change_texts
from segcredit.runlog import Run
from segcredit.runlog.rollouts import evenly, sample_rollouts
from segcredit.runlog.untrusted import requests_of
from segcredit.types import Rollouts

LARGEST = 1e30
"""Numbers up to here are finite as the partitions read them, in 32 bits."""
PARTITIONS: tuple[tuple[str, Partition], ...] = (
    ("after the most uncertain 10 % of tokens", make_partition("entropy", fraction=0.1)),
    ("after the most uncertain 30 % (SAPO)", make_partition("entropy", fraction=0.3)),
    ("after the most uncertain 50 %", make_partition("entropy", fraction=0.5)),
    ("after peaks among the most uncertain 30 %", make_partition("peaks")),
    ("after the most uncertain stretches of 5 tokens", make_partition("smooth")),
    ("before every 5th token below p = 0.9 (SPO)", make_partition("probability")),
    ("after every 5th token below p = 0.9", make_partition("accumulate")),
    ("lines", make_partition("newline")),
    ("“Step N” marks", make_partition("step")),
    ("every 16 tokens", make_partition("fixed", size=16)),
    ("tokens (PPO)", make_partition("token")),
    ("the whole response (GRPO)", make_partition("response")),
)


def cuts(rows: Sequence[Mapping[str, Any]]) -> list[list[list[int]]]:
    """Of each row, for each of PARTITIONS, the places of its segments' last tokens.

    Empty where a row lacks what the partitions read: pieces, entropies, log-probabilities.
    """
    found: list[list[list[int]]] = [[[] for _ in PARTITIONS] for _ in rows]
    whole = [i for i, row in enumerate(rows) if _is_whole(row)]
    if not whole:
        return found
    rollouts = _as_rollouts([rows[i] for i in whole])
    for number, (_, partition) in enumerate(PARTITIONS):
        segments = partition(rollouts)
        for i, ends, mask in zip(whole, segments.end, segments.mask, strict=True):
            found[i][number] = ends[mask].tolist()
    return found


def _is_whole(row: Mapping[str, Any]) -> bool:
    """Whether every token has its text, entropy and log-probability, all of them numbers."""
    columns = [row.get(name) for name in ("pieces", "entropy", "logp_old")]
    if not all(isinstance(x, list) and x for x in columns):
        return False
    pieces, *numbers = (x for x in columns if isinstance(x, list))
    return all(
        len(x) == len(pieces)
        and all(isinstance(v, int | float) and -LARGEST < v < LARGEST for v in x)
        for x in numbers
    )


def _as_rollouts(rows: Sequence[Mapping[str, Any]]) -> Rollouts:
    width = max(len(row["pieces"]) for row in rows)
    mask = torch.arange(width) < torch.tensor([len(row["pieces"]) for row in rows])[:, None]

    def column(name: str) -> torch.Tensor:
        padded = ([*row[name], *[0.0] * (width - len(row[name]))] for row in rows)
        return torch.tensor([[float(x) for x in row] for row in padded])

    nothing = torch.zeros(len(rows))
    return Rollouts(
        tokens=mask.long(),
        mask=mask,
        logp_old=column("logp_old"),
        reward=nothing,
        group=torch.arange(len(rows)),
        truncated=nothing.bool(),
        entropy=column("entropy").clamp_min(0.0),
        pieces=[[*map(str, row["pieces"]), *[""] * (width - len(row["pieces"]))] for row in rows],
    )


DIGITS = 4
"""Significant digits on the page."""
LONGEST = 2000
"""Characters of one token, or of a prompt's message times ten, before the rest is left out."""
LONGEST_NAME = 200
"""Characters of a prompt's id or a message's role."""
PER_TOKEN = ("entropy", "value", "advantage", "ratio", "logp_old")


def page_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows of one file; every distinct piece of text stands once in ``texts``."""
    number: dict[str, int] = {}
    found = [_row(row, number) for row in rows]
    for row, cut in zip(found, cuts(rows), strict=True):
        row["cuts"] = cut
    return {"texts": list(number), "rows": found}


def _row(row: Mapping[str, Any], number: dict[str, int]) -> dict[str, Any]:
    pieces = [shortened(str(x), LONGEST) for x in _list(row, "pieces")]
    if not pieces and row.get("response"):
        pieces = [shortened(str(row["response"]), 10 * LONGEST)]
    made: dict[str, Any] = {
        "id": prompt_id(row),
        "messages": _messages(row),
        "images": [str(x) for x in _list(row, "images")],
        "answer": None if row.get("answer") is None else shortened(str(row["answer"]), LONGEST),
        "pieces": [number.setdefault(x, len(number)) for x in pieces],
        "tokens": [plain_number(x) for x in _list(row, "tokens")],
        "segment": _segment(row, len(pieces)),
        "reward": plain_number(row.get("reward")),
        "reason": shortened(str(row.get("reason") or ""), LONGEST),
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
    """What tells prompts apart."""
    return shortened(str(row.get("prompt_id", "")), LONGEST_NAME)


def _segment(row: Mapping[str, Any], count: int) -> list[int]:
    """Of each token; empty if any has none."""
    found = _list(row, "segment")
    whole = len(found) == count and all(type(m) is int and -1 <= m < 2**31 for m in found)
    return found if whole else []


def _messages(row: Mapping[str, Any]) -> list[list[str]]:
    """Role and content; runs of older versions hold one text alone."""
    messages = _list(row, "messages")
    if not messages:
        return [["prompt", shortened(str(row.get("prompt", "")), 10 * LONGEST)]]
    return [
        [
            shortened(str(x.get("role", "")), LONGEST_NAME),
            shortened(str(x.get("content", "")), 10 * LONGEST),
        ]
        for x in messages
        if isinstance(x, Mapping)
    ]


def _list(row: Mapping[str, Any], name: str) -> list[Any]:
    found = row.get(name)
    return found if isinstance(found, list) else []


def shortened(text: str, longest: int) -> str:
    """Its beginning, and how much is missing."""
    if len(text) <= longest:
        return text
    return f"{text[:longest]}… [{len(text) - longest:,} more characters]"


def plain_number(x: Any) -> float | int | str | None:
    """With few digits; JSON has no NaN, so it becomes a string."""
    if isinstance(x, bool) or x is None:
        return None if x is None else int(x)
    if not isinstance(x, int | float):
        return str(x)[:40]
    if isinstance(x, int) and abs(x) < 2**53:
        return x
    try:
        x = float(x)
    except OverflowError:  # JSON's whole numbers have no bounds
        x = math.inf if x > 0 else -math.inf
    if not math.isfinite(x):
        return "NaN" if math.isnan(x) else "∞" if x > 0 else "−∞"
    return float(f"{x:.{DIGITS}g}")


MOST_POINTS = 1500
"""Of one curve; of a longer one every n-th step is shown."""
MOST_WARNINGS = 20
"""Maximum number of warnings shown per run."""
RESULTS = (
    ("sampled", "sampled accuracy"),
    ("greedy", "greedy accuracy"),
    ("reward", "sampled reward"),
    ("greedy_reward", "greedy reward"),
    ("no_verdict", "no verdict"),
    ("response_length", "tokens per response"),
    ("truncated", "truncated"),
)
SHARES = ("sampled", "greedy", "no_verdict", "truncated")
"""Measurements that are shown in percent."""
REWARDS = ("reward", "greedy_reward")
STAGES = ("warm_start", "pretrain_critic", "optimize", "evaluation")


def overview(run: Run) -> dict[str, Any]:
    """Of one run."""
    return {
        "name": run.path.name,
        "group": _without_seed(run.config),
        "facts": facts(run),
        "method": method(run.config),
        "results": results(run),
        "warnings": warnings(run),
        "curves": curves(run),
        "config": yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True),
    }


def facts(run: Run) -> list[list[str]]:
    """Labels and what stands behind them; unknown ones are left out."""
    config, environment = run.config, run.environment
    model, data = _part(config, "model"), _part(config, "data")
    packages, hardware = _part(environment, "packages"), _part(environment, "hardware")
    git = _part(environment, "git")
    versions = ("segcredit", "torch", "transformers", "vllm", "verl")
    found = {
        "method": _name(config.get("algorithm")),
        "model": model.get("path") or (model.get("tiny") and f"tiny {model['tiny']}"),
        "data": data.get("world") or _listed(data.get("train")),
        "reward": _name(config.get("reward")),
        "seed": config.get("seed"),
        "started": environment.get("started"),
        "versions": ", ".join(f"{x} {packages[x]}" for x in versions if x in packages),
        "python": environment.get("python"),
        "hardware": _hardware(hardware),
        "source": git.get("commit")
        and f"{str(git['commit'])[:12]}{' + changes' * bool(git.get('dirty'))}",
        "command": _listed(environment.get("command"), " "),
    }
    return [
        [label, shortened(str(x), LONGEST)] for label, x in found.items() if x not in (None, "")
    ]


def method(config: Mapping[str, Any]) -> list[list[str]]:
    """The method as a composition: its parts and their settings."""
    given = config.get("algorithm")
    if given is None:
        return []
    settings = dict(given) if isinstance(given, Mapping) else {"name": given}
    name = settings.pop("name", None)
    try:
        if requests_of({"algorithm": given}):
            raise ValueError("a run's own code is not run")
        algorithm = make_algorithm(str(name), **settings)
    except (ValueError, TypeError):  # from another version, or code of its own
        return [["algorithm", shortened(repr(given), LONGEST)]]
    parts = [
        (x.name, getattr(algorithm, x.name))
        for x in dataclasses.fields(algorithm)  # type: ignore[arg-type]  # every method is one
    ]
    return [[name, repr(part)] for name, part in parts if part not in (None, ())]


def results(run: Run) -> list[dict[str, Any]]:
    """First and last evaluation: before and after."""
    rows = [x for x in run.metrics if x.get("stage") == "evaluation"]
    if not rows:
        return []
    first, last = rows[0], rows[-1] if len(rows) > 1 else {}
    return [
        {
            "label": label,
            "before": _measured(first, key),
            "after": _measured(last, key),
            "share": key in SHARES,
            "texts": _texts(first.get(key), last.get(key), key in SHARES)
            if key in (*SHARES, *REWARDS)
            else None,
        }
        for key, label in RESULTS
        if key in first and (key != "no_verdict" or first[key] or last.get(key))
    ]


def _texts(before: Any, after: Any, share: bool) -> tuple[str, str, str]:
    """Format before, after and change as the terminal does; a browser rounds differently."""
    old, new = (
        x if isinstance(x, float) or (type(x) is int and abs(x) < 2**53) else math.nan
        for x in (before, after)
    )
    return change_texts(old, new, share)


def warnings(run: Run) -> list[list[Any]]:
    """Step and message of each warning, at most ``MOST_WARNINGS``."""
    rows = [
        x for x in run.warnings if _is_step(x.get("step")) and isinstance(x.get("message"), str)
    ]
    return [[x["step"], shortened(x["message"], LONGEST)] for x in rows[:MOST_WARNINGS]]


def curves(run: Run) -> dict[str, dict[str, list[list[Any]]]]:
    """stage → metric → [steps, values]."""
    found: dict[str, dict[str, list[list[Any]]]] = {}
    for stage in STAGES:
        lines = [x for x in run.metrics if x.get("stage") == stage and _is_step(x.get("step"))]
        lines = lines[:: -max(1, -(-len(lines) // MOST_POINTS))][::-1]  # the last one is in
        keys = dict.fromkeys(key for x in lines for key in x if key not in ("step", "stage"))
        for key in keys:
            steps = [x["step"] for x in lines if key in x]
            values = [plain_number(x[key]) for x in lines if key in x]
            found.setdefault(stage, {})[key] = [steps, values]
    return found


def _measured(row: Mapping[str, Any], key: str) -> list[Any]:
    """Value, and its interval where there is one."""
    return [plain_number(row.get(name)) for name in (key, f"{key}_low", f"{key}_high")]


IRRELEVANT = ("seed", "name", "threads", "version")
"""Settings in which runs of one group may differ."""


def _without_seed(config: Mapping[str, Any]) -> str:
    """Equal for runs that differ in nothing but the seed."""
    rest = {key: x for key, x in config.items() if key not in IRRELEVANT}
    return yaml.safe_dump(rest)


def _part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def _name(part: Any) -> Any:
    return part.get("name") if isinstance(part, Mapping) else part


def _listed(x: Any, between: str = ", ") -> str:
    return between.join(map(str, x)) if isinstance(x, list) else str(x or "")


def _is_step(x: Any) -> bool:
    return type(x) is int and 0 <= x < 2**53


def _hardware(found: Mapping[str, Any]) -> str:
    shown = [_listed(found["gpus"])] if found.get("gpus") else []
    if found.get("cpus"):
        shown.append(f"{found['cpus']} CPU cores")
    if found.get("memory_gib"):
        shown.append(f"{found['memory_gib']} GiB memory")
    return ", ".join(shown)


SIDE = 360
"""Pixels, at most."""


def as_data_uri(run: Path, name: str) -> str | None:
    """The picture, drawn anew as PNG or JPEG; None if it is no picture of the run folder."""
    try:
        path = (run / name).resolve()
        if not path.is_relative_to(run.resolve()) or not path.is_file():
            return None
        picture = open_image(path)
    except (PictureError, OSError, ValueError, RuntimeError):
        return None  # no picture; or no name that a file can have, or links in a circle
    picture.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    few = picture.getcolors(512) is not None  # a drawing, mostly: PNG is smaller, and exact
    made = {kind: _saved(picture, kind) for kind in (("png", "jpeg") if few else ("jpeg",))}
    kind = min(made, key=lambda x: len(made[x]))
    return f"data:image/{kind};base64,{base64.b64encode(made[kind]).decode()}"


def _saved(picture: Image.Image, kind: str) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind)
    return file.getvalue()


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
