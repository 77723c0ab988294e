"""What can be set on the command line, apart from the strategies themselves."""

import json
from dataclasses import asdict, dataclass, fields

import torch
from torch import Tensor

from segcredit.core.advantages import segment_gae
from segcredit.core.checks import require_unit_interval
from segcredit.core.segments import Segments
from segcredit.partition import PARTITIONS, Partition, make_partition, settings_of
from segcredit.report.responses import InputError, Row, Settings
from segcredit.types import Rollouts


@dataclass(frozen=True)
class SegmentNumbers:
    """One segment z_m; a number is None where the row lacks what it is made of."""

    start: int
    """b_m: position of the first token, from 0 on."""
    end: int
    """e_m: position of the last token."""
    text: str
    """Text of its tokens; a hole's is left out."""
    num_tokens: int
    entropy_at_end: float | None
    entropy_mean: float | None
    value: float | None
    """V(s_m)."""
    advantage: float | None
    """Â_m."""
    value_target: float | None
    """R̂_m."""


@dataclass(frozen=True)
class Cut:
    """A row under one strategy."""

    strategy: str
    partition: Partition
    index: list[int]
    """m(t) of each token, from 0 on; −1 in a hole."""
    segments: list[SegmentNumbers]

    @property
    def num_tokens(self) -> int:
        """Tokens that belong to a segment."""
        return sum(segment.num_tokens for segment in self.segments)


def partitions(settings: Settings) -> dict[str, Partition]:
    """Every strategy's partition; a setting that one of them refuses is an InputError."""
    try:
        require_unit_interval("gamma", settings.gamma, "Language tasks use 1.0.")
        require_unit_interval("lam", settings.lam, "The paper uses 0.99 per segment.")
        return {name: _made(name, settings) for name in PARTITIONS}
    except ValueError as error:
        raise InputError(str(error)) from None


def _made(name: str, settings: Settings) -> Partition:
    return make_partition(name, **{x: getattr(settings, x) for x in settings_of(name)})


def partition_settings(partition: Partition) -> dict[str, object]:
    """The partition's own settings; functions, such as a rounding rule, are left out."""
    values = {field.name: getattr(partition, field.name) for field in fields(partition)}
    return {name: value for name, value in values.items() if not callable(value)}


def cut_row(row: Row, strategy: str, partition: Partition, settings: Settings) -> Cut:
    """Cut one row and read off each segment's entropy, value and credit."""
    try:
        rollouts = _rollouts(row)
        segments = partition(rollouts)
        numbers = _numbers(rollouts, segments, row.reward, settings)
    except ValueError as error:
        raise InputError(str(error)) from None
    index = segments.index[0].tolist()
    texts = [""] * segments.width
    for piece, m in zip(row.pieces, index, strict=True):
        if m >= 0:
            texts[m] += piece
    columns = [
        segments.start[0].tolist(),
        segments.end[0].tolist(),
        texts,
        segments.length[0].tolist(),
        *(
            [None] * segments.width if x is None else x[0].tolist()  # (1, M) → a list
            for x in numbers
        ),
    ]
    return Cut(
        strategy,
        partition,
        index,
        [SegmentNumbers(*column) for column in zip(*columns, strict=True)],
    )


def _rollouts(row: Row) -> Rollouts:
    """A batch of one, in float64."""
    mask = torch.tensor([row.on_mask])
    logp = _tensor(row.logp)
    if row.prob is not None:
        logp = torch.tensor([row.prob], dtype=torch.float64).log()
    return Rollouts(
        tokens=torch.zeros(mask.shape, dtype=torch.long),
        mask=mask,
        logp_old=torch.zeros(mask.shape, dtype=torch.float64) if logp is None else logp,
        reward=torch.tensor([row.reward or 0.0], dtype=torch.float64),
        group=torch.zeros(1, dtype=torch.long),
        truncated=torch.zeros(1, dtype=torch.bool),
        entropy=_tensor(row.entropy),
        value=_tensor(row.value),
        pieces=[row.pieces],
    )


def _tensor(numbers: list[float] | None) -> Tensor | None:
    return None if numbers is None else torch.tensor([numbers], dtype=torch.float64)


def _numbers(
    rollouts: Rollouts, segments: Segments, reward: float | None, settings: Settings
) -> tuple[Tensor | None, ...]:
    """H at the end, mean H, V, Â and R̂ of every segment."""
    entropy, value = rollouts.entropy, rollouts.value
    at_end = mean = state_value = advantage = target = None
    if entropy is not None:
        at_end, mean = segments.at_end(entropy), segments.mean(entropy)
    if value is not None:
        read = segments.at_start if settings.value_at == "start" else segments.at_end
        state_value = read(value)
    if value is not None and reward is not None:
        credit = segment_gae(
            rollouts.reward,
            value,
            segments,
            settings.gamma,
            settings.lam,
            settings.value_at.value,
        )
        assert credit.value_target is not None
        advantage = segments.at_end(credit.advantage)
        target = segments.at_end(credit.value_target)
    numbers = (at_end, mean, state_value, advantage, target)
    if not all(x is None or x.isfinite().all() for x in numbers):
        raise ValueError(
            "entropy, value and reward must be of moderate size; got a sum that overflows; "
            "look at what wrote them"
        )
    return numbers


def as_json(label: str, cut: Cut, settings: Settings) -> str:
    """The numbers unrounded, and ASCII throughout, so that a terminal may print it as it is."""
    return json.dumps(
        {
            "id": label,
            "strategy": cut.strategy,
            "settings": {
                **partition_settings(cut.partition),
                "gamma": settings.gamma,
                "lam": settings.lam,
                "value_at": settings.value_at.value,
            },
            "tokens": cut.num_tokens,
            "segments": [asdict(segment) for segment in cut.segments],
        }
    )
