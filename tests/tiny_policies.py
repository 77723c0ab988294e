"""Tiny policies of every architecture, with prompts of very different lengths."""

import io
from functools import lru_cache

import torch
from PIL import Image
from torch import Tensor

from segcredit.data.worlds import World, make_world
from segcredit.models import TINY, Policy
from segcredit.rollout import HFEngine
from segcredit.types import Encoded, Prompt, Rollouts, Sampling

ARCHITECTURES = tuple(TINY)
VISION = tuple(name for name in TINY if name.endswith("_vl"))
TEXT = tuple(name for name in TINY if not name.endswith("_vl"))


@lru_cache
def world(name: str) -> World:
    """Shapes for vision-language models, variables for the others."""
    return make_world("shape_grid" if name in VISION else "derived_variables")


@lru_cache
def policy(name: str) -> Policy:
    """Shared by all tests: never write to it."""
    return fresh_policy(name)


def fresh_policy(name: str, seed: int = 0) -> Policy:
    """One's own, with attention and a head far from uniform: mistakes in positions show."""
    made = Policy.tiny(name, world(name).tokenizer(), seed=seed, hidden=32, heads=4)
    with torch.no_grad():
        for key, x in made.model.named_parameters():
            if "q_proj" in key or "k_proj" in key:
                x *= 3.0
            elif "lm_head" in key:
                x *= 2.0
            elif "bias" in key:  # zero at birth
                x += 0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(7))
    ends = [made.codec.tokenizer.eos_token_id, *range(20, 26)]  # so that many responses end
    made.model.generation_config.eos_token_id = ends
    return made


def changed_head(name: str, change: Tensor) -> Policy:
    """A policy to whose logits something is added."""
    made = fresh_policy(name)
    made.model.get_output_embeddings().register_forward_hook(lambda _, __, out: out + change)
    return made


def picture(width: int, height: int, seed: int = 0) -> bytes:
    """Noise, smooth enough that resizing keeps something of it."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, 256, (height // 4 + 1, width // 4 + 1, 3), generator=generator)
    image = Image.fromarray(noise.to(torch.uint8).numpy()).resize((width, height))
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def ask(text: str, *images: bytes, id: str = "asked") -> Prompt:
    return Prompt(id=id, messages=({"role": "user", "content": text},), images=images)


def vision_prompts() -> list[Prompt]:
    """No image, one, several of different sizes; text before, between, behind, or nowhere."""
    return [
        ask("list ?"),
        ask("count <image>red circle plus <image><image> blue square ?", *pictures(3)),
        ask("<image>list ?", picture(56, 112)),
        ask("twice red circle ?<image>", picture(140, 28, seed=5)),
        ask("<image>", picture(100, 71, seed=6)),
        ask("count " + "red circle plus " * 24 + "<image>blue square ?<image>", *pictures(2)),
        world(VISION[0]).prompt("train", 0),
    ]


def pictures(count: int) -> list[bytes]:
    sizes = [(84, 56), (28, 84), (112, 112)]
    return [picture(*size, seed=n) for n, size in enumerate(sizes[:count])]


def text_prompts() -> list[Prompt]:
    long = world(TEXT[0]).prompts("train", 0, 3)
    return [ask("a ?"), long[0], ask("a = 5 ; b = 9 ; x = a + b ; x ?"), long[1], ask("?"), long[2]]


@lru_cache
def encoded(name: str) -> list[Encoded]:
    """Prompts of 7 to 120 tokens."""
    prompts = vision_prompts() if name in VISION else text_prompts()
    return [policy(name).encode(prompt) for prompt in prompts]


def engine(drawn_from: Policy, rows: int = 256) -> HFEngine:
    return HFEngine(drawn_from.model, drawn_from.end_tokens, drawn_from.banned, rows)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@lru_cache
def drawn(name: str, temperature: float = 1.0, max_tokens: int = 20, seed: int = 0) -> Rollouts:
    """A response to each of the prompts, from the shared policy: never write to it, either."""
    sampling = Sampling(max_tokens, temperature)
    return engine(policy(name)).sample(encoded(name), sampling, seeded(seed))


def some_rollouts(lengths: list[int], prompts: list[Encoded]) -> Rollouts:
    """Responses of these lengths; nothing but their lengths and prompts means anything."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    zeros = torch.zeros(mask.shape)
    return Rollouts(
        tokens=zeros.long(),
        mask=mask,
        logp_old=zeros,
        reward=zeros[:, 0],
        group=torch.arange(len(mask)),
        truncated=zeros[:, 0].bool(),
        prompts=prompts,
    )
