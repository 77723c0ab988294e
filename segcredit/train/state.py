"""What a run holds while it trains."""

import warnings
from dataclasses import dataclass, field

from torch import nn

from segcredit.config import Recipe
from segcredit.data.worlds import World
from segcredit.models import Critic, Policy
from segcredit.train.optimizer import Optimizer
from segcredit.train.parallel import Parallel
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
        """For the rest of the run; gradients stay what they are."""
        self.micro_batches_halved += 1
        warnings.warn(
            f"out of memory in the update: going on with micro-batches of {self.tokens_per_micro} "
            f"tokens, which changes nothing but time. To begin so: "
            f"update.tokens_per_micro={self.tokens_per_micro}",
            stacklevel=2,
        )

    @property
    def seed(self) -> int:
        return self.recipe.seed

    def optimizers(self) -> list[Optimizer]:
        return [x for x in (self.policy_optimizer, self.critic_optimizer) if x is not None]


def freeze(model: nn.Module) -> None:
    """No gradients."""
    for x in model.parameters():
        x.requires_grad_(False)
