"""The policy: a causal language model or vision-language model of transformers, with its codec."""

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from segcredit.core.logits import head_logp_and_entropy, token_logp_and_entropy
from segcredit.models.codec import Codec
from segcredit.models.families import (
    TOKEN_TYPES,
    Family,
    GeneralVision,
    VisionFamily,
    find_family,
    tiny_config,
)
from segcredit.models.inputs import (
    distinct,
    full_inputs,
    packed_inputs,
    prompt_inputs,
    response_inputs,
)
from segcredit.models.layers import (
    full_attention,
    is_sharded,
    packs,
    recomputes,
    recomputing,
    run_inside,
    set_attention,
    trained_weights,
)
from segcredit.models.loading import (
    load_codec,
    load_config,
    load_model,
    without_progress_bars,
)
from segcredit.models.lora import POLICY, REFERENCE, Lora, merge_adapter
from segcredit.types import Encoded, Prompt, Rollouts


def response_outputs(
    model: nn.Module, rollouts: Rollouts, head: bool, family: Family | None = None
) -> Float[Tensor, "N _"]:
    """Compute the model's outputs before each of the N tokens on the mask, row by row.

    Args:
        model: A whole model or its trunk.
        head: Return logits; if False, the trunk's last hidden states.
        family: None: by the model's configuration.
    """
    prompts = rollouts.prompts
    if prompts is None:
        raise ValueError("scoring needs the rollouts' 'prompts'; got none. Pass Encoded prompts.")
    family = find_family(model.config) if family is None else family
    if not is_sharded(model):
        return _outputs(model, rollouts, prompts, head, family, share_prompts=True)
    # a sharded forward pass is a collective operation: every rank must run the same layers, so
    # each runs a single pass, and the vision tower even if its own rows have no images
    with recomputing(model):
        blank = 0.0 if any(x.vision for x in prompts) else family.blank_image_sum(model) * 0.0
    return _outputs(model, rollouts, prompts, head, family, share_prompts=False) + blank


def _outputs(
    model: nn.Module,
    rollouts: Rollouts,
    prompts: Sequence[Encoded],
    head: bool,
    family: Family,
    share_prompts: bool,
) -> Tensor:
    place = torch.arange(1, rollouts.mask.shape[1] + 1, device=rollouts.mask.device)
    width = int((rollouts.mask * place).max())  # the only device synchronization
    tokens, mask = rollouts.tokens[:, :width], rollouts.mask[:, :width]
    if packs(model, family):
        packed = packed_inputs(prompts, tokens, mask)
        with recomputing(model):
            outputs = model(**packed.arguments(), use_cache=False)
        return (outputs.logits if head else outputs.last_hidden_state)[0, packed.before]
    few, which = distinct(prompts)
    # with full attention, a response depends on its prompt only through keys and values
    shared = share_prompts and len(few) < len(prompts)
    if shared and full_attention(model.config) and not recomputes(model):
        return _prompts_once(model, few, which.to(tokens.device), tokens, mask, head)[mask]
    inputs = full_inputs(prompts, tokens, mask)
    # the state before response token t is one place to its left: of the last T'+1, all but one
    extra = {"logits_to_keep": width + 1} if head else {}
    with recomputing(model):
        outputs = model(**inputs.arguments(), use_cache=False, **extra)
    states = outputs.logits if head else outputs.last_hidden_state[:, -(width + 1) :]
    return states[:, :-1][mask]


def spread(x: Float[Tensor, " N"], rollouts: Rollouts) -> Float[Tensor, "B T"]:
    """Scatter one number per token on the mask back to the tokens' positions; 0 elsewhere."""
    empty = torch.zeros(rollouts.mask.shape, dtype=x.dtype, device=x.device)
    return empty.masked_scatter(rollouts.mask, x)


def _prompts_once(
    model: nn.Module,
    few: Sequence[Encoded],
    which: Tensor,
    tokens: Tensor,
    mask: Tensor,
    head: bool,
) -> Tensor:
    """Process each distinct prompt once, then all responses with its KV cache.

    Gradients flow back through the keys and values, so the results are the same.
    """
    asked = prompt_inputs(few, tokens.device)
    cache = DynamicCache(config=model.config)
    extra = {"logits_to_keep": 1} if head else {}
    outputs = model(**asked.arguments(), past_key_values=cache, use_cache=True, **extra)
    before_first = (outputs.logits if head else outputs.last_hidden_state[:, -1:])[which]
    cache.batch_select_indices(which)
    answered = response_inputs(asked.select(which), tokens, mask)
    outputs = model(**answered.arguments(), past_key_values=cache, use_cache=True)
    rest = outputs.logits if head else outputs.last_hidden_state
    return torch.cat([before_first, rest[:, :-1]], dim=1)


CHECKED_TOKENS = 8
"""Tokens of a response by which a model without a family is checked."""
CACHED_POSITIONS = 1024
"""Maximum number of cached position-id layouts: 25 MB at a thousand tokens each."""


@dataclass(frozen=True, eq=False)
class Policy:
    """A language model and the codec that makes its inputs from text and images."""

    model: PreTrainedModel
    codec: Codec
    lora: Lora | None = None
    """The model's adapters, if these are trained instead of its weights."""
    adapter: str | None = POLICY
    """Adapter that this policy uses; None: the base model."""

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        dtype: torch.dtype = torch.float32,
        trust_remote_code: bool = False,
        template: str | None = None,
        family: str | None = None,
    ) -> "Policy":
        """Load a policy from a folder or hub id.

        Args:
            template: Text with ``{question}`` that replaces the chat template.
            family: Model family, by name or ``file.py:Name``; None: by the model's type.
        """
        place, config = load_config(source, trust_remote_code, family)
        codec = load_codec(place, config, trust_remote_code, template, family)
        model = load_model(place, config, dtype, trust_remote_code, codec.family)
        set_attention(model, "auto")
        return cls(model.eval(), codec)

    @classmethod
    def tiny(
        cls,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        seed: int = 0,
        family: str | None = None,
        **sizes: int | None,
    ) -> "Policy":
        """Make a small model of a real architecture with random weights."""
        config = tiny_config(name, tokenizer, family=family, **sizes)  # type: ignore[arg-type]
        codec = Codec.for_tiny(tokenizer, config, find_family(config, family))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = codec.family.auto_class.from_config(
                config, dtype=torch.float32, attn_implementation="sdpa"
            )
        set_attention(model, "auto")
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.generation_config.pad_token_id = tokenizer.pad_token_id
        return cls(model.eval(), codec)

    @property
    def family(self) -> Family:
        """The model's family."""
        return self.codec.family

    def save(self, folder: Path) -> None:
        """Save as a plain Hugging Face folder, with adapters merged into the weights."""
        whole = None
        if self.lora is not None:
            named = merge_adapter(self.model, self.model.state_dict().items())
            whole = {name: x.cpu() for name, x in named}
        with without_progress_bars():
            self.model.save_pretrained(folder, state_dict=whole)
        self.codec.save(folder)

    def save_without_weights(self, folder: Path) -> None:
        """Save configuration, tokenizer and processor, for engines that get the weights later."""
        config = type(self.model.config).from_dict(self.model.config.to_dict())
        config.architectures = [type(self.model).__name__]
        config.save_pretrained(folder)
        self.codec.save(folder)

    def with_lora(self, rank: int, alpha: float, **settings: Any) -> "Policy":
        """Return the same model, frozen, with a trainable LoRA adapter."""
        return replace(self, lora=Lora(self.model, self.family, rank, alpha, **settings))

    def active(self) -> AbstractContextManager[None]:
        """Return a context in which the model uses the policy's adapter; no effect without LoRA."""
        return nullcontext() if self.lora is None else self.lora.use(self.adapter)

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters, by names that do not change between runs."""
        return trained_weights(self.model) if self.lora is None else self.lora.named(POLICY)

    def reference(self, copied: bool = False) -> "Policy":
        """Return π_ref: the policy as it is now, without gradients.

        With LoRA this needs no second model: π_ref is the base model or, if the policy's adapter
        was trained already, a copy of that adapter. ``copied`` always makes a copy, for a method
        that resets the policy to it.
        """
        if self.lora is None:
            model = copy.deepcopy(self.model).eval()
            return Policy(model.requires_grad_(False), self.codec)
        if self.lora.is_zero(POLICY) and not copied:
            return replace(self, adapter=None)
        self.lora.add_copy(REFERENCE)
        return replace(self, adapter=REFERENCE)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def packs(self) -> bool:
        """Whether rows are packed end to end, without padding."""
        return packs(self.model, self.family)

    @cached_property
    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that end a response; the generation config may name several."""
        configured = getattr(self.model.generation_config, "eos_token_id", None)
        if configured is None:
            configured = self.codec.tokenizer.eos_token_id
        if configured is None:
            raise ValueError(
                "the model names no end-of-sequence token, neither in generation_config.json nor "
                "in its tokenizer, so no response could ever end. Set eos_token_id in one of them."
            )
        return tuple(configured) if isinstance(configured, list | tuple) else (int(configured),)

    @cached_property
    def banned(self) -> Bool[Tensor, " V"] | None:
        """Tokens of probability zero: prompt-only tokens, and rows of the head without a token."""
        width = self.family.head(self.model).weight.shape[0]
        # by id, since a vocabulary may have gaps: its size does not determine its largest id
        known = set(self.codec.tokenizer.get_vocab().values()) - set(self.codec.banned)
        banned = torch.tensor([token not in known for token in range(width)])
        return banned.to(self.device) if bool(banned.any()) else None

    def encode(self, prompt: Prompt, cache: bool = True) -> Encoded:
        """Encode a prompt, with its rotary positions; small images are kept if ``cache``."""
        tokens, images = self.codec.encode(prompt, self.device, cache)
        types = {name: images.pop(name)[0] for name in TOKEN_TYPES if name in images}
        return Encoded(prompt, tokens, self._positions(tokens, images), images, types)

    def _positions(self, tokens: Tensor, images: dict[str, Tensor]) -> Tensor:
        family = self.family
        if not isinstance(family, VisionFamily) or not images:
            return torch.arange(len(tokens)).expand(family.planes(self.model.config), -1)
        if family.layout_inputs is None:
            return family.positions(self.model, tokens, images)
        # positions depend on where the images are and on their sizes, not on the words
        is_image = tokens == family.image_token_id(self.model.config)
        layout = [images[name].numpy().tobytes() for name in family.layout_inputs]
        key = (is_image.numpy().tobytes(), *layout)
        cache = self._position_cache
        if (known := cache.get(key)) is not None:
            return known
        positions = family.positions(self.model, tokens, images)
        if len(cache) < CACHED_POSITIONS:
            cache[key] = positions
        return positions

    @cached_property
    def _position_cache(self) -> dict[tuple[bytes, ...], Tensor]:
        return {}

    def score(
        self, rollouts: Rollouts, temperature: float, with_entropy: bool = False
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"] | None]:
        """Compute log π of every response token at a temperature, and optionally its entropy H."""
        if type(self.family) is GeneralVision:
            self._check_general(rollouts)
        with self.active():
            if not self.plain_head:
                return self._score(rollouts, temperature, with_entropy)
            return run_inside(self.model, lambda: self._score(rollouts, temperature, with_entropy))

    def _check_general(self, rollouts: Rollouts) -> None:
        """Raise ValueError if a model without a family gives other logits with a KV cache.

        Compares, once, one forward pass over the first prompt with an image and its response to a
        pass over the response with the prompt's KV cache. They differ for a model that attends to
        later tokens of a response (a prefix language model), which would be scored wrongly.
        """
        rows = [n for n, x in enumerate(rollouts.prompts or ()) if x.vision]
        if self._checked or not rows or rollouts.prompts is None:
            return
        row, prompt = rows[0], [rollouts.prompts[rows[0]]]
        tokens = rollouts.tokens[row : row + 1, :CHECKED_TOKENS]
        mask = torch.ones_like(tokens, dtype=torch.bool)
        with torch.no_grad(), self.active():
            inputs = full_inputs(prompt, tokens, mask).arguments()
            logits = self.model(**inputs, use_cache=False).logits
            one = logits[:, -(tokens.shape[1] + 1) : -1].float().log_softmax(-1)
            first = torch.zeros(1, dtype=torch.long, device=tokens.device)
            other = _prompts_once(self.model, prompt, first, tokens, mask, head=True)
            difference = float((one - other.float().log_softmax(-1)).abs().mean())
        if difference > (1e-3 if self.model.dtype == torch.float32 else 0.2):
            raise ValueError(
                f"{type(self.model).__name__} cannot be scored: the log-probabilities of a "
                f"response read at once and token by token differ by {difference:.2g} on average. "
                f"Its attention is not causal, or it needs inputs that the general path does not "
                f"pass. Write a model family for it (docs/extending.md)."
            )
        self._checked.append(True)

    @cached_property
    def _checked(self) -> list[bool]:
        return []

    def _score(
        self, rollouts: Rollouts, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        tokens = rollouts.tokens[rollouts.mask]
        if self.plain_head:
            trunk = self.family.trunk(self.model)
            hidden = response_outputs(trunk, rollouts, head=False, family=self.family)
            head = self.family.head(self.model)
            logp, h = head_logp_and_entropy(
                hidden,
                head.weight,
                tokens,
                temperature,
                self.banned,
                getattr(head, "bias", None),
            )
        else:
            logits = response_outputs(self.model, rollouts, head=True, family=self.family)
            logp, h = token_logp_and_entropy(logits, tokens, temperature, self.banned)
        return spread(logp, rollouts), spread(h, rollouts) if with_entropy else None

    @cached_property
    def plain_head(self) -> bool:
        """Whether logits are W h + b, so that the fused head can be used; tried on a few tokens.

        Some architectures scale or cap their logits.
        """
        if self.family.trunk(self.model) is self.model:
            return False
        tokens = torch.arange(4, device=self.device)[None]
        planes = self.family.planes(self.model.config)
        positions = torch.arange(4, device=self.device).expand(planes, 1, 4)
        given = {"input_ids": tokens, "position_ids": positions if planes > 1 else positions[0]}
        head = self.family.head(self.model)
        with torch.no_grad():
            logits = self.model(**given, use_cache=False).logits
            hidden = self.family.trunk(self.model)(**given, use_cache=False).last_hidden_state
            expected = torch.nn.functional.linear(hidden, head.weight, getattr(head, "bias", None))
        return torch.allclose(logits.float(), expected.float(), rtol=1e-3, atol=1e-3)
