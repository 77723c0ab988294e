"""Trees of responses (SPO-tree): each part of a response branches, and each branch is one row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from segcredit.config import TreeSettings
from segcredit.core.group import tree_advantage
from segcredit.models.inputs import encode_all
from segcredit.rewards.checks import grade
from segcredit.train.collect import Context
from segcredit.train.metrics import RolloutBatch
from segcredit.train.provider import Provider
from segcredit.train.state import State
from segcredit.types import Batch, Encoded, Prompt, Response, Reward, Rollouts, Sampling

NO_CREDIT = 1e-6
"""Smaller advantages are rounding errors of means of equal rewards."""


@dataclass(frozen=True)
class Node:
    """The start of branches: a prompt, or the end of an unfinished branch."""

    prompt: Encoded
    begun: Int[Tensor, " L"]
    """The response so far."""
    read: Encoded
    """The prompt and the response so far: the model's input before the branch."""
    number: int
    """Number of the prompt."""
    row: int = -1
    """Row of the branch that ends here; −1 at a prompt."""

    def after(self, branch: Int[Tensor, " L"], row: int) -> "Node":
        begun = torch.cat([self.begun, branch])
        return Node(self.prompt, begun, self.prompt.extended(begun), self.number, row)


class Branches(NamedTuple):
    """The branches of all prompts' trees, one row per branch, and the node where each begins."""

    rollouts: Rollouts
    """One row per branch, with ``parent``; not graded yet."""
    origins: list[Node]


class TreeSampler:
    """Samples trees of responses, with the branching of ``rollout.tree``."""

    def sample(self, context: Context, prompts: Sequence[Prompt]) -> Branches:
        return draw_tree(context, prompts)

    def grade(self, context: Context, drawn: Branches) -> RolloutBatch:
        return grade_tree(context.state, drawn.rollouts, drawn.origins)


@dataclass(frozen=True)
class TreeProvider(Provider):
    """Samples trees of responses; the update leaves out branches without credit."""

    prepares_at_build = True
    sampler = TreeSampler()

    def select_rows(self, batch: Batch) -> Int[Tensor, " R"]:
        return rows_with_credit(batch)


def draw_tree(context: Context, prompts: Sequence[Prompt]) -> Branches:
    """Sample the branches of every prompt's tree."""
    state, settings = context.state, context.state.recipe.rollout
    assert settings.tree is not None, "checked when the run was planned"
    nothing = torch.zeros(0, dtype=torch.long)
    asked = encode_all(state.policy.encode, prompts)
    open_ends = [Node(x, nothing, x, number) for number, x in enumerate(asked)]
    levels: list[Rollouts] = []
    origins: list[Node] = []
    for depth, branching in enumerate(settings.tree.branching):
        if not open_ends:
            break
        begin = [node for node in open_ends for _ in range(branching)]
        limit = _limit(settings.tree, depth, settings.max_tokens)
        sampling = settings.sampling(limit)
        made = _draw_level(context.within("level", depth), begin, sampling)
        first = len(origins)
        levels.append(made)
        origins += begin
        last = limit == settings.max_tokens
        cut = [] if last else made.truncated.nonzero().flatten().tolist()
        tokens = made.tokens.cpu()
        open_ends = [begin[i].after(tokens[i][made.mask[i].cpu()], first + i) for i in cut]
    return Branches(_join_levels(levels, origins), origins)


def _limit(tree: TreeSettings, depth: int, longest: int) -> int:
    """Return the maximum response length after a level; ``rollout.max_tokens`` after the last."""
    last = depth + 1 == len(tree.branching)
    return longest if last else (depth + 1) * tree.tokens


def _draw_level(context: Context, begin: Sequence[Node], sampling: Sampling) -> Rollouts:
    """Sample one branch from each of these nodes; each process samples its share."""
    state, drawn = context.state, context.generator("tree", *context.purpose)
    own = state.parallel.own(begin)
    # skip the random numbers that belong to other ranks
    torch.rand(state.parallel.before(begin), sampling.max_tokens, generator=drawn)
    made = None
    if own:
        made = state.engine.continue_from(
            [x.prompt for x in own], [x.begun for x in own], sampling, drawn
        )
    return state.parallel.gather_rollouts(made, [x.read for x in begin], state.device)


def _join_levels(levels: Sequence[Rollouts], origins: Sequence[Node]) -> Rollouts:
    """Join all levels into one batch, and set ``parent``."""
    joined = Rollouts.join(levels)
    device = joined.mask.device
    parent = torch.tensor([x.row for x in origins], device=device)
    inner = torch.zeros(len(parent), dtype=torch.bool, device=device)
    inner[parent[parent >= 0]] = True
    return joined.replace(
        truncated=joined.truncated & ~inner,  # an inner branch was continued
        group=torch.tensor([x.number for x in origins], device=device),
        parent=parent,
        prompts=[x.read for x in origins],
    )


def grade_tree(state: State, rollouts: Rollouts, origins: Sequence[Node]) -> RolloutBatch:
    """Grade finished responses; the reward of an inner branch is the mean of its children's.

    The weight of a finished response is its probability under uniform branching; inner branches
    have weight 0.
    """
    assert rollouts.parent is not None
    decode, limit = state.policy.codec.decode, state.recipe.rollout.max_tokens
    responses = []
    for node, tokens, mask, cut in zip(
        origins,
        rollouts.tokens.cpu(),
        rollouts.mask.cpu(),
        rollouts.truncated.tolist(),
        strict=True,
    ):
        written = [*node.begun.tolist(), *tokens[mask].tolist()]
        responses.append(Response(node.prompt.prompt, decode(written), len(written), cut, limit))
    parent = rollouts.parent.cpu()
    children = torch.bincount(parent[parent >= 0], minlength=len(parent))
    leaves = (children == 0).nonzero().flatten().tolist()
    own = [responses[row] for row in state.parallel.own(leaves)]
    graded = state.parallel.gather(grade(state.reward, own) if own else [])
    found = dict(zip(leaves, graded, strict=True))
    values = torch.tensor([found[row].value if row in found else 0.0 for row in range(len(parent))])
    group = rollouts.group.cpu()
    value = tree_advantage(values, parent, group)[1]
    rewards = [
        found.get(row) or Reward(float(value[row]), f"mean of {int(children[row])} branches")
        for row in range(len(parent))
    ]
    return RolloutBatch(
        rollouts.replace(reward=value.to(rollouts.mask.device)),
        responses,
        rewards,
        _chances(parent, group).where(children == 0, 0.0),
    )


def _chances(parent: Int[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Compute each branch's probability: its share among siblings times its parent's."""
    above = torch.where(parent >= 0, parent, len(parent) + group)
    siblings = torch.bincount(above)[above]
    share = torch.ones(len(parent))
    for row in range(len(parent)):  # parents come before their children
        before = float(share[parent[row]]) if parent[row] >= 0 else 1.0
        share[row] = before / float(siblings[row])
    return share


def rows_with_credit(batch: Batch) -> Int[Tensor, " R"]:
    """Return the branches that are better or worse than their siblings; others have no gradient."""
    assert batch.credit is not None
    size = batch.credit.advantage.masked_fill(~batch.rollouts.mask, 0.0).abs().amax(dim=1)
    return (size > NO_CREDIT).nonzero().flatten()
