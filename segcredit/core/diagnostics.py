"""Two quantities of the paper's analyses: the ratio's bias and the Lift of high-entropy tokens."""

from fractions import Fraction

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from segcredit.core.checks import accumulation_dtype, keep
from segcredit.core.segments import Segments


def ratio_bias(
    log_ratio: Float[Tensor, "B T"], segments: Segments
) -> tuple[Float[Tensor, "B M"], Float[Tensor, "B M"]]:
    """|e^{Lμ} − e^{μ}| and its bound e^{L|μ|}(L−1)|μ| per segment (App. D).

    L = |z_m|, μ = mean log-ratio: how far the geometric mean is from the exact segment ratio.
    """
    length = segments.length
    mean = segments.mean(log_ratio)
    gap = ((length * mean).exp() - mean.exp()).abs()
    bound = (length * mean.abs()).exp() * (length - 1).clamp(min=0) * mean.abs()
    return keep(segments.mask, gap), keep(segments.mask, bound)


def lift_events(
    entropy: Float[Tensor, " N"], value_jump: Float[Tensor, " N"], q: float, d: float = 0.9
) -> tuple[Bool[Tensor, " N"], Bool[Tensor, " N"]]:
    """A = {H ≥ quantile_q(H)} and D = {ΔV ≥ quantile_d(ΔV)} (§4.2).

    The paper does not give the threshold d of D; its text calls A the "top q" where its figure's
    axis is the quantile q.
    """
    for name, x in (("q", q), ("d", d)):
        if not 0.0 <= x < 1.0:
            raise ValueError(f"{name} must be a quantile in [0, 1); got {x}. For 90 % pass 0.9.")
    if entropy.shape != value_jump.shape or entropy.ndim != 1 or len(entropy) == 0:
        raise ValueError(
            f"entropy and value_jump must be two non-empty vectors of one length; got shapes "
            f"{tuple(entropy.shape)} and {tuple(value_jump.shape)}."
        )
    return entropy >= _quantile(entropy, q), value_jump >= _quantile(value_jump, d)


def lift(
    entropy: Float[Tensor, " N"], value_jump: Float[Tensor, " N"], q: float, d: float = 0.9
) -> Float[Tensor, ""]:
    """Lift(q) = P(D | A) / P(D) (Eq. 12).

    Over tokens pooled by the caller, each response's last token left out: V = 0 after it would
    make its jump spuriously large.
    """
    high_entropy, decisive = lift_events(entropy, value_jump, q, d)
    exact = accumulation_dtype(entropy)
    both = (high_entropy & decisive).sum(dtype=exact)
    return both / high_entropy.sum() / (decisive.sum(dtype=exact) / len(decisive))


def _quantile(x: Float[Tensor, " N"], q: float) -> Float[Tensor, ""]:
    """Linear interpolation; torch.quantile refuses more than 16 million entries."""
    ordered = x.sort().values
    position = Fraction(str(float(q))) * (len(x) - 1)  # exact: .55 · 100 must hit entry 55
    below = int(position)
    above = min(below + 1, len(x) - 1)
    return torch.lerp(ordered[below], ordered[above], float(position - below))
