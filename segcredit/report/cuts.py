"""The same responses cut in every way there is, for the eye to compare."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from segcredit.partition import Partition, make_partition
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
