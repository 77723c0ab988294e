"""Norms by torch's kernel say what the written-out ones say."""

import copy

import pytest
import torch
from tiny_policies import ARCHITECTURES, fresh_policy, world
from torch import nn
from torch._dynamo.utils import counters
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from segcredit.models import Policy
from segcredit.models.layers import compile_layers, fuse_norms


def norms_of(model: nn.Module) -> list[nn.Module]:
    return [x for x in model.modules() if type(x).__name__.endswith("RMSNorm")]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_all_norms_of_a_model_are_replaced_once(name: str) -> None:
    model = fresh_policy(name).model
    found = norms_of(model)
    kept = {key: x.clone() for key, x in model.state_dict().items()}
    assert fuse_norms(model) == len(found) > 0
    assert fuse_norms(model) == 0
    assert all(torch.equal(x, kept[key]) for key, x in model.state_dict().items())


def test_values_and_gradients_are_the_same() -> None:
    torch.manual_seed(0)
    norm = Qwen2RMSNorm(24, eps=1e-5)
    nn.init.normal_(norm.weight)
    found = []
    given = torch.randn(3, 5, 24)
    for fused in (False, True):
        if fused:
            assert fuse_norms(nn.Sequential(norm)) == 1
        x = given.clone().requires_grad_()
        norm.weight.grad = None
        said = norm(x)
        (said * torch.arange(24)).sum().backward()
        found.append((said, x.grad, norm.weight.grad))
    for plain, fused in zip(*found, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-4)


def test_a_copy_has_its_own_weight() -> None:
    norm = nn.Sequential(Qwen2RMSNorm(8))
    fuse_norms(norm)
    other = copy.deepcopy(norm)
    nn.init.constant_(other[0].weight, 3.0)
    x = torch.randn(2, 8)
    torch.testing.assert_close(other(x), 3.0 * norm(x))


def test_a_weight_that_was_replaced_is_used() -> None:
    norm = Qwen2RMSNorm(8)
    fuse_norms(norm)
    before = norm(torch.ones(1, 8))
    norm.weight = nn.Parameter(torch.full((8,), 2.0))
    torch.testing.assert_close(norm(torch.ones(1, 8)), 2.0 * before)


def test_half_precision_is_as_good_as_written_out() -> None:
    torch.manual_seed(1)
    norm = Qwen2RMSNorm(64)
    nn.init.normal_(norm.weight)
    x = torch.randn(200, 64)
    exact = norm(x)
    norm, x = norm.bfloat16(), x.bfloat16()
    plain = norm(x)
    fuse_norms(norm)
    off = [float((said.float() - exact).detach().abs().mean()) for said in (plain, norm(x))]
    assert off[1] < 1.05 * off[0] < 0.01


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_equal_layers_are_still_compiled_once() -> None:
    graphs = []
    for fused in (False, True):
        torch._dynamo.reset()
        counters.clear()
        tokenizer = world("qwen2").tokenizer()
        model = Policy.tiny("qwen2", tokenizer, hidden=32, heads=4, layers=10).model
        assert not fused or fuse_norms(model) == 21
        compile_layers(model, backend="eager")
        with torch.no_grad():
            model(torch.arange(6)[None], use_cache=False)
        graphs.append(counters["stats"]["unique_graphs"])
    torch._dynamo.reset()
    assert graphs[0] == graphs[1] < 5


def test_mixed_precision_is_left_to_the_model() -> None:
    norm = Qwen2RMSNorm(8).bfloat16()
    plain = norm(torch.ones(1, 8))
    fuse_norms(norm)
    assert norm(torch.ones(1, 8)).dtype == plain.dtype


def test_other_norms_of_that_name_are_left_alone() -> None:
    gemma = GemmaRMSNorm(8)
    gemma.variance_epsilon = gemma.eps  # even if it had all the parts
    assert fuse_norms(nn.Sequential(gemma, nn.LayerNorm(8))) == 0
    assert type(gemma) is GemmaRMSNorm
