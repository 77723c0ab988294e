"""What saves memory changes no result: recomputing, offloading, rounding, halving."""

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tiny_policies import ARCHITECTURES, drawn, fresh_policy
from tiny_runs import assert_same_run, changed, write_recipe
from train.test_train_invariance import collected, distance, gradients, small_state

from segcredit.config import OptimizerSettings, parse_recipe
from segcredit.config.read import load_run_recipe
from segcredit.models import Critic
from segcredit.models.layers import recompute_activations
from segcredit.runlog.folder import later_than
from segcredit.train import offload
from segcredit.train import step as training_step
from segcredit.train.checkpoint import load_state
from segcredit.train.offload import CpuOffload
from segcredit.train.optim import Optimizer, missing_requirement
from segcredit.train.trainer import Trainer

SETTINGS = OptimizerSettings()


class Kept:
    """Bytes that autograd keeps between forward and backward."""

    def __init__(self) -> None:
        self.bytes = 0

    def __enter__(self) -> "Kept":
        def pack(x: torch.Tensor) -> torch.Tensor:
            if not x.is_leaf:
                self.bytes += x.nbytes
            return x

        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_recomputed_activations_give_the_same_gradients(name: str) -> None:
    rollouts = drawn(name)
    # every prompt twice: such prompts would be read through a cache, which recomputing cannot do
    assert rollouts.prompts is not None
    twice = rollouts.select(torch.arange(len(rollouts)).repeat_interleave(2))
    found = []
    for again in (False, True):
        policy = fresh_policy(name)
        critic = Critic.from_policy(policy)
        torch.nn.init.normal_(critic.head.weight, generator=torch.manual_seed(0))
        if again:
            recompute_activations(policy.model)
            recompute_activations(critic.trunk)
        with Kept() as kept:
            logp, h = policy.score(twice, 1.0, with_entropy=True)
            value = critic(twice)
        assert h is not None
        (logp.sum() + h.sum() + value.sum()).backward()
        grads = [
            x.grad
            for part in (policy.model, critic)
            for x in part.parameters()
            if x.grad is not None
        ]
        found.append((torch.cat([x.flatten() for x in grads]), kept.bytes))
        assert not any(x.training for x in policy.model.modules())
    (plain, much), (again, little) = found
    torch.testing.assert_close(plain, again, rtol=1e-4, atol=1e-5 * float(plain.abs().max()))
    assert little < 0.7 * much


def test_sampling_still_uses_its_cache() -> None:
    policy = fresh_policy("qwen2_5_vl")
    recompute_activations(policy.model)
    lengths: list[int] = []
    policy.model.register_forward_pre_hook(
        lambda _, __, given: lengths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    from tiny_policies import encoded, engine, seeded

    from segcredit.types import Sampling

    engine(policy).sample(encoded("qwen2_5_vl"), Sampling(4), seeded())
    assert lengths[1:] == [1] * (len(lengths) - 1), "one token at a time behind the prompt"


def in_bfloat16() -> tuple[torch.nn.Linear, Optimizer]:
    layer = torch.nn.Linear(4, 3).bfloat16()
    return layer, Optimizer("policy", layer, 1e-6, SETTINGS)


def test_small_steps_are_not_lost_to_rounding() -> None:
    layer, optimizer = in_bfloat16()
    before = [x.detach().clone() for x in optimizer.parameters]
    assert all(x.dtype == torch.float32 for x in before)
    for _ in range(3):
        layer(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    moved = [
        float((a - b).detach().abs().max())
        for a, b in zip(optimizer.parameters, before, strict=True)
    ]
    assert all(2e-6 < x < 4e-6 for x in moved), "three steps of 1e-6, in float32"
    for weight, original in zip(layer.parameters(), optimizer.parameters, strict=True):
        assert torch.equal(weight, original.bfloat16())


def test_gradients_add_up_in_float32() -> None:
    layer, optimizer = in_bfloat16()
    one = torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=torch.bfloat16)
    for size in (256.0, *[1.0] * 16):  # in bfloat16, 256 + 1 is 256
        layer(one * size).sum().backward()
    assert all(x.grad is None for x in layer.parameters())
    assert float(optimizer.parameters[0].grad[0, 0]) == 272.0  # type: ignore[index]


def test_a_closed_optimizer_leaves_the_gradients_alone() -> None:
    layer, optimizer = in_bfloat16()
    optimizer.close()
    layer(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    assert layer.weight.grad is not None


def test_the_originals_are_saved_and_loaded() -> None:
    layer, optimizer = in_bfloat16()
    for _ in range(2):
        layer(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    other = copy.deepcopy(layer)
    with torch.no_grad():
        for x in other.parameters():
            x.zero_()
            x._post_accumulate_grad_hooks = None  # a copy would still feed the first optimizer
    loaded = Optimizer("policy", other, 1e-6, SETTINGS)
    loaded.load(optimizer.state())
    for a, b in zip(optimizer.parameters, loaded.parameters, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(layer.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_offloaded_tensors_stay_themselves() -> None:
    tensors = [torch.randn(3, 4), torch.nn.Parameter(torch.randn(5))]
    before = [x.detach().clone() for x in tensors]
    copies = CpuOffload()
    copies.load(tensors)
    for _ in range(2):
        copies.offload(tensors)
        copies.load(tensors)
    for x, was in zip(tensors, before, strict=True):
        assert torch.equal(x, was)
    with torch.no_grad():
        tensors[0].add_(1.0)
    copies.offload(tensors)
    assert torch.equal(tensors[0], before[0] + 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_offloaded_optimizer_takes_the_same_steps(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    first = torch.nn.Linear(4, 3).to(dtype)
    second = copy.deepcopy(first)
    pair = [
        (first, Optimizer("policy", first, 1e-2, SETTINGS)),
        (second, Optimizer("policy", second, 1e-2, SETTINGS, offload=True)),
    ]
    for step in range(4):
        for layer, optimizer in pair:
            with optimizer.on_device():
                layer(torch.full((2, 4), 1.0 + step, dtype=dtype)).square().sum().backward()
                optimizer.step()
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_an_offloaded_optimizer_is_loaded_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its moments would stay in main memory, and so would, after them, the originals."""
    layer, optimizer = in_bfloat16()
    layer(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    other = Optimizer("policy", torch.nn.Linear(4, 3).bfloat16(), 1e-6, SETTINGS, offload=True)
    happened: list[str] = []

    def noted(name: str, call: Callable[..., object]) -> Callable[..., object]:
        return lambda *given: (happened.append(name), call(*given))[1]

    monkeypatch.setattr(CpuOffload, "load", noted("bring", CpuOffload.load))
    monkeypatch.setattr(CpuOffload, "offload", noted("send", CpuOffload.offload))
    load = other._adam.load_state_dict
    monkeypatch.setattr(other._adam, "load_state_dict", noted("load", load))
    other.load(optimizer.state())
    assert happened == ["bring", "load", "send"]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
def test_an_offloaded_optimizer_goes_on_where_it_was(kind: str) -> None:
    if missing_requirement(kind) is not None:
        pytest.skip(missing_requirement(kind))
    settings = OptimizerSettings(kind=kind)
    torch.manual_seed(0)
    first = torch.nn.Linear(64, 64).to("cuda", torch.bfloat16)
    optimizer = Optimizer("policy", first, 1e-2, settings, offload=True)

    def step(layer: torch.nn.Module, its: Optimizer) -> None:
        with its.on_device():
            layer(torch.ones(2, 64, dtype=torch.bfloat16, device="cuda")).square().sum().backward()
            its.step()

    step(first, optimizer)
    second = torch.nn.Linear(64, 64).to("cuda", torch.bfloat16)
    loaded = Optimizer("policy", second, 1e-2, settings, offload=True)
    loaded.load(copy.deepcopy(optimizer.state()))  # as from a file: nothing shared
    for layer, its in ((first, optimizer), (second, loaded)):
        step(layer, its)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_out_of_memory_halves_the_micro_batches_and_keeps_the_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = small_state("sapo", "chains")
    rollouts = collected(state)
    whole = gradients(copy.copy(state), rollouts, budget=10**6)
    sizes: list[int] = []
    score = type(state.policy).score

    def limited(self, given, temperature, with_entropy=False):  # type: ignore[no-untyped-def]
        sizes.append(len(given))
        logp = score(self, given, temperature, with_entropy)
        if len(given) > 8 and torch.is_grad_enabled():
            logp[0].sum().backward()  # half a gradient is there already
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return logp

    monkeypatch.setattr(type(state.policy), "score", limited)
    state.recipe = state.recipe.model_copy(
        update={"update": state.recipe.update.model_copy(update={"tokens_per_micro": 4096})}
    )
    given_back = mock.Mock()
    monkeypatch.setattr(state.engine, "close", given_back)  # what CUDA graphs keep
    with pytest.warns(UserWarning, match="out of memory.*tokens_per_micro="):
        halved = gradients(state, rollouts, budget=4096)
    assert state.micro_batches_halved > 0
    assert given_back.called
    assert max(sizes) > 8 >= sizes[-1]
    assert distance(whole, halved) < 1e-5


@pytest.fixture(scope="module")
def halved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of sapo_authors whose memory did not suffice in its first update, and only there."""
    folder = tmp_path_factory.mktemp("halved")
    write_recipe(folder)
    given = {
        "reward": f"{folder}/reward.py:by_length",
        "algorithm": "sapo_authors",
        "stages": [
            {"kind": "warm_start", "steps": 1, "batch": 4},
            {"kind": "optimize", "steps": 2},
        ],
        "update": {"minibatches": 1, "tokens_per_micro": 256},
        "evaluation": {"prompts": 2, "every": 0},
        "save": {"every": 1, "keep": 9},
    }
    micros: list[int] = []
    by_micro = training_step._micro_by_micro

    def limited(*arguments: Any) -> Any:
        micros.append(len(arguments[3]))
        if len(micros) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return by_micro(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_step, "_micro_by_micro", limited)
        trainer = Trainer.from_recipe(parse_recipe(changed(**given)))
        with pytest.warns(UserWarning, match="out of memory"):
            trainer.train(folder / "run", progress=False)
    assert micros[1] > micros[0]
    return folder / "run"


def resumed(run: Path, folder: Path, **changes: int) -> Path:
    """A copy of the run, resumed after its first update."""
    shutil.copytree(run, folder / "run")
    for place in later_than(folder / "run" / "checkpoints", 2):
        shutil.rmtree(place)
    overrides = [f"update.{key}={x}" for key, x in changes.items()]
    trainer = Trainer.from_recipe(load_run_recipe(folder / "run", overrides, True))
    trainer.train(folder / "run", resume=True, progress=False)
    return folder / "run"


def test_a_resumed_run_keeps_its_smaller_micro_batches(halved_run: Path, tmp_path: Path) -> None:
    """sapo_authors averages within micro-batches, so another size gives another policy."""
    assert_same_run(resumed(halved_run, tmp_path), halved_run)


def test_a_new_size_of_micro_batches_replaces_the_smaller_one(
    halved_run: Path, tmp_path: Path
) -> None:
    """A size of micro-batches that the user has set after the warning is not halved again."""
    with pytest.warns(UserWarning, match="Settings changed"):
        place = resumed(halved_run, tmp_path, tokens_per_micro=128)
    states = [load_state(x / "checkpoints" / "step-000003") for x in (halved_run, place)]
    assert [x.get("micro_batches") for x in states] == [
        {"tokens_per_micro": 256, "halved": 1},
        None,
    ]


def test_one_row_that_does_not_fit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    state = small_state("grpo", "chains")
    rollouts = collected(state)

    def never(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(type(state.policy), "score", never)
    with pytest.raises(torch.OutOfMemoryError), pytest.warns(UserWarning, match="out of memory"):
        gradients(state, rollouts, budget=256)


def test_parts_of_page_locked_memory_fill_earlier_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "SLAB", 4096)
    made: list[int] = []

    def make(size: int) -> torch.Tensor:
        made.append(size)
        return torch.zeros(size, dtype=torch.uint8)

    slabs = offload.Slabs(make)
    parts = [slabs.take(size) for size in (3000, 2000, 700, 5000, 2000)]
    assert made == [4096, 4096, 5000]  # 700 fits into the first, the last 2000 into the second
    assert [len(x) for x in parts] == [3000, 2000, 700, 5000, 2000]
    for number, part in enumerate(parts):
        part.fill_(number + 1)
    assert [set(x.tolist()) for x in parts] == [{n + 1} for n in range(len(parts))]  # no overlap


def test_offloading_more_than_the_cpu_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "available_memory", lambda: 3 * 2**30)
    said = r"memory.offload_optimizer needs 4.0 GiB more of CPU memory; 3.0 GiB are available"
    with pytest.raises(ValueError, match=said):
        offload.Slabs().take(10)


def test_available_memory_is_read_where_linux_tells_it() -> None:
    found = offload.available_memory()
    if not Path("/proc/meminfo").exists():
        assert found is None
    else:
        assert found is not None
        assert 2**20 < found < 2**50
