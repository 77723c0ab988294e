"""Sampling in fixed buffers, with CUDA graphs or without, equals plain sampling."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_policies import ARCHITECTURES, TEXT, VISION, encoded, fresh_policy, policy, seeded
from tiny_runs import changed
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

from segcredit.config import RecipeError, RolloutSettings, parse_recipe
from segcredit.models import Policy
from segcredit.models.layers import set_attention
from segcredit.rollout import HFEngine, hf, make_engine
from segcredit.rollout import graphs as fixed
from segcredit.rollout.graphs import (
    BufferSize,
    CudaGraphs,
    DecodingState,
    DecodingStep,
    bucket,
)
from segcredit.types import Encoded, Rollouts, Sampling

WAYS = [Sampling(40), Sampling(40, 0.7), Sampling(40, 0.0), Sampling(40, 1.3, 0.8, 20)]
SHORT = [Sampling(1), Sampling(2), Sampling(14)]
CLOSE = 1e-5
ATTENTION = ["packed", "sdpa", "eager"]


def engine(owner: Policy, graphs: bool, rows: int = 256) -> HFEngine:
    return HFEngine(owner.model, owner.end_tokens, owner.banned, rows, graphs)


def check_same(a: Rollouts, b: Rollouts) -> None:
    for column in ("tokens", "mask", "truncated"):
        assert torch.equal(getattr(a, column), getattr(b, column)), column
    assert a.entropy is not None
    assert b.entropy is not None
    assert float((a.logp_old - b.logp_old).abs().max()) < CLOSE
    assert float((a.entropy - b.entropy).abs().max()) < CLOSE


def many(name: str) -> list[Encoded]:
    """Of very different lengths, and siblings among them."""
    return [x for x in encoded(name) for _ in range(2)]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_draws_are_those_of_the_growing_cache(name: str) -> None:
    plain, fixed_size = engine(policy(name), False), engine(policy(name), True)
    for sampling in (*WAYS, *SHORT):
        drawn = [x.sample(many(name), sampling, seeded()) for x in (plain, fixed_size)]
        check_same(*drawn)
    assert len(set(drawn[0].mask.sum(dim=1).tolist())) > 3
    assert drawn[0].truncated.any()
    assert not drawn[0].truncated.all()
    assert plain._fixed is None
    assert fixed_size._fixed is not None


@pytest.mark.parametrize("name", [TEXT[0], VISION[0]])
def test_rows_leave_and_rooms_change(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed, "LEAST_ROWS", 2)
    monkeypatch.setattr(fixed, "LEAST_COLUMNS", 8)
    monkeypatch.setattr(fixed, "CHECK_EVERY", 3)
    owner, seen = fresh_policy(name), set()
    plain = engine(owner, False).sample(many(name), WAYS[0], seeded())
    run = DecodingStep.run

    def watched(self: DecodingStep, rows: int, columns: int, cache: DynamicCache) -> None:
        seen.add((rows, columns))
        run(self, rows, columns, cache)

    monkeypatch.setattr(DecodingStep, "run", watched)
    for rows in (256, 5):
        check_same(engine(owner, True, rows).sample(many(name), WAYS[0], seeded()), plain)
        assert len({rows for rows, _ in seen}) > 2
        assert len({columns for _, columns in seen}) > 1
        seen.clear()


@pytest.mark.parametrize("name", [TEXT[1], VISION[1]])
def test_begun_responses_go_on_with_their_own_budgets(name: str) -> None:
    owner = policy(name)
    begun = [torch.arange(10, 10 + n % 9) for n in range(len(many(name)))]
    drawn = [
        engine(owner, graphs).continue_from(many(name), begun, Sampling(15), seeded())
        for graphs in (False, True)
    ]
    check_same(*drawn)
    assert len(set(drawn[0].mask.sum(dim=1)[drawn[0].truncated].tolist())) > 3


def test_a_room_serves_many_batches_and_grows() -> None:
    owner = fresh_policy("qwen2")
    plain, other = engine(owner, False), engine(owner, True)
    asked = encoded("qwen2")
    sizes = []
    for prompts, width in [(asked[:2], 5), (asked, 90), (asked * 3, 9), (asked[:1], 70)]:
        made = [x.sample(prompts, Sampling(width), seeded(width)) for x in (plain, other)]
        check_same(*made)
        assert other._fixed is not None
        assert other._fixed.state is not None
        sizes.append(other._fixed.state.size)
    assert sizes[0] != sizes[1] != sizes[2] == sizes[3]
    assert sizes[3].holds(sizes[1])
    assert sizes[3].holds(sizes[0])


def test_weights_may_change_in_place_or_move() -> None:
    owner = fresh_policy("qwen2")
    drawer = engine(owner, True)
    drawer.sample(many("qwen2"), WAYS[0], seeded())
    assert drawer._fixed is not None
    graphs = drawer._fixed.graphs
    with torch.no_grad():
        for x in owner.model.parameters():
            x += 0.05 * torch.randn(x.shape, generator=seeded(1))
    made = drawer.sample(many("qwen2"), WAYS[0], seeded())
    check_same(made, engine(owner, False).sample(many("qwen2"), WAYS[0], seeded()))
    assert drawer._fixed.graphs is graphs
    for x in owner.model.parameters():
        x.data = 1.1 * x.data
    made = drawer.sample(many("qwen2"), WAYS[0], seeded())
    check_same(made, engine(owner, False).sample(many("qwen2"), WAYS[0], seeded()))
    assert drawer._fixed.graphs is not graphs


def test_what_a_damaged_model_left_does_no_harm() -> None:
    owner = fresh_policy("llama")
    drawer = engine(owner, True)
    head = owner.model.model.layers[0].self_attn.v_proj.weight
    good = head.detach().clone()
    with torch.no_grad():
        head.fill_(torch.nan)
        with pytest.raises(ValueError, match="not finite"):
            drawer.sample(many("llama"), Sampling(60), seeded())
        head.copy_(good)
    made = drawer.sample(many("llama"), WAYS[0], seeded())
    check_same(made, engine(owner, False).sample(many("llama"), WAYS[0], seeded()))


class Refused(nn.Module):
    """Around a model: masks of four dimensions are refused, or not looked at."""

    def __init__(self, model: nn.Module, ignores: bool) -> None:
        super().__init__()
        self.inner, self.ignores = model, ignores
        self.config = model.config
        self.dtype = model.dtype

    def forward(self, attention_mask: Tensor, **others: object) -> object:
        if attention_mask.ndim == 4:
            if not self.ignores:
                raise TypeError("two dimensions, please")
            attention_mask = torch.zeros_like(attention_mask)
        return self.inner(attention_mask=attention_mask, **others)


@pytest.mark.parametrize("ignores", [False, True])
def test_a_model_that_takes_no_room_is_drawn_from_without(ignores: bool) -> None:
    owner = policy("qwen2")
    drawer = HFEngine(Refused(owner.model, ignores).eval(), owner.end_tokens, graphs=True)
    why = "logits would be wrong" if ignores else "two dimensions, please"
    with pytest.warns(UserWarning, match=rf"without CUDA graphs.*{why}"):
        made = drawer.sample(many("qwen2"), WAYS[0], seeded())
    plain = HFEngine(owner.model, owner.end_tokens, graphs=False)
    check_same(made, plain.sample(many("qwen2"), WAYS[0], seeded()))
    check_same(made, drawer.sample(many("qwen2"), WAYS[0], seeded()))  # warned once


def test_unasked_only_on_a_gpu_and_never_where_a_layer_forgets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner = fresh_policy("qwen2")
    auto = HFEngine(owner.model, owner.end_tokens)
    auto.sample(many("qwen2"), Sampling(3), seeded())
    assert auto._fixed is None
    wanted = engine(owner, True)
    monkeypatch.setattr(owner.model.config, "layer_types", ["full_attention", "sliding_attention"])
    monkeypatch.setattr(owner.model.config, "sliding_window", 4)
    monkeypatch.setattr(owner.model.model, "has_sliding_layers", True)
    wanted.sample(many("qwen2"), Sampling(3), seeded())
    assert wanted._fixed is None


class OnDevice(TorchDispatchMode):
    """Counts operations, and refuses those that a tensor of another device takes part in."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, found)):
            assert not isinstance(x, Tensor) or x.device.type == "meta", f"{func}: {x.device}"
        self.count += 1
        return found


@pytest.mark.parametrize(
    ("name", "attention"),
    [*((name, "auto") for name in ARCHITECTURES), *((TEXT[0], x) for x in ATTENTION)],
)
def test_a_step_asks_the_host_nothing(name: str, attention: str) -> None:
    """On the meta device, which knows no values: what depends on one, or on the host, raises."""
    model = fresh_policy(name).model.to("meta")
    set_attention(model, attention)
    cache = DynamicCache(config=model.config)
    with torch.inference_mode(), torch.device("meta"):
        for layer in cache.layers:
            layer.update(torch.zeros(3, 2, 10, 8), torch.zeros(3, 2, 10, 8))
        room = DecodingState(cache, BufferSize(8, 64, 128))
        banned = torch.zeros(model.get_output_embeddings().weight.shape[0], dtype=torch.bool)
        ends = torch.zeros(11, dtype=torch.long)
    for sampling in WAYS:
        steps = DecodingStep(model, room, sampling, banned, ends, 3 if name in VISION else 1)
        with torch.inference_mode(), OnDevice() as watched:
            steps.run(8, 96, room.cache(model.config, 8, 96))
        assert watched.count > 100


def test_out_of_memory_the_first_cache_is_freed_before_the_second_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[weakref.ref[hf.Prefill]] = []

    def watched(*given: Any) -> hf.Prefill:
        assert all(x() is None for x in made)
        made.append(weakref.ref(found := prefill(*given)))
        return found

    def broken(*_: Any) -> None:
        raise torch.OutOfMemoryError

    prefill, owner = hf.prefill, policy(TEXT[0])
    monkeypatch.setattr(hf, "prefill", watched)
    monkeypatch.setattr(fixed.FixedSampler, "draw", broken)
    with pytest.warns(UserWarning, match="not enough memory for their KV cache"):
        engine(owner, True).sample(many(TEXT[0]), Sampling(4), seeded())
    assert len(made) == 2


class FakeGpus:
    """Two GPUs of which the first is the current one, and which steps wait for which stream."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.current, self.waits = torch.device("cuda", 0), list[torch.device]()
        for name in ("device", "current_stream", "stream"):
            patch.setattr(torch.cuda, name, getattr(self, name))

    @contextmanager
    def device(self, other: torch.device) -> Iterator[None]:
        before, self.current = self.current, other
        yield
        self.current = before

    def current_stream(self) -> SimpleNamespace:
        return SimpleNamespace(device=self.current, wait_stream=self.wait_stream)

    def wait_stream(self, other: SimpleNamespace) -> None:
        self.waits.append(other.device)

    def stream(self, other: SimpleNamespace) -> Any:
        return nullcontext()


def test_steps_of_another_gpu_wait_for_its_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus, second = FakeGpus(monkeypatch), torch.device("cuda", 1)
    recorder = CudaGraphs(torch.device("cpu"))
    recorder._stream = SimpleNamespace(device=second, wait_stream=gpus.wait_stream)  # type: ignore[assignment]
    found: list[torch.device] = []
    recorder.run("step", lambda: found.append(gpus.current), 1)
    assert gpus.waits == [second, second]
    assert found == [second]
    assert gpus.current.index == 0


def test_sizes_are_few() -> None:
    sizes = [bucket(n, 8) for n in range(1, 1001)]
    assert all(n <= size for n, size in enumerate(sizes, 1))
    assert all(size <= 1.5 * max(n, 8) for n, size in enumerate(sizes, 1))
    assert sorted(set(sizes)) == [8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
    assert [bucket(n, 2) for n in range(1, 7)] == [2, 2, 3, 4, 6, 6]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rollout": {"graphs": True, "engine": "vllm"}},
            r"a setting of the hf engine: remove it",
        ),
        ({"rollout": {"graphs": "sometimes"}}, "graphs.*auto"),
        (
            {"rollout": {"graphs": True}, "model": {"attention": "flash_attention_2"}},
            r"set model\.attention=auto, or rollout.graphs=false",
        ),
    ],
)
def test_settings_that_mean_nothing(changes: dict[str, dict[str, object]], message: str) -> None:
    recipe = changed()
    for part, settings in changes.items():
        recipe[part] = {**recipe[part], **settings}
    with pytest.raises(RecipeError, match=message):
        parse_recipe(recipe, "recipe.yaml")


def test_the_setting_reaches_the_engine() -> None:
    for graphs in (True, False, "auto"):
        settings = RolloutSettings(graphs=graphs)
        made = make_engine("hf", policy("qwen2"), settings.engine_settings())
        assert isinstance(made, HFEngine)
        assert made.graphs == graphs
