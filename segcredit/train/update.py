"""From a batch with credit to gradient steps."""

from collections.abc import Callable

import torch
from torch import Tensor

from segcredit.algorithms.asks import is_offline
from segcredit.core.checks import sent
from segcredit.train.metrics import Metrics
from segcredit.train.micro import micro_batches, numbered
from segcredit.train.optim import Optimizer
from segcredit.train.seeds import generator
from segcredit.train.state import State
from segcredit.types import Algorithm, Batch, Outputs, Rollouts

Watch = Callable[[Tensor, Rollouts, Tensor], None]
"""Gets row numbers of a mini-batch, those rows, and log π of their tokens."""


def update(
    state: State,
    algorithm: Algorithm,
    batch: Batch,
    log: Metrics,
    *purpose: object,
    epochs: int,
    minibatches: int | None = None,
    factor: float = 1.0,
    critic_only: bool = False,
) -> Tensor:
    """Epochs of mini-batches over the batch, first for the policy, then for the critic.

    The two losses reach different weights, so their order changes nothing; one after the other,
    only one model's gradients and optimizer need to be on the device. Returns log π of each token
    when its row last entered a gradient, (B, T); of this rank's rows.
    """
    seen = batch.rollouts.logp_old.clone()
    items = len(batch.rollouts) // batch.rows_per_item
    asked = state.recipe.update.minibatches if minibatches is None else minibatches
    count = min(asked, items)  # a method that selects may leave few
    errors: list[Tensor] = []
    optimizers = [x for x in state.optimizers() if not (critic_only and x.name == "policy")]
    for optimizer in optimizers:
        if optimizer.name == "critic" and "value" not in state.algorithm.needs:
            continue
        with optimizer.awake():
            for epoch in range(epochs):
                order = generator(state.seed, "minibatches", *purpose, epoch)
                split = batch.split_rows(count, order)
                for number, rows in enumerate(split):
                    part = batch.select(rows)

                    def watch(
                        micro: Tensor,
                        rollouts: Rollouts,
                        logp: Tensor,
                        rows: Tensor = rows,
                        first: bool = epoch == number == 0 and not is_offline(algorithm),
                    ) -> None:
                        seen[sent(rows[micro], seen.device)] = logp
                        if first:
                            errors.append(_ratio_error(logp, rollouts))

                    log.add(
                        state.parallel.add(_gradients(state, algorithm, part, optimizer, watch))
                    )
                    if not state.shards:  # theirs were added in the backward passes
                        state.parallel.add_gradients(optimizer.parameters)
                    log.add(optimizer.step(factor))
    largest = [float(torch.stack(errors).max())] if errors else []
    for error in state.parallel.gather(largest):
        log.highest("agreement/ratio_error", error)
    return seen


def _gradients(
    state: State, algorithm: Algorithm, part: Batch, optimizer: Optimizer, watch: Watch
) -> dict[str, Tensor]:
    """Add up a mini-batch's gradients, micro-batch by micro-batch; what the loss measured.

    Where memory does not suffice, the mini-batch begins again in micro-batches of half the size:
    the gradient is the same, except for a method that averages within micro-batches
    (``MicroBatchTokenMean``: ``sapo_authors``).
    """
    while True:
        micros = micro_batches(
            part.rollouts, state.tokens_per_micro, state.policy.packs, part.rows_per_item
        )
        found, failed = None, None
        try:
            found = _micro_by_micro(state, algorithm, part, micros, optimizer.name, watch)
        except torch.OutOfMemoryError as error:
            failed = error
        if state.shards and failed is not None:
            raise ValueError(_no_room(state)) from failed  # the others wait inside their passes
        if not any(state.parallel.gather([failed is not None])):
            assert found is not None
            return found
        # all of them, or the processes would disagree on who has which rows
        if max(len(x) for x in micros) <= part.rows_per_item:
            raise failed or RuntimeError("another process is out of memory")
        del failed
        state.halve_micro_batches()
        optimizer.zero_grad()  # some layers may have added theirs already
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _no_room(state: State) -> str:
    """Of a sharded update, which cannot begin again: a layer's pass is everyone's."""
    return (
        f"out of memory on process {state.parallel.rank}: micro-batches of "
        f"{state.tokens_per_micro} tokens are too large, and with memory.shard a mini-batch cannot "
        f"begin again in smaller ones. Go on with: "
        f"update.tokens_per_micro={max(1, state.tokens_per_micro // 2)}"
    )


def _micro_by_micro(
    state: State,
    algorithm: Algorithm,
    part: Batch,
    micros: list[Tensor],
    name: str,
    watch: Watch,
) -> dict[str, Tensor]:
    number = sent(numbered(micros, len(part.rollouts)), part.loss_mask.device)
    part = algorithm.minibatch(part, number)
    totals: dict[str, Tensor] = {}
    for rows, counts in state.turns(micros):
        if not counts:
            _for_nothing(state, part.rollouts.select(rows), name)
            continue
        micro = part.select(rows)
        rollouts = micro.rollouts
        if name == "critic":
            assert state.critic is not None
            with state.critic.active():  # until the gradient is there: it may compute states again
                loss = algorithm.loss(Outputs(rollouts.logp_old, state.critic(rollouts)), micro)
                assert loss.value is not None
                loss.value.backward()
            found = {"value_loss": loss.metrics["value_loss"]}
        else:
            with state.policy.active():
                logp, _ = state.policy.score(rollouts, state.temperature)
                loss = algorithm.loss(Outputs(logp, rollouts.value), micro)
                loss.policy.backward()
            found = {key: x for key, x in loss.metrics.items() if key != "value_loss"}
            watch(rows, rollouts, logp.detach().float())
        for key, value in found.items():
            totals[key] = totals.get(key, torch.zeros((), device=value.device)) + value
    return totals


def _for_nothing(state: State, rollouts: Rollouts, name: str) -> None:
    """A pass whose gradient is zero, beside those of the others."""
    if name == "critic":
        assert state.critic is not None
        outputs = state.critic(rollouts)
    else:
        outputs, _ = state.policy.score(rollouts, state.temperature)
    (outputs.sum() * 0.0).backward()


def _ratio_error(logp: Tensor, rollouts: Rollouts) -> Tensor:
    """Largest |π_θ / π_old − 1| before the first update: sampler and trainer must agree."""
    difference = (logp - rollouts.logp_old).masked_fill(~rollouts.mask, 0.0)
    return difference.expm1().abs().max()
