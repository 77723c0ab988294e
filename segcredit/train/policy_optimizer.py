"""The policy's optimizer, made anew when a stage begins, or when a method begins again."""

import torch

from segcredit.config import OptimizerSettings
from segcredit.models.lora import POLICY, REFERENCE
from segcredit.train.optimizer import Optimizer
from segcredit.train.sharded_optimizer import make_optimizer
from segcredit.train.state import State


def set_policy_optimizer(state: State, lr: float, settings: OptimizerSettings) -> Optimizer:
    """A new one for the policy, in the place of the old."""
    if state.policy_optimizer is not None:
        state.policy_optimizer.close()
    offload = state.recipe.memory.offload_optimizer
    policy = state.policy
    state.policy_optimizer = make_optimizer(
        "policy", policy.model, lr, settings, offload, policy.trained()
    )
    return state.policy_optimizer


@torch.no_grad()
def restart(state: State) -> None:
    """Put the policy back to where reinforcement learning began, and forget all moments."""
    first, lora = state.reference, state.policy.lora
    assert first is not None
    if lora is not None:
        pairs = zip(lora.parameters(POLICY), lora.parameters(REFERENCE), strict=True)
    else:
        pairs = zip(state.policy.model.parameters(), first.model.parameters(), strict=True)
    for now, then in pairs:
        now.copy_(then)
    settings = state.recipe.optimizer
    set_policy_optimizer(state, settings.lr, settings)
