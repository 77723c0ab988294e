"""Advantages of whole responses relative to others of the same prompt: groups and trees."""

from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from segcredit.core.checks import (
    accumulation_dtype,
    at_least_float32,
    finite_vector,
    none,
    require,
)

Std = Literal["sample", "population", "none"]


def group_zscore(
    reward: Float[Tensor, " B"], group: Int[Tensor, " B"], std: Std = "sample", eps: float = 1e-6
) -> Float[Tensor, " B"]:
    """Compute A_i = (r_i − mean_G) / (std_G + ε) over the responses to one prompt (GRPO).

    Args:
        group: any integer per response; equal integers form a group, in any order.
        std: "sample" (verl, ε 1e-6), "population" (SPO's repository, ε 1e-8), or "none"
            (Dr. GRPO: centered only).
    """
    check_std(std)
    reward = at_least_float32(reward)
    slot, size = _groups(reward, group)
    # float64: the mean of eight equal rewards of 0.1 differs from 0.1 in float32, and ε is small
    exact = reward.to(accumulation_dtype(reward))
    centered = exact - _sum_by(slot, exact, size)[slot] / size[slot]
    if std == "none":
        return centered.to(reward.dtype)
    degrees = size - 1 if std == "sample" else size
    deviation = (_sum_by(slot, centered.square(), size) / degrees).sqrt()
    return (centered / (deviation[slot] + eps)).to(reward.dtype)


def check_std(std: str) -> None:
    """Raise ValueError unless the deviation is one of ``Std``."""
    if std not in get_args(Std):
        raise ValueError(
            f"std must be 'sample', 'population' or 'none'; got {std!r}. verl uses 'sample'."
        )


def leave_one_out(reward: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Compute reward minus mean of the group's other rewards, G/(G−1) · (r_i − mean_G) (RLOO)."""
    reward = at_least_float32(reward)
    slot, size = _groups(reward, group)
    exact = reward.to(accumulation_dtype(reward))
    others = (_sum_by(slot, exact, size)[slot] - exact) / (size[slot] - 1)
    return (exact - others).to(reward.dtype)


def rank_within(group: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
    """Return the index of each row within its group, in row order: [7, 3, 7, 7] → [0, 0, 1, 2]."""
    order = group.argsort(stable=True)
    _, size = group[order].unique_consecutive(return_counts=True)
    first = torch.repeat_interleave(size.cumsum(0) - size, size)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device) - first
    return rank


def _groups(reward: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    if reward.shape != group.shape or reward.ndim != 1:
        raise ValueError(
            f"reward and group must be one number per response; got shapes {tuple(reward.shape)} "
            f"and {tuple(group.shape)}."
        )
    ids, slot, size = group.unique(return_inverse=True, return_counts=True)
    require(
        finite_vector("reward", reward),
        none(
            size < 2,
            lambda: (
                f"a group needs at least two responses to compare; got one response for group "
                f"{int(ids[size == 1][0])}. Sample more per prompt: samples_per_prompt ≥ 2."
            ),
        ),
    )
    return slot, size


def _sum_by(slot: Tensor, x: Tensor, size: Tensor) -> Tensor:
    return x.new_zeros(len(size)).index_add(0, slot, x)


def tree_advantage(
    reward: Float[Tensor, " N"],
    parent: Int[Tensor, " N"],
    group: Int[Tensor, " N"],
    normalize: bool = False,
    eps: float = 1e-8,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Compute edge advantages and node values of trees of continuations (SPO-tree).

    V(leaf) = its reward; V(node) = mean of its children; A(edge to child) = V(child) − V(parent).
    The parent's mean includes the child, so A is (G−1)/G of a leave-one-out advantage.

    Args:
        reward: read at leaves only, the nodes without children.
        parent: row of each node's parent; −1 for children of the group's root, which is not a row.
        normalize: divide by the siblings' population deviation + ε (SPO's "grpo").
    """
    reward = at_least_float32(reward)
    if not reward.shape == parent.shape == group.shape:
        raise ValueError(
            f"reward, parent and group must be one number per row; got shapes "
            f"{tuple(reward.shape)}, {tuple(parent.shape)} and {tuple(group.shape)}."
        )
    astray = (parent < -1) | (parent >= len(parent))
    astray = astray | ((parent >= 0) & (group[parent.clamp(0, len(parent) - 1)] != group))
    require(
        finite_vector("reward", reward),
        none(
            astray,
            lambda: (
                f"parent must be −1 or a row of the same group; got {int(parent[astray][0])} in "
                f"row {int(astray.nonzero()[0])}. Keep whole trees together."
            ),
        ),
    )
    rows = torch.arange(len(parent), device=parent.device)
    _, root = group.unique(return_inverse=True)
    num = len(parent)
    above = torch.where(parent >= 0, parent, num + root)  # roots come after the rows
    level = _levels(parent)
    size = num + int(root.max()) + 1
    exact = accumulation_dtype(reward)
    children = torch.zeros(size, device=reward.device, dtype=exact).index_add(
        0, above, torch.ones_like(rows, dtype=exact)
    )
    value = torch.zeros_like(children)
    value[:num] = torch.where(children[:num] == 0, reward.to(exact), 0.0)
    for depth in range(int(level.max()), -1, -1):  # a tree has a handful of levels
        here = torch.where(level == depth, value[:num], 0.0)
        value = value.index_add(0, above, here / children[above])
    advantage = value[:num] - value[above]
    if normalize:
        variance = torch.zeros_like(children).index_add(0, above, advantage.square())
        advantage = advantage / ((variance[above] / children[above]).sqrt() + eps)
    return advantage.to(reward.dtype), value[:num].to(reward.dtype)


def _levels(parent: Int[Tensor, " N"]) -> Int[Tensor, " N"]:
    """Return the depth of each node under its root; all nodes walk up together."""
    level = torch.zeros_like(parent)
    at = parent
    for _ in range(len(parent)):
        climbing = at >= 0
        if not bool(climbing.any()):
            return level
        level = level + climbing
        at = torch.where(climbing, parent[at.clamp(min=0)], at)
    raise ValueError(
        "parent must describe trees; got a cycle. Each parent must be nearer the root."
    )
