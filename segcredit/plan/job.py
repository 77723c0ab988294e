"""One training step to be predicted: a model, a recipe's settings, lengths, and GPUs."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from segcredit.algorithms.asks import (
    continues,
    grows_trees,
    is_offline,
    rescored,
    wants_first_weights,
)
from segcredit.config import Optimize, Recipe
from segcredit.data import load_prompts
from segcredit.data.worlds import make_world
from segcredit.models.images import FORMATS
from segcredit.plan.gpus import Gpu
from segcredit.plan.model import Adapter, Shape, Tower, adapter_of
from segcredit.rollout.fixed import SMALL_MODEL
from segcredit.types import Algorithm, Prompt

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


BLOCK = 256
"""Numbers of a moment that share a scale, where moments take eight bits (bitsandbytes)."""
SMALLEST = 4096
"""Moments of tensors of fewer numbers stay in float32 even so."""


@dataclass(frozen=True)
class Job:
    """Everything the prediction depends on."""

    shape: Shape
    lengths: Lengths
    gpu: Gpu
    gpus: int = 1

    critic: bool = True
    reference: bool = True
    tracked: bool = False
    """Whether each prompt's previous and current response are scored after the step
    (single-stream SPO)."""
    rescored: bool = False
    """Whether log π_old comes from a forward pass of its own."""
    half: bool = True
    """bfloat16; else float32."""
    packed: bool = True
    eager: bool = False
    """Attention that writes its matrix down."""
    copied_keys: bool = False
    """Whether sampling copies keys and values for every query head, as it did when its times were
    measured."""
    compile: bool = False
    freeze_vision: bool = False
    adapter: Adapter | None = None
    """LoRA: the weights are frozen, and there is one copy of them."""
    recompute: bool = False
    offload: bool = False
    stream: bool = False
    """Whether what rests comes back a part at a time, in every gradient step."""
    vllm: float = 0.0
    """Share of the GPU that vLLM fills while it samples; 0: transformers sample."""
    eight_bit: bool = False
    """Whether moments take eight bits each."""
    shard: bool = False

    prompts: int = 128
    samples: int = 1
    max_tokens: int = 2048
    rows: int = 256
    minibatches: int = 4
    epochs: int = 1
    tokens_per_micro: int = 16_384
    steps: int = 0
    """Of the recipe's reinforcement learning; 0: not asked."""
    uncounted: tuple[str, ...] = ()
    """What the method does beyond drawing responses and learning once from each."""

    @property
    def bytes(self) -> int:
        """Of a weight or an activation."""
        return 2 if self.half else 4

    @property
    def shards(self) -> bool:
        """Whether models and optimizers are divided; one GPU has all parts."""
        return self.shard and self.gpus > 1

    @property
    def shares(self) -> int:
        """GPUs that one weight is divided among."""
        return self.gpus if self.shards else 1

    @property
    def responses(self) -> int:
        """Of a step, all GPUs together."""
        return self.prompts * self.samples

    @property
    def own_responses(self) -> int:
        """That one GPU draws."""
        return math.ceil(self.responses / self.gpus)

    @property
    def rows_at_once(self) -> int:
        """Responses that one GPU draws at once."""
        return min(self.rows, self.own_responses)

    @property
    def prompts_at_once(self) -> int:
        """Distinct prompts among them."""
        return min(self.prompts, math.ceil(self.rows_at_once / self.samples))

    @property
    def per_minibatch(self) -> int:
        """Responses of a mini-batch, all GPUs together."""
        return math.ceil(self.responses / self.minibatches)

    @property
    def longest_row(self) -> int:
        return self.lengths.longest + self.max_tokens

    @property
    def mean_row(self) -> float:
        return self.lengths.prompt + self.lengths.response

    def micro_tokens(self, responses: int) -> float:
        """Of the fullest micro-batch when so many responses grow to their limit."""
        longest = self.lengths.prompt if self.packed else self.lengths.longest
        full = min(self.tokens_per_micro, responses * (longest + self.max_tokens))
        return max(full, self.longest_row)  # a row is never divided

    def micro_rows(self, responses: int) -> float:
        """Responses in it: the more, the shorter they are."""
        return min(responses, max(1.0, self.micro_tokens(responses) / self.mean_row))

    def micro_count(self, responses: int, length: float) -> int:
        """Micro-batches of so many responses of this length, prompts included."""
        return min(responses, max(1, math.ceil(responses * length / self.tokens_per_micro)))

    @property
    def adds_up(self) -> bool:
        """Whether a GPU's mini-batch may take several micro-batches: then gradients wait."""
        full = self.lengths.prompt + self.max_tokens
        return math.ceil(self.micro_count(self.per_minibatch, full) / self.gpus) > 1

    @property
    def policy_trained(self) -> int:
        """The policy's parameters that have gradients."""
        return self.adapter.numbers if self.adapter else self.trainable(self.shape.parameters)

    @property
    def critic_trained(self) -> int:
        """The critic's: its value head among them."""
        if self.adapter:
            return self.adapter.numbers + self.shape.hidden + 1
        return self.trainable(self.shape.critic_parameters)

    @property
    def layers_trained(self) -> int:
        """Those of one model's text layers."""
        return self.adapter.text if self.adapter else self.shape.layer_parameters

    @property
    def tower_trained(self) -> int:
        """Those of its vision tower."""
        if self.adapter:
            return self.adapter.numbers - self.adapter.text
        return 0 if self.freeze_vision or not self.shape.tower else self.shape.tower.parameters

    @property
    def tower_rests(self) -> bool:
        """Whether the vision tower's states need no gradients."""
        return not self.adapter.vision if self.adapter else self.freeze_vision

    def moment(self, count: int) -> int:
        """Bytes of one of the two moments of a tensor of so many numbers."""
        if not self.eight_bit or count < SMALLEST:
            return 4 * count
        return count + 4 * math.ceil(count / BLOCK)

    def trained_sizes(self, critic: bool) -> list[int]:
        """Numbers of each tensor that has gradients, of the policy or of its critic."""
        shape = self.shape
        if self.adapter:
            own = list(self.adapter.sizes)
        else:
            own = [count for count, vision in shape.sizes if not (vision and self.freeze_vision)]
            if critic and not shape.tied:
                own.remove(shape.embedding)  # the head stays behind
        return [*own, shape.hidden, 1] if critic else own

    def trainable(self, parameters: int) -> int:
        """Of so many weights those that have gradients, where all are trained."""
        tower = self.shape.tower
        return parameters - (tower.parameters if tower and self.freeze_vision else 0)


def job_of(recipe: Recipe, shape: Shape, lengths: Lengths, gpu: Gpu, gpus: int) -> Job:
    """What the recipe's settings mean for memory and time."""
    algorithm = recipe.make_algorithm()
    needs = algorithm.needs
    half = recipe.model.dtype == "bfloat16"
    attention = recipe.model.attention
    wanted = attention == "packed" or (attention == "auto" and half)
    return Job(
        shape=shape,
        lengths=lengths,
        gpu=gpu,
        gpus=gpus,
        critic="value" in needs,
        reference=wants_first_weights(algorithm),
        tracked="baseline" in needs,
        rescored=recipe.recomputes and rescored(algorithm),
        half=half,
        packed=wanted and shape.full_attention,
        eager=attention == "eager",
        compile=recipe.model.compile,
        freeze_vision=recipe.model.freeze_vision,
        adapter=adapter_of(recipe, shape),
        recompute=recipe.memory.recompute_activations,
        offload=bool(recipe.memory.offload_optimizer),
        stream=recipe.memory.offload_optimizer == "stream",
        vllm=recipe.rollout.vllm.memory if recipe.rollout.engine == "vllm" else 0.0,
        eight_bit=recipe.optimizer.kind == "adamw_8bit",
        shard=recipe.memory.shard,
        prompts=recipe.rollout.prompts,
        samples=recipe.rollout.samples,
        max_tokens=recipe.rollout.max_tokens,
        rows=recipe.rollout.rows,
        minibatches=recipe.update.minibatches,
        epochs=recipe.update.epochs,
        tokens_per_micro=recipe.update.tokens_per_micro,
        steps=sum(stage.steps for stage in recipe.stages if isinstance(stage, Optimize)),
        uncounted=tuple(_uncounted(recipe, algorithm, shape)),
    )


def _uncounted(recipe: Recipe, algorithm: Algorithm, shape: Shape) -> Iterator[str]:
    if recipe.rollout.engine == "hf" and recipe.rollout.graphs and shape.parameters < SMALL_MODEL:
        yield "CUDA graphs: sampling is faster, and its keys and values keep their memory"
    if continues(algorithm):
        limit = recipe.rollout.prefixes
        most = "" if limit is None else f", at most {limit:,} beginnings a step"
        yield f"continuations of begun responses{most}, most of what is drawn"
    if grows_trees(algorithm):
        yield "branches: a step is counted as if each prompt had one response, not a tree of them"
    if is_offline(algorithm) and not continues(algorithm):
        yield "selection: the update is counted as if every response were learned from once"
