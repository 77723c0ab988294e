"""What a checkpoint of a run holds, and how a run goes on from one."""

import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from segcredit.algorithms.asks import wants_first_weights
from segcredit.config import Optimize, OptimizerSettings, WarmStart
from segcredit.models import Critic, Policy
from segcredit.models.lora import Lora
from segcredit.models.packed import set_attention
from segcredit.runlog import MetricsWriter, RunFolder, delete_after
from segcredit.runlog.folder import CRITIC, POLICY, REFERENCE, step_name
from segcredit.train import checkpoint
from segcredit.train.build import load_policy
from segcredit.train.moments import load_moments, save_part
from segcredit.train.policy_optimizer import set_policy_optimizer
from segcredit.train.sharded_optimizer import ShardedOptimizer
from segcredit.train.sharding import whole_critic, whole_policy
from segcredit.train.source import Listed
from segcredit.train.stages import add_critic, add_reference, saved_critic
from segcredit.train.state import State, freeze
from segcredit.train.together import Together
from segcredit.train.tracker import Tracker

ADAPTERS = "adapters"
"""With LoRA: what is trained, in PEFT's format; the policy lies beside it whole, all the same."""
CPU = torch.device("cpu")


def save(state: State, folder: RunFolder, metrics: MetricsWriter) -> Path:
    """Write a checkpoint of this step: whole, or not at all.

    For the first process; if the models are divided, all others :func:`help_save` meanwhile.
    """
    keep = state.recipe.save.keep
    own = state.reference is not None and state.policy.lora is None  # with LoRA it is no model
    new = own and not (folder.checkpoints / REFERENCE).exists()
    if state.parallel.share(new) if state.shards else new:
        checkpoint.save_checkpoint(
            folder.checkpoints, REFERENCE, lambda place: _write_reference(state, place), keep
        )
    metrics.sync()
    position = metrics.position()
    name = step_name(state.step)
    return checkpoint.save_checkpoint(
        folder.checkpoints, name, lambda place: _write(state, place, position), keep
    )


def help_save(state: State) -> None:
    """What the other processes do while the first one saves divided models."""
    if state.parallel.share(False):
        _write_reference(state, None)
    _write(state, None, 0)


def _write_reference(state: State, place: Path | None) -> None:
    assert state.reference is not None
    if not state.shards:
        assert place is not None
        state.reference.save(place)
        return
    with Together(state.parallel, place) as together:
        reference = whole_policy(state.reference, CPU, keep=state.parallel.first)
        together.write(lambda: _save(reference, together.place))


def _write(state: State, place: Path | None, metrics_position: int) -> None:
    lora = state.policy.lora
    rest = {
        "stage": state.stage,
        "stage_step": state.stage_step,
        "step": state.step,
        "position": state.position,
        "noted": dict(state.noted),
        "metrics_position": metrics_position,
        "rates": {x.name: x.lr for x in state.optimizers()},
        "tracker": None if state.tracker is None else state.tracker.state(),
        "base": None if lora is None else lora.fingerprint(),
    }
    if state.shards:
        _write_divided(state, place, rest)
        return
    assert place is not None
    state.policy.save(place / POLICY)
    if lora is not None:
        _write_adapters(state, lora, place / ADAPTERS)
    elif state.critic is not None:
        state.critic.save(place / CRITIC)
    optimizers = {x.name: x.state() for x in state.optimizers()}
    checkpoint.save_state(place, rest | {"optimizers": optimizers})


def _write_divided(state: State, place: Path | None, rest: dict[str, Any]) -> None:
    """Every process its part of the optimizers, the first one all that is not divided."""
    first, rank, size = state.parallel.first, state.parallel.rank, state.parallel.size
    optimizers: dict[str, Any] = {}
    with Together(state.parallel, place) as together:
        policy = whole_policy(state.policy, CPU, keep=first)
        together.write(lambda: _save(policy, together.place / POLICY))
        del policy
        if state.critic is not None:
            critic = whole_critic(state.critic, CPU, keep=first)
            together.write(lambda: _save(critic, together.place / CRITIC))
            del critic
        for optimizer in state.optimizers():
            assert isinstance(optimizer, ShardedOptimizer)

            def write(optimizer: ShardedOptimizer = optimizer) -> None:
                optimizers[optimizer.name] = save_part(optimizer, together.place, rank, size)

            together.write(write)
        if first:
            together.write(
                lambda: checkpoint.save_state(together.place, rest | {"optimizers": optimizers})
            )


def _save(model: Policy | Critic | None, folder: Path) -> None:
    """Only one process keeps it to save it."""
    if model is not None:
        model.save(folder)


def _write_adapters(state: State, lora: Lora, place: Path) -> None:
    """The policy's; the critic's with its head; π_ref's, if it is one of its own."""
    lora.save(POLICY, place / POLICY)
    if state.critic is not None:
        state.critic.save(place / CRITIC)
    if REFERENCE in lora.names:
        lora.save(REFERENCE, place / REFERENCE)


def _settings(state: State) -> OptimizerSettings:
    """Of the present stage's optimizer."""
    settings = state.recipe.optimizer
    stage = state.recipe.stages[min(state.stage, len(state.recipe.stages) - 1)]
    if isinstance(stage, WarmStart):
        return settings.model_copy(update={"beta2": stage.beta2})
    return settings


def restore(state: State, folder: RunFolder, place: Path) -> int:
    """Put the state where the checkpoint was; where the metrics ended then."""
    found: dict[str, Any] = checkpoint.load_state(place)
    _check_same_kind(state, place, found)
    if state.policy.lora is not None:
        _read_adapters(state, state.policy.lora, place / ADAPTERS)
    elif (place / CRITIC).exists():
        add_critic(state, saved_critic(state, place / CRITIC))
    state.stage, state.stage_step = found["stage"], found["stage_step"]
    state.step, state.position = found["step"], found["position"]
    state.noted = dict(found["noted"])
    _reopen_a_longer_stage(state)
    settings = _settings(state)
    for name, kept in found["optimizers"].items():
        if name == "policy":
            lr = found["rates"][name]
            load_moments(set_policy_optimizer(state, lr, settings), kept, place)
        else:
            assert state.critic_optimizer is not None
            state.critic_optimizer.lr = found["rates"][name]
            load_moments(state.critic_optimizer, kept, place)
    if found["tracker"] is not None:
        assert isinstance(state.train, Listed)
        state.tracker = Tracker(state.train.prompts)
        state.tracker.load(found["tracker"])
    if wants_first_weights(state.algorithm) and _reference_is_made(state):
        add_reference(state, _load_reference(state, folder))
    return int(found["metrics_position"])


def _check_same_kind(state: State, place: Path, found: dict[str, Any]) -> None:
    """Refuse to go on with adapters where there were none, or beside other weights."""
    lora = state.policy.lora
    then = (place / ADAPTERS).exists()
    if then != (lora is not None):
        raise checkpoint.CheckpointError(
            f"{place} was written {'with' if then else 'without'} model.lora, so the run cannot go "
            f"on {'without' if then else 'with'} it. Leave model.lora as it was, or begin a new "
            f"run on the trained policy: model.path={shlex.quote(str(place / POLICY))}"
        )
    if lora is not None and found["base"] != lora.fingerprint():
        raise checkpoint.CheckpointError(
            f"{place} holds adapters for other weights than those of "
            f"{state.recipe.model.path or state.recipe.model.tiny}: it is another model, or was "
            f"changed since. Put the old one back, or begin a new run on the trained policy: "
            f"model.path={shlex.quote(str(place / POLICY))}"
        )


def _read_adapters(state: State, lora: Lora, place: Path) -> None:
    lora.load(POLICY, place / POLICY)
    if (place / CRITIC).exists():
        critic = Critic.from_policy(state.policy)
        critic.load_adapter(place / CRITIC)
        add_critic(state, critic)
    if (place / REFERENCE).exists():
        lora.load(REFERENCE, place / REFERENCE)


def _reopen_a_longer_stage(state: State) -> None:
    """A finished run of which the last stage now has more steps goes on with that stage."""
    stages = state.recipe.stages
    left = state.recipe.total_steps - state.step
    if state.stage == len(stages) and 0 < left < stages[-1].steps:
        state.stage = len(stages) - 1
        state.stage_step = stages[-1].steps - left


def forget_after(state: State, folder: RunFolder) -> None:
    """Delete what an earlier process wrote after the step from which the run goes on."""
    delete_after(folder.rollouts, state.step)
    delete_after(folder.watched, state.step)
    delete_after(folder.evaluations, state.step)
    checkpoint.delete_after(folder.checkpoints, state.step)
    if not _reference_is_made(state):
        shutil.rmtree(folder.checkpoints / REFERENCE, ignore_errors=True)


def _reference_is_made(state: State) -> bool:
    """Whether reinforcement learning has begun: that is when π_ref is taken."""
    begun = state.stage + (state.stage_step > 0)
    return any(isinstance(stage, Optimize) for stage in state.recipe.stages[:begun])


def _load_reference(state: State, folder: RunFolder) -> Policy:
    lora = state.policy.lora
    if lora is not None:
        return replace(state.policy, adapter=REFERENCE if REFERENCE in lora.names else None)
    kept = folder.checkpoints / REFERENCE
    try:
        checkpoint.verify(kept)
    except checkpoint.CheckpointError as error:
        raise checkpoint.CheckpointError(
            f"the reference model, of which there is one copy, cannot be used: {error} So this run "
            f"cannot go on; begin again: segcredit train {shlex.quote(str(folder.config))}"
        ) from None
    reference = load_policy(state.recipe, kept)
    reference.model.to(state.policy.device)
    set_attention(reference.model, state.recipe.model.attention)
    freeze(reference.model)
    return reference
