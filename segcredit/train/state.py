"""What a run holds while it trains."""

import warnings
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from segcredit.algorithms.asks import loss_temperature
from segcredit.config import OptimizerSettings, Recipe
from segcredit.data.worlds import World
from segcredit.models import Critic, Policy
from segcredit.models.lora import POLICY, REFERENCE
from segcredit.models.weights import copy_weights
from segcredit.rollout import HFEngine
from segcredit.train.distributed import Parallel
from segcredit.train.optim import Optimizer, make_optimizer
from segcredit.train.source import PromptSource
from segcredit.train.tracker import Tracker
from segcredit.types import Algorithm, RewardFn, RolloutEngine


@dataclass
class State:
    """Models, their optimizers, and where in the recipe the run stands."""

    recipe: Recipe
    algorithm: Algorithm
    policy: Policy
    engine: RolloutEngine
    reward: RewardFn
    train: PromptSource
    test: PromptSource | None
    world: World | None = None
    """Where demonstrations come from, if the data is generated."""
    parallel: Parallel = field(default_factory=Parallel)
    critic: Critic | None = None
    reference: Policy | None = None
    """π_ref, only if something reads it."""
    tracker: Tracker | None = None
    """Values of prompts, only if something reads them (single-stream SPO)."""
    whole: PreTrainedModel | None = None
    """The policy's weights undivided, to sample from; None: the policy has them."""
    policy_optimizer: Optimizer | None = None
    critic_optimizer: Optimizer | None = None

    stage: int = 0
    """Number of the present stage."""
    stage_step: int = 0
    """Steps done in it."""
    step: int = 0
    """Steps done in all."""
    position: int = 0
    """Prompts taken from the training source."""
    noted: dict[str, float] = field(default_factory=dict)
    """Results kept for the end: the evaluations before and after."""

    micro_batches_halved: int = 0
    """How often memory did not suffice."""

    @property
    def tokens_per_micro(self) -> int:
        """Prompt and response tokens in one forward pass with gradients."""
        return max(1, self.recipe.update.tokens_per_micro >> self.micro_batches_halved)

    def halve_micro_batches(self) -> None:
        """Halve micro-batches for the rest of the run.

        Gradients stay the same, unless the method averages within micro-batches.
        """
        self.micro_batches_halved += 1
        if isinstance(self.engine, HFEngine):
            self.engine.close()  # keys and values that graphs keep; they come back as they can
        warnings.warn(
            f"out of memory in the update: going on with micro-batches of {self.tokens_per_micro} "
            f"tokens. Only the time changes, unless the method averages within micro-batches "
            f"(sapo_authors). To begin so: "
            f"update.tokens_per_micro={self.tokens_per_micro}",
            stacklevel=2,
        )

    @property
    def temperature(self) -> float:
        """Temperature of log π and log π_ref in the loss."""
        return loss_temperature(self.algorithm, self.recipe.rollout.temperature)

    @property
    def shards(self) -> bool:
        """Whether weights, gradients and optimizer state are divided among the processes."""
        return self.recipe.memory.shard and self.parallel.size > 1

    def turns(self, parts: list[Tensor]) -> list[tuple[Tensor, bool]]:
        """This process's micro-batches of row numbers, and whether they count.

        Passes of sharded models are everyone's, so those with fewer micro-batches read one row
        more, for nothing.
        """
        return self.parallel.turns(parts, parts[-1][:1] if self.shards else None)

    def sync(self) -> None:
        """Let the engine draw from the policy as it is now."""
        if self.whole is not None:
            copy_weights(self.policy.model, self.whole)
        self.engine.load_weights(self.policy.model if self.whole is None else self.whole)

    @property
    def seed(self) -> int:
        return self.recipe.seed

    def optimizers(self) -> list[Optimizer]:
        return [x for x in (self.policy_optimizer, self.critic_optimizer) if x is not None]


def freeze(model: nn.Module) -> None:
    """No gradients."""
    for x in model.parameters():
        x.requires_grad_(False)


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
