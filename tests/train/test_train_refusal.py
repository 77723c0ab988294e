"""A gradient that is not finite never reaches the weights; five in a row stop the run."""

import math
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from forked_cli import run
from tiny_runs import changed, metrics, write_recipe
from torch import Tensor, nn

from segcredit.config import OptimizerSettings, parse_recipe
from segcredit.train.distributed import Parallel
from segcredit.train.optim import PATIENCE, NotFinite, Optimizer
from segcredit.train.saving import POLICY
from segcredit.train.trainer import Trainer


def optimizer_of(model: nn.Module) -> Optimizer:
    return Optimizer("policy", model, 0.1, OptimizerSettings(weight_decay=0.1))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


def give_gradients(model: nn.Module, poison: float | None = None) -> None:
    model(torch.ones(2, 3)).sum().backward()
    if poison is not None:
        bias = model.get_parameter("1.bias")
        assert bias.grad is not None
        bias.grad[0] = poison


def weights(model: nn.Module) -> list[Tensor]:
    return [x.detach().clone() for x in model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_one_poisoned_entry_is_enough_to_refuse(model: nn.Module, poison: float) -> None:
    optimizer = optimizer_of(model)
    give_gradients(model)
    assert optimizer.step()["policy/refused"] == 0.0
    before, moments = weights(model), str(optimizer.state())
    give_gradients(model, poison)
    shown = optimizer.step(0.5)
    assert shown == {"policy/refused": 1.0, "policy/lr": 0.05}
    assert same(weights(model), before)
    assert str(optimizer.state()) == moments.replace("'refused': 0", "'refused': 1")
    assert all(x.grad is None for x in model.parameters()), "the poison is gone"
    give_gradients(model)
    assert optimizer.step()["policy/grad_norm"] > 0
    assert not same(weights(model), before)


def test_patience_ends_and_a_good_step_renews_it(model: nn.Module) -> None:
    optimizer = optimizer_of(model)
    for _ in range(2):
        for _ in range(PATIENCE - 1):
            give_gradients(model, math.nan)
            optimizer.step()
        give_gradients(model)
        optimizer.step()
    before = weights(model)
    for _ in range(PATIENCE - 1):
        give_gradients(model, math.nan)
        optimizer.step()
    resumed = optimizer_of(model)
    resumed.load(optimizer.state())
    give_gradients(model, math.nan)
    with pytest.raises(NotFinite, match=r"the policy's gradient was NaN or infinite 5 times in a"):
        resumed.step()
    assert same(weights(model), before)


# ── In a run ─────────────────────────────────────────────────────────────────────────────────────

STAGES = [
    {"kind": "warm_start", "steps": 1, "batch": 4},
    {"kind": "optimize", "steps": 3},
]


class Poisoned:
    """Spoils the policy's gradients at some calls, counted from 0 in reinforcement learning."""

    def __init__(self, calls: Iterable[int]) -> None:
        self.calls = set(calls)
        self.count = -1  # the warm start's own

    def __call__(self, parallel: Parallel, parameters: list[Tensor]) -> None:
        gradient = parameters[0].grad
        if self.count in self.calls and gradient is not None:
            gradient.view(-1)[0] = math.nan
        self.count += 1


def trainer() -> Trainer:
    made = changed(stages=STAGES, reward="exact", algorithm={"name": "gspo"}, rollout__samples=2)
    return Trainer.from_recipe(parse_recipe(made))


@pytest.mark.filterwarnings("ignore:a gradient was not finite")
def test_a_run_counts_what_it_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned = Poisoned([0, 1, 3])  # two mini-batches a step: all of the first, half of the second
    monkeypatch.setattr(Parallel, "add_gradients", lambda *x: poisoned(*x))
    trainer().train(tmp_path / "run")
    found = [x["policy/refused"] for x in metrics(tmp_path / "run") if "policy/refused" in x]
    assert found == [0.0, 1.0, 0.5, 0.0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a gradient was not finite")
def test_a_run_that_only_meets_poison_keeps_its_weights_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned = Poisoned(range(99))
    monkeypatch.setattr(Parallel, "add_gradients", lambda *x: poisoned(*x))
    with pytest.raises(NotFinite, match=r"weights are intact. Lower the learning rate \(now "):
        trainer().train(tmp_path / "run")
    assert poisoned.count == PATIENCE
    kept = sorted((tmp_path / "run" / "checkpoints").glob(f"step-*/{POLICY}/model.safetensors"))
    assert [x.parts[-3] for x in kept] == ["step-000001"], "not while steps are refused"
    monkeypatch.undo()
    done = trainer().train(tmp_path / "run", resume=True)
    assert done.model is not None


def test_a_learning_rate_that_breaks_the_model_ends_in_one_sentence(tmp_path: Path) -> None:
    recipe = write_recipe(
        tmp_path,
        stages=[{"kind": "warm_start", "steps": 40, "batch": 2, "lr": 1e36, "warmup_steps": 0}],
    )
    call = run(tmp_path, "train", recipe, "--folder", "run")
    assert call.code == 2, call.said
    (line,) = call.complained.splitlines()
    assert line.startswith("error: the policy's gradient was NaN or infinite 5 times in a row;")
