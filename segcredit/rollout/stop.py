"""Stop strings: find the token with which the text of a response first contains one."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

Decode = Callable[[list[int]], str]

MARGIN = 8
"""Tokens of context before the longest possible stop string: the first decoded tokens may lack a
leading space or the beginning of a character."""
BAD = "\ufffd"
"""Character in place of incomplete ones. With byte fallback (Llama 2), all neighboring bytes become
it, newlines too, until the character is complete."""


class StopStrings:
    """Finds responses whose text contains a stop string, while they are sampled.

    Text is decoded every few steps, and a response is cut after the token that completed the
    string. The result does not depend on when the text is decoded: each row has its own random
    numbers, and tokens after the cut have no effect.
    """

    def __init__(
        self,
        strings: Sequence[str],
        decode: Decode,
        prefixes: Sequence[Int[Tensor, "_"]],
        device: torch.device,
    ) -> None:
        """Prepare the search.

        ``prefixes`` are the response tokens before the sampled ones; a stop string may begin there.
        """
        self.strings = tuple(strings)
        self.decode = decode
        # a token has at least one byte
        self.window = max(len(x.encode()) for x in strings) + MARGIN
        self.before = [x[-self.window :].tolist() for x in prefixes]
        self.ends: dict[int, int] = {}
        """Index of the token that completed a stop string, by row."""
        self.stopped = torch.zeros(len(prefixes), dtype=torch.bool, device=device)
        self._checked = 0

    def check(
        self, tokens: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"], done: int
    ) -> Bool[Tensor, " B"]:
        """Check the tokens since the last check; return all rows that have stopped.

        Args:
            tokens: Sampled tokens; only the first ``done`` columns are read.
            mask: False after a row's end token.
        """
        first = self._checked
        self._checked = done
        if first >= done:
            return self.stopped
        begin = max(0, first - self.window)
        recent, alive = tokens[:, begin:done].tolist(), mask[:, first:done].sum(dim=1).tolist()
        for row, (read, count) in enumerate(zip(recent, alive, strict=True)):
            if count == 0 or row in self.ends:
                continue
            context = read[: first - begin]
            if begin == 0:
                context = self.before[row] + context
            new = read[first - begin : first - begin + int(count)]
            end = self._first_end(context[-self.window :], new)
            if end is not None:
                self.ends[row] = first + end
                self.stopped[row] = True
        return self.stopped

    def cut(self, mask: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
        """Remove the tokens after a stop string from the mask."""
        last = torch.full((len(mask),), mask.shape[1], device=mask.device)
        for row, end in self.ends.items():
            last[row] = end
        return mask & (torch.arange(mask.shape[1], device=mask.device) <= last[:, None])

    def _first_end(self, context: list[int], new: list[int]) -> int | None:
        """Return the index of the first new token with which the text contains a stop string."""
        if not self._holds(context + new) and BAD not in self.decode(context + new):
            return None
        ends = (n for n in range(len(new)) if self._holds(context + new[: n + 1]))
        return next(ends, None)

    def _holds(self, tokens: list[int]) -> bool:
        """Whether the text contains a stop string, even one that begins inside a character."""
        for skipped in range(4):
            text = self.decode(tokens[skipped:])
            if any(x in text for x in self.strings):
                return True
            if BAD not in text:
                return False
        return False
