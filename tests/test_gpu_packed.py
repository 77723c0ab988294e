"""Packed rows on a GPU: the variable-length kernel against padding, in both precisions."""

import pytest
import torch
from tiny_policies import ARCHITECTURES, drawn, fresh_policy

from segcredit.models import Policy
from segcredit.models.layers import packs, set_attention
from segcredit.types import Encoded, Rollouts

pytestmark = pytest.mark.gpu


def moved(rollouts: Rollouts) -> Rollouts:
    assert rollouts.prompts is not None
    prompts = [Encoded(x.prompt, x.tokens, x.positions, x.vision) for x in rollouts.prompts]
    return rollouts.replace(
        tokens=rollouts.tokens.cuda(),
        mask=rollouts.mask.cuda(),
        logp_old=rollouts.logp_old.cuda(),
        prompts=prompts,
    )


def on_gpu(name: str, attention: str, dtype: torch.dtype) -> Policy:
    owner = fresh_policy(name)
    owner.model.to("cuda", dtype)
    set_attention(owner.model, attention)
    return owner


def scores(owner: Policy, rollouts: Rollouts) -> list[torch.Tensor]:
    logp, h = owner.score(rollouts, 1.0, with_entropy=True)
    assert h is not None
    (logp.sum() + h.sum()).backward()
    grads = [x.grad.flatten() for x in owner.model.parameters() if x.grad is not None]
    return [logp.detach(), h.detach(), torch.cat(grads).float()]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_float32_is_exact(name: str) -> None:
    rollouts = moved(drawn(name))
    ours = scores(on_gpu(name, "packed", torch.float32), rollouts)
    theirs = scores(on_gpu(name, "sdpa", torch.float32), rollouts)
    for a, b in zip(ours, theirs, strict=True):
        assert float((a - b).abs().max()) <= 1e-4 * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_bfloat16_is_as_near_to_float32_as_padding_is(name: str) -> None:
    rollouts = moved(drawn(name))
    exact = scores(on_gpu(name, "sdpa", torch.float32), rollouts)
    packed = on_gpu(name, "auto", torch.bfloat16)
    assert packs(packed.model)
    ours = scores(packed, rollouts)
    theirs = scores(on_gpu(name, "sdpa", torch.bfloat16), rollouts)
    for a, b, right in zip(ours, theirs, exact, strict=True):
        error, allowed = ((x - right).square().mean().sqrt() for x in (a, b))
        assert float(error) <= 1.5 * float(allowed) + 1e-3 * float(right.abs().max())
