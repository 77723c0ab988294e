"""FastVLM of pretrained parts (ResNet-50, SmolLM2) through the general path.

Set SEGCREDIT_REAL_MODELS to a folder that holds smollm2-resnet50-vlm.
"""

import os
from pathlib import Path

import pytest
import torch
from test_models_families import reference, sample
from tiny_policies import ask, picture
from transformers import AutoModelForImageTextToText

from segcredit.models import Critic, Policy
from segcredit.models.critic import verify_equal
from segcredit.models.families import GeneralVision

FOLDER = Path(os.environ.get("SEGCREDIT_REAL_MODELS", "")) / "smollm2-resnet50-vlm"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (FOLDER / "config.json").is_file(),
        reason="SEGCREDIT_REAL_MODELS names no folder with smollm2-resnet50-vlm",
    ),
    pytest.mark.filterwarnings("ignore:no model family here describes"),
]
PROMPTS = [
    ask("What is 2 + 2?"),
    ask("<image>Describe the picture.", picture(300, 200)),
    ask("Compare <image> with <image>", picture(84, 84, seed=1), picture(448, 448, seed=2)),
]


def test_log_probs_and_critic_of_pretrained_parts() -> None:
    policy = Policy.from_pretrained(FOLDER)
    assert isinstance(policy.family, GeneralVision)
    assert [x.tokens.eq(5).sum().item() for x in map(policy.encode, PROMPTS)] == [0, 196, 392]
    assert [policy.codec.count_tokens(x) for x in PROMPTS] == [
        len(policy.encode(x).tokens) for x in PROMPTS
    ]
    text = policy.codec.render(PROMPTS[1])
    assert "<file_sep>Describe the picture." in text, "SmolLM2's template reads strings"
    rollouts = sample(policy, PROMPTS, 8)
    assert rollouts.prompts is not None
    assert not rollouts.tokens[rollouts.mask].eq(5).any()
    with torch.no_grad():
        logp, _ = policy.score(rollouts, 1.0)
    assert float((logp - rollouts.logp_old).abs().max()) < 1e-4
    stock = AutoModelForImageTextToText.from_pretrained(FOLDER, dtype=torch.float32).eval()
    for row, prompt in enumerate(rollouts.prompts):
        written = rollouts.mask[row]
        expected = reference(stock, policy, prompt, rollouts.tokens[row][written])
        assert float((logp[row][written] - expected).abs().max()) < 1e-4
    critic = Critic.from_policy(policy)
    verify_equal(policy.family.trunk(policy.model), critic.trunk)
