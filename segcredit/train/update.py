"""From a batch with credit to gradient steps."""

import torch
from torch import Tensor

from segcredit.train.metrics import Metrics
from segcredit.train.micro import numbered, rows_of
from segcredit.train.seeds import generator
from segcredit.train.state import State
from segcredit.types import Algorithm, Batch, Outputs


def update(
    state: State,
    algorithm: Algorithm,
    batch: Batch,
    log: Metrics,
    *purpose: object,
    epochs: int,
    factor: float = 1.0,
    critic_only: bool = False,
) -> Tensor:
    """Epochs of mini-batches over the batch: forward, loss, backward, step.

    Returns log π of each token when its row last entered a gradient, (B, T); of this rank's rows.
    """
    seen = batch.rollouts.logp_old.clone()
    budget = state.recipe.update.tokens_per_micro
    optimizers = [x for x in state.optimizers() if not (critic_only and x.name == "policy")]
    for epoch in range(epochs):
        order = generator(state.seed, "minibatches", *purpose, epoch)
        for number, rows in enumerate(batch.split_rows(state.recipe.update.minibatches, order)):
            part = batch.select(rows)
            micros = rows_of(part, budget)
            part = algorithm.minibatch(part, numbered(micros, len(rows)))
            totals: dict[str, Tensor] = {}
            for micro_rows in state.parallel.own(micros):
                micro = part.select(micro_rows)
                outputs = _outputs(state, micro, critic_only)
                loss = algorithm.loss(outputs, micro)
                if critic_only:
                    assert loss.value is not None
                    loss.value.backward()
                else:
                    loss.total.backward()
                for name, value in loss.metrics.items():
                    totals[name] = totals.get(name, torch.zeros((), device=value.device)) + value
                seen[rows[micro_rows]] = outputs.logp.detach().float()
                if epoch == number == 0 and not critic_only:
                    log.highest("agreement/ratio_error", _ratio_error(outputs.logp, micro))
            if critic_only:
                totals = {"value_loss": totals["value_loss"]} if totals else {}
            log.add(state.parallel.add(totals))
            for optimizer in optimizers:
                state.parallel.add_gradients(optimizer.parameters)
                log.add(optimizer.step(factor))
    return seen


def _outputs(state: State, micro: Batch, critic_only: bool) -> Outputs:
    """log π_θ and V_φ, with gradients."""
    value = None
    if state.critic is not None and "value" in state.algorithm.needs:
        value = state.critic(micro.rollouts)
    if critic_only:
        return Outputs(micro.rollouts.logp_old, value)
    logp, _ = state.policy.score(micro.rollouts, state.recipe.rollout.temperature)
    return Outputs(logp, value)


def _ratio_error(logp: Tensor, micro: Batch) -> Tensor:
    """Largest |π_θ / π_old − 1| before the first update: sampler and trainer must agree."""
    difference = (logp.detach() - micro.rollouts.logp_old).masked_fill(~micro.rollouts.mask, 0.0)
    return difference.expm1().abs().max()
