"""Partitions of responses into segments, for padded batches whose masks may have holes."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from segcredit.core.checks import (
    Claim,
    constant,
    empty_rows,
    keep,
    none,
    positions,
    require,
    require_mask,
    require_shape,
)

FAR = 2**62
"""A position after every token."""

ValueAt = Literal["start", "end"]
"""Where V(s_m) is read: before the segment's first token (paper) or its last (authors' code)."""


@dataclass(frozen=True, eq=False)
class Segments:
    """A partition of each response's tokens into consecutive segments z_1 … z_M (Eq. 5).

    Columns past a response's last segment are padding: their ``start`` and ``end`` are 0 and their
    ``mask`` is False. A token off the token mask (padding, or a hole such as tool output) belongs
    to no segment, and every result equals that of the response with those tokens cut out.
    """

    token_mask: Bool[Tensor, "B T"]
    """True at the tokens that belong to a segment."""
    slot: Int[Tensor, "B T"]
    """m(t), 0-based, with arbitrary columns off the mask. Use ``index`` instead."""
    num: Int[Tensor, " B"]
    """M: number of segments of each response."""
    width: int
    """Second dimension of (B, M) tensors: the largest M of the original batch."""

    @classmethod
    def from_ends(cls, ends: Bool[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> "Segments":
        """Make segments from marks at their last tokens, e_m.

        A response's last token ends its last segment, marked or not. Marks must be on the mask.
        """
        return cls.from_trusted_ends(ends, mask, _marks_on_mask("ends", ends, mask))

    @classmethod
    def from_starts(cls, starts: Bool[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> "Segments":
        """Make segments from marks at their first tokens, b_m.

        A response's first token starts its first segment, marked or not. Marks must be on the
        mask.
        """
        return cls.from_trusted_starts(starts, mask, _marks_on_mask("starts", starts, mask))

    @classmethod
    def from_trusted_ends(
        cls, ends: Bool[Tensor, "B T"], mask: Bool[Tensor, "B T"], *claims: Claim
    ) -> "Segments":
        """Make segments from marks at last tokens, without checking that they are on the mask.

        Partitions use this: their marks are on the mask by construction. Empty responses and the
        caller's ``claims`` are checked with one device synchronization.
        """
        closed = ends.flatten().cumsum(dim=0).view(ends.shape)  # one long scan, not B short ones
        before = closed - ends.view(torch.uint8)
        return cls._from_index(before - before[:, :1], mask, claims)

    @classmethod
    def from_trusted_starts(
        cls, starts: Bool[Tensor, "B T"], mask: Bool[Tensor, "B T"], *claims: Claim
    ) -> "Segments":
        """Make segments from marks at first tokens; see ``from_trusted_ends``."""
        opened = starts.flatten().cumsum(dim=0).view(starts.shape)
        first = keep(mask, opened, FAR).amin(dim=1, keepdim=True)
        return cls._from_index(opened - first, mask, claims)

    @classmethod
    def _from_index(cls, index: Tensor, mask: Tensor, claims: tuple[Claim, ...]) -> "Segments":
        num = keep(mask, index, -1).amax(dim=1) + 1
        width = _width(num, mask, claims)
        # tokens off the mask add zero; they are spread over all columns, because many atomic
        # additions to one address are slow
        slot = torch.where(mask, index, positions(mask.shape[1], mask.device) % width)
        # the CUDA kernels need contiguous memory, not a view such as full[:, prompt:]
        return cls(mask.contiguous(), slot.contiguous(), num, width)

    @cached_property
    def index(self) -> Int[Tensor, "B T"]:
        """Number m(t) of each token's segment, 0-based; −1 off the mask."""
        return keep(self.token_mask, self.slot, -1)

    @cached_property
    def mask(self) -> Bool[Tensor, "B M"]:
        """True at the segments a response has."""
        return positions(self.width, self.num.device) < self.num[:, None]

    @cached_property
    def length(self) -> Int[Tensor, "B M"]:
        """Number of tokens |z_m| of each segment, without holes; 0 past the last segment."""
        return self._sum(self.token_mask.long())

    @cached_property
    def start(self) -> Int[Tensor, "B M"]:
        """Position b_m of each segment's first token."""
        return self._extreme_position("amin", FAR)

    @cached_property
    def end(self) -> Int[Tensor, "B M"]:
        """Position e_m of each segment's last token."""
        return self._extreme_position("amax", -1)

    @cached_property
    def starts(self) -> Bool[Tensor, "B T"]:
        """True at the first token of each segment."""
        position = positions(self.slot.shape[1], self.slot.device)
        return self.token_mask & (self.start.gather(1, self.slot) == position)

    def _extreme_position(self, reduce: str, neutral: int) -> Int[Tensor, "B M"]:
        device = self.slot.device
        position = positions(self.slot.shape[1], device)
        source = torch.where(self.token_mask, position, constant(neutral, torch.long, device))
        out = torch.full(self.mask.shape, neutral, device=device)
        return keep(self.mask, out.scatter_reduce_(1, self.slot, source, reduce))

    def _sum(self, x: Tensor) -> Tensor:
        if self.width == 1:  # a plain sum, not thousands of additions to one address
            return keep(self.token_mask, x).sum(dim=1, keepdim=True)
        zeros = x.new_zeros(self.mask.shape)
        return zeros.scatter_add_(1, self.slot, keep(self.token_mask, x))

    def _spread(self, y: Tensor, divisor: Tensor | None = None) -> Tensor:
        y = y if divisor is None else y / divisor
        return keep(self.token_mask, y.gather(1, self.slot))

    def sum(self, x: Float[Tensor, "B T"]) -> Float[Tensor, "B M"]:
        """Sum x over each segment, Σ_{t ∈ z_m} x_t. Entries off the mask are not read."""
        require_shape("x", x, "the token mask", self.token_mask)
        return _Sum.apply(x, self)  # type: ignore[no-untyped-call]

    def mean(self, x: Float[Tensor, "B T"]) -> Float[Tensor, "B M"]:
        """Average x over each segment, (1/|z_m|) Σ_{t ∈ z_m} x_t; 0 past the last segment."""
        return self.sum(x) / self._divisor

    def smooth(self, x: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """Compute the mean of each token's segment, spread(mean(x)); 0 off the mask.

        An orthogonal projection, so it is its own transpose and its own gradient.
        """
        require_shape("x", x, "the token mask", self.token_mask)
        return _Smooth.apply(x, self)  # type: ignore[no-untyped-call]

    @cached_property
    def _divisor(self) -> Int[Tensor, "B M"]:
        return self.length.clamp(min=1)

    def at_start(self, x: Float[Tensor, "B T"]) -> Float[Tensor, "B M"]:
        """Return x at each segment's first token; 0 past the last segment."""
        return keep(self.mask, self.read(x, "start"))

    def at_end(self, x: Float[Tensor, "B T"]) -> Float[Tensor, "B M"]:
        """Return x at each segment's last token; 0 past the last segment."""
        return keep(self.mask, self.read(x, "end"))

    def read(self, x: Float[Tensor, "B T"], at: ValueAt) -> Float[Tensor, "B M"]:
        """Return x at each segment's first or last token; arbitrary past the last segment."""
        check_value_at(at)
        require_shape("x", x, "the token mask", self.token_mask)
        return x.gather(1, self.start if at == "start" else self.end)

    def spread(self, y: Float[Tensor, "B M"]) -> Float[Tensor, "B T"]:
        """Give every token its segment's value y_{m(t)}; 0 off the mask."""
        require_shape("y", y, "the segment mask", self.mask)
        return _Spread.apply(y, self)  # type: ignore[no-untyped-call]

    def select(self, rows: Int[Tensor, " R"]) -> "Segments":
        """Return the segments of some responses, in the given order."""
        return Segments(self.token_mask[rows], self.slot[rows], self.num[rows], self.width)


class _Sum(torch.autograd.Function):
    """Sum over each segment; its gradient is _Spread (the transpose)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, segments: Segments) -> Tensor:
        ctx.segments = segments
        return segments._sum(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.segments.spread(grad), None


class _Spread(torch.autograd.Function):
    """Spread of segment values over tokens; its gradient is _Sum (the transpose)."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, segments: Segments) -> Tensor:
        ctx.segments = segments
        return segments._spread(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.segments.sum(grad), None


class _Smooth(torch.autograd.Function):
    """Mean over each segment, spread over its tokens; it is its own transpose and gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, segments: Segments) -> Tensor:
        ctx.segments = segments
        return segments._spread(segments._sum(x), segments._divisor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.segments.smooth(grad), None


def _width(num: Tensor, mask: Tensor, claims: tuple[Claim, ...]) -> int:
    require(*claims)
    fewest, most = num.cpu().aminmax()
    if fewest == 0:
        raise ValueError(empty_rows(mask))
    return int(most)


def check_value_at(at: ValueAt) -> None:
    """Raise ValueError unless ``at`` is "start" or "end"."""
    if at not in ("start", "end"):
        raise ValueError(f"value_at must be 'start' (paper) or 'end' (authors' code); got {at!r}.")


def last_position(mask: Bool[Tensor, "B T"]) -> Int[Tensor, "B 1"]:
    """Return the position of the last valid token of each response; 0 if there is none."""
    return (mask * positions(mask.shape[1], mask.device)).argmax(dim=1, keepdim=True)


def first_token(mask: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """True at the first valid token of each response."""
    return mask & (mask.cumsum(dim=1) == 1)


def _marks_on_mask(name: str, marks: Tensor, mask: Tensor) -> Claim:
    require_mask("mask", mask)
    require_mask(name, marks)
    require_shape(name, marks, "mask", mask)
    stray = marks & ~mask
    return none(
        stray,
        lambda: (
            f"{name} must lie on response tokens; got one at (response, token) "
            f"{tuple(stray.nonzero()[0].tolist())}, where the mask is False. Pass {name} & mask."
        ),
    )
