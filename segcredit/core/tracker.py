"""Per-prompt success rates with forgetting: single-stream SPO's tracker, and the curriculum."""

from jaxtyping import Float
from torch import Tensor

from segcredit.core.checks import (
    accumulation_dtype,
    at_least_float32,
    finite_vector,
    none,
    require,
)

RHO_MIN, RHO_MAX = 0.875, 0.96
"""Bounds of the forgetting factor: between 8 and 25 effective observations."""
HALF_LIFE = 0.06
"""Drift at which the forgetting factor would be ½; the bound ρ_min applies long before."""
WEIGHT_FLOOR = 0.05
"""Minimum sampling weight, for prompts that are always or never solved."""


def tracker_init(
    successes: Float[Tensor, " P"], samples: int, rho_min: float = RHO_MIN
) -> tuple[Float[Tensor, " P"], Float[Tensor, " P"]]:
    """Initialize α, β from offline samples: 1/(1−ρ_min) pseudo-observations at (S + ½)/(n + 1)."""
    strength = 1.0 / (1.0 - rho_min)
    mean = (successes + 0.5) / (samples + 1)
    return strength * mean, strength * (1.0 - mean)


def tracker_value(alpha: Float[Tensor, " P"], beta: Float[Tensor, " P"]) -> Float[Tensor, " P"]:
    """Return v̂ = α/(α + β); read it *before* the update with this step's reward."""
    return alpha / (alpha + beta)


def tracker_forgetting(drift: Float[Tensor, " P"]) -> Float[Tensor, " P"]:
    """Compute the forgetting factor ρ = clip(2^(−D/D_half), ρ_min, ρ_max).

    D is the token mean of |Δ log π| on the prompt's stored response (0 on a first visit). The
    paper calls it a KL divergence, which it is not.
    """
    return (2.0 ** (-drift / HALF_LIFE)).clamp(RHO_MIN, RHO_MAX)


def tracker_update(
    alpha: Float[Tensor, " P"],
    beta: Float[Tensor, " P"],
    reward: Float[Tensor, " P"],
    drift: Float[Tensor, " P"],
) -> tuple[Float[Tensor, " P"], Float[Tensor, " P"]]:
    """Discount the counts and add a reward: α ← ρα + r, β ← ρβ + 1 − r."""
    require(
        finite_vector("drift", drift),
        none(
            ~((reward >= 0) & (reward <= 1)),
            lambda: (
                f"the tracker counts successes, so rewards must be in [0, 1]; got "
                f"{reward.min().item()} … {reward.max().item()}. Rescale the reward."
            ),
        ),
    )
    rho = tracker_forgetting(drift)
    return rho * alpha + reward, rho * beta + 1.0 - reward


FORGETTING = 0.5
"""Factor of earlier successes and failures when a prompt is drawn again (curriculum)."""


def count_successes(
    alpha: Float[Tensor, " P"],
    beta: Float[Tensor, " P"],
    successes: Float[Tensor, " P"],
    samples: Float[Tensor, " P"],
    prior: float,
) -> tuple[Float[Tensor, " P"], Float[Tensor, " P"]]:
    """Discount the counts of prompts with n > 0 responses in this step, and add s successes.

    α ← ½α + ½α₀ + s, β ← ½β + ½β₀ + n − s.

    The rule is that of MoPPS (arXiv 2507.04632; verl's recipe/mopps at 2d93d38), which has a
    setting in place of ½.

    Args:
        prior: α₀ = β₀.
    """
    require(
        none(
            ~((successes >= 0) & (successes <= samples)),
            lambda: (
                "data.curriculum counts successes, so rewards must be in [0, 1]; got others. "
                "Rescale the reward, let it report which responses are correct, or set "
                "data.curriculum=false."
            ),
        )
    )
    seen = samples > 0
    old = (
        FORGETTING * alpha + (1 - FORGETTING) * prior,
        FORGETTING * beta + (1 - FORGETTING) * prior,
    )
    return (
        alpha.where(~seen, old[0] + successes),
        beta.where(~seen, old[1] + samples - successes),
    )


def tracker_weight(value: Float[Tensor, " P"]) -> Float[Tensor, " P"]:
    """Return sampling weights √(v̂(1 − v̂)) + floor, highest for prompts of medium difficulty."""
    return (value * (1.0 - value)).sqrt() + WEIGHT_FLOOR


def batch_normalize(x: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Normalize over the batch's responses: (x − mean) / std, unbiased."""
    if len(x) < 2:
        raise ValueError(
            f"normalizing over the batch needs at least two responses; got {len(x)}. "
            f"Use a larger batch."
        )
    x = at_least_float32(x)
    require(finite_vector("x", x))
    exact = x.to(accumulation_dtype(x))
    return ((exact - exact.mean()) / (exact.std() + 1e-8)).to(x.dtype)
