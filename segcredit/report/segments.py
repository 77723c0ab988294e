"""Cut responses with partitions, and compute each segment's entropy, value and credit."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass

import torch
from torch import Tensor

from segcredit.columns import in_order, resolve
from segcredit.core.advantages import segment_gae
from segcredit.core.segments import Segments
from segcredit.partition import PARTITIONS, Partition, make_partition, partition_class, partition_of
from segcredit.report.responses import CreditSettings, InputError, Row
from segcredit.runlog.untrusted import parse_yaml
from segcredit.types import Rollouts

ALL = "all"
"""Strategy name that selects every built-in partition."""
FIELDS = {"entropy": ("entropy",), "value": ("value",), "logp_old": ("prob", "logp"), "pieces": ()}
"""Columns that a partition may need → fields of a row, any one of which provides the column."""


def column_names(partition: Partition) -> list[str]:
    """Return the names of the columns that a partition needs."""
    return [column.name for column in in_order(resolve(partition.needs))]


def load_partitions(asked: Iterable[str], options: Mapping[str, float]) -> dict[str, Partition]:
    """Make every built-in partition and the requested ones.

    Args:
        asked: Names as typed by the user: ``entropy``, ``file.py:Name``, or
            ``{name: fixed, size: 8}``.
        options: Settings from the command line, used by every partition that has them.
    """
    names = dict.fromkeys([*PARTITIONS, *(name for name in asked if name != ALL)])
    return {name: _make(name, options) for name in names}


def _make(name: str, options: Mapping[str, float]) -> Partition:
    if name.startswith("{"):
        return partition_of(parse_yaml(name))
    kind = partition_class(name)
    known = kind.setting_fields()
    required = {key: x for key, x in kind.examples[0].items() if known[key].default is MISSING}
    return make_partition(name, **required | {key: x for key, x in options.items() if key in known})


def choose(asked: Sequence[str], row: Row, partitions: Mapping[str, Partition]) -> list[str]:
    """Return the strategies to show for a row: the requested ones, else entropy, else newline."""
    if not asked:
        return ["newline" if missing_column("entropy", row) else "entropy"]
    names: dict[str, None] = {}
    for name in asked:
        candidates = PARTITIONS if name == ALL else [name]
        for candidate in candidates:
            lacking = [x for x in column_names(partitions[candidate]) if missing_column(x, row)]
            if lacking and name != ALL:
                raise InputError(f"strategy {name!r} needs {missing_column(lacking[0], row)}")
            if not lacking:
                names[candidate] = None
    return list(names)


def missing_column(column: str, row: Row) -> str:
    """Return what to add to a row that lacks a column; empty if the row has it."""
    if column not in FIELDS:
        return f"the column {column!r}, which rows of a file cannot hold; type -s newline"
    fields = FIELDS[column]
    if not fields or any(getattr(row, field) is not None for field in fields):
        return ""
    example = (Row.model_fields[fields[0]].examples or [""])[0]
    return (
        f"the field {' or '.join(map(repr, fields))}; this row has none; "
        f"add {example}, or type -s newline"
    )


@dataclass(frozen=True)
class SegmentNumbers:
    """One segment z_m; a number is None if the row lacks the columns it is computed from."""

    start: int
    """b_m: position of the first token, from 0 on."""
    end: int
    """e_m: position of the last token."""
    text: str
    """Text of its tokens, without holes."""
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
    """A row under one partition."""

    strategy: str
    partition: Partition
    index: list[int]
    """m(t) of each token, from 0 on; −1 in a hole."""
    segments: list[SegmentNumbers]

    @property
    def num_tokens(self) -> int:
        """Number of the response's tokens that belong to any segment."""
        return sum(segment.num_tokens for segment in self.segments)

    def to_json(self, label: str, credit: CreditSettings) -> str:
        """Format one line of ``--json``: unrounded numbers, in ASCII, so it is safe to print."""
        settings = self.partition.settings() | asdict(credit)
        return json.dumps(
            {
                "id": label,
                "strategy": self.strategy,
                "settings": settings,
                "tokens": self.num_tokens,
                "segments": [asdict(segment) for segment in self.segments],
            }
        )


def cut_row(row: Row, strategy: str, partition: Partition, credit: CreditSettings) -> Cut:
    """Cut one row and compute each segment's entropy, value and credit."""
    try:
        rollouts = _rollouts(row)
        segments = partition(rollouts)
        numbers = _numbers(rollouts, segments, row.reward, credit)
    except ValueError as error:
        raise InputError(str(error)) from None
    index = segments.index[0].tolist()
    texts = [""] * segments.width
    for piece, m in zip(row.pieces, index, strict=True):
        if m >= 0:
            texts[m] += piece
    columns = (
        segments.start[0].tolist(),
        segments.end[0].tolist(),
        texts,
        segments.length[0].tolist(),
        *([None] * segments.width if x is None else x[0].tolist() for x in numbers),
    )
    found = [SegmentNumbers(*column) for column in zip(*columns, strict=True)]
    return Cut(strategy, partition, index, found)


def _rollouts(row: Row) -> Rollouts:
    """Return a batch of one response, in float64."""
    given = {"entropy": row.entropy, "value": row.value, "logp_old": row.logp}
    columns = {
        name: torch.tensor([x], dtype=torch.float64) for name, x in given.items() if x is not None
    }
    if row.prob is not None:
        columns["logp_old"] = torch.tensor([row.prob], dtype=torch.float64).log()
    reward = torch.tensor([row.reward or 0.0], dtype=torch.float64)
    mask = torch.tensor([row.on_mask])
    return Rollouts.from_columns(mask, reward=reward, pieces=[row.pieces], **columns)


def _numbers(
    rollouts: Rollouts, segments: Segments, reward: float | None, credit: CreditSettings
) -> tuple[Tensor | None, ...]:
    """Compute every segment's H at its end, mean H, V, Â and R̂."""
    entropy, value = rollouts.entropy, rollouts.value
    at_end = mean = state_value = advantage = target = None
    if entropy is not None:
        at_end, mean = segments.at_end(entropy), segments.mean(entropy)
    if value is not None:
        read = segments.at_start if credit.value_at == "start" else segments.at_end
        state_value = read(value)
    if value is not None and reward is not None:
        made = segment_gae(
            rollouts.reward, value, segments, credit.gamma, credit.lam, credit.value_at.value
        )
        assert made.value_target is not None
        advantage = segments.at_end(made.advantage)
        target = segments.at_end(made.value_target)
    numbers = (at_end, mean, state_value, advantage, target)
    if not all(x is None or x.isfinite().all() for x in numbers):
        raise ValueError(
            "entropy, value and reward must be of moderate size; got a sum that overflows; "
            "correct the program that wrote them"
        )
    return numbers
