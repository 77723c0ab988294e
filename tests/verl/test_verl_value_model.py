"""The value model: the policy's trunk to the last bit, its attention, and V as at home."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from tiny_vision import make_model
from toy import make_model as make_text_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from segcredit.integrations.verl.value_head import with_value_head
from segcredit.models import Critic, Policy
from segcredit.types import Prompt, Rollouts

VISION = ("qwen2_5_vl", "qwen3_vl")


def load(folder: Path, **settings: object):
    config = AutoConfig.from_pretrained(folder)
    kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    return kind.from_pretrained(folder, **settings)


@pytest.fixture(params=["qwen2", *VISION])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param in VISION:
        return make_model(tmp_path / request.param, request.param)
    return make_text_model(tmp_path / request.param)


def test_no_weight_of_the_trunk_differs(folder: Path) -> None:
    policy, made = load(folder), with_value_head(load(folder))
    theirs = {name: x for name, x in policy.named_parameters() if not name.startswith("lm_head")}
    ours = {name: x for name, x in made.named_parameters() if not name.startswith("lm_head")}
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(x, ours[name]) for name, x in theirs.items())
    assert [x for x in made.state_dict() if x.startswith("lm_head")] == [
        "lm_head.weight",
        "lm_head.bias",
    ]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_attention_setting_is_honored(folder: Path, attention: str) -> None:
    made = with_value_head(load(folder, attn_implementation=attention))
    assert made.config.get_text_config()._attn_implementation == attention
    assert made.config._attn_implementation == attention


def test_values_are_those_of_the_native_critic(folder: Path) -> None:
    policy = Policy.from_pretrained(folder)
    vision = hasattr(policy.model.config, "vision_config")
    picture = folder / "picture.png"
    Image.new("RGB", (64, 96), (10, 120, 200)).save(picture)
    prompts = [
        Prompt("a", ({"role": "user", "content": "<image>go" if vision else "go"},),
               (picture,) if vision else ()),
        Prompt("b", ({"role": "user", "content": "what is seen?"},)),
    ]  # fmt: skip
    mask = torch.tensor([[True] * 5 + [False] * 2, [True] * 7])
    rollouts = Rollouts(
        tokens=torch.randint(0, 200, (2, 7), generator=torch.Generator().manual_seed(0)),
        mask=mask,
        logp_old=torch.zeros(2, 7),
        reward=torch.zeros(2),
        group=torch.arange(2),
        truncated=torch.zeros(2, dtype=torch.bool),
        prompts=[policy.encode(x) for x in prompts],
    )
    critic = Critic.from_policy(policy)
    made = with_value_head(load(folder))
    assert not made(input_ids=rollouts.tokens).logits.any()  # V = 0 at the start
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(0))
    torch.nn.init.constant_(critic.head.bias, 0.3)
    made.lm_head.load_state_dict(critic.head.state_dict())
    with torch.no_grad():
        expected = critic(rollouts)
        for row, prompt in enumerate(rollouts.prompts):
            ids = torch.cat([prompt.tokens, rollouts.tokens[row][mask[row]]])[None]
            kinds = (ids == getattr(policy.model.config, "image_token_id", -1)).long()
            extra = {"mm_token_type_ids": kinds, **prompt.vision} if vision else {}
            value = made(input_ids=ids, **extra).logits[0, :, 0]
            begin = len(prompt.tokens) - 1  # V before a token is read one place to its left
            found = value[begin:-1]
            assert torch.allclose(found, expected[row][mask[row]], atol=1e-5)


def test_the_head_sums_in_float32(folder: Path) -> None:
    made = with_value_head(load(folder, dtype=torch.bfloat16))
    tokens = torch.randint(0, 200, (1, 9))
    assert made(input_ids=tokens).logits.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert made(input_ids=tokens).logits.dtype == torch.float32


def test_tied_embeddings_are_untied(tmp_path: Path) -> None:
    folder = make_text_model(tmp_path / "model")
    config = AutoConfig.from_pretrained(folder, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    made = with_value_head(load(folder))
    before = made.get_input_embeddings().weight.detach().clone()
    made.tie_weights()
    assert torch.equal(made.get_input_embeddings().weight, before)
    assert made.lm_head.weight.shape == (1, 64)
    made(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert made.lm_head.weight.grad is not None
