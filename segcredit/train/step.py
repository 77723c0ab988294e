"""One step of reinforcement learning: sample, score, annotate, credit, update, sync."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from segcredit.columns import ENTROPY, LOGP_OLD
from segcredit.core.checks import sent
from segcredit.train.ahead import AheadSampling, PendingBatch
from segcredit.train.collect import Context, collect
from segcredit.train.continuations import MonteCarloValues
from segcredit.train.distributed import micro_batch_numbers, micro_batches
from segcredit.train.metrics import (
    Metrics,
    RolloutBatch,
    StepResult,
    describe,
    describe_rewards,
)
from segcredit.train.optim import Learner, PolicyLearner
from segcredit.train.provider import Providers
from segcredit.train.state import State
from segcredit.types import Algorithm, Batch, NothingToLearn, Prompt, Rollouts

Observe = Callable[[Tensor, Rollouts, Tensor], None]
"""Called with row numbers of a mini-batch, those rows, and log π of their tokens."""


def train_step(
    state: State,
    prompts: list[Prompt] | PendingBatch,
    factor: float = 1.0,
    more: Callable[[], list[Prompt]] | None = None,
    ahead: bool = False,
) -> StepResult:
    """Run one outer iteration of Algorithm 1: sample, score, annotate, credit, update, sync.

    Args:
        prompts: Prompts to sample responses to, or a batch that was sampled ahead.
        factor: Factor of the learning rate.
        more: Returns the next prompts, for dynamic sampling; None: only ``prompts``.
        ahead: Whether to sample the next step's batch during the update (``State.pending``).
    """
    log = Metrics()
    context = Context(state, log, ("optimize", state.step))
    lagged = isinstance(prompts, PendingBatch)
    # y ~ π_old, r(x, y), log π_old, H, V, …
    if isinstance(prompts, PendingBatch):
        sampled = prompts.sampled
        log.add(prompts.metrics)
    else:
        sampled = collect(context, prompts, state.columns, more=more)
    if state.recipe.rollout.ahead:
        log.add({"ahead/lag": float(lagged)})
    if state.curriculum is not None:
        log.add(state.curriculum.update(sampled))
    with AheadSampling(state, log) if ahead else nullcontext() as following:
        shown, logp_new = learn(context, sampled, factor, lagged)
        if following is not None:
            state.pending = following.finish()
    log.add({"tokens_per_second": sampled.tokens / log.seconds})
    return StepResult(sampled, shown, logp_new, log.result())


def learn(
    context: Context, sampled: RolloutBatch, factor: float, lagged: bool
) -> tuple[Batch, Float[Tensor, "B T"]]:
    """Compute the credit of a batch and update the models.

    Args:
        lagged: Whether the batch was sampled before the last update.

    Returns:
        The batch with its credit, and log π of its tokens when they last entered a gradient.
    """
    state, log, rollouts = context.state, context.log, sampled.rollouts
    columns = state.providers_of(state.columns)
    log.add(describe_rewards(sampled.unfiltered or sampled) | columns.describe(rollouts))
    with log.time("credit"):
        selection = prepare(context, columns, rollouts)  # segments, advantages, value targets
    log.add(describe(selection.shown, state.requirements.offline) | describe_selection(selection))
    logp_new = rollouts.logp_old
    if selection.learned is not None:
        with log.time("update"):
            batch = columns.before_update(context, selection.learned)
            trained, epochs = (PolicyLearner.name, *columns.learners), state.recipe.update.epochs
            logp_new = selection.with_learned(
                update(
                    context,
                    state.algorithm,
                    batch,
                    trained,
                    epochs=epochs,
                    factor=factor,
                    on_policy=not lagged,
                )
            )
    with log.time("sync"):
        state.sync()
        log.add(columns.after_update(context, rollouts))
    return selection.shown, logp_new


def held_out_step(state: State) -> StepResult | None:
    """Sample responses to some held-out prompts and compute their credit; nothing is learned.

    The same prompts and random numbers are used every time, so that differences come from the
    policy alone.
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


@dataclass(frozen=True)
class Selection:
    """A batch with credit, and the part of it that the update learns from."""

    shown: Batch
    """All responses in order; without credit if the method assigns none to single responses."""
    learned: Batch | None
    """The batch of the gradient steps; None: there is nothing to learn from in this step."""
    rows: Int[Tensor, " R"] | None = None
    """Row in ``shown`` of each row of ``learned``; None: rows are rearranged, as into pairs."""

    def with_learned(self, logp: Float[Tensor, "R T"]) -> Float[Tensor, "B T"]:
        """Return log π of all rows: new where they entered the update, π_old's elsewhere."""
        old = self.shown.rollouts.logp_old
        return old if self.rows is None else old.index_copy(0, self.rows, logp.to(old.dtype))


def prepare(context: Context, columns: Providers, rollouts: Rollouts) -> Selection:
    """Compute segments, advantages and targets, and select the rows to learn from."""
    state = context.state
    plain = Batch(rollouts, rollouts.mask)
    estimator = columns.monte_carlo(context) or MonteCarloValues(context)
    drawn = {}
    if state.requirements.draws:
        drawn["generator"] = context.generator("prepare", *context.purpose)
    try:
        batch = state.algorithm.prepare(rollouts, estimator, **drawn)
    except NothingToLearn:
        return Selection(plain, None)
    if batch.rollouts is not rollouts:
        return Selection(plain, batch)
    rows = columns.select_rows(batch)
    if rows is None:
        return Selection(batch, batch, torch.arange(len(rollouts), device=rollouts.mask.device))
    return Selection(batch, batch.select(rows) if len(rows) else None, rows)


def describe_selection(selection: Selection) -> dict[str, float]:
    """Return metrics of how many rollouts are trained on; empty if all are."""
    if selection.learned is selection.shown:
        return {}
    prompts = float(len(selection.shown.rollouts.group.unique()))
    if selection.learned is None:
        return {"selected/items": 0.0, "selected/prompts_left_out": prompts}
    learned = selection.learned
    return {
        "selected/items": len(learned.rollouts) / learned.rows_per_item,
        "selected/prompts_left_out": prompts - len(learned.rollouts.group.unique()),
    }


def update(
    context: Context,
    algorithm: Algorithm,
    batch: Batch,
    trained: Sequence[str],
    *,
    epochs: int,
    minibatches: int | None = None,
    factor: float = 1.0,
    on_policy: bool = True,
) -> Tensor:
    """Run epochs of mini-batches over the batch, for one model after the other.

    The models have separate losses and weights, so their order has no effect; one after the other,
    only one model's gradients and optimizer must be on the device.

    Args:
        trained: Names of the models to train (``State.learners``).
        factor: Factor of the learning rate.
        on_policy: Whether the current policy sampled the batch, so that the first ratios are 1.

    Returns:
        log π of each token when its row last entered a gradient, (B, T).
    """
    state, log = context.state, context.log
    logp_old = batch.rollouts.logp_old
    seen = torch.full_like(logp_old, -torch.inf)
    items = len(batch.rollouts) // batch.rows_per_item
    wanted = state.recipe.update.minibatches if minibatches is None else minibatches
    count = min(wanted, items)  # a method that selects rows may leave few
    starts_at_one = on_policy and not state.requirements.offline
    errors: list[Tensor] = []
    for name in trained:
        learner = state.learners[name]
        with learner.optimizer.on_device():
            for epoch in range(epochs):
                order = context.generator("minibatches", *context.purpose, epoch)
                for number, rows in enumerate(batch.split_rows(count, order)):

                    def observe(
                        micro: Tensor,
                        rollouts: Rollouts,
                        logp: Tensor,
                        rows: Tensor = rows,
                        first: bool = epoch == number == 0 and starts_at_one,
                        last: bool = epoch == epochs - 1,
                    ) -> None:
                        if last:
                            seen[sent(rows[micro], seen.device)] = logp
                        if first:
                            errors.append(_ratio_error(logp, rollouts))

                    metrics = _gradients(state, algorithm, batch.select(rows), learner, observe)
                    log.add(state.parallel.add(metrics))
                    if not state.shards:  # sharded gradients were added in the backward passes
                        state.parallel.add_gradients(learner.optimizer.parameters)
                    log.add(learner.optimizer.step(factor))
    largest = [float(torch.stack(errors).max())] if errors else []
    for error in state.parallel.gather(largest):
        log.highest("agreement/ratio_error", error)
    seen = state.parallel.maximum(seen)  # other ranks have computed the other rows
    return logp_old.where(seen == -torch.inf, seen)  # the critic computes no log π


def _gradients(
    state: State, algorithm: Algorithm, part: Batch, learner: Learner, observe: Observe
) -> dict[str, Tensor]:
    """Add up a mini-batch's gradients over its micro-batches; return the loss's metrics.

    If memory runs out, the mini-batch starts again with micro-batches of half the size:
    the gradient is the same, except for a method that averages within micro-batches
    (``MicroBatchTokenMean``: ``sapo_authors``).
    """
    while True:
        micros = micro_batches(
            part.rollouts, state.tokens_per_micro, state.policy.packs, part.rows_per_item
        )
        found, failed = None, None
        try:
            found = _micro_by_micro(state, algorithm, part, micros, learner, observe)
        except torch.OutOfMemoryError as error:
            failed = error
        if state.shards and failed is not None:
            raise ValueError(_out_of_memory(state)) from failed  # other ranks wait in collectives
        if not any(state.parallel.gather([failed is not None])):
            assert found is not None
            return found
        # all ranks retry, since the micro-batches determine which rank has which rows
        if max(len(x) for x in micros) <= part.rows_per_item:
            raise failed or RuntimeError("another process is out of memory")
        del failed
        state.halve_micro_batches()
        learner.optimizer.zero_grad()  # some layers may have added gradients already
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _out_of_memory(state: State) -> str:
    return (
        f"out of memory on process {state.parallel.rank}: micro-batches of "
        f"{state.tokens_per_micro} tokens are too large, and with memory.shard a mini-batch cannot "
        f"start again with smaller ones. Resume with: "
        f"update.tokens_per_micro={max(1, state.tokens_per_micro // 2)}"
    )


def _micro_by_micro(
    state: State,
    algorithm: Algorithm,
    part: Batch,
    micros: list[Tensor],
    learner: Learner,
    observe: Observe,
) -> dict[str, Tensor]:
    number = sent(micro_batch_numbers(micros, len(part.rollouts)), part.loss_mask.device)
    part = algorithm.minibatch(part, number)
    totals: dict[str, Tensor] = {}
    for rows, counts in state.turns(micros):
        if not counts:  # a pass with zero gradient, so that the other ranks' collectives complete
            (learner.output(part.rollouts.select(rows)).sum() * 0.0).backward()
            continue
        micro = part.select(rows)
        metrics, logp = learner.backward(algorithm, micro)
        if logp is not None:
            observe(rows, micro.rollouts, logp)
        for key, value in metrics.items():
            totals[key] = totals.get(key, torch.zeros((), device=value.device)) + value
    return totals


def _ratio_error(logp: Tensor, rollouts: Rollouts) -> Tensor:
    """Compute the largest |π_θ / π_old − 1| before the first update, which should be near 0."""
    difference = (logp - rollouts.logp_old).masked_fill(~rollouts.mask, 0.0)
    return difference.expm1().abs().max()
