"""The kinds of stage a run is made of: what each prepares, and what one step of it does."""

from pathlib import Path

import torch

from segcredit.algorithms.asks import restarts, wants_first_weights
from segcredit.algorithms.policy_gradient import PolicyGradient
from segcredit.config import Optimize, OptimizerSettings, PretrainCritic, WarmStart
from segcredit.data.worlds import Demonstration
from segcredit.models import Critic, Policy
from segcredit.models.attention import set_attention
from segcredit.train.build import own_memory
from segcredit.train.collect import collect
from segcredit.train.demonstrations import imitate
from segcredit.train.describe import describe, describe_rewards
from segcredit.train.distributed import shard_critic, shard_policy
from segcredit.train.metrics import Metrics
from segcredit.train.optim import make_optimizer, rate
from segcredit.train.ready import fuse_on_gpu, make_ready
from segcredit.train.seeds import generator
from segcredit.train.source import Generated, Listed
from segcredit.train.state import State, set_policy_optimizer
from segcredit.train.step import Stepped, train_step
from segcredit.train.tracker import OFFLINE_SAMPLES, Tracker
from segcredit.train.update import update
from segcredit.types import Prompt

APART = 10**8
"""A place in a world's endless prompts that optimisation never comes to."""
AnyStage = WarmStart | PretrainCritic | Optimize


def enter(state: State, stage: AnyStage) -> None:
    """What a stage needs before its first step: optimizers, critic, reference, tracker."""
    if isinstance(stage, WarmStart):
        earlier = state.recipe.stages[state.stage - 1] if state.stage else None
        if isinstance(earlier, WarmStart) and state.policy_optimizer is not None:
            adopt_settings(state)  # imitation continues with the same moments
            return
        set_policy_optimizer(state, *_of_policy(state, stage))
        return
    if "value" in state.algorithm.needs and state.critic is None:
        add_critic(state, _first_critic(state))
    adopt_settings(state)
    if isinstance(stage, PretrainCritic):
        return
    set_policy_optimizer(state, *_of_policy(state, stage))
    if wants_first_weights(state.algorithm) and state.reference is None:
        add_reference(state, _whole_policy(state).reference(copied=restarts(state.algorithm)))
    if "baseline" in state.algorithm.needs:
        begin_tracker(state)


def adopt_settings(state: State) -> None:
    """Apply the recipe's settings for the current stage to the optimizers."""
    stage, settings = state.recipe.stages[state.stage], state.recipe.optimizer
    if state.policy_optimizer is not None and not isinstance(stage, PretrainCritic):
        state.policy_optimizer.adopt(*_of_policy(state, stage))
    if state.critic_optimizer is not None and not isinstance(stage, WarmStart):
        own = stage.lr if isinstance(stage, PretrainCritic) else None
        state.critic_optimizer.adopt(own or settings.critic_lr, settings)


def _of_policy(state: State, stage: WarmStart | Optimize) -> tuple[float, OptimizerSettings]:
    """Return the policy's learning rate and optimizer settings in a stage."""
    settings = state.recipe.optimizer
    if isinstance(stage, WarmStart):
        return stage.lr, settings.model_copy(update={"beta2": stage.beta2})
    return settings.lr, settings


def _first_critic(state: State) -> Critic:
    """As the recipe wants it: with the policy's own weights, or as a run has saved one."""
    if state.recipe.model.critic is None:
        return Critic.from_policy(_whole_policy(state))
    return saved_critic(state, Path(state.recipe.model.critic).expanduser())


def saved_critic(state: State, place: Path) -> Critic:
    """What lies there, on the policy's device."""
    settings = state.recipe.model
    critic = Critic.from_saved(place, getattr(torch, settings.dtype))
    own_memory(critic)
    critic.to(state.policy.device)
    set_attention(critic.trunk, settings.attention)
    return critic


def add_critic(state: State, critic: Critic) -> None:
    """Take a critic in, with its optimizer."""
    settings = state.recipe.optimizer
    if critic.lora is None:  # else the trunk is the policy's, and all this is done
        make_ready(critic.trunk, state.recipe)
    if state.shards:
        shard_critic(critic, state.parallel)
    state.critic = critic
    offload = state.recipe.memory.offload_optimizer
    state.critic_optimizer = make_optimizer(
        "critic", critic, settings.critic_lr, settings, offload, critic.trained()
    )


def add_reference(state: State, reference: Policy) -> None:
    """Take π_ref in."""
    fuse_on_gpu(reference.model)  # as the policy's: they are compared
    if state.shards:
        shard_policy(reference, state.parallel)
    state.reference = reference


def _whole_policy(state: State) -> Policy:
    """To be copied: when a stage begins, what one samples from is up to date."""
    return state.policy if state.whole is None else Policy(state.whole, state.policy.codec)


def step_of(state: State, stage: AnyStage) -> tuple[dict[str, float], Stepped | None]:
    """One step of the present stage."""
    if isinstance(stage, WarmStart):
        return _imitate(state, stage), None
    if isinstance(stage, PretrainCritic):
        return _pretrain_critic(state, stage), None
    settings = state.recipe.optimizer
    factor = rate(
        state.stage_step,
        stage.steps,
        settings.schedule,
        settings.warmup_steps,
        settings.min_lr_ratio,
    )
    stepped = train_step(state, next_prompts(state), factor)
    return stepped.metrics, stepped


def next_prompts(state: State, count: int | None = None) -> list[Prompt]:
    """The prompts of this step: the next of the source, or those the tracker finds worth it."""
    count = count or state.recipe.rollout.prompts
    if state.tracker is not None:
        assert isinstance(state.train, Listed)
        drawn = state.tracker.draw(count, generator(state.seed, "tracked prompts", state.step))
        return [state.train.prompts[i] for i in drawn]
    prompts = state.train.take(state.position, count)
    state.position += count
    return prompts


def _pretraining_prompts(state: State, stage: PretrainCritic) -> list[Prompt]:
    """Of a world, others than any run optimises on: the critic may come from another run."""
    if not isinstance(state.train, Generated):
        return next_prompts(state, stage.prompts)
    count = stage.prompts or state.recipe.rollout.prompts
    return state.train.take(APART + state.stage_step * count, count)


def _imitate(state: State, stage: WarmStart) -> dict[str, float]:
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
    if state.stage_step + 1 == stage.steps:  # nobody samples before
        state.sync()
    return measured


def demonstration(state: State, stage: WarmStart, index: int) -> Demonstration:
    """The index-th thing to imitate."""
    if state.world is not None:
        return state.world.demonstration(index, stage.phase)
    prompt = state.train.take(index, 1)[0]
    return Demonstration(prompt, str(prompt.columns["response"]))


def _pretrain_critic(state: State, stage: PretrainCritic) -> dict[str, float]:
    """The frozen policy's responses, and V regressed on their returns (λ = 1)."""
    log = Metrics()
    if not isinstance(state.algorithm, PolicyGradient):
        raise ValueError(f"this method has no critic to pretrain: {state.algorithm!r}")
    algorithm = state.algorithm.returns_only()
    collected = collect(
        state,
        _pretraining_prompts(state, stage),
        algorithm.needs,
        log,
        "pretrain critic",
        state.step,
    )
    log.add(describe_rewards(collected))
    with log.time("credit"):
        batch = algorithm.prepare(collected.rollouts)
    log.add(describe(batch))
    with log.time("update"):
        update(
            state,
            algorithm,
            batch,
            log,
            "pretrain critic",
            state.step,
            epochs=stage.epochs,
            minibatches=stage.minibatches,
            factor=rate(state.stage_step, stage.steps, stage.schedule),
            critic_only=True,
        )
    log.add({"tokens_per_second": float(batch.rollouts.mask.sum()) / log.seconds})
    return log.result()


def begin_tracker(state: State) -> None:
    """First values of all prompts, from responses of the policy as it is (single-stream SPO)."""
    assert isinstance(state.train, Listed)
    prompts = state.train.prompts
    state.tracker = Tracker(prompts)
    names, rewards = [], []
    at_once = state.recipe.rollout.prompts
    for first in range(0, len(prompts), at_once):
        some = prompts[first : first + at_once]
        found = collect(
            state, some, frozenset(), Metrics(), "tracker", first, samples=OFFLINE_SAMPLES
        )
        names += [x.prompt.id for x in found.responses]
        rewards.append(found.rollouts.reward.cpu())
    state.tracker.begin(names, torch.cat(rewards))
