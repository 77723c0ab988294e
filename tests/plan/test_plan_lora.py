"""LoRA in the plan: one frozen model, optimizers of adapters alone, and what that saves."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from alive import peak_of
from any_jobs import jobs
from hypothesis import given
from small_models import batch_for, job_for, large_shape, small_policy
from test_plan_activations import above, tensors

from segcredit.config import LoraSettings, OptimizerSettings, load_recipe
from segcredit.models import Critic, Policy, QwenVL
from segcredit.models.layers import recompute_activations
from segcredit.plan import (
    GPUS,
    Job,
    Lengths,
    Shape,
    advise,
    fits,
    memory,
    seconds,
    timing,
)
from segcredit.plan.memory import between
from segcredit.plan.model import Adapter, adapter_of, adapter_on
from segcredit.plan.predict import warnings
from segcredit.train.optim import Optimizer

SETTINGS = LoraSettings(rank=8)


def adapted(name: str, half: bool, targets: str = "language", **settings: bool) -> tuple:
    """A policy with LoRA, its critic, and the same as a job."""
    plain = small_policy(name, half, recompute=False)
    rollouts = batch_for(plain, name, rows=6)
    job = job_for(plain, rollouts, half=half, **settings)
    assert plain.plain_head
    policy = plain.with_lora(SETTINGS.rank, SETTINGS.alpha, targets=targets)
    if settings.get("recompute"):
        recompute_activations(policy.model, policy.lora)
    adapter = adapter_on(job.shape, SETTINGS.model_copy(update={"targets": targets}))
    return policy, Critic.from_policy(policy), rollouts, replace(job, adapter=adapter)


def optimizer_of(part: Policy | Critic) -> Optimizer:
    model = part.model if isinstance(part, Policy) else part
    return Optimizer("one", model, 1e-6, OptimizerSettings(), trained=part.trained())


@pytest.mark.parametrize("targets", ["language", "all-linear"])
@pytest.mark.parametrize("half", [True, False], ids=["bfloat16", "float32"])
def test_models_and_optimizers_hold_what_was_said(half: bool, targets: str):
    policy, critic, _, job = adapted("qwen2_5_vl", half, targets)
    parts = dict.fromkeys(("weights", "originals", "moments"), 0)
    models = {id(x): x for model in (policy.model, critic) for x in model.parameters()}
    parts["weights"] = sum(x.nbytes for x in models.values())
    for part in (policy, critic):
        optimizer = optimizer_of(part)
        for x in optimizer.parameters:
            x.grad = torch.ones_like(x)
        optimizer.step()
        own = {x.data_ptr() for x in models.values()}
        parts["originals"] += sum(x.nbytes for x in optimizer.parameters if x.data_ptr() not in own)
        parts["moments"] += sum(
            x.nbytes for each in optimizer._adam.state.values() for x in each.values() if x.ndim
        )
    said = memory(job)["annotate"].parts
    # the value head is in float32 at once, so its original is itself
    head = 4 * (job.shape.hidden + 1) if half else 0
    assert parts == {name: said[name] for name in parts} | {"originals": said["originals"] - head}
    assert sum(x.numel() for x in policy.trained().values()) == job.policy_trained
    assert sum(x.numel() for x in critic.trained().values()) == job.critic_trained
    third = replace(job, adapter=replace(job.adapter, reference=True))
    more = memory(third)["annotate"].parts["weights"] - said["weights"]
    assert more == job.bytes * job.policy_trained, "π_ref after a warm start"
    assert memory(replace(job, reference=False))["annotate"].parts["weights"] == said["weights"]


slow = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "half", "recompute", "targets"),
    [
        ("qwen2", True, True, "language"),
        ("qwen2", True, False, "all-linear"),
        ("llama", False, True, "all-linear"),
        pytest.param("qwen2_5_vl", True, True, "language", marks=slow),
        ("qwen2_5_vl", True, True, "all-linear"),
        ("qwen2_5_vl", True, False, "language"),
        pytest.param("qwen2_5_vl", True, False, "all-linear", marks=slow),
        pytest.param("qwen3_vl", False, False, "language", marks=slow),
        ("qwen3_vl", False, False, "all-linear"),
        # without a vision tower both targets are the same layers
        pytest.param("qwen2", True, True, "all-linear", marks=slow),
        pytest.param("qwen2", True, False, "language", marks=slow),
        pytest.param("llama", False, True, "language", marks=slow),
    ],
)
def test_models_take_what_was_said(name: str, half: bool, recompute: bool, targets: str):
    policy, critic, rollouts, job = adapted(name, half, targets, recompute=recompute)
    ours, theirs = optimizer_of(policy), optimizer_of(critic)
    weights = [*tensors(critic, ours), *tensors(policy.model, theirs)]
    said = memory(job)
    took = peak_of(lambda: policy.score(rollouts, 1.0)[0].sum().backward(), weights)
    assert took == pytest.approx(above(said["update policy"]), rel=0.12)
    ours.zero_grad()
    took = peak_of(lambda: critic(rollouts).sum().backward(), weights)
    assert took == pytest.approx(above(said["update critic"]), rel=0.12)
    with torch.no_grad():
        took = peak_of(lambda: critic(rollouts), weights)
    assert took == pytest.approx(above(said["annotate"]), rel=0.08)


def test_offloaded_adapters_leave_the_device():
    *_, job = adapted("qwen2", True)
    away = replace(job, offload=True)
    assert between(job) - between(away) == 12 * (job.policy_trained + job.critic_trained)


def seven_billion() -> Shape:
    """About Qwen2.5-VL-7B: the linear layers of one text layer and of one block, many times."""
    h, k, m, v = 3584, 512, 18_944, 1280
    text = [(h, h), (h, k), (h, k), (h, h), (h, m), (h, m), (m, h)]
    linears = [
        *((f"layers.{n}.{i}", *widths) for n in range(28) for i, widths in enumerate(text)),
        *((f"visual.blocks.{n}.qkv", v, 3 * v) for n in range(32)),
    ]
    return replace(
        large_shape(),
        parameters=8_292_166_656,
        trunk_parameters=7_747_168_256,
        layer_parameters=6_525_618_176,
        layer_weights=6_525_288_448,
        layers=28,
        hidden=h,
        intermediate=m,
        heads=28,
        key_heads=4,
        vocabulary=152_064,
        tied=False,
        sizes=((152_064 * h, False),) * 2 + ((6_525_621_760, False), (676_550_144, True)),
        linears=tuple(linears),
        family=QwenVL(),
    )


def paper_job() -> Job:
    return Job(
        shape=seven_billion(),
        lengths=Lengths(prompt=300, longest=1024, images=250, response=1000),
        gpu=GPUS["H200"],
        prompts=512,
        rescored=True,
        recompute=True,
    )


def test_seven_billion_fit_one_gpu_with_adapters_and_not_without():
    job = paper_job()
    assert not fits(job)
    assert not fits(replace(job, offload=True))
    with_lora = replace(job, adapter=adapter_on(job.shape, LoraSettings()))
    assert fits(with_lora)
    # 2 bytes of 8.3 B weights, and of two adapters 2 + 12 bytes of 81 M numbers each
    assert with_lora.policy_trained == 32 * 28 * (2 * 7168 + 2 * 4096 + 3 * 22_528)
    assert between(with_lora) / 2**30 == pytest.approx(15.45 + 2.11 + 0.13, abs=0.1)
    assert advise(with_lora) == []


def test_moments_of_adapters_take_eight_bits_too():
    job = paper_job()
    whole = replace(job, adapter=adapter_on(job.shape, LoraSettings()))
    small = memory(replace(whole, eight_bit=True))["annotate"].parts["moments"]
    head = 8 * (job.shape.hidden + 1)  # too small for blocks
    assert memory(whole)["annotate"].parts["moments"] == 8 * 2 * whole.policy_trained + head
    assert small == 2 * (1 + 4 / 256) * 2 * whole.policy_trained + head


def test_sharding_is_named_only_where_it_works():
    """LoRA refuses memory.shard."""
    whole = replace(paper_job(), gpus=2)
    with_lora = replace(whole, adapter=adapter_on(whole.shape, LoraSettings()))
    assert any("memory.shard=true" in line for line in warnings(whole))
    assert not any("memory.shard" in line for line in warnings(with_lora))


@given(jobs())
def test_adapters_take_less_than_weights(job: Job):
    adapter = Adapter((10**7, 10**6), 10**7, 32 * 252, 36 * 50_000, vision=False)
    job = replace(job, offload=False)
    with_lora = replace(job, adapter=adapter)
    assert between(with_lora) < between(job)
    before, after = memory(job), memory(with_lora)
    for phase, moment in after.items():
        for part in ("originals", "moments"):
            assert moment.parts[part] <= before[phase].parts[part]
    assert timing.update_policy(with_lora) < timing.update_policy(job)
    assert seconds(with_lora)["sample"] >= seconds(job)["sample"]


def test_a_recipes_adapter(tmp_path: Path):
    shape = seven_billion()
    recipe = load_recipe("demo")
    assert adapter_of(recipe, shape) is None
    settings = {"rank": 4, "targets": "all-linear"}
    model = recipe.model.model_copy(update={"lora": LoraSettings(**settings)})
    found = adapter_of(recipe.model_copy(update={"model": model}), shape)
    assert found is not None
    assert found.vision
    assert found.reference, "the demo begins with a warm start"
    assert found.numbers - found.text == 4 * 32 * 4 * 1280
    frozen = model.model_copy(update={"freeze_vision": True})
    found = adapter_of(recipe.model_copy(update={"model": frozen}), shape)
    assert found is not None
    assert not found.vision
