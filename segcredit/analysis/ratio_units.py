"""Over which tokens a method's ratio was formed: read off the segments, or cut again."""

from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int

from segcredit.analysis.padding import pad
from segcredit.analysis.reading import Step
from segcredit.analysis.result import CannotAnalyseError
from segcredit.analysis.segment_shapes import unit_of

if TYPE_CHECKING:
    from segcredit.algorithms import PolicyGradient


def ratio_units(method: "PolicyGradient", step: Step) -> Int[np.ndarray, " N"]:
    """Number the units from 0 on, −1 off all; a partition is a function, so it cuts as it did."""
    over = method.ratio.over
    if over == method.credit.over and (step.segment >= 0).any():
        return unit_of(step.owner, step.segment)
    import torch

    from segcredit.types import Rollouts

    padded = pad(step.owner, step.num_responses)
    full = padded.mask.any(axis=1)
    mask = torch.from_numpy(padded.mask[full])
    if not len(mask):
        return np.full(len(step.owner), -1)
    number = len(mask)
    rollouts = Rollouts(
        tokens=torch.zeros(mask.shape, dtype=torch.long),
        mask=mask,
        logp_old=torch.from_numpy(padded.spread(step.logp_old)[full]),
        reward=torch.zeros(number),
        group=torch.arange(number),
        truncated=torch.zeros(number, dtype=torch.bool),
        entropy=torch.from_numpy(padded.spread(step.entropy)[full]),
    )
    try:
        segments = over(rollouts)
    except (ValueError, TypeError, AttributeError) as error:
        raise CannotAnalyseError(f"the units of its ratio cannot be cut again: {error}") from None
    return unit_of(step.owner, segments.index.numpy()[padded.mask[full]])
