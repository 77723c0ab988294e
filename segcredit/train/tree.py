"""Trees of responses: each part of a response branches, and each branch is one row (SPO-tree)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from segcredit.config import TreeSettings
from segcredit.core.group import tree_advantage
from segcredit.models.inputs import encode_all
from segcredit.train.seeds import generator
from segcredit.train.state import State
from segcredit.types import Batch, Encoded, Prompt, Response, Reward, Rollouts, Sampling

NO_CREDIT = 1e-6
"""Advantages below are rounding: means of equal rewards."""
_WIDE = ("tokens", "mask", "logp_old", "entropy")


@dataclass(frozen=True)
class Node:
    """Where branches begin: at a prompt, or at the end of a branch that has not ended."""

    prompt: Encoded
    begun: Int[Tensor, " L"]
    """The response so far."""
    read: Encoded
    """The prompt with that behind it: what a model reads before the branch."""
    number: int
    """Of the prompt."""
    row: int = -1
    """Of the branch that ends here."""

    def after(self, branch: Int[Tensor, " L"], row: int) -> "Node":
        begun = torch.cat([self.begun, branch])
        return Node(self.prompt, begun, self.prompt.extended(begun), self.number, row)


class Tree(NamedTuple):
    """Trees of all prompts, a row per branch."""

    rollouts: Rollouts
    """With ``parent``; a branch's reward is the mean of those below it."""
    responses: list[Response]
    """Up to the end of each branch."""
    rewards: list[Reward]
    weight: Float[Tensor, " B"]
    """The chance of each finished response, as its prompt's branches share it out; 0 within."""


def draw_tree(
    state: State, prompts: Sequence[Prompt], *purpose: object
) -> tuple[Rollouts, list[Node]]:
    """Branches of every prompt's tree, and the node at which each begins; nothing is graded yet."""
    settings = state.recipe.rollout
    assert settings.tree is not None
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
        made = _draw_level(
            state, begin, Sampling(limit, settings.temperature), (*purpose, "level", depth)
        )
        first = len(origins)
        levels.append(made)
        origins += begin
        last = limit == settings.max_tokens
        cut = [] if last else made.truncated.nonzero().flatten().tolist()
        tokens = made.tokens.cpu()
        open_ends = [begin[i].after(tokens[i][made.mask[i].cpu()], first + i) for i in cut]
    return _joined(levels, origins), origins


def _limit(tree: TreeSettings, depth: int, longest: int) -> int:
    """Tokens of a response at the end of this level; the last one is bounded as responses are."""
    last = depth + 1 == len(tree.branching)
    return longest if last else (depth + 1) * tree.tokens


def _draw_level(
    state: State, begin: Sequence[Node], sampling: Sampling, purpose: tuple[object, ...]
) -> Rollouts:
    """One branch from each of these nodes, shared out among the processes."""
    drawn = generator(state.seed, "tree", *purpose)
    own = state.parallel.own(begin)
    torch.rand(state.parallel.before(begin), sampling.max_tokens, generator=drawn)
    made = None
    if own:
        made = state.engine.continue_from(
            [x.prompt for x in own], [x.begun for x in own], sampling, drawn
        )
    return state.parallel.gather_rollouts(made, [x.read for x in begin])


def _joined(levels: Sequence[Rollouts], origins: Sequence[Node]) -> Rollouts:
    """All levels as one batch; who continues whom."""
    width = max(x.mask.shape[1] for x in levels)
    columns: dict[str, Tensor] = {}
    for name in (*_WIDE, "reward", "truncated"):
        parts = [getattr(x, name) for x in levels]
        if any(x is None for x in parts):
            continue  # vLLM knows no entropies
        if name in _WIDE:
            parts = [torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in parts]
        columns[name] = torch.cat(parts)
    device = levels[0].mask.device
    parent = torch.tensor([x.row for x in origins], device=device)
    inner = torch.zeros(len(parent), dtype=torch.bool, device=device)
    inner[parent[parent >= 0]] = True
    columns["truncated"] = columns["truncated"] & ~inner  # what goes on was not cut off
    return Rollouts(
        **columns,  # type: ignore[arg-type]
        group=torch.tensor([x.number for x in origins], device=device),
        parent=parent,
        prompts=[x.read for x in origins],
    )


def grade_tree(state: State, rollouts: Rollouts, origins: Sequence[Node]) -> Tree:
    """Finished responses are graded; a branch that goes on is worth the mean of what follows."""
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
    graded = state.parallel.gather(state.reward(own) if own else [])
    found = dict(zip(leaves, graded, strict=True))
    values = torch.tensor([found[row].value if row in found else 0.0 for row in range(len(parent))])
    group = rollouts.group.cpu()
    value = tree_advantage(values, parent, group)[1]
    rewards = [
        found.get(row) or Reward(float(value[row]), f"mean of {int(children[row])} branches")
        for row in range(len(parent))
    ]
    return Tree(
        rollouts.replace(reward=value.to(rollouts.mask.device)),
        responses,
        rewards,
        _chances(parent, group).where(children == 0, 0.0),
    )


def _chances(parent: Int[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """A branch's share among its siblings, times that of the branch it continues."""
    above = torch.where(parent >= 0, parent, len(parent) + group)
    siblings = torch.bincount(above)[above]
    share = torch.ones(len(parent))
    for row in range(len(parent)):  # parents stand before their children
        before = float(share[parent[row]]) if parent[row] >= 0 else 1.0
        share[row] = before / float(siblings[row])
    return share


def rows_with_credit(batch: Batch) -> Int[Tensor, " R"]:
    """Branches that are better or worse than their siblings; the others teach nothing."""
    assert batch.credit is not None
    size = batch.credit.advantage.masked_fill(~batch.rollouts.mask, 0.0).abs().amax(dim=1)
    return (size > NO_CREDIT).nonzero().flatten()
