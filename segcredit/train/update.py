"""The update: gradient steps on a batch with credit."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from segcredit.core.checks import sent
from segcredit.train.collect import Context
from segcredit.train.distributed import micro_batch_numbers, micro_batches
from segcredit.train.optim import Learner
from segcredit.train.state import State
from segcredit.types import Algorithm, Batch, Rollouts

Observe = Callable[[Tensor, Rollouts, Tensor], None]
"""Called with row numbers of a mini-batch, those rows, and log π of their tokens."""


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
