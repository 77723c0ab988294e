"""Flat tokens as rows of one width, for functions that read batches."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int


@dataclass(frozen=True)
class Padded:
    """Where the tokens of R responses stand in an (R, T) array, padded on the right."""

    mask: Bool[np.ndarray, "R T"]

    def spread(self, x: Float[np.ndarray, " N"]) -> Float[np.ndarray, "R T"]:
        """Flat numbers as rows; 0 in the padding."""
        found = np.zeros(self.mask.shape)
        found[self.mask] = x
        return found


def pad(owner: Int[np.ndarray, " N"], num_responses: int) -> Padded:
    """Of tokens in the order of their responses."""
    length = np.bincount(owner, minlength=num_responses)
    return Padded(np.arange(max(1, length.max(initial=0))) < length[:, None])
