"""Single-stream SPO: one response per prompt against the prompt's tracked value."""

from segcredit.algorithms.credit import TrackedBaseline
from segcredit.algorithms.objective import Clipped, TokenMean
from segcredit.algorithms.policy_gradient import PolicyGradient
from segcredit.algorithms.ratio import TokenRatio


def single_stream_spo(
    clip: tuple[float, float] = (0.2, 0.28), dual_clip: float = 10.0
) -> PolicyGradient:
    """Single-stream Policy Optimization (arXiv 2509.13232): no group, no critic, no KL.

    Reads the tracker's v̂ from before this step's update (core/tracker.py). ε .2/.28, dual clip 10.
    """
    return PolicyGradient(
        credit=TrackedBaseline(),
        ratio=TokenRatio(),
        surrogate=Clipped(*clip, dual=dual_clip),
        reduce=TokenMean(),
    )
