"""Lists of responses into padded tensors and back, with holes and garbage wherever allowed.

Whatever a function computes from the tensors must equal what its oracle computes from the lists,
so every comparison made through this layout also tests invariance to padding width, to padding
content and to holes in the mask.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GARBAGE = (float("nan"), float("inf"), -float("inf"), 1e30, -7.0, 0.0)


@dataclass(frozen=True)
class Layout:
    """Where each response's tokens stand in a padded batch."""

    mask: Tensor
    seed: int

    def put(self, rows: Sequence[Sequence[float]], dtype: torch.dtype = torch.float64) -> Tensor:
        """The rows' numbers on the mask, garbage everywhere else."""
        chooser = random.Random(self.seed)
        flat = [chooser.choice(GARBAGE) for _ in range(self.mask.numel())]
        x = torch.tensor(flat, dtype=dtype).view(self.mask.shape)
        x[self.mask] = torch.tensor([v for row in rows for v in row], dtype=dtype)
        return x

    def marks(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """True at the given token numbers (counted without holes)."""
        out = torch.zeros_like(self.mask)
        for i, marked in enumerate(rows):
            positions = self.mask[i].nonzero().flatten()
            out[i, positions[list(marked)]] = True
        return out

    def texts(self, rows: Sequence[Sequence[str]]) -> list[list[str]]:
        """Token texts on the mask, misleading ones everywhere else."""
        out = [["\nStep 9\n"] * self.mask.shape[1] for _ in rows]
        for i, row in enumerate(rows):
            for position, text in zip(self.mask[i].nonzero().flatten(), row, strict=True):
                out[i][int(position)] = text
        return out

    def take(self, x: Tensor) -> list[list[float]]:
        """The numbers on the mask, as lists."""
        return [x[i][self.mask[i]].tolist() for i in range(len(x))]


def layout(lengths: Sequence[int], seed: int = 0, holes: bool = True, extra: int = 3) -> Layout:
    """A padded batch for responses of these lengths, with random holes and extra padding."""
    chooser = random.Random(seed)
    rows = []
    for length in lengths:
        row: list[bool] = []
        for _ in range(length):
            if holes:
                row += [False] * chooser.choice((0, 0, 0, 1, 2))
            row.append(True)
        rows.append(row)
    width = max(map(len, rows)) + (chooser.randint(0, extra) if extra else 0)
    mask = torch.tensor([row + [False] * (width - len(row)) for row in rows])
    return Layout(mask=mask, seed=seed)


def units(per_row: Sequence[Sequence[float]], width: int) -> Tensor:
    """Per-segment lists as a right-padded (B, M) tensor."""
    return torch.tensor(
        [list(row) + [0.0] * (width - len(row)) for row in per_row], dtype=torch.float64
    )


def ends_of(segments: object, mask: Tensor) -> list[list[int]]:
    """Segment ends as token numbers counted without holes."""
    index = segments.index  # type: ignore[attr-defined]
    out = []
    for row, valid in zip(index, mask, strict=True):
        m = row[valid].tolist()
        out.append([t for t in range(len(m)) if t + 1 == len(m) or m[t + 1] != m[t]])
    return out
