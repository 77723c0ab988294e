"""Importance ratios π_θ / π_old over any partition. Off the mask every ratio is 1."""

from jaxtyping import Bool, Float
from torch import Tensor

from segcredit.core.checks import at_least_float32, keep, require_shape
from segcredit.core.segments import Segments


def log_ratio(
    logp: Float[Tensor, "B T"],
    logp_old: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    limit: float | None = None,
) -> Float[Tensor, "B T"]:
    """Compute x_t = log π_θ(y_t) − log π_old(y_t), in float32 at least; 0 off the mask.

    ``limit`` clamps each token's x to ±limit (the authors' code: 20).
    """
    return keep(mask, _difference(logp, logp_old, mask, limit))


def _difference(logp: Tensor, logp_old: Tensor, mask: Tensor, limit: float | None) -> Tensor:
    """Return the log-ratio with arbitrary values off the mask."""
    require_shape("logp", logp, "mask", mask)
    require_shape("logp_old", logp_old, "mask", mask)
    x = at_least_float32(logp) - at_least_float32(logp_old.detach())
    return x if limit is None else x.clamp(-limit, limit)


def bounded_exp(x: Tensor) -> Tensor:
    """Compute e^x, clamped to e^±80: float32 overflows at e^88, and a clipped loss has 0 · ∞."""
    return x.clamp(-80.0, 80.0).exp()


def token_ratio(
    logp: Float[Tensor, "B T"],
    logp_old: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    limit: float | None = None,
) -> Float[Tensor, "B T"]:
    """Compute the token ratio exp(x_t) (Eq. 2)."""
    return bounded_exp(log_ratio(logp, logp_old, mask, limit))


def geometric_mean_ratio(
    logp: Float[Tensor, "B T"],
    logp_old: Float[Tensor, "B T"],
    segments: Segments,
    limit: float | None = None,
) -> Float[Tensor, "B T"]:
    """Compute the geometric mean of the ratios in each token's segment (Eq. 8).

    exp((1/|z_m|) Σ_{t ∈ z_m} x_t).

    One segment per response gives GSPO's ratio, one per token PPO's.
    """
    x = _difference(logp, logp_old, segments.token_mask, limit)
    return bounded_exp(segments.smooth(x))


def raw_ratio(
    logp: Float[Tensor, "B T"],
    logp_old: Float[Tensor, "B T"],
    segments: Segments,
    limit: float | None = None,
) -> Float[Tensor, "B T"]:
    """Compute the exact ratio of each token's segment, exp(Σ_{t ∈ z_m} x_t) (App. D).

    The sum grows with the segment's length, and the ratio with its exponential.
    """
    x = _difference(logp, logp_old, segments.token_mask, limit)
    return bounded_exp(segments.spread(segments.sum(x)))


def gspo_token_ratio(
    logp: Float[Tensor, "B T"],
    logp_old: Float[Tensor, "B T"],
    segments: Segments,
    limit: float | None = None,
) -> Float[Tensor, "B T"]:
    """Compute GSPO-token's ratio, sg[s_{m(t)}] · π_θ(y_t) / sg[π_θ(y_t)].

    Its value is the geometric mean; its gradient goes through the token's own log-prob, so that
    advantages may differ within a segment. If they do not, both forms have the same gradient.
    """
    x = log_ratio(logp, logp_old, segments.token_mask, limit)
    mean = segments.smooth(x.detach())
    return bounded_exp(mean + (x - x.detach()))
