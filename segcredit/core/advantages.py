"""Advantages: generalized advantage estimation over any units, and value differences."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from segcredit.core.checks import (
    Claim,
    accumulation_dtype,
    at_least_float32,
    constant,
    finite,
    has_kernels,
    keep,
    none,
    not_finite,
    require,
    require_mask,
    require_positive,
    require_shape,
    require_unit_interval,
)
from segcredit.core.segments import Segments, ValueAt, last_position

BLOCK = 128
"""Units per block: two levels of blocks cover 16,384 units, three 2 million."""


def reverse_scan(
    x: Float[Tensor, "B M"], decay: "float | Float[Tensor, ' B']"
) -> Float[Tensor, "B M"]:
    """Compute the discounted sum y_m = x_m + decay · y_{m+1} = Σ_{l≥0} decay^l x_{m+l}.

    Inside a block of units the sum is a product with a triangular matrix of powers; the carry
    between blocks is the same scan over the blocks' first units with decay^BLOCK. Powers are only
    multiplied, so nothing overflows for any decay in [0, 1] and any width.
    """
    rows, width = x.shape
    num_blocks = -(-width // BLOCK)
    within, carry = _powers(decay, x.dtype, x.device)
    blocks = pad(x, (0, num_blocks * BLOCK - width)).view(rows, num_blocks, BLOCK)
    local = blocks @ within
    if num_blocks > 1:
        first = reverse_scan(local[:, :, 0], decay**BLOCK)
        local = torch.addcmul(local, pad(first[:, 1:], (0, 1))[:, :, None], carry)
    return local.reshape(rows, -1)[:, :width]


def _powers(
    decay: float | Tensor, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return decay^(j−i) for j ≥ i in a block, and decay^(BLOCK−i) for the carry from the next."""
    if isinstance(decay, Tensor):  # one decay per response
        return _power_matrices(decay.to(dtype)[:, None, None])
    return _shared_powers(decay, dtype, device)


@lru_cache(maxsize=32)
def _shared_powers(decay: float, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):  # a cached tensor must be usable outside inference mode
        return _power_matrices(torch.full((1, 1, 1), decay, dtype=dtype, device=device))


def _power_matrices(decay: Float[Tensor, "R 1 1"]) -> tuple[Tensor, Tensor]:
    unit = torch.arange(BLOCK, device=decay.device)
    distance = unit[:, None] - unit  # row j, column i: how far unit j lies after unit i
    within = torch.where(distance >= 0, decay ** distance.clamp(min=0), 0.0)
    carry = decay ** (BLOCK - unit)
    return within, carry


@dataclass(frozen=True)
class Credit:
    """Advantages of tokens and targets of the critic, over the segments of a rollout batch."""

    advantage: Float[Tensor, "B T"]
    """Â_{m(t)}; 0 off the mask."""
    value_target: Float[Tensor, "B T"] | None
    """R̂_{m(t)}, read where V is read; None without a critic."""
    segments: Segments
    """The units of credit."""
    value_at: ValueAt = "start"
    """Where V was read, and where the target applies."""

    @property
    def per_segment(self) -> Float[Tensor, "B M"]:
        """Advantage Â_m of each segment."""
        return self.segments.at_start(self.advantage)

    def select(self, rows: Int[Tensor, " R"]) -> "Credit":
        """Return the credit of some responses, in the given order."""
        target = None if self.value_target is None else self.value_target[rows]
        return Credit(self.advantage[rows], target, self.segments.select(rows), self.value_at)


@torch.no_grad()
def gae(
    reward: Float[Tensor, "B M"],
    value: Float[Tensor, "B M"],
    mask: Bool[Tensor, "B M"],
    gamma: float,
    lam: "float | Float[Tensor, ' B']",
) -> Float[Tensor, "B M"]:
    """Compute generalized advantage estimates over any right-padded sequence of units.

    δ_m = r_m + γ V(s_{m+1}) − V(s_m)               (Eq. 6)
    Â_m = Σ_l (γλ)^l δ_{m+l} = δ_m + γλ Â_{m+1}     (Eq. 7)

    One unit per token gives PPO (Eq. 4). V and Â past the last unit are zero, so a truncated
    response counts as finished. Sums are in float64; results have the input's precision. Advantages
    are constants for the losses: no gradient flows through them.

    Args:
        mask: True at a response's units, False only after them. For tokens under a mask with
            holes, call ``segment_gae`` with one segment per token.
        lam: one λ, or one per response (VAPO).
    """
    require_mask("mask", mask)
    require_shape("reward", reward, "mask", mask)
    require_shape("value", value, "mask", mask)
    require_unit_interval("gamma", gamma, "Language tasks use 1.0.")
    if not isinstance(lam, Tensor):
        require_unit_interval("lam", lam, "The paper uses 0.99 per segment, 0.95 per token.")
    _check_lam_shape(lam, mask)
    reward, value = at_least_float32(reward), at_least_float32(value)
    hole = mask[:, 1:] & ~mask[:, :-1]
    require(
        none(
            hole,
            lambda: (
                f"mask must be True first and False after, in every row; row "
                f"{int(hole.nonzero()[0, 0])} has a hole. Use segment_gae with "
                f"segcredit.partition.tokens(mask), which steps over holes."
            ),
        ),
        finite(mask, reward=reward, value=value),
        *_lam_claims(lam),
    )
    advantage, _ = _gae(keep(mask, reward), keep(mask, value), gamma, lam)
    return advantage


@torch.no_grad()
def segment_gae(
    reward: Float[Tensor, "B T"] | Float[Tensor, " B"],
    value: Float[Tensor, "B T"],
    segments: Segments,
    gamma: float,
    lam: "float | Float[Tensor, ' B']",
    value_at: ValueAt = "start",
    lam_critic: float | None = None,
) -> Credit:
    """Compute GAE over segments (Eq. 6–7): r_m = Σ_{t ∈ z_m} r_t, V(s_m) read at a boundary.

    Rewards inside a segment are not discounted. R̂_m = Â_m + V(s_m). Every token of z_m gets Â_m
    and R̂_m.

    Args:
        reward: r(x, y), one number per response, given at its end; or one per token (see
            ``kl_shaped_reward``).
        value: V of the prefix *before* each token.
        value_at: "start" is the paper's s_m; "end" is the authors' code, whose baseline knows the
            segment's own tokens (docs/deviations.md).
        lam_critic: separate λ for the targets R̂ (VC-PPO, VAPO: 1); None uses ``lam``.
    """
    token_mask = segments.token_mask
    if reward.ndim == 1:
        _check_one_per_response(reward, token_mask)
    else:
        require_shape("reward", reward, "the token mask", token_mask)
    require_shape("value", value, "the token mask", token_mask)
    require_unit_interval("gamma", gamma, "Language tasks use 1.0.")
    for name, x in (("lam", lam), ("lam_critic", lam_critic)):
        if x is not None and not isinstance(x, Tensor):
            require_unit_interval(name, x, "The paper uses 0.99 per segment, 0.95 per token.")
    _check_lam_shape(lam, token_mask)
    if value_at == "start" and has_kernels(reward, value):
        return _by_kernel(reward, value, segments, gamma, lam, lam_critic)
    if reward.ndim == 1:
        reward = terminal_reward(reward, token_mask)
    require(finite(token_mask, reward=reward, value=value), *_lam_claims(lam))

    reward_seg = segments.sum(at_least_float32(reward))
    value_seg = keep(segments.mask, segments.read(at_least_float32(value), value_at))
    advantage, target = _gae(reward_seg, value_seg, gamma, lam)
    if lam_critic is not None:
        _, target = _gae(reward_seg, value_seg, gamma, lam_critic)
    return Credit(segments.spread(advantage), segments.spread(target), segments, value_at)


def _by_kernel(
    reward: Tensor,
    value: Tensor,
    segments: Segments,
    gamma: float,
    lam: float | Tensor,
    lam_critic: float | None,
) -> Credit:
    from segcredit.core import kernels

    def run(lam: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if isinstance(lam, Tensor):
            decay = gamma * lam.double()
        else:
            decay = constant(gamma * lam, torch.float64, reward.device)
        mask, slot, num = segments.token_mask, segments.slot, segments.num
        return kernels.segment_gae(reward, value, mask, slot, segments.starts, num, decay, gamma)

    advantage, target, bad = run(lam)
    mask = segments.token_mask

    def message() -> str:
        per_token = terminal_reward(reward, mask) if reward.ndim == 1 else reward
        return not_finite(mask, reward=per_token, value=value)

    require(Claim(bad, lambda number: number == 0, message), *_lam_claims(lam))
    if lam_critic is not None:
        _, target, _ = run(lam_critic)
    return Credit(advantage, target, segments, "start")


def _gae(reward: Tensor, value: Tensor, gamma: float, lam: float | Tensor) -> tuple[Tensor, Tensor]:
    """Compute Â and R̂. Reward and value are 0 past a response's last unit, and so is Â."""
    exact = value.to(accumulation_dtype(value))
    td_error = reward - exact
    td_error[:, :-1].add_(exact[:, 1:], alpha=gamma)
    advantage = reverse_scan(td_error, gamma * lam).to(reward.dtype)
    return advantage, advantage + value


def _check_one_per_response(reward: Tensor, mask: Tensor) -> None:
    if reward.shape != mask.shape[:1]:
        raise ValueError(
            f"reward must be one number per response, shape {tuple(mask.shape[:1])}; "
            f"got {tuple(reward.shape)}."
        )


def _check_lam_shape(lam: float | Tensor, mask: Tensor) -> None:
    if isinstance(lam, Tensor) and lam.shape != mask.shape[:1]:
        raise ValueError(
            f"lam must be one number, or one per response, shape {tuple(mask.shape[:1])}; "
            f"got shape {tuple(lam.shape)}."
        )


def _lam_claims(lam: float | Tensor) -> list[Claim]:
    if not isinstance(lam, Tensor):
        return []
    return [
        none(
            ~((lam >= 0) & (lam <= 1)),
            lambda: (
                f"every lam must be in [0, 1]; got {lam.min().item()} … {lam.max().item()}. "
                f"VAPO's formula is negative for short responses: clamp it."
            ),
        )
    ]


def length_adaptive_lambda(
    length: Int[Tensor, " B"], alpha: float, clamp: bool = True
) -> Float[Tensor, " B"]:
    """Compute λ for a response of l tokens, 1 − 1/(α l), clamped to [0, 1] (VAPO).

    With the paper's α = .05 the formula is 0 at 20 tokens and negative below; ``clamp=False``
    returns it as printed.
    """
    require_positive("alpha", alpha, "VAPO uses 0.05.")
    lam = 1.0 - 1.0 / (alpha * length.to(accumulation_dtype(length)))
    return lam.clamp(0.0, 1.0) if clamp else lam


def terminal_reward(reward: Float[Tensor, " B"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Put r(x, y) on the last token, 0 on all others (r_m = 0 for m < M, §4.1)."""
    require_mask("mask", mask)
    _check_one_per_response(reward, mask)
    reward = at_least_float32(reward)[:, None]
    return keep(mask, reward.new_zeros(mask.shape).scatter_(1, last_position(mask), reward))


def kl_shaped_reward(
    reward: Float[Tensor, " B"],
    logp_old: Float[Tensor, "B T"],
    logp_ref: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    coef: float,
) -> Float[Tensor, "B T"]:
    """Put the reward on the last token and subtract the KL penalty (k1) from every token's reward.

    r_t = r(x, y)·[t = T] − β (log π_old(y_t) − log π_ref(y_t)).

    ``segment_gae`` sums it inside segments, undiscounted, as the authors' code does. So r_m ≠ 0
    before the last segment, where the paper has r_m = 0.
    """
    require_shape("logp_old", logp_old, "mask", mask)
    require_shape("logp_ref", logp_ref, "mask", mask)
    require(finite(mask, logp_old=logp_old, logp_ref=logp_ref))
    penalty = coef * (at_least_float32(logp_old) - at_least_float32(logp_ref))
    return terminal_reward(reward, mask) - keep(mask, penalty)


def whiten(
    x: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], eps: float = 1e-8
) -> Float[Tensor, "B T"]:
    """Whiten x over the mask: (x − mean) / √(var + ε), with unbiased variance; 0 off the mask.

    Entries have equal weights: over tokens, a long segment counts once per token.
    """
    require_mask("mask", mask)
    require_shape("x", x, "mask", mask)
    x = at_least_float32(x)
    count = mask.sum()
    require(
        Claim(
            count,
            lambda number: number > 1,
            lambda: (
                f"whitening needs at least two valid entries; got {int(count)}. "
                f"Use a larger batch or leave whitening out."
            ),
        )
    )
    exact = keep(mask, x).to(accumulation_dtype(x))
    centered = keep(mask, exact - exact.sum() / count)
    variance = centered.square().sum() / (count - 1)
    return (centered / (variance + eps).sqrt()).to(x.dtype)


def image_weight(
    image_kl: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    has_image: Bool[Tensor, " B"],
    floor: float,
) -> Float[Tensor, " B"]:
    """Weight responses by their dependence on the images: β + (1 − β) s / mean(s) (VPPO).

    s ∈ [0, 1] is a response's mean KL, shifted and scaled by the minimum and maximum of the batch,
    so the mean weight is 1. Responses without an image have weight 1 and do not enter s. All
    responses have weight 1 if their mean KLs differ by less than 1e-6.

    Args:
        floor: β, the weight of the response that depends least on its images.
    """
    total = keep(mask & has_image[:, None], at_least_float32(image_kl)).sum(dim=1)
    mean = total / mask.sum(dim=1)
    low = keep(has_image, mean, torch.inf).amin()
    high = keep(has_image, mean, -torch.inf).amax()
    spread = high - low
    scaled = keep(has_image & (spread > 1e-6), (mean - low) / spread)
    ratio = scaled / (scaled.sum() / has_image.sum())
    return keep(has_image & (spread > 1e-6), floor + (1.0 - floor) * ratio, 1.0)


def clamp(x: Float[Tensor, "B T"], limit: float) -> Float[Tensor, "B T"]:
    """Clamp x to ±limit (the authors' code: advantages to ±5 after whitening)."""
    require_positive("limit", limit, "The authors' code uses 5.")
    return x.clamp(-limit, limit)


def value_difference(
    reward: Float[Tensor, "B M"],
    state_value: Float[Tensor, "B M"],
    mask: Bool[Tensor, "B M"],
    estimated: Bool[Tensor, "B M"] | None = None,
) -> Float[Tensor, "B M"]:
    """Compute A_m = r_m + V̂(s_{m+1}) − V̂(s_m), with V̂ = 0 past the last unit.

    Equal to segment GAE at γ = 1, λ = 0 with these values.

    Args:
        reward: per unit (an outcome reward is on the last one).
        state_value: mean reward of fresh continuations from the prefix before each unit.
        estimated: where V̂ was estimated (None: everywhere). A unit without an estimate at its
            start gets A = 0. A missing next value is replaced by the observed return from there.
            So VinePPO's unestimated tail and the tokens before SPO's first cut get no credit.
    """
    require_mask("mask", mask)
    require_shape("reward", reward, "mask", mask)
    require_shape("state_value", state_value, "mask", mask)
    known = mask if estimated is None else mask & estimated
    require(finite(mask, reward=reward), finite(known, state_value=state_value))
    reward = keep(mask, reward)
    observed = reverse_scan(reward.to(accumulation_dtype(reward)), 1.0).to(reward.dtype)
    value = torch.where(known, state_value, observed)
    return keep(known, reward + pad(value[:, 1:], (0, 1)) - value)


@torch.no_grad()
def return_to_go(reward: Float[Tensor, "B M"], gamma: float) -> Float[Tensor, "B M"]:
    """Compute G_m = r_m + γ G_{m+1} over right-padded units (REINFORCE++)."""
    require_unit_interval("gamma", gamma, "Language tasks use 1.0.")
    return reverse_scan(reward.to(accumulation_dtype(reward)), gamma).to(reward.dtype)


@torch.no_grad()
def rewards_before(reward: Float[Tensor, "B T"], segments: Segments) -> Float[Tensor, "B T"]:
    """Compute the sum of the rewards that precede each token in its own segment."""
    exact = keep(segments.token_mask, reward).to(accumulation_dtype(reward))
    before = exact.cumsum(dim=1) - exact
    return (before - segments.spread(segments.at_start(before))).to(reward.dtype)


def explained_variance(value: Float[Tensor, " N"], outcome: Float[Tensor, " N"]) -> float:
    """Compute 1 − Var(R − V) / Var(R), R the response's reward; 0 if all rewards are equal."""
    spread = outcome.double().var(correction=0)
    if float(spread) == 0.0:
        return 0.0
    left = (outcome - value).double().var(correction=0)
    return float(1.0 - left / torch.clamp(spread, min=1e-12))
