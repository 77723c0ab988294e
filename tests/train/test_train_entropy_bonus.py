"""Entropy bonus (update.entropy_coef): worked number, gradient, identity at 0, training."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from train.small import SMALL, recipe, run_stage

from segcredit.algorithms import make_algorithm
from segcredit.algorithms.objective import EntropyBonus, ResponseMean, TokenMean
from segcredit.algorithms.policy_gradient import PolicyGradient
from segcredit.config import RecipeError
from segcredit.core.logits import head_logp_and_entropy
from segcredit.train.build import build, make_plan
from segcredit.types import Batch, Outputs, Rollouts

MASK = torch.tensor([[True, True, False], [True, False, False]])
COEF = 0.1


def rollouts() -> Rollouts:
    return Rollouts.from_columns(
        MASK,
        logp_old=torch.full((2, 3), -1.0, dtype=torch.float64),
        reward=torch.tensor([0.0, 1.0], dtype=torch.float64),
        group=torch.tensor([0, 0]),
    )


def method(coef: float, reduce: str = "token") -> PolicyGradient:
    made = make_algorithm("grpo", kl=0.0, reduce=reduce)
    assert isinstance(made, PolicyGradient)
    return made.with_entropy_bonus(coef)


def prepared(algorithm: PolicyGradient) -> Batch:
    return algorithm.minibatch(algorithm.prepare(rollouts()))


def spread(x: Tensor) -> Tensor:
    """Three tokens' numbers in the batch, with NaN in the padding."""
    return torch.full((2, 3), torch.nan, dtype=torch.float64).masked_scatter(MASK, x)


def test_worked_number() -> None:
    # first response: (1/2, 1/2) and a certain token; second response: (1/4, 3/4)
    first, last = math.log(2), 0.25 * math.log(4) + 0.75 * math.log(4 / 3)
    entropy = spread(torch.tensor([first, 0.0, last], dtype=torch.float64))
    logp = spread(torch.full((3,), -1.0, dtype=torch.float64))
    for reduce, mean in (("token", (first + last) / 3), ("response", (first / 2 + last) / 2)):
        algorithm = method(COEF, reduce)
        batch = prepared(algorithm)
        loss = algorithm.loss(Outputs(logp, entropy=entropy), batch)
        plain = method(0.0, reduce).loss(Outputs(logp), batch)
        assert loss.metrics["entropy_bonus"].item() == pytest.approx(-COEF * mean, abs=1e-12)
        assert (loss.policy - plain.policy).item() == pytest.approx(-COEF * mean, abs=1e-12)
    # 0.6931 and 0.5623 nats: −0.1 · 1.2555 / 3
    assert -COEF * (first + last) / 3 == pytest.approx(-0.0418494, abs=1e-6)


def test_gradient_through_the_head() -> None:
    algorithm = method(COEF)
    batch = prepared(algorithm)
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    hidden, weight = draw(3, 4).requires_grad_(), draw(5, 4).requires_grad_()
    tokens = torch.tensor([0, 3, 1])

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        logp, entropy = head_logp_and_entropy(hidden, weight, tokens, temperature=0.7, chunk=2)
        return algorithm.loss(Outputs(spread(logp), entropy=spread(entropy)), batch).policy

    assert torch.autograd.gradcheck(loss, (hidden, weight))
    # the bonus alone: ∂(−c H / 3)/∂x_j = c p_j (log p_j + H) / 3 with x = W h / 0.7
    bonus = EntropyBonus(COEF)
    _, entropy = head_logp_and_entropy(hidden, weight, tokens, temperature=0.7)
    term = bonus(Outputs(spread(entropy), entropy=spread(entropy)), batch)
    term[MASK].mean().backward()
    log_p = (hidden.detach() @ weight.detach().T / 0.7).log_softmax(-1)
    p = log_p.exp()
    slope = COEF * p * (log_p - (p * log_p).sum(-1, keepdim=True)) / 3
    assert torch.allclose(hidden.grad, slope @ weight.detach() / 0.7, atol=1e-12)


def test_zero_is_none() -> None:
    assert method(0.0) == make_algorithm("grpo", kl=0.0, reduce="token")
    assert not method(0.0).uses_entropy
    assert method(COEF).uses_entropy
    made = recipe(SMALL["chains"], "sapo", update={"entropy_coef": 0.0})
    assert repr(made.make_algorithm()) == repr(make_algorithm("sapo"))


def test_bonus_is_averaged_as_the_policy_loss() -> None:
    for reduce, kind in (("token", TokenMean), ("response", ResponseMean)):
        (bonus,) = method(COEF, reduce).terms
        assert isinstance(bonus.reduce, kind)


def test_messages() -> None:
    algorithm = method(COEF)
    batch, outputs = prepared(algorithm), Outputs(torch.zeros(2, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match="needs the policy's entropies; got outputs without"):
        algorithm.loss(outputs, batch)
    with pytest.raises(RecipeError, match=r"update\.entropy_coef is for policy-gradient methods"):
        recipe(SMALL["chains"], "restem", samples=2, update={"entropy_coef": 0.1})
    with pytest.raises(RecipeError, match="entropy_coef"):
        recipe(SMALL["chains"], "sapo", update={"entropy_coef": -0.1})
    with pytest.raises(ValueError, match="coef"):
        EntropyBonus(-1.0)


def trained(name: str, **update: float) -> list[dict[str, float]]:
    """Metrics of two steps from random weights."""
    settings: dict[str, Any] = {"minibatches": 1, **update}
    rollout = {"prompts": 4, "samples": 2, "max_tokens": 6}
    made = recipe(SMALL["chains"], name, steps=2, rollout=rollout, update=settings)
    number = next(n for n, x in enumerate(made.stages) if x.kind == "optimize")
    return run_stage(build(make_plan(made)), number, made.stages[number])


@pytest.mark.parametrize("name", ["sapo_authors", pytest.param("dapo", marks=pytest.mark.slow)])
def test_training(name: str) -> None:
    plain, zero, bonus = (
        trained(name),
        trained(name, entropy_coef=0.0),
        trained(name, entropy_coef=0.5),
    )
    timed = lambda x: x.startswith(("time/", "memory/")) or "per_second" in x  # noqa: E731
    for one, other in zip(plain, zero, strict=True):
        assert {k: v for k, v in one.items() if not timed(k)} == {
            k: v for k, v in other.items() if not timed(k)
        }
    assert "entropy_bonus" not in plain[0]
    # one mini-batch, so the update is at π_old, whose entropy the step records; both token means
    assert bonus[0]["entropy_bonus"] == pytest.approx(-0.5 * bonus[0]["entropy"], rel=1e-4)
    assert bonus[0]["policy_loss"] == pytest.approx(plain[0]["policy_loss"], abs=1e-6)
    norm = next(key for key in plain[0] if "grad_norm" in key and "critic" not in key)
    assert bonus[0][norm] != pytest.approx(plain[0][norm], rel=1e-3)
