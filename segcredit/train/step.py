"""One step of reinforcement learning."""

from dataclasses import dataclass, replace

from torch import Tensor

from segcredit.columns import ENTROPY, LOGP_OLD
from segcredit.train.collect import Context, RolloutBatch, collect
from segcredit.train.describe import describe, describe_rewards
from segcredit.train.learners import PolicyLearner
from segcredit.train.metrics import Metrics
from segcredit.train.selection import describe_selection, prepare
from segcredit.train.state import State
from segcredit.train.update import update
from segcredit.types import Batch, Prompt


@dataclass(frozen=True)
class StepResult:
    """The rollouts of a step with their credit, and its metrics."""

    sampled: RolloutBatch
    batch: Batch
    """All sampled responses; without credit if the method gives none to each of them."""
    logp_new: Tensor
    """log π of each token when it last entered a gradient."""
    metrics: dict[str, float]


def train_step(state: State, prompts: list[Prompt], factor: float = 1.0) -> StepResult:
    """Run one outer iteration of Algorithm 1: sample, score, annotate, credit, update, sync.

    Args:
        factor: Factor of the learning rate.
    """
    log, algorithm = Metrics(), state.algorithm
    context = Context(state, log, ("optimize", state.step))
    columns = state.providers_of(state.columns)
    sampled = collect(context, prompts, state.columns)  # y ~ π_old, r(x, y), log π_old, H, V, …
    rollouts = sampled.rollouts
    log.add(describe_rewards(sampled) | columns.describe(rollouts))
    with log.time("credit"):
        selection = prepare(context, columns, rollouts)  # segments, advantages, value targets
    log.add(describe(selection.shown, state.requirements.offline) | describe_selection(selection))
    logp_new = rollouts.logp_old
    if selection.learned is not None:
        with log.time("update"):
            batch = columns.before_update(context, selection.learned)
            trained, epochs = (PolicyLearner.name, *columns.learners), state.recipe.update.epochs
            logp_new = selection.with_learned(
                update(context, algorithm, batch, trained, epochs=epochs, factor=factor)
            )
    with log.time("sync"):
        state.sync()
        log.add(columns.after_update(context, rollouts))
    log.add({"tokens_per_second": float(rollouts.mask.sum()) / log.seconds})
    return StepResult(sampled, selection.shown, logp_new, log.result())


def held_out_step(state: State) -> StepResult | None:
    """Sample responses to some held-out prompts and compute their credit; nothing is learned.

    The same prompts and random numbers are used every time, so that changes of the policy show.
    """
    count = state.recipe.evaluation.watch
    if state.test is None or not count:
        return None
    if state.test.size is not None:
        count = min(count, state.test.size)
    context = Context(state, Metrics(), ("watch",))
    columns = state.columns
    credited = state.requirements.assigns_credit and state.can_fill_held_out(columns)
    if not credited:
        columns = tuple(x for x in columns if x in (LOGP_OLD, ENTROPY))
    sampled = collect(context, state.test.take(0, count), columns)
    batch = Batch(sampled.rollouts, sampled.rollouts.mask)
    if credited:
        batch = prepare(context, state.providers_of(columns), sampled.rollouts).shown
    # without an update there is no ratio to record
    batch = replace(batch, ratio_segments=None)
    return StepResult(sampled, batch, sampled.rollouts.logp_old, {})
