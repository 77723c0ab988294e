"""Parameters, optimizer states and arithmetic against models built for real."""

import copy
from dataclasses import replace

import pytest
import torch
from small_models import batch_for, job_for, small_config, small_policy
from tiny_runs import changed
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    LlamaConfig,
    LlavaConfig,
    MambaConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    T5Config,
)

from segcredit.config import OptimizerSettings, parse_recipe
from segcredit.models import TINY, Critic
from segcredit.plan import memory, shape_of
from segcredit.plan.job import job_of
from segcredit.plan.memory import CACHE_STEP, between
from segcredit.plan.timing import text_forward, trunk_forward
from segcredit.rollout.sampling import SPARE_COLUMNS
from segcredit.train.models import freeze_vision
from segcredit.train.optim import Optimizer


def numbers(model: torch.nn.Module) -> int:
    return sum(x.numel() for x in model.parameters())


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", TINY)
def test_parameters_are_counted_exactly(name: str, tied: bool):
    config = small_config(name, tie_word_embeddings=tied)
    shape, policy = (
        shape_of(copy.deepcopy(config)),
        small_policy(name, False, False, packed=False, tie_word_embeddings=tied),
    )
    model = policy.model
    assert shape.parameters == numbers(model)
    assert shape.tied == tied
    assert sum(count for count, _ in shape.sizes) == shape.parameters
    assert shape.critic_parameters == numbers(Critic.from_policy(policy))
    layers = [x for name, x in model.named_parameters() if ".layers." in name]
    assert shape.layer_parameters == sum(x.numel() for x in layers)
    assert (shape.layers, shape.hidden, shape.intermediate) == (4, 64, 256)
    assert shape.vocabulary == model.get_output_embeddings().weight.shape[0]
    assert (shape.tower is not None) == name.endswith("_vl")
    if shape.tower is not None:
        assert shape.tower.parameters == numbers(model.model.visual)
        assert shape.tower.depth == 4


@pytest.mark.parametrize("freeze", [True, False])
@pytest.mark.parametrize("half", [True, False], ids=["bfloat16", "float32"])
def test_models_and_optimizers_hold_what_was_said(half: bool, freeze: bool):
    policy = small_policy("qwen2_5_vl", half, recompute=False)
    critic = Critic.from_policy(policy)
    job = job_for(policy, batch_for(policy, "qwen2_5_vl", 2), half=half, freeze_vision=freeze)
    if freeze:
        freeze_vision(policy.model, policy.family)
        freeze_vision(critic.trunk, policy.family)
    parts = dict.fromkeys(("weights", "originals", "moments"), 0)
    for name, model in (("policy", policy.model), ("critic", critic)):
        optimizer = Optimizer(name, model, 1e-6, OptimizerSettings())
        for x in optimizer.parameters:
            x.grad = torch.ones_like(x)
        optimizer.step()
        parts["weights"] += sum(x.nbytes for x in model.parameters())
        own = {x.data_ptr() for x in model.parameters()}
        parts["originals"] += sum(x.nbytes for x in optimizer.parameters if x.data_ptr() not in own)
        parts["moments"] += sum(
            x.nbytes for each in optimizer._adam.state.values() for x in each.values() if x.ndim
        )
    parts["weights"] += sum(x.nbytes for x in policy.model.parameters())  # the reference
    said = memory(job)["annotate"].parts
    # the value head is in float32 at once, so its original is itself
    head = 4 * (job.shape.hidden + 1) if half else 0
    assert parts == {name: said[name] for name in parts} | {"originals": said["originals"] - head}


def test_offloading_holds_one_optimizer_on_the_device():
    policy = small_policy("qwen2", True, recompute=False)
    job = job_for(policy, batch_for(policy, "qwen2", 2))
    away = replace(job, offload=True)
    trained = job.shape.parameters, job.shape.critic_parameters
    assert between(job) - between(away) == 12 * sum(trained)
    for phase, count in zip(("update policy", "update critic"), trained, strict=True):
        here = memory(away)[phase].parts
        assert (here["originals"], here["moments"]) == (4 * count, 8 * count)


def test_the_copy_that_samples_ahead_is_a_model_more():
    policy = small_policy("qwen2", True, recompute=False)
    job = job_for(policy, batch_for(policy, "qwen2", 2))
    assert between(replace(job, copied=True)) - between(job) == 2 * numbers(policy.model)


@pytest.mark.parametrize(
    ("training", "copy", "shared"),
    [
        ("auto", None, True),
        ("auto", "cuda", True),
        ("auto", "cuda:0", True),
        ("cuda:1", "cuda:1", True),
        ("auto", "cuda:1", False),
        ("cuda:1", "cuda", False),
        ("auto", "cpu", False),
    ],
)
def test_the_copy_is_counted_where_it_is(training: str, copy: str | None, shared: bool):
    model = {"tiny": "qwen2", "hidden": 32, "layers": 1, "heads": 4, "device": training}
    made = changed(model=model, reward="exact", rollout__ahead=1, rollout__device=copy)
    recipe = parse_recipe(made)
    policy = small_policy("qwen2", True, recompute=False)
    job = job_for(policy, batch_for(policy, "qwen2", 2))
    assert job_of(recipe, job.shape, job.lengths, job.gpu, 1).copied == shared


@pytest.mark.parametrize("name", ["qwen2", "qwen2_5_vl"])
def test_operations_are_those_that_torch_counts(name: str):
    policy = small_policy(name, False, recompute=False)
    rollouts = batch_for(policy, name, rows=4)
    critic = Critic.from_policy(policy)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        critic(rollouts)
    counted = counter.get_flop_counts()["Global"]
    products = sum(x for name, x in counted.items() if "attention" not in str(name))
    job = job_for(policy, rollouts)
    length = job.mean_row - 1
    matrix = text_forward(job, length) - 2 * job.shape.layer_weights * length
    said = 4 * (trunk_forward(job) - matrix + 2 * job.shape.hidden * job.lengths.response)
    assert said == pytest.approx(products, rel=0.001)
    # half of queries times keys and of weights times values, in every layer
    assert matrix == pytest.approx(job.shape.layers * 4 * length**2 * job.shape.query_width / 2)


def test_numbers_that_other_modules_hold():
    assert CACHE_STEP == SPARE_COLUMNS


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (MambaConfig(num_hidden_layers=1, hidden_size=32), "no attention layers"),
        (T5Config(num_layers=1, d_model=32), "t5 cannot be built"),
        (
            LlavaConfig(
                text_config=LlamaConfig(num_hidden_layers=1, hidden_size=32, vocab_size=100)
            ),
            "vision tower that the plan does not support",
        ),
    ],
    ids=["mamba", "t5", "llava"],
)
def test_models_of_other_kinds_are_refused(config: PreTrainedConfig, said: str):
    with pytest.raises(ValueError, match=said) as error:
        shape_of(config)
    assert len(str(error.value)) < 300


def test_a_mixture_of_experts_is_refused():
    config = Qwen2MoeConfig(num_hidden_layers=2, hidden_size=32, num_experts=4, vocab_size=100)
    with pytest.raises(ValueError, match="mixture of experts"):
        shape_of(config)
