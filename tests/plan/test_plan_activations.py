"""The formulas for memory against tensors counted one by one while real models work."""

from dataclasses import replace

import pytest
import torch
from alive import peak_of
from small_models import batch_for, job_for, small_policy

from segcredit.config import OptimizerSettings
from segcredit.models import Critic, Policy
from segcredit.models.layers import recompute_activations
from segcredit.plan import memory
from segcredit.plan.memory import MemoryUse
from segcredit.train.optim import Optimizer
from segcredit.types import Rollouts

ABOVE = ("gradients", "activations", "logits")


def above(use: MemoryUse) -> float:
    """Beside models, optimizers and workspace."""
    return sum(use.parts[name] for name in ABOVE)


def tensors(model: torch.nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers(), *optimizer.parameters]


def score_peak(policy: Policy, rollouts: Rollouts, times: int) -> int:
    optimizer = Optimizer("policy", policy.model, 1e-6, OptimizerSettings())

    def work() -> None:
        for _ in range(times):
            policy.score(rollouts, 1.0)[0].sum().backward()

    return peak_of(work, tensors(policy.model, optimizer))


def critic_peaks(policy: Policy, rollouts: Rollouts, recompute: bool) -> tuple[int, int]:
    """With gradients, and without."""
    critic = Critic.from_policy(policy)
    if recompute:
        recompute_activations(critic.trunk)
    optimizer = Optimizer("critic", critic, 1e-6, OptimizerSettings())
    weights = tensors(critic, optimizer)
    with_gradients = peak_of(lambda: critic(rollouts).sum().backward(), weights)
    with torch.no_grad():
        return with_gradients, peak_of(lambda: critic(rollouts), weights)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "half", "recompute"),
    [
        ("qwen2", True, True),
        ("qwen2", True, False),
        ("llama", False, True),
        ("qwen2_5_vl", True, True),
        pytest.param("qwen2_5_vl", True, False, marks=pytest.mark.slow),
        pytest.param("qwen3_vl", True, True, marks=pytest.mark.slow),
        ("qwen3_vl", False, False),
    ],
)
def test_models_take_what_was_said(name: str, half: bool, recompute: bool):
    policy = small_policy(name, half, recompute)
    rollouts = batch_for(policy, name, rows=6)
    assert policy.plain_head
    said = memory(job_for(policy, rollouts, half=half, recompute=recompute))
    trained, annotated = critic_peaks(policy, rollouts, recompute)
    # attention on a CPU keeps one state per layer more than on a GPU
    assert score_peak(policy, rollouts, 1) == pytest.approx(above(said["update policy"]), rel=0.12)
    assert trained == pytest.approx(above(said["update critic"]), rel=0.12)
    assert annotated == pytest.approx(above(said["annotate"]), rel=0.08)


def test_padded_rows_take_what_was_said():
    policy = small_policy("qwen2", half=True, recompute=True, packed=False)
    rollouts = batch_for(policy, "qwen2", rows=6)
    said = memory(job_for(policy, rollouts, recompute=True, packed=False))
    took = score_peak(policy, rollouts, 1)
    assert took == pytest.approx(above(said["update policy"]), rel=0.15)


def test_gradients_of_an_earlier_micro_batch_wait(monkeypatch: pytest.MonkeyPatch):
    """A wide vocabulary, so that gradients weigh more than activations."""
    monkeypatch.setattr("segcredit.core.logits.CHUNK", 80_000)  # a CPU copies chunks to float32
    policy = small_policy("qwen2", False, True, vocab_size=20_000)
    rollouts = batch_for(policy, "qwen2", rows=2)
    one = job_for(policy, rollouts, half=False, recompute=True)
    tokens = one.prompts * (one.lengths.prompt + one.max_tokens)
    several = replace(one, prompts=2 * one.prompts, tokens_per_micro=int(tokens))
    assert (one.accumulates, several.accumulates) == (False, True)
    for job, times in ((one, 1), (several, 2)):
        said = above(memory(job)["update policy"])
        assert score_peak(policy, rollouts, times) == pytest.approx(said, rel=0.1)


def test_rounded_weights_have_gradients_in_float32():
    policy = small_policy("qwen2", True, True, vocab_size=20_000)
    rollouts = batch_for(policy, "qwen2", rows=2)
    said = memory(job_for(policy, rollouts, recompute=True))
    assert critic_peaks(policy, rollouts, True)[0] == pytest.approx(
        above(said["update critic"]), rel=0.1
    )
