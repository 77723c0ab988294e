"""The state of a run: models, optimizers, columns, position in the recipe, and random numbers.

The run's seed and a purpose determine each random generator, so a checkpoint holds no random state.
"""

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from segcredit.algorithms.requirements import Requirements, requirements
from segcredit.columns import Column
from segcredit.config import OptimizerSettings, Recipe
from segcredit.data.worlds import World
from segcredit.models import Policy
from segcredit.models.layers import copy_weights
from segcredit.rollout import HFEngine
from segcredit.train.best import Best
from segcredit.train.curriculum import Curriculum
from segcredit.train.distributed import Parallel
from segcredit.train.optim import Learner, Optimizer, PolicyLearner, make_optimizer
from segcredit.train.provider import Provider, Providers
from segcredit.types import Algorithm, PromptSource, RewardFn, RolloutEngine

if TYPE_CHECKING:
    from segcredit.train.ahead import Lookahead, PendingBatch


@dataclass
class State:
    """All state of a run during training."""

    recipe: Recipe
    algorithm: Algorithm
    policy: Policy
    engine: RolloutEngine
    reward: RewardFn
    train: PromptSource
    test: PromptSource | None
    world: World | None = None
    """Source of demonstrations, if the data is generated."""
    parallel: Parallel = field(default_factory=Parallel)
    whole: PreTrainedModel | None = None
    """Unsharded copy of a sharded policy's model, to sample from; None: it is not sharded."""
    providers: dict[Column, Provider] = field(default_factory=dict)
    """Providers of columns that are prepared: reference model, critic, tracked values, …"""
    learners: dict[str, Learner] = field(default_factory=dict)
    """Models with their optimizers: ``policy`` from the first stage that trains it, ``critic``."""

    stage: int = 0
    """Number of the current stage."""
    stage_step: int = 0
    """Steps done in the current stage."""
    step: int = 0
    """Steps done in all stages."""
    position: int = 0
    """Prompts taken from the training source."""
    noted: dict[str, float] = field(default_factory=dict)
    """Results of the evaluations before and after optimization, reported at the end of the run."""
    best: Best | None = None
    """The best evaluation so far, if a setting needs it."""
    curriculum: Curriculum | None = None
    """Success rates of the training prompts, from the first step that draws by them."""
    lookahead: "Lookahead | None" = None
    """The copy of the policy that samples with ``rollout.ahead``, from its first use."""
    pending: "PendingBatch | None" = None
    """The batch that was sampled ahead for the next step."""

    code: list[str] = field(default_factory=list)
    """Hashes of the files with code of the user, as they were when the run started."""
    config: dict[str, Any] = field(default_factory=dict)
    """Content of the run's config.yaml, for the model card; on rank 0 only."""
    micro_batches_halved: int = 0
    """How often micro-batches were halved because memory did not suffice."""

    def __post_init__(self) -> None:
        self.requirements: Requirements = requirements(self.algorithm)
        """What the method requires of the run."""
        self.device = self.policy.device
        """Device that trains. A policy that only samples may be on another (``rollout.device``)."""

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of a training step."""
        return self.requirements.columns

    def providers_of(self, columns: Sequence[Column]) -> Providers:
        """Return the providers of these columns, each once, in the columns' order."""
        return Providers(tuple(dict.fromkeys(self.providers[x] for x in columns)))

    @property
    def prepared(self) -> Providers:
        """All providers that are prepared."""
        return self.providers_of(tuple(self.providers))

    def can_fill_held_out(self, columns: Sequence[Column]) -> bool:
        """Whether these columns can be filled for held-out prompts."""
        return all(x in self.providers and self.providers[x].held_out for x in columns)

    def has_begun(self, *kinds: str) -> bool:
        """Whether a stage of one of these kinds has begun."""
        begun = self.stage + (self.stage_step > 0)
        return any(stage.kind in kinds for stage in self.recipe.stages[:begun])

    @property
    def stage_kind(self) -> str | None:
        """Kind of the stage that is in progress; None between stages."""
        stages = self.recipe.stages
        in_progress = self.stage < len(stages) and self.stage_step > 0
        return stages[self.stage].kind if in_progress else None

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
            self.engine.close()  # frees the KV cache of CUDA graphs; it is allocated again on use
        warnings.warn(
            f"out of memory in the update: continuing with micro-batches of "
            f"{self.tokens_per_micro} tokens. Only the time changes, unless the method averages "
            f"within micro-batches (sapo_authors). To start with this size: "
            f"update.tokens_per_micro={self.tokens_per_micro}",
            stacklevel=2,
        )

    @property
    def temperature(self) -> float:
        """Temperature of log π and log π_ref in the loss."""
        return self.requirements.temperature(self.recipe.rollout.temperature)

    @property
    def shards(self) -> bool:
        """Whether weights, gradients and optimizer state are sharded over the processes."""
        return self.recipe.memory.shard and self.parallel.size > 1

    def turns(self, parts: list[Tensor]) -> list[tuple[Tensor, bool]]:
        """Return this rank's micro-batches (row numbers), and whether each counts in the loss.

        Every rank must take part in the forward passes of sharded models (collective operations),
        so ranks with fewer micro-batches run one extra row with zero loss.
        """
        return self.parallel.turns(parts, parts[-1][:1] if self.shards else None)

    def sync(self) -> None:
        """Pass the policy's current weights to the engine."""
        if self.whole is not None:
            copy_weights(self.policy.model, self.whole)
        self.engine.load_weights(self.policy.model if self.whole is None else self.whole)

    def whole_policy(self) -> Policy:
        """Return the policy unsharded, to copy; it is up to date when a stage begins."""
        return self.policy if self.whole is None else Policy(self.whole, self.policy.codec)

    @property
    def seed(self) -> int:
        return self.recipe.seed

    def new_policy_optimizer(self, lr: float, settings: OptimizerSettings) -> Optimizer:
        """Replace the policy's optimizer by a new one."""
        if (old := self.learners.get(PolicyLearner.name)) is not None:
            old.optimizer.close()
        policy, offload = self.policy, self.recipe.memory.offload_optimizer
        optimizer = make_optimizer(
            PolicyLearner.name, policy.model, lr, settings, offload, policy.trained()
        )
        self.learners[PolicyLearner.name] = PolicyLearner(policy, optimizer, self.temperature)
        return optimizer

    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers, the policy's first."""
        names = sorted(self.learners, key=lambda name: name != PolicyLearner.name)
        return [self.learners[name].optimizer for name in names]


def derive(seed: int, *names: object) -> int:
    """Derive a seed from the run's seed and the names of a purpose."""
    digest = hashlib.sha256(repr((seed, *names)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator(seed: int, *names: object) -> torch.Generator:
    """Make a CPU generator for one purpose at one step."""
    return torch.Generator().manual_seed(derive(seed, *names))
