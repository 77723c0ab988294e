"""The algebra between tokens and segments, on padded batches whose masks may have holes."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from segcredit.core.checks import (
    Claim,
    constant,
    empty_rows,
    keep,
    none,
    require,
    require_mask,
    require_shape,
)

FAR = 2**62
"""A position behind every token."""


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
    """m(t), 0-based. Off the mask any column: tokens there carry zero, and are dealt out over the
    columns because, sent to a single one, they would queue for its address."""
    num: Int[Tensor, " B"]
    """M: how many segments each response has."""
    width: int
    """The largest M of the batch from which this was made: the second axis of (B, M) tensors."""

    @classmethod
    def from_ends(
        cls, ends: Bool[Tensor, "B T"], mask: Bool[Tensor, "B T"], *claims: Claim
    ) -> "Segments":
        """Segments from the marks e_m of their last tokens.

        A response's last token ends its last segment, marked or not. Marks must lie on the mask.
        ``claims`` about the caller's own input are checked in the same breath.
        """
        _check_marks("ends", ends, mask)
        return cls._from_raw_index(ends.cumsum(dim=1) - ends.long(), ends, mask, claims)

    @classmethod
    def from_starts(
        cls, starts: Bool[Tensor, "B T"], mask: Bool[Tensor, "B T"], *claims: Claim
    ) -> "Segments":
        """Segments from the marks b_m of their first tokens.

        A response's first token starts its first segment, marked or not; else as from_ends.
        """
        _check_marks("starts", starts, mask)
        opened = starts.cumsum(dim=1)
        first = keep(mask, opened, FAR).amin(dim=1, keepdim=True)
        return cls._from_raw_index(opened - first, starts, mask, claims)

    @classmethod
    def _from_raw_index(
        cls, index: Tensor, marks: Tensor, mask: Tensor, claims: tuple[Claim, ...]
    ) -> "Segments":
        num = keep(mask, index, -1).amax(dim=1) + 1
        fewest, most = num.aminmax()
        stray = marks & ~mask
        (width,) = require(
            *claims,
            Claim(fewest, lambda number: number > 0, lambda: empty_rows(mask)),
            none(
                stray,
                lambda: (
                    f"marks must lie on response tokens; got one at (response, token) "
                    f"{tuple(stray.nonzero()[0].tolist())}, where the mask is False. "
                    f"Pass marks & mask."
                ),
            ),
            read=(most,),
        )
        position = torch.arange(mask.shape[1], device=mask.device)
        slot = torch.where(mask, index, position % int(width))
        return cls(token_mask=mask, slot=slot, num=num, width=int(width))

    @cached_property
    def index(self) -> Int[Tensor, "B T"]:
        """m(t): which segment the token belongs to, 0-based; −1 off the mask."""
        return keep(self.token_mask, self.slot, -1)

    @cached_property
    def mask(self) -> Bool[Tensor, "B M"]:
        """True at the segments a response has."""
        return torch.arange(self.width, device=self.num.device) < self.num[:, None]

    @cached_property
    def length(self) -> Int[Tensor, "B M"]:
        """|z_m|: tokens in each segment, holes not counted; 0 past the last segment."""
        return self._scatter_sum(self.token_mask.long())

    @cached_property
    def start(self) -> Int[Tensor, "B M"]:
        """b_m: position of each segment's first token."""
        return self._extreme_position("amin", FAR)

    @cached_property
    def end(self) -> Int[Tensor, "B M"]:
        """e_m: position of each segment's last token."""
        return self._extreme_position("amax", -1)

    def _extreme_position(self, reduce: str, neutral: int) -> Int[Tensor, "B M"]:
        device = self.slot.device
        position = torch.arange(self.slot.shape[1], device=device)
        source = torch.where(self.token_mask, position, constant(neutral, torch.long, device))
        out = torch.full(self.mask.shape, neutral, device=device)
        return keep(self.mask, out.scatter_reduce_(1, self.slot, source, reduce))

    def _scatter_sum(self, x: Tensor) -> Tensor:
        if self.width == 1:  # one segment: a plain sum, not thousands of adds to one address
            return x.sum(dim=1, keepdim=True)
        return x.new_zeros(self.mask.shape).scatter_add(1, self.slot, x)

    def sum(self, x: Float[Tensor, "B T"]) -> Float[Tensor, "B M"]:
        """Σ_{t ∈ z_m} x_t. Whatever stands off the mask, NaN included, is not read."""
        require_shape("x", x, "the token mask", self.token_mask)
        return self._scatter_sum(keep(self.token_mask, x))

    def mean(self, x: Float[Tensor, "B T"]) -> Float[Tensor, "B M"]:
        """(1/|z_m|) Σ_{t ∈ z_m} x_t; 0 past the last segment."""
        return self.sum(x) / self.length.clamp(min=1)

    def at_start(self, x: Float[Tensor, "B T"]) -> Float[Tensor, "B M"]:
        """x at each segment's first token; 0 past the last segment."""
        return self._at(x, self.start)

    def at_end(self, x: Float[Tensor, "B T"]) -> Float[Tensor, "B M"]:
        """x at each segment's last token; 0 past the last segment."""
        return self._at(x, self.end)

    def _at(self, x: Tensor, position: Tensor) -> Tensor:
        require_shape("x", x, "the token mask", self.token_mask)
        return keep(self.mask, x.gather(1, position))

    def spread(self, y: Float[Tensor, "B M"]) -> Float[Tensor, "B T"]:
        """y of each token's segment, y_{m(t)}; 0 off the mask."""
        require_shape("y", y, "the segment mask", self.mask)
        return keep(self.token_mask, y.gather(1, self.slot))

    def select(self, rows: Int[Tensor, " R"]) -> "Segments":
        """The segments of some responses, in the given order."""
        return Segments(self.token_mask[rows], self.slot[rows], self.num[rows], self.width)


def last_token(mask: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """True at the last valid token of each response."""
    seen = mask.cumsum(dim=1)
    return mask & (seen == seen[:, -1:])


def first_token(mask: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """True at the first valid token of each response."""
    return mask & (mask.cumsum(dim=1) == 1)


def _check_marks(name: str, marks: Tensor, mask: Tensor) -> None:
    require_mask("mask", mask)
    require_mask(name, marks)
    require_shape(name, marks, "mask", mask)
