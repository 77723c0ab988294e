"""Supervised steps on demonstrations, before reinforcement learning."""

from collections.abc import Sequence

import torch
from torch import Tensor

from segcredit.data.worlds import Demonstration
from segcredit.train.learners import PolicyLearner
from segcredit.train.metrics import Metrics
from segcredit.train.micro import micro_batches
from segcredit.train.state import State
from segcredit.types import Rollouts


def imitate(state: State, shown: Sequence[Demonstration], factor: float) -> dict[str, float]:
    """Take one gradient step on the token mean of −log π(demonstration)."""
    log = Metrics()
    with log.time("encode"):
        rollouts = as_rollouts(state, shown)
        count = rollouts.mask.sum()
    optimizer = state.learners[PolicyLearner.name].optimizer
    with log.time("update"), optimizer.awake():
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
