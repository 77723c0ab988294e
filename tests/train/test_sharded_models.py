"""A model divided by FSDP2, here among one process: the same scores, steps and weights."""

import copy
from collections.abc import Iterator
from dataclasses import fields

import pytest
import torch
import torch.distributed as dist
from tiny_policies import drawn, fresh_policy
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from segcredit.config import OptimizerSettings
from segcredit.models import Critic, Policy
from segcredit.models.layers import (
    copy_weights,
    full_weights,
    is_sharded,
    recompute_activations,
    set_attention,
    shard,
    unshard,
)
from segcredit.train.models import freeze_vision
from segcredit.train.optim import ShardedOptimizer, make_optimizer
from segcredit.types import Rollouts

BOTH = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SETTINGS = OptimizerSettings(weight_decay=0.1, eps=1e-3, max_grad_norm=0.5)
HALF = torch.bfloat16


@pytest.fixture
def mesh(device: str) -> Iterator[DeviceMesh]:
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh(device, (1,))
    dist.destroy_process_group()


def made(name: str, device: str, dtype: torch.dtype, tied: bool = False) -> Policy:
    policy = fresh_policy(name)
    if tied:
        policy.model.config.get_text_config().tie_word_embeddings = True
        policy.model.config.tie_word_embeddings = True
        policy.model.tie_weights()
    policy.model.to(device, dtype)
    set_attention(policy.model, "packed")
    return policy


def responses(name: str, device: str) -> Rollouts:
    found = drawn(name)
    columns = {f.name: getattr(found, f.name) for f in fields(found)}
    moved = {name: x.to(device) for name, x in columns.items() if isinstance(x, torch.Tensor)}
    return found.replace(**moved)


def divided(policy: Policy, mesh: DeviceMesh) -> Policy:
    other = Policy(copy.deepcopy(policy.model), policy.codec)
    assert other.plain_head
    shard(other.model, mesh)
    assert is_sharded(other.model)
    assert not is_sharded(policy.model)
    return other


CASES = {
    "text": ("qwen2", torch.float32, False, False),
    "tied": ("llama", HALF, True, False),
    "pictures": ("qwen2_5_vl", HALF, False, True),
    "frozen": ("qwen3_vl", HALF, True, False),
}


@pytest.mark.parametrize("device", BOTH)
@pytest.mark.parametrize("case", CASES)
def test_the_same_steps(case: str, device: str, mesh: DeviceMesh) -> None:
    name, dtype, tied, recompute = CASES[case]
    plain = made(name, device, dtype, tied)
    if case == "frozen":
        freeze_vision(plain.model, plain.family)
    if recompute:
        recompute_activations(plain.model)
    policies = [plain, divided(plain, mesh)]
    optimizers = [make_optimizer("policy", x.model, 1e-3, SETTINGS) for x in policies]
    assert isinstance(optimizers[1], ShardedOptimizer)
    rollouts = responses(name, device)
    for _ in range(3):
        found = []
        for policy, optimizer in zip(policies, optimizers, strict=True):
            for rows in torch.arange(len(rollouts), device=device).split(3):  # two micro-batches
                logp, entropy = policy.score(rollouts.select(rows), 1.0, with_entropy=True)
                assert entropy is not None
                (logp.square().mean() + entropy.mean()).backward()
            found.append((logp.detach(), optimizer.step()))
        (ours, mine), (theirs, its) = found
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)
        assert mine == pytest.approx(its, rel=1e-5)
    weights = dict(plain.model.named_parameters())
    for key, x in full_weights(policies[1].model):
        assert x.dtype == dtype
        assert not isinstance(x, DTensor)
        assert torch.allclose(x.float(), weights[key].float(), rtol=1e-5, atol=1e-5), key
    originals = zip(*(x.parameters for x in optimizers), strict=True)
    assert all(torch.allclose(x, y, rtol=1e-5, atol=1e-5) for x, y in originals)


@pytest.mark.parametrize("device", BOTH)
def test_a_critic_whose_head_is_more_precise(device: str, mesh: DeviceMesh) -> None:
    policy = made("qwen2_5_vl", device, HALF)
    rollouts = responses("qwen2_5_vl", device)
    plain = Critic.from_policy(policy)
    torch.nn.init.normal_(plain.head.weight, generator=torch.Generator(device).manual_seed(0))
    other = copy.deepcopy(plain)
    shard(other, mesh, apart=[other.head])
    assert torch.allclose(plain(rollouts), other(rollouts), rtol=1e-5, atol=1e-5)
    whole = unshard(other, torch.device("cpu"))
    assert isinstance(whole, Critic)
    assert whole.head.weight.dtype == torch.float32
    assert whole.trunk.dtype == HALF
    for (name, x), y in zip(whole.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(x, y.cpu()), name


@pytest.mark.parametrize("device", ["cpu"])
def test_put_together_again_it_is_an_ordinary_model(device: str, mesh: DeviceMesh) -> None:
    plain = made("qwen2", device, HALF, tied=True)
    other = divided(plain, mesh)
    assert unshard(other.model, torch.device(device), keep=False) is None
    whole = unshard(other.model, torch.device(device))
    assert type(whole) is type(plain.model)
    assert whole.lm_head.weight is whole.model.embed_tokens.weight
    rollouts = responses("qwen2", device)
    ours = Policy(whole, plain.codec).score(rollouts, 1.0)[0]
    assert torch.equal(ours, plain.score(rollouts, 1.0)[0])
    ours.sum().backward()
    with torch.no_grad():
        for x in plain.model.parameters():
            x.zero_()
    copy_weights(other.model, plain.model)
    assert torch.equal(plain.score(rollouts, 1.0)[0], ours)


@pytest.mark.parametrize("device", ["cpu"])
def test_the_originals_of_a_new_optimizer_are_what_the_model_computes_with(
    device: str, mesh: DeviceMesh
) -> None:
    """As those of an undivided one are: the stage before may have left finer ones."""
    policy = divided(made("qwen2", device, HALF), mesh)
    with torch.no_grad():
        for x in policy.model.parameters():
            x.mul_(1.0001)
    optimizer = make_optimizer("policy", policy.model, 1e-3, SETTINGS)
    assert all(torch.equal(x, x.to(HALF).float()) for x in optimizer.parameters)


@pytest.mark.parametrize("device", ["cpu"])
def test_types_that_cannot_be_gathered_together(device: str, mesh: DeviceMesh) -> None:
    policy = made("qwen2", device, HALF)
    policy.model.model.layers[0].mlp.float()
    with pytest.raises(ValueError, match=r"Qwen2DecoderLayer mixes .* Set memory.shard=false"):
        shard(policy.model, mesh)
