"""Records of a step's responses: text, tokens, segments, credit, reward and its reason."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from segcredit.core.ratios import geometric_mean_ratio
from segcredit.core.segments import Segments
from segcredit.models import Codec
from segcredit.runlog.rollouts import save_image
from segcredit.train.step import StepResult
from segcredit.types import Algorithm, Batch


def rollout_rows(
    result: StepResult, algorithm: Algorithm, codec: Codec, count: int, images: Path
) -> Iterator[dict[str, Any]]:
    """Yield records of the first ``count`` responses of a step; images are saved to ``images``."""
    batch, sampled = result.batch, result.sampled
    rollouts = batch.rollouts
    columns: dict[str, Tensor] = {"logp_old": rollouts.logp_old}
    for name in ("entropy", "value"):
        if (column := getattr(rollouts, name)) is not None:
            columns[name] = column
    if batch.credit is not None:
        columns["advantage"] = batch.credit.advantage
        columns["segment"] = batch.credit.segments.index
    if batch.ratio_segments is not None:
        columns["ratio"] = _ratio(algorithm, batch, batch.ratio_segments, result.logp_new)
    for row in range(min(count, len(rollouts))):
        mask = rollouts.mask[row]
        tokens = rollouts.tokens[row][mask].tolist()
        response, reward = sampled.responses[row], sampled.rewards[row]
        yield {
            "prompt_id": response.prompt.id,
            "prompt": codec.render(response.prompt),
            "messages": [dict(x) for x in response.prompt.messages],
            "images": [save_image(images, x) for x in response.prompt.images],
            "response": response.text,
            "tokens": tokens,
            "pieces": codec.pieces(tokens),
            **{name: _plain(x[row][mask]) for name, x in columns.items()},
            "reward": reward.value,
            "reason": reward.reason,
            "parts": dict(reward.parts),
            "correct": reward.correct,
            "verdict": reward.verdict,
            "truncated": response.truncated,
            "answer": response.prompt.answer,
        }


def _ratio(algorithm: Algorithm, batch: Batch, units: Segments, logp: Tensor) -> Tensor:
    """Compute the method's own ratio after the update; by default the geometric mean per unit."""
    if hasattr(algorithm, "recorded_ratio"):
        return algorithm.recorded_ratio(logp, batch)
    return geometric_mean_ratio(logp, batch.rollouts.logp_old, units)


def _plain(x: Tensor) -> list[float] | list[int]:
    """Convert to plain numbers, rounded to six digits."""
    if not x.is_floating_point():
        return x.tolist()
    return [float(f"{v:.6g}") for v in x.tolist()]
