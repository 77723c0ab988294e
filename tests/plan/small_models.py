"""Small models built for real, batches for them, and the same as jobs to predict."""

import copy
from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from segcredit.data.worlds import make_world
from segcredit.models import Codec, Policy, tiny_config
from segcredit.models.layers import recompute_activations, set_attention
from segcredit.plan import GPUS, Job, Lengths, Shape, Tower, shape_of
from segcredit.types import Prompt, Rollouts

WRITTEN = 96


def small_config(name: str, **text: Any) -> PreTrainedConfig:
    """A tiny architecture with a deeper tower, and what else is asked for."""
    world = make_world("shape_grid" if name.endswith("_vl") else "derived_variables")
    config = tiny_config(name, world.tokenizer(), hidden=64, layers=4, heads=4)
    inner = config.get_text_config()
    inner.intermediate_size = 256
    inner.layer_types = ["full_attention"] * 4
    for key, value in text.items():
        setattr(inner, key, value)
        if key == "tie_word_embeddings":
            setattr(config, key, value)
    if name.endswith("_vl"):
        config.vision_config.depth = 4
    return config


def built(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> Any:
    """With random weights."""
    vision = getattr(config, "vision_config", None) is not None
    kind = AutoModelForImageTextToText if vision else AutoModelForCausalLM
    torch.manual_seed(0)
    return kind.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def small_policy(
    name: str, half: bool, recompute: bool, packed: bool = True, **text: Any
) -> Policy:
    config = small_config(name, **text)
    world = make_world("shape_grid" if name.endswith("_vl") else "derived_variables")
    model = built(config, torch.bfloat16 if half else torch.float32)
    set_attention(model, "packed" if packed else "sdpa")
    if recompute:
        recompute_activations(model)
    return Policy(model, Codec.for_tiny(world.tokenizer(), config))


def batch_for(policy: Policy, name: str, rows: int = 12) -> Rollouts:
    """Prompts with a picture each, where the model sees; responses of equal length."""
    world = make_world("shape_grid" if name.endswith("_vl") else "derived_variables")
    prompts: list[Prompt] = world.prompts("train", 0, rows)
    encoded = [policy.encode(prompt) for prompt in prompts]
    shape = (rows, WRITTEN)
    tokens = torch.randint(10, 20, shape, generator=torch.Generator().manual_seed(0))
    return Rollouts(
        tokens=tokens,
        mask=torch.ones(shape, dtype=torch.bool),
        logp_old=torch.zeros(shape),
        reward=torch.zeros(rows),
        group=torch.arange(rows),
        truncated=torch.zeros(rows, dtype=torch.bool),
        prompts=encoded,
    )


def job_for(policy: Policy, rollouts: Rollouts, **settings: Any) -> Job:
    """That batch as one micro-batch."""
    shape = shape_of(copy.deepcopy(policy.model.config))
    assert rollouts.prompts is not None
    asked = [len(x.tokens) for x in rollouts.prompts]
    patches = sum(len(x.vision["pixel_values"]) for x in rollouts.prompts if x.vision)
    merge = shape.tower.merge if shape.tower else 1
    rows = len(rollouts)
    lengths = Lengths(sum(asked) / rows, max(asked), patches / merge / rows, WRITTEN)
    given: dict[str, Any] = {"minibatches": 1, "tokens_per_micro": 10**9, "prompts": rows}
    return Job(shape, lengths, GPUS["H200"], max_tokens=WRITTEN, **(given | settings))


@cache
def large_shape(tower: bool = True) -> Shape:
    """About Qwen2.5-VL-3B, by numbers alone."""
    seeing = Tower(
        parameters=668_684_288,
        depth=32,
        hidden=1280,
        intermediate=3420,
        head_width=80,
        pixels=1176,
        merge=4,
        patch_side=14,
        patch_weights=631_470_080,
        token_weights=36_700_160,
    )
    return Shape(
        kind="Large",
        parameters=3_754_622_976,
        trunk_parameters=3_754_622_976,
        layer_parameters=2_774_771_712,
        layer_weights=2_774_532_096,
        layers=36,
        hidden=2048,
        intermediate=11_008,
        heads=16,
        key_heads=2,
        head_width=128,
        vocabulary=151_936,
        tied=True,
        head_norms=False,
        full_attention=True,
        tower=seeing if tower else None,
        sizes=((311_164_928, False), (2_774_773_760, False), (668_684_288, True)),
    )
