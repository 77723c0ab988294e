"""How long prompts and responses are: as told, as the data suggests, or as assumed."""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from segcredit.config import Recipe
from segcredit.data import load_prompts
from segcredit.data.worlds import make_world
from segcredit.images import FORMATS
from segcredit.plan.shape import Tower
from segcredit.types import Prompt

RESPONSE_SHARE = 0.5
"""Of max_tokens that a response has on average, unless told otherwise."""
PROMPT = 256
"""Tokens of a prompt of which nothing is known."""
LONGEST = 3.0
"""The longest prompt of a batch to the mean one, where only the mean is known; in 256 of GSM8K
2.0, of Geometry3K 4.2, of MATH500 6.5."""
PICTURE_SHARE = 0.85
"""Of a prompt's tokens that are its picture's, where that is not known; as in Geometry3K."""
TEMPLATE = 20
"""Tokens that a chat template adds."""
CHARACTERS = 4
"""Per token of text."""
LOOKED_AT = 256
"""Prompts of the data."""


@dataclass(frozen=True)
class Lengths:
    """Tokens."""

    prompt: float
    """On average, pictures included."""
    longest: int
    """Of a batch: where rows are padded, all are as long."""
    pictures: float
    """Of a prompt's tokens, on average, those that are pictures."""
    response: float
    """On average."""
    prompt_from: str = "given"
    """Where the numbers come from, to be told."""
    response_from: str = "given"


def lengths_of(
    recipe: Recipe,
    tower: Tower | None,
    prompt: float | None = None,
    longest: int | None = None,
    pictures: float | None = None,
    response: float | None = None,
) -> Lengths:
    """What was given, and the rest from the data or assumed."""
    limit = recipe.rollout.max_tokens
    if response is not None and response > limit:
        raise ValueError(
            f"--mean-length: responses have at most rollout.max_tokens={limit} tokens; got "
            f"{response:g}."
        )
    if response is not None:
        response_from = f"--mean-length {response:g}"
    else:
        response = max(1.0, limit * RESPONSE_SHARE)
        response_from = (
            f"assumed: {RESPONSE_SHARE:.0%} of rollout.max_tokens on average; --mean-length "
            f"TOKENS if you know better"
        )
    found = None
    if prompt is not None:
        prompt_from = f"--prompt-tokens {prompt:g}"
    else:
        found, prompt_from = _from_data(recipe, tower)
        prompt = found.prompt if found else _assumed(recipe)
    guessed = []
    if longest is None:
        longest = found.longest if found else round(prompt * LONGEST)
        guessed += [] if found else ["the longest"]
        bound = recipe.data.max_prompt_tokens
        longest = longest if bound is None else min(longest, bound)
    if pictures is None:
        known = found.pictures if found else prompt * PICTURE_SHARE
        pictures = 0.0 if tower is None else known
        guessed += [] if found or tower is None else ["pictures"]
    if tower is None and pictures:
        raise ValueError(
            f"--picture-tokens: this model reads text alone; got {pictures:g}. Leave it out."
        )
    if pictures > prompt:
        raise ValueError(
            f"--picture-tokens: pictures are a part of the prompt's {prompt:g} tokens; got "
            f"{pictures:g}. Give --prompt-tokens with the pictures included."
        )
    if guessed and prompt_from.startswith("--"):
        prompt_from += f"; assumed: {' and '.join(guessed)}"
    return Lengths(
        prompt, max(longest, round(prompt)), pictures, response, prompt_from, response_from
    )


@dataclass(frozen=True)
class _Found:
    prompt: float
    longest: int
    pictures: float


def _from_data(recipe: Recipe, tower: Tower | None) -> tuple[_Found | None, str]:
    """An estimate from the prompts at hand, and how it came about."""
    data = recipe.data
    if data.world is not None:
        prompts: Sequence[Prompt] = make_world(data.world, **data.settings).prompts("train", 0, 64)
        where = f"64 prompts of {data.world}"
    elif all(Path(name).is_file() for name in data.train):
        prompts = load_prompts(
            list(data.train),
            limit=LOOKED_AT,
            skip_bad_rows=True,
            suffix=data.suffix,
            allow_outside=data.allow_outside,
        ).prompts
        where = f"the first {len(prompts)} prompts of the data"
    else:
        prompts, where = [], ""
    if not prompts:
        return None, "assumed, since the data is not here; --prompt-tokens TOKENS if you know"
    around = TEMPLATE if data.template is None else len(data.template) / CHARACTERS
    both = [_estimate(prompt, tower, around) for prompt in prompts]
    each = [text + picture for text, picture in both]
    mean = sum(each) / len(each)
    pictures = sum(picture for _, picture in both) / len(each)
    area = "" if tower is None else f", a token per {tower.token_pixels} pixels of pictures"
    how = f"estimated from {where}: a token per {CHARACTERS} characters of text{area}"
    return _Found(mean, round(max(each)), pictures), how


def _estimate(prompt: Prompt, tower: Tower | None, around: float) -> tuple[float, float]:
    """Tokens of a prompt's text with what stands around it, and of its pictures."""
    text = sum(len(message["content"]) for message in prompt.messages) / CHARACTERS
    if tower is None:
        return text + around, 0.0
    return text + around, sum(_area(x) for x in prompt.images) / tower.token_pixels


def _area(picture: bytes | Path) -> int:
    """In pixels; only the file's head is read."""
    from PIL import Image

    source = BytesIO(picture) if isinstance(picture, bytes) else picture
    with Image.open(source, formats=FORMATS) as image:
        return image.width * image.height


def _assumed(recipe: Recipe) -> float:
    bound = recipe.data.max_prompt_tokens
    return float(PROMPT if bound is None else min(PROMPT, bound))
