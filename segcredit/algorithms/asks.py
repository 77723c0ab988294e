"""Requirements of a method beyond the columns it needs; defaults apply to missing attributes.

``offline``, ``restarts``, ``fits_credit``, ``draws`` and ``temperature`` are attributes of a
method, built-in or custom.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from segcredit.algorithms.credit import GroupZScore, LeaveOneOut, ValueDifference
from segcredit.algorithms.dpo import DirectPreference
from segcredit.types import Algorithm, Batch, MonteCarlo, Rollouts


def is_offline(algorithm: Algorithm) -> bool:
    """Whether the loss reads no π_old, only log π of the model itself (RestEM, DPO).

    The log-probabilities at sampling time are then not needed.
    """
    return bool(getattr(algorithm, "offline", False))


def loss_temperature(algorithm: Algorithm, sampled_at: float) -> float:
    """Temperature of log π in the loss, given the sampling temperature.

    The method's attribute ``temperature``, where None is the sampling temperature. A method without
    the attribute is computed at the sampling temperature, as π_old is, or at 1 if it is offline.
    """
    own = getattr(algorithm, "temperature", 1.0 if is_offline(algorithm) else None)
    return sampled_at if own is None else float(own)


def fits_credit(algorithm: Algorithm) -> bool:
    """Whether the method's credit is a regression target, which must not be weighted (DVO)."""
    return bool(getattr(algorithm, "fits_credit", False))


def prepare(
    algorithm: Algorithm,
    rollouts: Rollouts,
    monte_carlo: MonteCarlo,
    generator: torch.Generator,
) -> Batch:
    """Prepare the batch; a method with ``draws`` gets the run's generator (DPO draws pairs)."""
    if getattr(algorithm, "draws", False):
        return algorithm.prepare(rollouts, monte_carlo, generator=generator)  # type: ignore[call-arg]
    return algorithm.prepare(rollouts, monte_carlo)


def scored(
    algorithm: Algorithm, reward: Float[Tensor, "*N"], truncated: Bool[Tensor, "*N"]
) -> Float[Tensor, "*N"]:
    """Rewards of continuations as the method counts them; a truncated one may count 0."""
    credit = getattr(algorithm, "credit", None)
    return credit.scored(reward, truncated) if isinstance(credit, ValueDifference) else reward


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
    """Whether the method needs at least two responses per prompt (GRPO, RLOO, DPO)."""
    group = isinstance(getattr(algorithm, "credit", None), GroupZScore | LeaveOneOut)
    return group or isinstance(algorithm, DirectPreference)


def compares_groups(algorithm: Algorithm) -> bool:
    """Whether credit is a difference between responses to one prompt (GRPO, GSPO, RLOO)."""
    return isinstance(getattr(algorithm, "credit", None), GroupZScore | LeaveOneOut)
