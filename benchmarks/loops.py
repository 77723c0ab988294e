"""SAPO's credit and losses as plain loops over responses and segments: the baseline of credit.py.

The loops process one response and one segment at a time and follow the equations literally. They
run on the same tensors and device as the package and support autograd.
"""

import torch
from torch import Tensor


def segment_ends(entropy: Tensor, fraction: float) -> list[int]:
    """Return the ⌈T · fraction⌉ tokens of largest entropy (ties: lower index) and the last one."""
    length = len(entropy)
    count = max(1, -(-length * round(fraction * 100) // 100))
    values = entropy.tolist()
    picked = sorted(range(length), key=lambda t: (-values[t], t))[:count]
    return sorted({*picked, length - 1})


def loss_by_loops(
    entropy: Tensor,
    mask: Tensor,
    value_old: Tensor,
    reward: Tensor,
    logp_old: Tensor,
    logp: Tensor,
    value: Tensor,
    fraction: float,
    lam: float,
    clip: float,
) -> tuple[Tensor, Tensor]:
    """Compute policy loss (Eq. 9) and value loss (Eq. 10), mean over responses; γ = 1."""
    policy, critic = logp.new_zeros(()), logp.new_zeros(())
    for i in range(len(mask)):
        length = int(mask[i].sum())
        ends = segment_ends(entropy[i, :length], fraction)
        starts = [0] + [e + 1 for e in ends[:-1]]

        advantage = [logp.new_zeros(())] * len(ends)
        ahead, next_value = logp.new_zeros(()), logp.new_zeros(())
        for m in reversed(range(len(ends))):
            r = reward[i] if m == len(ends) - 1 else 0.0
            td_error = r + next_value - value_old[i, starts[m]]
            ahead = td_error + lam * ahead
            advantage[m] = ahead
            next_value = value_old[i, starts[m]]

        for m, (b, e) in enumerate(zip(starts, ends, strict=True)):
            ratio = (logp[i, b : e + 1] - logp_old[i, b : e + 1]).mean().exp()
            unclipped = ratio * advantage[m]
            clipped = ratio.clamp(1.0 - clip, 1.0 + clip) * advantage[m]
            term = torch.minimum(unclipped, clipped)
            policy = policy - term * (e - b + 1) / length / len(mask)
            target = advantage[m] + value_old[i, b]
            critic = critic + (value[i, b] - target).square() / len(ends) / len(mask)
    return policy, critic
