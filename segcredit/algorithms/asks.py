"""What a method asks of a run beyond the columns it needs; a method that says nothing asks nothing.

``offline`` and ``restarts`` are class attributes of a method, which may be of one's own.
"""

from segcredit.algorithms.credit import GroupZScore, LeaveOneOut, ValueDifference
from segcredit.algorithms.dpo import DirectPreference
from segcredit.types import Algorithm


def is_offline(algorithm: Algorithm) -> bool:
    """Whether its loss reads no π_old, only log π of the model itself, at temperature 1.

    So nobody need know how likely the responses were when they were drawn (RestEM, DPO, DVO).
    """
    return bool(getattr(algorithm, "offline", False))


def rescored(algorithm: Algorithm) -> bool:
    """Whether log π_old or H of what was drawn is read, and so computed again if need be."""
    return "entropy" in algorithm.needs or not is_offline(algorithm)


def restarts(algorithm: Algorithm) -> bool:
    """Whether each step begins again at the weights of the first, with a new optimizer (RestEM)."""
    return bool(getattr(algorithm, "restarts", False))


def wants_first_weights(algorithm: Algorithm) -> bool:
    """Whether the policy must be kept as it was when learning began: as π_ref, or to go back to."""
    return "logp_ref" in algorithm.needs or restarts(algorithm)


def continues(algorithm: Algorithm) -> bool:
    """Whether values of begun responses come from continuations (VinePPO, SPO-chain, DVO)."""
    return isinstance(getattr(algorithm, "credit", None), ValueDifference)


def grows_trees(algorithm: Algorithm) -> bool:
    """Whether responses to a prompt are branches of one tree (SPO-tree)."""
    return "parent" in algorithm.needs


def compares_responses(algorithm: Algorithm) -> bool:
    """Whether a prompt needs two responses or more: they are compared (GRPO, RLOO, DPO)."""
    group = isinstance(getattr(algorithm, "credit", None), GroupZScore | LeaveOneOut)
    return group or isinstance(algorithm, DirectPreference)
