"""One training step to predict: model, recipe settings, lengths and GPUs."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from segcredit.algorithms.requirements import Requirements, requirements
from segcredit.columns import (
    BASELINE,
    COLUMNS,
    ENTROPY,
    INITIAL_POLICY,
    LOGP_OLD,
    LOGP_REF,
    PARENT,
    VALUE,
    Continuations,
    ImageKL,
)
from segcredit.config import Optimize, Recipe
from segcredit.data import load_prompts
from segcredit.data.worlds import make_world
from segcredit.models.images import image_size
from segcredit.plan.model import Adapter, Shape, Tower, adapter_of
from segcredit.printable import shown
from segcredit.rollout.graphs import SMALL_MODEL
from segcredit.types import Prompt


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU; peak numbers from the vendor's data sheet, without sparsity."""

    name: str
    memory: float
    """GiB as torch reports it."""
    bfloat16: float
    """TFLOP/s of the tensor cores, accumulating in float32."""
    float32: float
    """TFLOP/s without tensor cores, torch's default for float32."""
    bandwidth: float
    """Memory bandwidth, GB/s."""
    host: float
    """Bandwidth to CPU memory, GB/s in one direction."""


PCIE4, PCIE5 = 32.0, 64.0

GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("B200", 178.0, 2250, 75.0, 8000, PCIE5),
        Gpu("H200", 139.8, 989, 67.0, 4800, PCIE5),
        Gpu("H100-80G", 79.1, 989, 67.0, 3350, PCIE5),
        Gpu("H100-PCIe", 79.1, 756, 51.0, 2000, PCIE5),
        Gpu("A100-80G", 79.1, 312, 19.5, 2039, PCIE4),
        Gpu("A100-40G", 39.4, 312, 19.5, 1555, PCIE4),
        Gpu("L40S", 44.4, 362, 91.6, 864, PCIE4),
        Gpu("L4", 22.0, 121, 30.3, 300, PCIE4),
        Gpu("A10G", 22.0, 70, 31.2, 600, PCIE4),
        Gpu("RTX-A6000", 47.4, 155, 38.7, 768, PCIE4),
        Gpu("RTX-6000-Ada", 47.4, 364, 91.1, 960, PCIE4),
        Gpu("RTX-5090", 31.4, 210, 104.8, 1792, PCIE5),
        Gpu("RTX-4090", 23.5, 165, 82.6, 1008, PCIE4),
        Gpu("RTX-3090", 23.5, 71, 35.6, 936, PCIE4),
    )
}
_KEYS = {re.sub(r"[^a-z0-9]", "", name.lower()): name for name in GPUS}
_MAX_GPUS = 1024


def parse_gpus(text: str) -> tuple[int, Gpu]:
    """Parse a count and a name: ``8xA100-80G``, or ``H200`` for one."""
    match = re.fullmatch(r"\s*(?:(\d{1,9})\s*[x×*]\s*)?(\S(?:.*\S)?)\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(
            f"--gpus: expected a count and a name, such as 8xA100-80G; got {shown(text)}."
        )
    count = int(match[1] or 1)
    if not 1 <= count <= _MAX_GPUS:
        raise ValueError(f"--gpus: expected 1 to {_MAX_GPUS} GPUs; got {count}.")
    return count, gpu_named(match[2])


def gpu_named(name: str) -> Gpu:
    """Look up a GPU by its name; case, spaces and hyphens are ignored."""
    key = re.sub(r"[^a-z0-9]", "", name.lower().replace("gb", "g"))
    if key in _KEYS:
        return GPUS[_KEYS[key]]
    raise ValueError(
        f"--gpus: unknown GPU {shown(name)}.{_nearest(key)} The GPUs are: {', '.join(GPUS)}."
    )


def _nearest(key: str) -> str:
    """Suggest GPUs whose names start or end with the key; otherwise the most similar one."""
    key = key.removeprefix("nvidia").removeprefix("geforce")
    near = [known for known in _KEYS if key and (known.startswith(key) or known.endswith(key))]
    near = near or get_close_matches(key, _KEYS, n=1, cutoff=0.4)
    names = " or ".join(_KEYS[known] for known in near)
    return f" Did you mean {names}?" if names else ""


def present_gpus() -> tuple[int, Gpu]:
    """Count and identify the GPUs of this machine."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise ValueError(
            "torch finds no GPU here; name those to plan for: --gpus 1xH200 or --gpus 8xA100-80G."
        )
    here = torch.cuda.get_device_properties(0)
    gib = here.total_memory / 2**30
    words = re.sub(r"[^a-z0-9 ]", " ", here.name.lower()).split()
    named = {gpu.name: set(gpu.name.lower().split("-")) - {"80g", "40g"} for gpu in GPUS.values()}
    matches = [
        gpu
        for gpu in GPUS.values()
        if named[gpu.name] <= set(words) and abs(gpu.memory - gib) < 0.2 * gpu.memory
    ]
    if not matches:
        raise ValueError(
            f"this machine's GPU, {shown(here.name)} with {gib:.0f} GiB, is not in the table: name "
            f"the most similar one, such as --gpus {count}xA100-80G. The GPUs are: "
            f"{', '.join(GPUS)}."
        )
    return count, max(matches, key=lambda gpu: len(named[gpu.name]))


RESPONSE_SHARE = 0.5
"""Assumed mean length of a response, as a share of max_tokens."""
PROMPT = 256
"""Assumed tokens of a prompt when the data is not available."""
LONGEST = 3.0
"""Assumed ratio of the longest prompt of a batch to the mean. The data sets have 2.0 (GSM8K), 4.2
(Geometry3K) and 6.5 (MATH500) over 256 prompts."""
IMAGE_SHARE = 0.85
"""Assumed share of image tokens in a prompt, as in Geometry3K."""
TEMPLATE = 20
"""Tokens added by a chat template."""
CHARACTERS = 4
"""Characters of text per token."""
NUM_READ = 256
"""Number of prompts read from the data."""


@dataclass(frozen=True)
class Lengths:
    """Lengths in tokens."""

    prompt: float
    """Mean prompt, images included."""
    longest: int
    """Longest prompt of a batch, to which prompts are padded while sampling."""
    images: float
    """Mean number of image tokens in a prompt."""
    response: float
    """Mean response."""
    prompt_from: str = "given"
    """Source of the prompt lengths, for the output."""
    response_from: str = "given"


def lengths_of(
    recipe: Recipe,
    tower: Tower | None,
    prompt: float | None = None,
    longest: int | None = None,
    images: float | None = None,
    response: float | None = None,
) -> Lengths:
    """Combine the given lengths with estimates from the data or assumptions."""
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
            f"assumed: {RESPONSE_SHARE:.0%} of rollout.max_tokens on average; set --mean-length "
            f"TOKENS if you know it"
        )
    estimate = None
    bound = recipe.data.max_prompt_tokens
    if prompt is not None:
        prompt_from = f"--prompt-tokens {prompt:g}"
    else:
        estimate, prompt_from = _from_data(recipe, tower)
        prompt = estimate[0] if estimate else float(PROMPT if bound is None else min(PROMPT, bound))
    assumed = []
    if longest is None:
        longest = estimate[1] if estimate else round(prompt * LONGEST)
        assumed += [] if estimate else ["the longest"]
        longest = longest if bound is None else min(longest, bound)
    if images is None:
        known = estimate[2] if estimate else prompt * IMAGE_SHARE
        images = 0.0 if tower is None else known
        assumed += [] if estimate or tower is None else ["images"]
    if tower is None and images:
        raise ValueError(
            f"--image-tokens: this model reads text only; got {images:g}. Leave the option out."
        )
    if images > prompt:
        raise ValueError(
            f"--image-tokens: image tokens are part of the prompt's {prompt:g} tokens; got "
            f"{images:g}. Give --prompt-tokens with the images included."
        )
    if assumed and prompt_from.startswith("--"):
        prompt_from += f"; assumed: {' and '.join(assumed)}"
    return Lengths(
        prompt, max(longest, round(prompt)), images, response, prompt_from, response_from
    )


def _from_data(recipe: Recipe, tower: Tower | None) -> tuple[tuple[float, int, float] | None, str]:
    """Estimate mean prompt, longest prompt and mean image tokens; describe the source."""
    data = recipe.data
    if data.world is not None:
        prompts: Sequence[Prompt] = make_world(data.world, **data.settings).prompts("train", 0, 64)
        where = f"64 prompts of {data.world}"
    elif all(Path(name).is_file() for name in data.train):
        prompts = load_prompts(
            list(data.train),
            limit=NUM_READ,
            skip_bad_rows=True,
            suffix=data.suffix,
            system=data.system,
            allow_outside=data.allow_outside,
        ).prompts
        where = f"the first {len(prompts)} prompts of the data"
    else:
        prompts, where = [], ""
    if not prompts:
        return None, "assumed, since the data is not here; set --prompt-tokens TOKENS if you know"
    template = TEMPLATE if data.template is None else len(data.template) / CHARACTERS
    both = [_estimate(prompt, tower, template) for prompt in prompts]
    each = [text + image for text, image in both]
    images = sum(image for _, image in both) / len(each)
    area = "" if tower is None else f", a token per {tower.token_pixels} pixels of images"
    how = f"estimated from {where}: a token per {CHARACTERS} characters of text{area}"
    return (sum(each) / len(each), round(max(each)), images), how


def _estimate(prompt: Prompt, tower: Tower | None, template: float) -> tuple[float, float]:
    """Estimate the text tokens of a prompt, template included, and its image tokens."""
    text = sum(len(message["content"]) for message in prompt.messages) / CHARACTERS
    if tower is None:
        return text + template, 0.0
    pixels = sum(math.prod(image_size(x)) for x in prompt.images)
    return text + template, pixels / tower.token_pixels


BLOCK = 256
"""Numbers of an 8-bit moment that share a scale (bitsandbytes)."""
SMALLEST = 4096
"""Tensors with fewer elements keep float32 moments."""


@dataclass(frozen=True)
class Job:
    """All data that a prediction depends on."""

    shape: Shape
    lengths: Lengths
    gpu: Gpu
    gpus: int = 1

    critic: bool = True
    reference: bool = True
    tracked: bool = False
    """Whether the previous and the current responses are scored after the step (single-stream
    SPO)."""
    hides_images: bool = False
    """Whether responses are scored again with hidden images (VPPO)."""
    rescored: bool = False
    """Whether log π_old comes from a separate forward pass."""
    half: bool = True
    """bfloat16; else float32."""
    packed: bool = True
    copied_keys: bool = False
    """Whether sampling copies keys and values for every query head, as it did when it was
    measured."""
    compile: bool = False
    freeze_vision: bool = False
    adapter: Adapter | None = None
    """LoRA: one frozen copy of the weights, and adapters."""
    recompute: bool = False
    offload: bool = False
    stream: bool = False
    """Whether offloaded state is streamed through the GPU in every gradient step."""
    vllm: float = 0.0
    """Share of GPU memory that vLLM uses while sampling; 0: transformers samples."""
    eight_bit: bool = False
    """8-bit optimizer moments."""
    copied: bool = False
    """Whether a copy of the policy samples on this GPU (rollout.ahead)."""

    prompts: int = 128
    samples: int = 1
    max_tokens: int = 2048
    rows: int = 256
    minibatches: int = 4
    epochs: int = 1
    tokens_per_micro: int = 16_384
    steps: int = 0
    """Optimization steps of the recipe; 0: unknown."""
    uncounted: tuple[str, ...] = ()
    """Work of this job that the prediction leaves out."""

    @property
    def bytes(self) -> int:
        """Bytes of a weight or an activation."""
        return 2 if self.half else 4

    @property
    def cached(self) -> int:
        """Bytes of the keys and values of a token, over all layers."""
        return self.shape.layers * 2 * self.bytes * self.shape.key_width

    @property
    def responses(self) -> int:
        """Responses of a step, over all GPUs."""
        return self.prompts * self.samples

    @property
    def own_responses(self) -> int:
        """Responses that one GPU samples in a step."""
        return math.ceil(self.responses / self.gpus)

    @property
    def rows_at_once(self) -> int:
        """Responses that one GPU samples at once."""
        return min(self.rows, self.own_responses)

    @property
    def prompts_at_once(self) -> int:
        """Distinct prompts among ``rows_at_once``."""
        return min(self.prompts, math.ceil(self.rows_at_once / self.samples))

    @property
    def per_minibatch(self) -> int:
        """Responses of a mini-batch, over all GPUs."""
        return math.ceil(self.responses / self.minibatches)

    @property
    def longest_row(self) -> int:
        return self.lengths.longest + self.max_tokens

    @property
    def mean_row(self) -> float:
        return self.lengths.prompt + self.lengths.response

    def micro_tokens(self, responses: int) -> float:
        """Count the tokens of the largest micro-batch if all responses reach max_tokens."""
        longest = self.lengths.prompt if self.packed else self.lengths.longest
        full = min(self.tokens_per_micro, responses * (longest + self.max_tokens))
        return max(full, self.longest_row)  # a row is never split

    def micro_rows(self, responses: int) -> float:
        """Count the responses in the largest micro-batch at mean length."""
        return min(responses, max(1.0, self.micro_tokens(responses) / self.mean_row))

    def micro_count(self, responses: int, length: float) -> int:
        """Return the number of micro-batches for responses of this length, prompts included."""
        return min(responses, max(1, math.ceil(responses * length / self.tokens_per_micro)))

    @property
    def accumulates(self) -> bool:
        """Whether a GPU accumulates gradients over several micro-batches of a mini-batch."""
        full = self.lengths.prompt + self.max_tokens
        return math.ceil(self.micro_count(self.per_minibatch, full) / self.gpus) > 1

    @property
    def policy_trained(self) -> int:
        """Trainable parameters of the policy."""
        return self.adapter.numbers if self.adapter else self.trainable(self.shape.parameters)

    @property
    def critic_trained(self) -> int:
        """Trainable parameters of the critic, value head included."""
        if self.adapter:
            return self.adapter.numbers + self.shape.hidden + 1
        return self.trainable(self.shape.critic_parameters)

    @property
    def layers_trained(self) -> int:
        """Trainable parameters in one model's text layers."""
        return self.adapter.text if self.adapter else self.shape.layer_parameters

    @property
    def tower_trained(self) -> int:
        """Trainable parameters in one model's vision tower."""
        if self.adapter:
            return self.adapter.numbers - self.adapter.text
        return 0 if self.freeze_vision else self.shape.tower_parameters

    @property
    def tower_frozen(self) -> bool:
        """Whether the vision tower needs no gradients."""
        return not self.adapter.vision if self.adapter else self.freeze_vision

    def moment(self, count: int) -> int:
        """Compute the bytes of one of the two moments of a tensor with ``count`` elements."""
        if not self.eight_bit or count < SMALLEST:
            return 4 * count
        return count + 4 * math.ceil(count / BLOCK)

    def trained_sizes(self, critic: bool) -> list[int]:
        """Return the number of elements of each trainable tensor of the policy or of its critic."""
        shape = self.shape
        if self.adapter:
            own = list(self.adapter.sizes)
        else:
            own = [count for count, vision in shape.sizes if not (vision and self.freeze_vision)]
            if critic and not shape.tied:
                own.remove(shape.embedding)  # the critic has no language-model head
        return [*own, shape.hidden, 1] if critic else own

    def trainable(self, parameters: int) -> int:
        """Return a model's trainable parameters, without LoRA."""
        return parameters - (self.shape.tower_parameters if self.freeze_vision else 0)


def job_of(recipe: Recipe, shape: Shape, lengths: Lengths, gpu: Gpu, gpus: int) -> Job:
    """Collect the effects of a recipe's settings on memory and time."""
    needed = requirements(recipe.make_algorithm())
    columns = set(needed.columns)
    half = recipe.model.dtype == "bfloat16"
    attention = recipe.model.attention
    packed = attention == "packed" or (attention == "auto" and half)
    return Job(
        shape=shape,
        lengths=lengths,
        gpu=gpu,
        gpus=gpus,
        critic=VALUE in columns,
        reference=bool(columns & {LOGP_REF, INITIAL_POLICY}),
        tracked=BASELINE in columns,
        hides_images=needed.needs(ImageKL),
        rescored=recipe.recomputes and bool(columns & {LOGP_OLD, ENTROPY}),
        half=half,
        packed=packed and shape.full_attention,
        compile=recipe.model.compile,
        freeze_vision=recipe.model.freeze_vision,
        adapter=adapter_of(recipe, shape),
        recompute=recipe.memory.recompute_activations,
        offload=bool(recipe.memory.offload_optimizer),
        stream=recipe.memory.offload_optimizer == "stream",
        vllm=recipe.rollout.vllm.memory if recipe.rollout.engine == "vllm" else 0.0,
        eight_bit=recipe.optimizer.kind == "adamw_8bit",
        copied=bool(recipe.rollout.ahead) and _shares_gpu(recipe),
        prompts=recipe.rollout.prompts,
        samples=recipe.rollout.samples,
        max_tokens=recipe.rollout.max_tokens,
        rows=recipe.rollout.rows,
        minibatches=recipe.update.minibatches,
        epochs=recipe.update.epochs,
        tokens_per_micro=recipe.update.tokens_per_micro,
        steps=sum(stage.steps for stage in recipe.stages if isinstance(stage, Optimize)),
        uncounted=tuple(_uncounted(recipe, needed, shape, gpus)),
    )


def _shares_gpu(recipe: Recipe) -> bool:
    """Whether the copy of ``rollout.device`` is on the GPU that trains, however both are named."""
    training, other = recipe.model.device, recipe.rollout.device
    first = {"auto": "cuda:0", "cuda": "cuda:0"}
    return other is None or first.get(other, other) == first.get(training, training)


def _uncounted(recipe: Recipe, needed: Requirements, shape: Shape, gpus: int) -> Iterator[str]:
    """Describe the work of this recipe that the prediction does not include."""
    if recipe.rollout.engine == "hf" and recipe.rollout.graphs and shape.parameters < SMALL_MODEL:
        yield "CUDA graphs: sampling is faster, and its KV cache stays allocated"
    if recipe.rollout.ahead:
        yield "rollout.ahead: sampling overlaps with the update, in time and in memory"
    if recipe.memory.shard and gpus > 1:
        yield "memory.shard: sharded models take less memory than counted here (not measured)"
    if recipe.model.attention == "eager":
        yield "the attention matrices of model.attention=eager (not measured)"
    if not shape.full_attention:
        yield "savings of layers without full attention, counted as full attention (not measured)"
    if continues := needed.needs(Continuations):
        limit = recipe.rollout.prefixes
        most = "" if limit is None else f", at most {limit:,} prefixes per step"
        yield f"continuations from prefixes{most}, most of what is sampled"
    if PARENT in needed.columns:
        yield "branches: a step is counted as if each prompt had one response instead of a tree"
    if needed.offline and not continues:
        yield "selection: the update is counted as if every response were used once"
    for column in needed.columns:
        if column.name not in COLUMNS or type(column) is not type(COLUMNS[column.name]):
            yield f"{column.name}: {column.description}"
