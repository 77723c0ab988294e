"""Partitions of the text: lines, and "Step N" headings.

They loop over strings on the CPU, one response at a time. ``pieces[i][t]`` is the text of token t
of response i; a special token (end of sequence) is the empty string.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from segcredit.columns import PIECES, Needs
from segcredit.core.checks import require_mask
from segcredit.core.segments import Segments
from segcredit.partition.base import Partition
from segcredit.types import Rollouts

Pieces = Sequence[Sequence[str]]

_STEP = re.compile(r"^[#* ]*(Step [0-9]+)", re.MULTILINE)


def newline(pieces: Pieces, mask: Bool[Tensor, "B T"]) -> Segments:
    r"""Cut after each token whose text contains "\n".

    A blank segment is merged into the one before it (at the very beginning, the one after it), and
    so is the end-of-sequence token. Without a newline there is one segment.
    """
    return _from_rows(_newline_ends, pieces, mask)


def step_markers(pieces: Pieces, mask: Bool[Tensor, "B T"]) -> Segments:
    """Cut before the token with the S of "Step 1", "Step 2", … at the start of a line.

    The marker may follow #, * or spaces. The text before the first marker is a segment of its own,
    unless it is blank or only # and *. Without a marker there is one segment.
    """
    return _from_rows(_step_ends, pieces, mask)


def _newline_ends(texts: list[str]) -> list[int]:
    ends: list[int] = []
    begin = 0
    for t, text in enumerate(texts):
        if "\n" not in text and t + 1 < len(texts):
            continue
        if "".join(texts[begin : t + 1]).strip():
            ends.append(t)
        elif ends:
            ends[-1] = t
        begin = t + 1
    return ends or [len(texts) - 1]


def _step_ends(texts: list[str]) -> list[int]:
    owner = [t for t, text in enumerate(texts) for _ in text]  # character → token
    starts = sorted({owner[match.start(1)] for match in _STEP.finditer("".join(texts))} - {0})
    if starts and not "".join(texts[: starts[0]]).strip("#* \t\r\n"):
        starts = starts[1:]
    return [t - 1 for t in starts] + [len(texts) - 1]


def _from_rows(ends_of: Callable[[list[str]], list[int]], pieces: Pieces, mask: Tensor) -> Segments:
    require_mask("mask", mask)
    if len(pieces) != len(mask):
        raise ValueError(
            f"pieces must hold one list of token texts for each of the {len(mask)} responses; "
            f"got {len(pieces)}."
        )
    ends = torch.zeros(mask.shape, dtype=torch.bool)
    for row, (texts, valid) in enumerate(zip(pieces, mask.tolist(), strict=True)):
        positions = [t for t, ok in enumerate(valid) if ok]
        if not positions:
            continue  # Segments raises the error for an empty row
        if len(texts) <= positions[-1]:
            raise ValueError(
                f"pieces[{row}] must hold the text of each of the response's tokens, at least "
                f"{positions[-1] + 1}; got {len(texts)}."
            )
        chosen = ends_of([texts[t] for t in positions])
        ends[row, [positions[t] for t in chosen]] = True
    return Segments.from_trusted_ends(ends.to(mask.device), mask)


@dataclass(frozen=True)
class Newline(Partition):
    """Cut after each line (VinePPO, DVO; SAPO's Table 3)."""

    @property
    def needs(self) -> Needs:
        return frozenset({PIECES})

    def __call__(self, rollouts: Rollouts) -> Segments:
        return newline(rollouts.token_texts("Newline"), rollouts.mask)


@dataclass(frozen=True)
class StepMarkers(Partition):
    """Cut before each "Step N" (SAPO's Table 3; the prompt must ask for that format)."""

    @property
    def needs(self) -> Needs:
        return frozenset({PIECES})

    def __call__(self, rollouts: Rollouts) -> Segments:
        return step_markers(rollouts.token_texts("StepMarkers"), rollouts.mask)
