"""An optimizer whose state never lies on the device as a whole takes the same steps."""

import copy

import pytest
import torch
from tiny_runs import changed

import segcredit.train.optim as streamed
from segcredit.config import OptimizerSettings, RecipeError, parse_recipe
from segcredit.train.optim import NotFinite, Optimizer, StreamedOptimizer

SETTINGS = OptimizerSettings(weight_decay=0.1, max_grad_norm=0.5)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two or three tensors at once."""
    monkeypatch.setattr(streamed, "PART", 12 * 300)


def network(device: str) -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 16) for _ in range(5)]
    return torch.nn.Sequential(*layers).to(device, torch.bfloat16)


def train(model: torch.nn.Module, optimizer: Optimizer, steps: range) -> list[dict[str, float]]:
    device = next(model.parameters()).device
    found = []
    for step in steps:
        with optimizer.on_device():
            for part in range(2):  # two micro-batches
                x = torch.full((2, 16), 0.1 + step + part, dtype=torch.bfloat16, device=device)
                model(x).square().mean().backward()
            found.append(optimizer.step(1.0 / (1 + step)))
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_steps_bit_for_bit(device: str) -> None:
    first, second = network(device), network(device)
    whole = Optimizer("policy", first, 1e-2, SETTINGS)
    parts = StreamedOptimizer("policy", second, 1e-2, SETTINGS)
    assert len(list(parts._parts())) >= 4
    assert train(first, whole, range(5)) == train(second, parts, range(5))
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    ours, theirs = parts.state(), whole.state()
    for a, b in zip(ours["originals"], theirs["originals"], strict=True):  # type: ignore[call-overload]
        assert torch.equal(a.to(device), b)


@pytest.mark.parametrize("device", DEVICES)
def test_between_steps_the_device_holds_weights_alone(device: str) -> None:
    model = network(device)
    optimizer = StreamedOptimizer("policy", model, 1e-2, SETTINGS)
    train(model, optimizer, range(2))
    for x in optimizer.parameters:
        assert x.device.type == device
        assert x.untyped_storage().nbytes() <= 4, "a stand-in without memory"
        assert x.grad is None
    if device == "cuda":
        moments = [y for x in optimizer._adam.state.values() for y in x.values() if y.ndim]
        assert moments
        assert all(not x.is_cuda for x in moments)


@pytest.mark.parametrize("device", DEVICES)
def test_saved_and_loaded_it_goes_on_where_it_was(device: str) -> None:
    model = network(device)
    optimizer = StreamedOptimizer("policy", model, 1e-2, SETTINGS)
    train(model, optimizer, range(3))
    kept = copy.deepcopy(optimizer.state())
    train(model, optimizer, range(3, 5))
    for kind in (StreamedOptimizer, Optimizer):  # what one saved, the other goes on from
        other = network(device)
        loaded = kind("policy", other, 1e-2, SETTINGS)
        loaded.load(copy.deepcopy(kept))
        train(other, loaded, range(3, 5))
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)


def test_a_gradient_that_is_not_finite_is_refused() -> None:
    model = network("cpu")
    optimizer = StreamedOptimizer("policy", model, 1e-2, SETTINGS)
    train(model, optimizer, range(1))
    before = copy.deepcopy(optimizer.state()["originals"])
    for _ in range(4):
        model(torch.full((2, 16), torch.nan, dtype=torch.bfloat16)).sum().backward()
        assert optimizer.step()["policy/refused"] == 1.0
    model(torch.full((2, 16), torch.nan, dtype=torch.bfloat16)).sum().backward()
    with pytest.raises(NotFinite):
        optimizer.step()
    for a, b in zip(before, optimizer.state()["originals"], strict=True):  # type: ignore[call-overload]
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ({"offload_optimizer": "stream"}, "set model.dtype=bfloat16"),
        (
            {"offload_optimizer": "stream", "shard": True},
            "stream cannot be combined with memory.shard",
        ),
        ({"offload_optimizer": "sometimes"}, "stream"),
    ],
)
def test_what_does_not_go_together(memory: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        parse_recipe(changed() | {"memory": memory}, "recipe.yaml")
    with pytest.raises(ValueError, match="half precision"):
        StreamedOptimizer("policy", torch.nn.Linear(2, 2), 1e-2, SETTINGS)
