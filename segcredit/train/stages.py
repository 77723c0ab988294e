"""The kinds of stages of a run: how each is prepared, and what one of its steps does."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from segcredit.algorithms.requirements import requirements
from segcredit.config import Optimize, PretrainCritic, WarmStart
from segcredit.data.worlds import Demonstration
from segcredit.train.collect import Context, collect
from segcredit.train.columns import prepare_columns
from segcredit.train.curriculum import Curriculum
from segcredit.train.distributed import micro_batches
from segcredit.train.metrics import Metrics, StepResult, describe, describe_rewards
from segcredit.train.optim import CriticLearner, PolicyLearner, rate
from segcredit.train.source import WorldPrompts, next_prompts, training_prompts
from segcredit.train.state import State
from segcredit.train.step import train_step, update
from segcredit.types import Algorithm, Prompt, Rollouts

PRETRAINING_POSITION = 10**8
"""Position in a world's endless prompts that optimization never reaches."""
AnyStage = WarmStart | PretrainCritic | Optimize


@runtime_checkable
class Stage(Protocol):
    """One stage of a run."""

    def enter(self) -> None:
        """Prepare models, optimizers and columns before the first step."""
        ...

    def adopt_settings(self) -> None:
        """Apply the recipe's settings for this stage to optimizers that exist already."""
        ...

    def step(self) -> tuple[dict[str, float], StepResult | None]:
        """Run the next step; return its metrics, and its rollouts if they may be recorded."""
        ...


@dataclass(frozen=True)
class ImitationStage:
    """Imitate demonstrations (``warm_start``)."""

    state: State
    settings: WarmStart

    def enter(self) -> None:
        state = self.state
        earlier = state.recipe.stages[state.stage - 1] if state.stage else None
        if isinstance(earlier, WarmStart) and PolicyLearner.name in state.learners:
            self.adopt_settings()  # imitation continues with the same moments
            return
        optimizer = state.recipe.optimizer.model_copy(update={"beta2": self.settings.beta2})
        state.new_policy_optimizer(self.settings.lr, optimizer)

    def adopt_settings(self) -> None:
        optimizer = self.state.recipe.optimizer.model_copy(update={"beta2": self.settings.beta2})
        _adopt(self.state, PolicyLearner.name, self.settings.lr, optimizer)

    def step(self) -> tuple[dict[str, float], None]:
        state, stage = self.state, self.settings
        first = state.stage_step * stage.batch
        shown = [demonstration(state, stage, first + i) for i in range(stage.batch)]
        factor = rate(
            state.stage_step,
            stage.steps,
            stage.schedule,
            stage.warmup_steps,
            stage.min_lr_ratio,
            stage.hold,
        )
        measured = imitate(state, shown, factor)
        if state.stage_step + 1 == stage.steps:  # no responses are sampled before
            state.sync()
        return measured, None


def demonstration(state: State, stage: WarmStart, index: int) -> Demonstration:
    """Return the index-th demonstration."""
    if state.world is not None:
        return state.world.demonstration(index, stage.phase)
    prompt = state.train.take(index, 1)[0]
    return Demonstration(prompt, str(prompt.columns["response"]))


def imitate(state: State, shown: Sequence[Demonstration], factor: float) -> dict[str, float]:
    """Take one gradient step on the token mean of −log π(demonstration)."""
    log = Metrics()
    with log.time("encode"):
        rollouts = as_rollouts(state, shown)
        count = rollouts.mask.sum()
    optimizer = state.learners[PolicyLearner.name].optimizer
    with log.time("update"), optimizer.on_device():
        total: Tensor = torch.zeros((), device=rollouts.mask.device)
        right = torch.zeros((), device=rollouts.mask.device)
        micros = micro_batches(rollouts, state.tokens_per_micro, state.policy.packs)
        for rows, counts in state.turns(micros):
            micro = rollouts.select(rows)
            logp, _ = state.policy.score(micro, temperature=1.0)
            if not counts:
                (logp.sum() * 0.0).backward()
                continue
            loss = -logp.masked_fill(~micro.mask, 0.0).sum() / count
            loss.backward()
            total = total + loss.detach()
            right = (
                right + (logp.detach().exp() > 0.5).masked_fill(~micro.mask, False).sum() / count
            )
        log.add(state.parallel.add({"nll": total, "likely_tokens": right}))
        if not state.shards:
            state.parallel.add_gradients(optimizer.parameters)
        log.add(optimizer.step(factor))
    log.add({"tokens_per_second": float(count) / log.seconds})
    return log.result()


def as_rollouts(state: State, shown: Sequence[Demonstration]) -> Rollouts:
    """Convert demonstrations to rollouts, so that models can score them."""
    codec = state.policy.codec
    tokens = [codec.encode_response(x.response) for x in shown]
    pad = torch.nn.utils.rnn.pad_sequence
    device = state.policy.device
    padded = pad(tokens, batch_first=True).to(device)
    mask = pad([torch.ones(len(x), dtype=torch.bool) for x in tokens], batch_first=True).to(device)
    prompts = [state.policy.encode(x.prompt) for x in shown]
    return Rollouts.from_columns(mask, tokens=padded, prompts=prompts)


@dataclass(frozen=True)
class CriticStage:
    """Fit the critic to the frozen policy's returns, λ = 1 (``pretrain_critic``)."""

    state: State
    settings: PretrainCritic

    @property
    def algorithm(self) -> Algorithm:
        """The method with Monte-Carlo returns as value targets."""
        if not hasattr(self.state.algorithm, "returns_only"):
            raise ValueError(
                f"this method has no critic to pretrain: {self.state.algorithm!r}. Remove the "
                f"stage pretrain_critic."
            )
        return self.state.algorithm.returns_only()

    def enter(self) -> None:
        prepare_columns(self.state, requirements(self.algorithm).columns)
        self.adopt_settings()

    def adopt_settings(self) -> None:
        optimizer = self.state.recipe.optimizer
        lr = self.settings.lr or optimizer.critic_lr
        _adopt(self.state, CriticLearner.name, lr, optimizer)

    def step(self) -> tuple[dict[str, float], None]:
        state, stage, algorithm, log = self.state, self.settings, self.algorithm, Metrics()
        context = Context(state, log, ("pretrain critic", state.step))
        sampled = collect(context, self._prompts(), requirements(algorithm).columns)
        log.add(describe_rewards(sampled))
        with log.time("credit"):
            batch = algorithm.prepare(sampled.rollouts)
        log.add(describe(batch))
        with log.time("update"):
            update(
                context,
                algorithm,
                batch,
                (CriticLearner.name,),
                epochs=stage.epochs,
                minibatches=stage.minibatches,
                factor=rate(state.stage_step, stage.steps, stage.schedule),
            )
        log.add({"tokens_per_second": float(batch.rollouts.mask.sum()) / log.seconds})
        return log.result(), None

    def _prompts(self) -> list[Prompt]:
        """Return the step's prompts.

        A world's prompts are taken from a part that no run optimizes on, since another run may use
        the critic.
        """
        state, stage = self.state, self.settings
        if not isinstance(state.train, WorldPrompts):
            return next_prompts(state, stage.prompts)
        count = stage.prompts or state.recipe.rollout.prompts
        return state.train.take(PRETRAINING_POSITION + state.stage_step * count, count)


@dataclass(frozen=True)
class OptimizeStage:
    """Reinforcement learning (``optimize``)."""

    state: State
    settings: Optimize

    def enter(self) -> None:
        state, optimizer = self.state, self.state.recipe.optimizer
        prepare_columns(state, state.columns)
        state.pending = None
        self.adopt_settings()
        state.new_policy_optimizer(optimizer.lr, optimizer)

    def adopt_settings(self) -> None:
        optimizer = self.state.recipe.optimizer
        _adopt(self.state, PolicyLearner.name, optimizer.lr, optimizer)
        _adopt(self.state, CriticLearner.name, optimizer.critic_lr, optimizer)

    def step(self) -> tuple[dict[str, float], StepResult]:
        state, optimizer = self.state, self.state.recipe.optimizer
        factor = rate(
            state.stage_step,
            self.settings.steps,
            optimizer.schedule,
            optimizer.warmup_steps,
            optimizer.min_lr_ratio,
        )
        if state.recipe.data.curriculum and state.curriculum is None:
            state.curriculum = Curriculum(training_prompts(state))
        pending, state.pending = state.pending, None
        more = partial(next_prompts, state) if state.recipe.rollout.refills else None
        is_last = state.stage_step + 1 >= self.settings.steps
        ahead = bool(state.recipe.rollout.ahead) and not is_last
        result = train_step(state, pending or next_prompts(state), factor, more, ahead)
        return result.metrics, result


def _adopt(state: State, name: str, lr: float, settings: Any) -> None:
    """Apply settings to a model's optimizer, if there is one."""
    if name in state.learners:
        state.learners[name].optimizer.adopt(lr, settings)


def stage_of(state: State, settings: AnyStage | None = None) -> Stage:
    """Return a stage of the run; by default the current one."""
    settings = state.recipe.stages[state.stage] if settings is None else settings
    match settings:
        case WarmStart():
            return ImitationStage(state, settings)
        case PretrainCritic():
            return CriticStage(state, settings)
        case Optimize():
            return OptimizeStage(state, settings)
