"""One step of reinforcement learning, as a story."""

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from segcredit.algorithms.asks import is_offline, restarts
from segcredit.train.collect import Collected, collect, score_now
from segcredit.train.continuations import Continuations
from segcredit.train.describe import describe, describe_rewards
from segcredit.train.metrics import Metrics
from segcredit.train.mismatch import corrected, describe_mismatch
from segcredit.train.seeds import generator
from segcredit.train.selection import describe_selection, prepare
from segcredit.train.state import State, restart
from segcredit.train.update import update
from segcredit.types import Batch, Prompt


@dataclass(frozen=True)
class Stepped:
    """A step's batch and what it measured, for whoever records it."""

    collected: Collected
    batch: Batch
    """Of all responses that were collected; without credit, where a method learns from some."""
    logp_new: Tensor
    """log π of each token when it last entered a gradient."""
    metrics: dict[str, float]


def train_step(state: State, prompts: list[Prompt], factor: float = 1.0) -> Stepped:
    """One outer iteration of Algorithm 1: sample, score, annotate, credit, update, sync."""
    log, algorithm = Metrics(), state.algorithm
    collected = collect(state, prompts, algorithm.needs, log, "optimize", state.step)
    rollouts = collected.rollouts
    log.add(describe_rewards(collected) | describe_mismatch(rollouts))
    with log.time("credit"):
        continuations = Continuations(state, log, ("optimize", state.step))  # V̂, if it is asked
        drawn = generator(state.seed, "prepare", "optimize", state.step)
        prepared = prepare(algorithm, rollouts, continuations, drawn)  # z_m, Â_m, R̂_m
    log.add(describe(prepared.shown, is_offline(algorithm)) | describe_selection(prepared))
    logp_new = rollouts.logp_old
    if prepared.learned is not None:
        logp_new = prepared.with_learned(_learn(state, prepared.learned, log, factor))
    with log.time("sync"):
        state.sync()
        if state.tracker is not None:
            log.add(state.tracker.update(rollouts, partial(score_now, state)))
    tokens = float(rollouts.mask.sum())
    log.add({"tokens_per_second": tokens / log.seconds})
    return Stepped(collected, prepared.shown, logp_new, log.result())


def _learn(state: State, batch: Batch, log: Metrics, factor: float) -> Tensor:
    """Gradient steps; log π of each token when it last entered one."""
    algorithm, cap = state.algorithm, state.recipe.rollout.mismatch_cap
    weighed, measured = (batch, {}) if cap is None else corrected(batch, cap)
    log.add(measured)
    with log.time("update"):
        if restarts(algorithm):
            restart(state)
        epochs = state.recipe.update.epochs
        return update(
            state, algorithm, weighed, log, "optimize", state.step, epochs=epochs, factor=factor
        )
