"""VPPO: weights of responses and choice of tokens by their dependence on the images."""

import math
import random
from dataclasses import replace

import oracles
import pytest
import torch
from batches import story
from ragged import layout

from segcredit import algorithms
from segcredit.algorithms import make_algorithm
from segcredit.algorithms.credit import Case, ImageDependence
from segcredit.algorithms.requirements import requirements
from segcredit.columns import IMAGE_KL, ImageKL
from segcredit.core.advantages import image_weight
from segcredit.core.losses import k3
from segcredit.types import Outputs, Rollouts

NAN = float("nan")


def rollouts_of(image_kl: list[list[float]], seed: int = 0, **columns: torch.Tensor) -> Rollouts:
    """Responses of two prompts, of which every second one is right."""
    place = layout([len(row) for row in image_kl], seed=seed)
    rows = len(image_kl)
    given = {
        "logp_old": place.put([[-0.5] * len(row) for row in image_kl]),
        "reward": torch.tensor([float(n % 2) for n in range(rows)], dtype=torch.float64),
        "group": torch.tensor([n // 2 for n in range(rows)]),
        "image_kl": place.put(image_kl),
    }
    return Rollouts.from_columns(place.mask, **given | columns)


def advantages(method: algorithms.PolicyGradient, rollouts: Rollouts) -> list[list[float]]:
    credit = method.prepare(rollouts).credit
    assert credit is not None
    assert (credit.advantage[~rollouts.mask] == 0).all()
    return [row[mask].tolist() for row, mask in zip(credit.advantage, rollouts.mask, strict=True)]


def test_hand_numbers() -> None:
    """Mean KLs .1, .5, .2, .1: s = 0, 1, .25, 0, whose mean is .3125; β .9, so .9 + .32 s."""
    image_kl = [[0.0, 0.2], [0.9, 0.1, 0.5], [0.1, 0.1, 0.5, 0.1, 0.2], [0.1]]
    method = algorithms.vppo(fraction=0.4, floor=0.9, eps=0.0)
    got = advantages(method, rollouts_of(image_kl))
    z = 1 / math.sqrt(2)  # rewards 0 and 1, sample deviation
    # ⌈.8⌉ = 1, ⌈1.2⌉ = 2, ⌈2⌉ = 2 and 1 token: those with the largest KL
    assert got[0] == pytest.approx([0.0, -0.9 * z])
    assert got[1] == pytest.approx([1.22 * z, 0.0, 1.22 * z])
    assert got[2] == pytest.approx([0.0, 0.0, -0.98 * z, 0.0, -0.98 * z])
    assert got[3] == pytest.approx([0.9 * z])


def test_hand_numbers_of_the_kl() -> None:
    """π halves: u = −log 2, e^u − u − 1 = .19315; π · 4: 1.61371; the limits are 10 and ±20."""
    old = torch.tensor([[-1.0, -3.0, -0.1, -30.0]], dtype=torch.float64)
    hidden = old + torch.tensor([[math.log(0.5), math.log(4.0), -25.0, 25.0]])
    got = k3(old, hidden, limit=10.0, log_ratio_limit=20.0)[0].tolist()
    assert got == pytest.approx([math.log(2) - 0.5, 3 - math.log(4), 10.0, 10.0])


@pytest.mark.parametrize("seed", range(6))
def test_weights_and_tokens_are_the_oracles(seed: int) -> None:
    chooser = random.Random(seed)
    fraction, floor = chooser.choice(["0.1", "0.4", "0.55", "1.0"]), chooser.choice([0.0, 0.5, 0.9])
    rows = [
        None
        if chooser.random() < 0.3
        else [round(chooser.random(), 1) for _ in range(chooser.randint(1, 20))]
        for _ in range(10)
    ]
    image_kl = [[NAN] * 4 if row is None else row for row in rows]
    rollouts = rollouts_of(image_kl, seed=seed)
    base = advantages(algorithms.dapo(dual_clip=3.0), rollouts)
    got = advantages(algorithms.vppo(float(fraction), floor), rollouts)
    weights = oracles.image_weights(rows, floor)
    for row, before, after, weight in zip(rows, base, got, weights, strict=True):
        kept = [True] * 4 if row is None else oracles.most_dependent(row, fraction)
        expected = [weight * x if keeps else 0.0 for x, keeps in zip(before, kept, strict=True)]
        assert after == pytest.approx(expected)
    seen = [x for x, row in zip(weights, rows, strict=True) if row is not None]
    assert sum(seen) / len(seen) == pytest.approx(1.0)


def loss_and_gradient(method: algorithms.PolicyGradient) -> tuple[float, torch.Tensor]:
    rollouts, outputs = story(seed=4).lay_out(2, holes=True)
    batch = method.minibatch(method.prepare(rollouts))
    loss = method.loss(Outputs(outputs.logp), batch).policy
    loss.backward()
    assert outputs.logp.grad is not None
    return loss.item(), outputs.logp.grad


def test_all_tokens_and_equal_weights_give_its_base_method() -> None:
    loss, gradient = loss_and_gradient(algorithms.vppo(fraction=1.0, floor=1.0))
    base_loss, base = loss_and_gradient(algorithms.dapo(dual_clip=3.0))
    assert loss == base_loss
    assert torch.equal(gradient, base)
    part = loss_and_gradient(algorithms.vppo(fraction=0.2, floor=1.0))[1]
    kept = part != 0
    assert torch.equal(part[kept], base[kept])
    assert 0 < kept.sum() < (base != 0).sum()
    weighted = loss_and_gradient(algorithms.vppo(fraction=1.0, floor=0.5))[1]
    assert not torch.allclose(weighted, base)


def test_prompts_without_an_image_have_weight_1() -> None:
    """They neither lose tokens nor change the weights of the others."""
    seen = [[0.0, 0.2], [0.9, 0.1, 0.5]]
    method = algorithms.vppo()
    alone = advantages(method, rollouts_of(seen))
    mixed = advantages(method, rollouts_of([*seen, [NAN] * 3, [NAN] * 2]))
    assert mixed[:2] == alone
    text = rollouts_of([[NAN] * 3, [NAN] * 2])
    assert advantages(method, text) == advantages(algorithms.dapo(), text)
    assert mixed[2:] == advantages(algorithms.dapo(), text)


def test_equal_dependence_gives_equal_weights() -> None:
    mask = torch.ones(3, 2, dtype=torch.bool)
    kl = torch.tensor([[0.25, 0.75], [0.5, 0.5], [0.5 + 1e-7, 0.5]])
    assert image_weight(kl, mask, mask[:, 0], 0.5).tolist() == [1.0] * 3


def test_a_kl_that_is_not_finite_is_an_error() -> None:
    with pytest.raises(ValueError, match="image_kl must be finite"):
        advantages(algorithms.vppo(), rollouts_of([[0.1, NAN], [0.1, 0.2]]))


def test_it_wraps_any_credit() -> None:
    inner = algorithms.sapo().credit
    wrapped = ImageDependence(inner)
    assert wrapped.needs == inner.needs | {IMAGE_KL}
    assert wrapped.over == inner.over
    assert not wrapped.compares_groups
    assert requirements(algorithms.vppo()).compares_groups
    rollouts, _ = story(seed=4).lay_out(2, holes=False)
    segments = inner.over(rollouts)
    reward = torch.zeros_like(rollouts.logp_old)
    reward[:, 0] = 1.0
    case = Case(rollouts, reward, segments)
    got = replace(wrapped, fraction=1.0, floor=1.0)(case)
    assert torch.equal(got.advantage, inner(case).advantage)
    assert torch.equal(got.value_target, inner(case).value_target)  # the critic learns everywhere


def test_settings_reach_the_column() -> None:
    method = make_algorithm("vppo", patch=28, probability=1.0)
    assert ImageKL(28, 1.0) in method.needs
    assert IMAGE_KL in make_algorithm("vppo").needs


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fraction": 40}, r"For top-40% pass 0\.40"),
        ({"floor": 1.5}, "floor must be in"),
        ({"patch": 0}, "patch must be a whole number of pixels, at least 1; got 0"),
        ({"patch": 14.5}, "a whole number of pixels, at least 1; got 14.5"),
        ({"probability": 0.0}, r"probability must be in \(0, 1\]; got 0.0"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_algorithm("vppo", **settings)
