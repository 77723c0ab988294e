"""What a run keeps of a step's responses: text, tokens, segments, credit, reward and reason."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from segcredit.models import Codec
from segcredit.runlog.rollouts import keep_picture
from segcredit.train.step import Stepped


def rollout_rows(
    stepped: Stepped, codec: Codec, count: int, images: Path
) -> Iterator[dict[str, Any]]:
    """The first ``count`` responses of a step, token by token; pictures go to ``images``."""
    batch, collected = stepped.batch, stepped.collected
    rollouts = batch.rollouts
    columns: dict[str, Tensor] = {"logp_old": rollouts.logp_old}
    for name in ("entropy", "value"):
        if (column := getattr(rollouts, name)) is not None:
            columns[name] = column
    if batch.credit is not None:
        columns["advantage"] = batch.credit.advantage
        columns["segment"] = batch.credit.segments.index
    if batch.ratio_segments is not None:
        moved = stepped.logp_new - rollouts.logp_old
        columns["ratio"] = batch.ratio_segments.smooth(moved).exp()
    for row in range(min(count, len(rollouts))):
        mask = rollouts.mask[row]
        tokens = rollouts.tokens[row][mask].tolist()
        response, reward = collected.responses[row], collected.rewards[row]
        yield {
            "prompt_id": response.prompt.id,
            "prompt": codec.render(response.prompt),
            "messages": [dict(x) for x in response.prompt.messages],
            "images": [keep_picture(images, x) for x in response.prompt.images],
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


def _plain(x: Tensor) -> list[float] | list[int]:
    """Six digits are enough to look at."""
    if not x.is_floating_point():
        return x.tolist()
    return [float(f"{v:.6g}") for v in x.tolist()]
