"""LoRA on a GPU: packed rows in bfloat16, and still one model of which three do not meet."""

import pytest
import torch
from tiny_policies import encoded, engine, fresh_policy, seeded

from segcredit.models import Critic
from segcredit.models.layers import full_weights, recompute_activations, set_attention
from segcredit.types import Sampling

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


@pytest.mark.parametrize("name", ["qwen2", "qwen2_5_vl"])
def test_policy_critic_and_reference_share_a_model(name: str) -> None:
    base = fresh_policy(name)
    base.model.to(DEVICE, torch.bfloat16)
    set_attention(base.model, "packed")
    rollouts = engine(base).sample(encoded(name), Sampling(12), seeded())
    with torch.no_grad():
        before, _ = base.score(rollouts, 1.0)
    frozen = {key: x.detach().clone() for key, x in base.model.named_parameters()}
    policy = base.with_lora(4, 8.0)
    recompute_activations(policy.model, policy.lora)
    reference, critic = policy.reference(), Critic.from_policy(policy)
    torch.nn.init.normal_(critic.head.weight)
    with torch.no_grad():
        assert torch.equal(policy.score(rollouts, 1.0)[0], before)
    pair = [torch.optim.AdamW(part.trained().values(), lr=1e-2) for part in (policy, critic)]
    for _ in range(3):
        logp, value = policy.score(rollouts, 1.0)[0], critic(rollouts)
        (logp.float().sum() + value.sum()).backward()
        for optimizer in pair:
            assert any(bool(x.grad.any()) for x in optimizer.param_groups[0]["params"])
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        assert torch.equal(reference.score(rollouts, 1.0)[0], before)
        assert not torch.equal(policy.score(rollouts, 1.0)[0], before)
    for key, x in policy.model.named_parameters():
        if ".lora_" not in key:
            assert torch.equal(x, frozen[key.replace(".base_layer", "")])
    names = [key for key, x in full_weights(policy.model) if not torch.equal(x, frozen[key])]
    assert names
    assert all(key.endswith("_proj.weight") for key in names)
    again = engine(policy).sample(encoded(name), Sampling(12), seeded())
    with torch.no_grad():
        scored, _ = policy.score(again, 1.0)
    wrong = (scored - again.logp_old)[again.mask].abs().mean()
    assert float(wrong) < 0.05  # bfloat16, with a cache and without
