"""verl's dumps of rollouts and metrics as a run folder of ours, for reports and analyses."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from segcredit.integrations.verl.credit import ENDS
from segcredit.runlog.atomic import replacing
from segcredit.runlog.lines import read_lines, to_line
from segcredit.runlog.rollouts import write_rollouts

METRICS, ROLLOUTS = Path("verl", "metrics.jsonl"), Path("verl", "rollouts")
"""Where in a run's folder verl writes them."""
TOKENS = "segment_tokens"
"""The column that our trainer adds to verl's rows."""
NAMES = {
    "critic/score/mean": "reward",
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
"""verl's name of a number → ours; the others keep theirs."""


def token_columns(
    columns: Mapping[str, Tensor], piece: Callable[[int], str], count: int
) -> Iterator[dict[str, Any]]:
    """The first responses token by token, in the names of our run folder; holes left out."""
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


def make_room(log: Path, resumed: bool) -> None:
    """Before verl opens its log of metrics, which it empties: keep that of the run's first part."""
    log.parent.mkdir(parents=True, exist_ok=True)
    if resumed and log.exists():
        number = len(list(log.parent.glob(f"{log.stem}-*{log.suffix}"))) + 1
        log.rename(log.with_name(f"{log.stem}-{number:03d}{log.suffix}"))


def logged(folder: Path) -> list[dict[str, Any]]:
    """Every line of verl's logs, those of earlier parts of the run first."""
    log = folder / METRICS
    earlier = sorted(log.parent.glob(f"{log.stem}-*{log.suffix}"))
    return [row for path in (*earlier, log) if path.exists() for row in read_lines(path)]


def adopt(folder: Path) -> None:
    """Write what verl wrote so far in our format beside it; again each time it is asked for."""
    if lines := logged(folder):
        with replacing(folder / "metrics.jsonl") as file:
            for row in metric_rows(lines):
                file.write(to_line(row))
    (folder / "rollouts").mkdir(exist_ok=True)
    for step, rows in recorded(folder / ROLLOUTS).items():
        write_rollouts(folder / "rollouts", step, map(response_row, rows))


def metric_rows(lines: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One line per step, and one per validation; of a step that was done again the later one."""
    by_step = {int(line["step"]): line["data"] for line in lines}
    for step, data in sorted(by_step.items()):
        scores = [
            value for key, value in data.items() if key.startswith("val-core/") and "/mean@" in key
        ]
        if scores:
            mean = sum(scores) / len(scores)
            yield {"step": step, "stage": "evaluation", "sampled": mean}
        rest = {NAMES.get(k, k): x for k, x in data.items() if not k.startswith("val-")}
        if "reward" in rest:
            pretraining = rest.pop("segment/critic_pretraining", 0)
            stage = "pretrain_critic" if pretraining else "optimize"
            yield {"step": step, "stage": stage, **rest}


def recorded(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """step → verl's rows with tokens; in a run that has none, a few of every step as they are."""
    found, few = {}, {}
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: int(path.stem)):
        rows = read_lines(path)  # one step at a time: a long run's dumps would fill the memory
        few[int(path.stem)] = rows[:16]
        if with_tokens := [row for row in rows if row.get(TOKENS)]:
            found[int(path.stem)] = with_tokens
    return found or few


def response_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """One of verl's rows as ours."""
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
