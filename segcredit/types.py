"""Central types and protocols: the data of one training step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import FunctionType
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from segcredit.columns import Needs
from segcredit.core.advantages import Credit
from segcredit.core.checks import sent
from segcredit.core.segments import Segments


@dataclass(frozen=True)
class Prompt:
    """One prompt of the data as it was read: not tokenized, images not decoded."""

    id: str
    messages: tuple[Mapping[str, str], ...]
    """Chat messages, ``{"role": …, "content": …}``; ``<image>`` marks where an image goes."""
    images: tuple[bytes | Path, ...] = ()
    """An encoded image (PNG, JPEG, …) or its path, one per ``<image>``."""
    answer: str | None = None
    """The verifiable answer."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Other columns of the row; reward functions get them by name."""
    source: str | None = field(default=None, compare=False)
    """File or dataset of the row, as the user named it; None: made in Python."""


@dataclass(frozen=True)
class Response:
    """One response of the policy, to be graded."""

    prompt: Prompt
    text: str
    """Text without special tokens."""
    num_tokens: int
    truncated: bool
    """Whether the response was cut off at the length limit."""
    max_tokens: int
    """The length limit."""


@dataclass(frozen=True)
class Reward:
    """The reward of a response, and its reason."""

    value: float
    reason: str
    correct: bool | None = None
    """Whether the answer was correct; None: the reward does not report correctness."""
    answered: bool | None = None
    """Whether an answer was found in the response; None: not reported."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Summands of the value: accuracy, format, length, …"""
    verdict: bool = True
    """False: the grader timed out, crashed or refused to compute, and ``reason`` says why. Such a
    response counts as not correct."""
    each: "Mapping[str, Reward]" = field(default_factory=dict)
    """The rewards of a weighted sum by label, before their weights; empty for a single reward."""

    @property
    def complete(self) -> bool:
        """Whether there is a verdict, in a weighted sum from each of its rewards."""
        return self.verdict and all(x.verdict for x in self.each.values())


def correctness(rewards: Sequence[Reward]) -> list[bool] | None:
    """Whether each response was correct; None if the rewards do not report correctness.

    A response without a verdict counts as not correct.
    """
    said = [x.correct for x in rewards if x.verdict]
    if None in said or all(x.correct is None for x in rewards):
        return None
    return [bool(x.verdict and x.correct) for x in rewards]


@runtime_checkable
class RewardFn(Protocol):
    """Reward function: grades a batch of responses and returns one Reward each, in order."""

    def __call__(self, responses: Sequence[Response]) -> list[Reward]: ...

    def close(self) -> None:
        """Stop its worker processes."""
        ...


@dataclass(frozen=True)
class Encoded:
    """A tokenized prompt: the inputs of the model."""

    prompt: Prompt
    tokens: Int[Tensor, " P"]
    positions: Int[Tensor, "R P"]
    """Rotary positions: one row for text models, three (time, height, width) for vision ones."""
    vision: Mapping[str, Tensor] = field(default_factory=dict)
    """Extra inputs of the model (pixel values, grids), concatenated along their first axis."""
    token_types: Mapping[str, Int[Tensor, " P"]] = field(default_factory=dict)
    """Extra inputs with one number per token, by name; 0 for the tokens of a response."""

    def extended(self, prefix: Int[Tensor, " L"]) -> "Encoded":
        """Append a prefix of a response to the prompt."""
        first = int(self.positions.max()) + 1
        more = torch.arange(first, first + len(prefix)).expand(len(self.positions), -1)
        return replace(
            self,
            tokens=torch.cat([self.tokens, prefix]),
            positions=torch.cat([self.positions, more], dim=1),
            token_types={
                name: torch.nn.functional.pad(x, (0, len(prefix)))
                for name, x in self.token_types.items()
            },
        )


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters."""

    max_tokens: int
    temperature: float = 1.0
    """Sampling temperature; 0: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """Number of most probable tokens to sample from; 0: all."""
    stop: tuple[str, ...] = ()
    """Texts that end a response: its last token is the one with which it first contains one."""

    def as_dict(self) -> dict[str, Any]:
        """Return the parameters for a record; ``stop`` only if there are stop strings."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return found if self.stop else {key: x for key, x in found.items() if key != "stop"}


@dataclass(frozen=True)
class Rollouts:
    """Sampled responses, padded to one width, and their columns; all are constants in the loss.

    Columns below the blank line are filled later, and only if the method needs them
    (segcredit/columns.py).
    """

    tokens: Int[Tensor, "B T"]
    """Response token ids."""
    mask: Bool[Tensor, "B T"]
    """True at tokens the policy wrote; holes (tool output) and padding are False."""
    logp_old: Float[Tensor, "B T"]
    """log π_old of each token."""
    reward: Float[Tensor, " B"]
    """Outcome reward r(x, y)."""
    group: Int[Tensor, " B"]
    """Number of the prompt; responses to one prompt have equal numbers."""
    truncated: Bool[Tensor, " B"]
    """Whether the response was cut off at the length limit."""

    correct: Bool[Tensor, " B"] | None = None
    """Whether each response was correct; None if the reward does not report correctness. Filled
    for every method."""
    logp_sampler: Float[Tensor, "B T"] | None = None
    """log π of each token as the sampler computed it, if log π_old was recomputed."""
    entropy: Float[Tensor, "B T"] | None = None
    """H_t under π_old, full vocabulary, at the sampling temperature."""
    value: Float[Tensor, "B T"] | None = None
    """V of the prefix before each token."""
    logp_ref: Float[Tensor, "B T"] | None = None
    """log π_ref of each token."""
    image_kl: Float[Tensor, "B T"] | None = None
    """KL of each token between the policy with its images and with hidden ones; NaN without."""
    pieces: Sequence[Sequence[str]] | None = None
    """Text of each token; special tokens are ''."""
    baseline: Float[Tensor, " B"] | None = None
    """Value of the prompt before this step, tracked over the run (single-stream SPO)."""
    parent: Int[Tensor, " B"] | None = None
    """Row of the response that this one continues; −1 at a tree's root (SPO-tree)."""
    prompts: Sequence[Encoded] | None = None
    """The prompt of each response, which the models read when they score it."""
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    """Columns of your own by name, one entry per response each (``with_column``)."""

    @classmethod
    def from_columns(cls, mask: Bool[Tensor, "B T"], **columns: Any) -> "Rollouts":
        """Make rollouts of known columns; a required column that is not given is zeros."""
        filled = {
            "tokens": torch.zeros_like(mask, dtype=torch.long),
            "logp_old": torch.zeros_like(mask, dtype=torch.float32),
            "reward": torch.zeros(len(mask), device=mask.device),
            "group": torch.arange(len(mask), device=mask.device),
            "truncated": torch.zeros(len(mask), dtype=torch.bool, device=mask.device),
        }
        return cls(mask=mask, **filled | columns)

    def column(self, name: str, reader: str) -> Tensor:
        """Return a column for ``reader``, the part that needs it; raise ValueError if missing."""
        x = self.extra[name] if name in self.extra else getattr(self, name, None)
        if x is None:
            raise ValueError(
                f"{reader} needs the rollouts' {name!r}; got none. "
                f"Fill it first: rollouts.with_column({name!r}, …)."
            )
        return x

    def token_texts(self, reader: str) -> Sequence[Sequence[str]]:
        """Return the token texts for ``reader``; raise ValueError if they are missing."""
        if self.pieces is None:
            raise ValueError(
                f"{reader} needs the rollouts' 'pieces'; got none. Decode each token by itself: "
                f"rollouts.replace(pieces=…)."
            )
        return self.pieces

    def is_correct(self, threshold: float) -> Bool[Tensor, " B"]:
        """Return whether each response is correct: as the reward reports, else by a threshold.

        Args:
            threshold: Minimum reward of a correct response, if correctness is not reported.
        """
        return self.reward >= threshold if self.correct is None else self.correct

    def with_column(self, name: str, values: Tensor) -> "Rollouts":
        """Return a copy with a column set: a field of this class, or one of your own."""
        if name in (f.name for f in fields(self)):
            return self.replace(**{name: values})
        return replace(self, extra={**self.extra, name: values})

    def replace(self, **columns: object) -> "Rollouts":
        """Return a copy with some fields set."""
        known = [f.name for f in fields(self)]
        for name in columns:
            if name not in known:
                raise ValueError(f"rollouts have no column {name!r}; they have {', '.join(known)}.")
        return replace(self, **columns)  # type: ignore[arg-type]

    def map(self, change: Callable[[Tensor], Tensor]) -> "Rollouts":
        """Return a copy with a function applied to every tensor; prompts stay as they are."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        changed = {name: change(x) for name, x in own.items() if isinstance(x, Tensor)}
        extra = {name: change(x) for name, x in self.extra.items()}
        return self.replace(**changed, extra=extra)

    def select(self, rows: Int[Tensor, " R"]) -> "Rollouts":
        """Select responses in the given order; row numbers in CPU memory avoid a device sync."""
        _check_rows(rows)
        numbers, rows = rows, sent(rows, self.mask.device)
        columns: dict[str, object] = {}
        for f in fields(self):
            x = getattr(self, f.name)
            if isinstance(x, Tensor):
                columns[f.name] = x[rows]
            elif f.name == "extra":
                columns[f.name] = {name: column[rows] for name, column in x.items()}
            elif x is not None:
                columns[f.name] = [x[row] for row in numbers.tolist()]
        if self.parent is not None:  # parents are row numbers, so they move with the rows
            place = torch.full_like(self.parent, -2)  # −2: not among the selected
            place[rows] = torch.arange(len(rows), device=rows.device)
            kept = self.parent[rows]
            columns["parent"] = torch.where(kept >= 0, place[kept.clamp(min=0)], kept)
        return replace(self, **columns)  # type: ignore[arg-type]

    @classmethod
    def join(cls, parts: "Sequence[Rollouts]") -> "Rollouts":
        """Join batches into one, padded to one width, with new group numbers.

        A column that one of them lacks is left out; ``parent`` must not be filled.
        """
        width = max(x.mask.shape[1] for x in parts)
        columns: dict[str, Any] = {}
        for f in fields(cls):
            found = [getattr(x, f.name) for x in parts]
            if f.name == "extra" or any(x is None for x in found):
                continue
            if not isinstance(found[0], Tensor):
                columns[f.name] = [x for part in found for x in part]
                continue
            if found[0].ndim == 2:
                found = [torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in found]
            columns[f.name] = torch.cat(found)
        numbers, first = [], 0
        for part in parts:
            number = part.group.unique(return_inverse=True)[1]
            numbers.append(number + first)
            first += int(number.max()) + 1
        return cls(**columns | {"group": torch.cat(numbers)})

    def __len__(self) -> int:
        return len(self.mask)


@dataclass(frozen=True)
class Outputs:
    """Outputs of the current models for a micro-batch."""

    logp: Float[Tensor, "B T"]
    """log π_θ of each token."""
    value: Float[Tensor, "B T"] | None = None
    """V_φ of the prefix before each token."""
    entropy: Float[Tensor, "B T"] | None = None
    """Entropy of π_θ at each token, with gradients; only for an algorithm with ``uses_entropy``."""


@dataclass(frozen=True)
class Loss:
    """A micro-batch's share of the loss of its mini-batch."""

    policy: Float[Tensor, ""]
    value: Float[Tensor, ""] | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Detached metrics that add up over the micro-batches."""

    @property
    def total(self) -> Float[Tensor, ""]:
        """Sum of policy and value loss, which have separate parameters."""
        return self.policy if self.value is None else self.policy + self.value


@dataclass(frozen=True)
class Batch:
    """Rollouts with their credit, to be split into mini- and micro-batches.

    ``shares`` holds, for each term of the loss, the denominators as per-entry shares of the
    mini-batch (see core/losses.py); ``Algorithm.minibatch`` fills it, and selecting rows
    slices it, so a micro-batch always carries its mini-batch's denominators.
    """

    rollouts: Rollouts
    loss_mask: Bool[Tensor, "B T"]
    """Tokens that enter the policy loss."""
    credit: Credit | None = None
    ratio_segments: Segments | None = None
    shares: Mapping[str, Tensor] = field(default_factory=dict)
    weight: Float[Tensor, "B T"] | None = None
    """Factor of each token's term of the policy loss, after every normalization; None: 1."""
    in_loss: Bool[Tensor, " B"] | None = None
    """Responses that enter the policy's loss, its additional terms and their denominators; None:
    all. The critic learns from all."""
    rows_per_item: int = 1
    """Number of neighboring rows that must stay together (2 for preference pairs)."""

    def select(self, rows: Int[Tensor, " R"]) -> "Batch":
        """Select responses in the given order; row numbers in CPU memory avoid a device sync."""
        _check_rows(rows)
        if not _whole_items(rows, self.rows_per_item):
            raise ValueError(
                f"rows must keep groups of {self.rows_per_item} adjacent rows together, in order "
                f"(chosen, rejected); got {rows.tolist()[:8]}."
            )
        rollouts = self.rollouts.select(rows)
        rows = sent(rows, self.loss_mask.device)
        return replace(
            self,
            rollouts=rollouts,
            loss_mask=self.loss_mask[rows],
            credit=None if self.credit is None else self.credit.select(rows),
            ratio_segments=None
            if self.ratio_segments is None
            else self.ratio_segments.select(rows),
            shares={name: x[rows] for name, x in self.shares.items()},
            weight=None if self.weight is None else self.weight[rows],
            in_loss=None if self.in_loss is None else self.in_loss[rows],
        )

    def share(self, term: str) -> Tensor:
        """Return the shares of one term of the loss."""
        if term not in self.shares:
            raise ValueError(
                f"the batch has no denominators for {term!r}. Call "
                f"batch = algorithm.minibatch(batch) once per mini-batch, before the loss."
            )
        return self.shares[term]

    def split(self, num: int, generator: torch.Generator | None = None) -> "list[Batch]":
        """Split into shuffled mini-batches of (almost) equal size."""
        return [self.select(rows) for rows in self.split_rows(num, generator)]

    def split_rows(self, num: int, generator: torch.Generator | None = None) -> list[Tensor]:
        """Return the row numbers of those mini-batches, in CPU memory."""
        items = len(self.rollouts) // self.rows_per_item
        if not 1 <= num <= items:
            raise ValueError(
                f"cannot split {items} responses or pairs into {num} mini-batches; "
                f"choose between 1 and {items}."
            )
        order = torch.randperm(items, generator=generator)
        within = torch.arange(self.rows_per_item)
        return [
            (part[:, None] * self.rows_per_item + within).flatten()
            for part in order.tensor_split(num)
        ]


def _whole_items(rows: Tensor, size: int) -> bool:
    """Return whether the rows are complete groups of ``size`` neighbors."""
    if size == 1:
        return True
    if len(rows) % size:
        return False
    items = rows.view(-1, size)
    whole = items == items[:, :1] + torch.arange(size, device=rows.device)
    return bool((whole & (items[:, :1] % size == 0)).all())


def _check_rows(rows: Tensor) -> None:
    if rows.dtype == torch.bool:
        raise ValueError(
            "rows must be row numbers; got a boolean mask. Pass keep.nonzero().flatten()."
        )


def named_repr(part: Any) -> str:
    """Return the repr of a frozen part with functions by name, so that it is equal in every run."""
    shown = []
    for f in fields(part):
        x = getattr(part, f.name)
        shown.append(f"{f.name}={x.__name__ if isinstance(x, FunctionType) else repr(x)}")
    return f"{type(part).__name__}({', '.join(shown)})"


MonteCarlo = Callable[[Rollouts, Segments, Tensor, int], Tensor]
"""(rollouts, segments, which (B, M) to estimate, samples) → mean rewards of fresh continuations
from the prefix before each segment, (B, M); NaN where there is none, because a budget was spent."""


@runtime_checkable
class PromptSource(Protocol):
    """An endless sequence of prompts."""

    @property
    def size(self) -> int | None:
        """Number of distinct prompts; None if unlimited."""
        ...

    def take(self, position: int, count: int) -> list[Prompt]:
        """Return the prompts at position … position + count − 1 of the sequence."""
        ...


@runtime_checkable
class RolloutEngine(Protocol):
    """Samples responses from the current policy."""

    def sample(
        self, prompts: Sequence[Encoded], sampling: Sampling, generator: torch.Generator
    ) -> Rollouts:
        """Sample one response per prompt; record log π and, if known, H of every token."""
        ...

    def continue_from(
        self,
        prompts: Sequence[Encoded],
        prefixes: Sequence[Int[Tensor, "_"]],
        sampling: Sampling,
        generator: torch.Generator,
    ) -> Rollouts:
        """Sample one continuation per response prefix; ``max_tokens`` includes the prefix."""
        ...

    def load_weights(self, policy: torch.nn.Module) -> None:
        """Sample from these weights from now on."""
        ...

    def close(self) -> None:
        """Release processes and memory at the end of a run."""
        ...


class NothingToLearn(ValueError):  # noqa: N818
    """Raised if a batch has nothing that the method can learn from."""


@runtime_checkable
class Algorithm(Protocol):
    """A training method: the columns it needs, its credit, its loss."""

    @property
    def needs(self) -> Needs:
        """The columns that must be filled (segcredit/columns.py); a string names a built-in one."""
        ...

    def prepare(self, rollouts: Rollouts, monte_carlo: MonteCarlo | None = None) -> Batch:
        """Compute segments, advantages and targets, once per rollout batch, under π_old.

        Raises ``NothingToLearn`` if no response is of use to the method.
        """
        ...

    def minibatch(self, batch: Batch, micro_batch: Int[Tensor, " B"] | None = None) -> Batch:
        """Compute the denominators of every term of the loss of a mini-batch.

        ``micro_batch`` is the index of each response's micro-batch. Only reductions that depend on
        micro-batches use it (the authors' code).
        """
        ...

    def loss(self, outputs: Outputs, batch: Batch) -> Loss:
        """Compute a micro-batch's share of the mini-batch's loss."""
        ...
