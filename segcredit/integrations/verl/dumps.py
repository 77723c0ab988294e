"""Convert verl's dumps of rollouts and metrics to a run directory, for reports and analyses."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from segcredit.integrations.verl.credit import ENDS
from segcredit.runlog.files import read_lines, replacing, to_line
from segcredit.runlog.records import write_rollouts

METRICS, ROLLOUTS = Path("verl", "metrics.jsonl"), Path("verl", "rollouts")
"""Where verl writes them, in the run directory."""
ADOPTED = Path("verl", "adopted")
"""Marker file: metrics.jsonl and rollouts were converted from verl's and may be replaced."""
TOKENS = "segment_tokens"
"""Column that our trainer adds to verl's rows."""
REWARD = "critic/score/mean"
"""Metric that verl logs in the line of each training step and nowhere else."""
NAMES = {
    REWARD: "reward",
    "actor/entropy": "entropy",
    "response_length/mean": "response_length",
    "response_length/clip_ratio": "truncated",
    "actor/pg_clipfrac": "clip_fraction",
    "actor/ratio": "ratio",
    "actor/pg_loss": "policy_loss",
    "critic/vf_loss": "value_loss",
    "segment/value_explained_variance": "explained_variance",
    "segment/num/mean": "segments",
    "timing_s/step": "seconds",
}
"""verl's metric name → ours; other metrics keep their names."""
HELD_OUT = {"acc": "sampled", "reward": "reward", "no_verdict": "no_verdict"}
"""Validation metrics of verl → names of ours."""
VALIDATION = re.compile(rf"val-(?:core|aux)/.*/({'|'.join(HELD_OUT)})/mean@\d+")
"""verl's key of a validation metric: data source, metric, number of samples in the mean."""


def token_columns(
    columns: Mapping[str, Tensor], piece: Callable[[int], str], count: int
) -> Iterator[dict[str, Any]]:
    """Return columns of the first responses without masked tokens, named as in run directories."""
    mask = columns["response_mask"].bool()
    ended = columns[ENDS].cumsum(dim=1) - columns[ENDS]
    for row in range(min(count, len(mask))):
        valid = mask[row]
        tokens = columns["responses"][row][valid].tolist()
        yield {
            "tokens": tokens,
            "pieces": [piece(token) for token in tokens],
            "segment": ended[row][valid].tolist(),
            "entropy": _short(columns["entropy"][row][valid]),
            "value": _short(columns["values"][row][valid]),
            "advantage": _short(columns["advantages"][row][valid]),
            "logp_old": _short(columns["old_log_probs"][row][valid]),
        }


def _short(x: Tensor) -> list[float]:
    return [float(f"{v:.6g}") for v in x.float().tolist()]


def rotate_log(log: Path) -> None:
    """Rename the log of an earlier start, because verl empties its log when it opens it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists() and log.stat().st_size:
        number = max(_parts(log), default=0) + 1
        log.rename(log.with_name(f"{log.stem}-{number:03d}{log.suffix}"))


def _parts(log: Path) -> dict[int, Path]:
    """Return the logs of earlier starts, by number."""
    pattern = re.compile(rf"{re.escape(log.stem)}-(\d+){re.escape(log.suffix)}")
    found = {pattern.fullmatch(path.name): path for path in log.parent.glob(f"{log.stem}-*")}
    return {int(match[1]): path for match, path in found.items() if match is not None}


def logged(folder: Path) -> list[list[dict[str, Any]]]:
    """Read the lines of verl's logs: one list per start of the run, in order."""
    log = folder / METRICS
    earlier = [path for _, path in sorted(_parts(log).items())]
    return [read_lines(path) for path in (*earlier, log) if path.exists()]


def check_free(folder: Path) -> None:
    """Refuse a folder that holds a run of segcredit train, which a verl run would overwrite."""
    if (folder / "metrics.jsonl").exists() and not (folder / ADOPTED).exists():
        raise ValueError(
            f"{folder} holds metrics.jsonl of another run, which a run on verl would replace. "
            f"Choose another folder with --out, or move that file away."
        )


def adopt(folder: Path) -> None:
    """Convert verl's logs and rollouts to our format; each call converts them again.

    Metrics and rollouts from another source are never replaced.
    """
    if not (starts := logged(folder)) and not (folder / ROLLOUTS).is_dir():
        return
    if (folder / "metrics.jsonl").exists() and not (folder / ADOPTED).exists():
        raise ValueError(
            f"{folder} holds a metrics.jsonl from segcredit and a verl run (verl/), so it is "
            f"unclear which of the two to show. Move {folder / 'verl'} away to see the former, or "
            f"metrics.jsonl and rollouts to see the latter."
        )
    (folder / ADOPTED).touch()
    with replacing(folder / "metrics.jsonl") as file:
        for row in metric_rows(starts):
            file.write(to_line(row))
    (folder / "rollouts").mkdir(exist_ok=True)
    for step, rows in recorded(folder / ROLLOUTS).items():
        write_rollouts(folder / "rollouts", step, map(response_row, rows))


def metric_rows(starts: list[list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yield one row per step and per validation; a later start replaces the steps it repeats."""
    by_step: dict[int, dict[str, Any]] = {}
    for lines in starts:
        logged_steps = [(int(x["step"]), x["data"]) for x in lines if _is_logged(x)]
        again = min((step for step, data in logged_steps if REWARD in data), default=None)
        by_step = {k: x for k, x in by_step.items() if again is None or k < again}
        for step, data in logged_steps:  # a resumed run validates again at its checkpoint's step
            by_step[step] = {**by_step.get(step, {}), **data}
    for step, data in sorted(by_step.items()):
        if held_out := _held_out(data):
            yield {"step": step, "stage": "evaluation", **held_out}
        rest = {NAMES.get(k, k): x for k, x in data.items() if not k.startswith("val-")}
        if "reward" in rest:
            pretraining = rest.pop("segment/critic_pretraining", 0)
            stage = "pretrain_critic" if pretraining else "optimize"
            yield {"step": step, "stage": stage, **rest}


def _held_out(data: Mapping[str, Any]) -> dict[str, float]:
    """Average verl's validation over data sources: accuracy, if the reward reports it."""
    scores: dict[str, list[float]] = {}
    for key, value in data.items():
        if found := VALIDATION.fullmatch(key):
            scores.setdefault(HELD_OUT[found[1]], []).append(value)
    return {name: sum(x) / len(x) for name, x in scores.items()}


def _is_logged(line: Mapping[str, Any]) -> bool:
    """Whether verl's logger wrote the line."""
    step = line.get("step")
    return isinstance(step, int) and isinstance(line.get("data"), dict)


def recorded(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Map each step to verl's rows with tokens; in a run without tokens, to a few of its rows."""
    found, few = {}, {}
    paths = [path for path in folder.glob("*.jsonl") if path.stem.isdecimal()]
    for path in sorted(paths, key=lambda path: int(path.stem)):
        rows = read_lines(path)  # one step at a time, since a long run's dumps exceed memory
        few[int(path.stem)] = rows[:16]
        if with_tokens := [row for row in rows if row.get(TOKENS)]:
            found[int(path.stem)] = with_tokens
    return found or few


def response_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert one of verl's rows."""
    return {
        "prompt_id": str(row.get("uid", "")).rsplit("_", 2)[0],
        "prompt": row.get("input"),
        "response": row.get("output"),
        "reward": row.get("score"),
        "reason": str(row.get("reason", "")),
        "answer": _text(row.get("gts")),
        **(row.get(TOKENS) or {}),
    }


def _text(x: Any) -> str | None:
    return x if x is None or isinstance(x, str) else json.dumps(x)
