"""All randomness of a run, as a function of its seed and of what is being drawn.

Nothing depends on what was drawn before, so a resumed run has no random state to restore.
"""

import hashlib

import torch


def derive(seed: int, *names: object) -> int:
    """A number that only this seed and these names give."""
    digest = hashlib.sha256(repr((seed, *names)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator(seed: int, *names: object) -> torch.Generator:
    """A fresh CPU generator for one purpose at one step."""
    return torch.Generator().manual_seed(derive(seed, *names))
