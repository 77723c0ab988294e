"""The policy: any causal language model of transformers, or a Qwen-VL, with its codec."""

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
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from segcredit.core.logits import head_logp_and_entropy, token_logp_and_entropy
from segcredit.models.attention import packs, sees_all, set_attention
from segcredit.models.codec import Codec
from segcredit.models.inputs import (
    answer_inputs,
    distinct,
    full_inputs,
    packed_inputs,
    prompt_inputs,
)
from segcredit.models.layers import recomputes, recomputing
from segcredit.models.loading import is_vision, load_codec, load_config, load_model, model_class
from segcredit.models.lora import POLICY, REFERENCE, Lora, merged
from segcredit.models.tiny import tiny_config
from segcredit.models.weights import inside, is_sharded, trained_weights
from segcredit.types import Encoded, Prompt, Rollouts


def response_outputs(model: nn.Module, rollouts: Rollouts, head: bool) -> Float[Tensor, "N _"]:
    """What the model says before each of the N tokens on the mask, row by row.

    Logits with ``head``, else the trunk's last hidden states.
    """
    prompts = rollouts.prompts
    if prompts is None:
        raise ValueError("scoring needs the rollouts' 'prompts'; got none. Pass Encoded prompts.")
    if not is_sharded(model):
        return _outputs(model, rollouts, prompts, head, share_prompts=True)
    # the passes of all processes must meet layer by layer, whatever each of them reads: so every
    # one is a single pass, and goes through the vision tower
    with recomputing(model):
        nothing = 0.0 if any(x.vision for x in prompts) else blank_picture(model) * 0.0
    return _outputs(model, rollouts, prompts, head, share_prompts=False) + nothing


def _outputs(
    model: nn.Module,
    rollouts: Rollouts,
    prompts: Sequence[Encoded],
    head: bool,
    share_prompts: bool,
) -> Tensor:
    place = torch.arange(1, rollouts.mask.shape[1] + 1, device=rollouts.mask.device)
    width = int((rollouts.mask * place).max())  # one number: the host waits once
    tokens, mask = rollouts.tokens[:, :width], rollouts.mask[:, :width]
    if packs(model):
        packed = packed_inputs(prompts, tokens, mask)
        with recomputing(model):
            outputs = model(**packed.arguments(), use_cache=False)
        return (outputs.logits if head else outputs.last_hidden_state)[0, packed.before]
    few, which = distinct(prompts)
    # then all that a response knows of its prompt is the prompt's keys and values
    shared = share_prompts and len(few) < len(prompts)
    if shared and sees_all(model.config) and not recomputes(model):
        return _prompts_once(model, few, which.to(tokens.device), tokens, mask, head)[mask]
    inputs = full_inputs(prompts, tokens, mask)
    # the state before response token t is one place to its left: of the last T'+1, all but one
    extra = {"logits_to_keep": width + 1} if head else {}
    with recomputing(model):
        outputs = model(**inputs.arguments(), use_cache=False, **extra)
    found = outputs.logits if head else outputs.last_hidden_state[:, -(width + 1) :]
    return found[:, :-1][mask]


def blank_picture(model: nn.Module) -> Tensor:
    """The sum of what the vision tower says of a smallest, empty picture; 0 without a tower."""
    tower: Any = next((x for name, x in model.named_modules() if name.endswith("visual")), None)
    if tower is None:
        return torch.zeros(())
    side = tower.spatial_merge_size
    patch = tower.patch_embed.proj.weight
    pixels = patch.new_zeros(side * side, patch[0].numel())
    grid = torch.tensor([[1, side, side]], device=patch.device)
    said = tree_leaves(dict(tower(pixels, grid_thw=grid, return_dict=True)))
    return torch.stack([x.sum() for x in said if isinstance(x, Tensor)]).sum()


def spread(x: Float[Tensor, " N"], rollouts: Rollouts) -> Float[Tensor, "B T"]:
    """Numbers of the tokens on the mask, put where the tokens are; zeros elsewhere."""
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
    """The distinct prompts first; then the responses, each on its prompt's keys and values.

    Gradients flow back through those, so this is the same function of the weights.
    """
    asked = prompt_inputs(few, tokens.device)
    cache = DynamicCache(config=model.config)
    extra = {"logits_to_keep": 1} if head else {}
    outputs = model(**asked.arguments(), past_key_values=cache, use_cache=True, **extra)
    before_first = (outputs.logits if head else outputs.last_hidden_state[:, -1:])[which]
    cache.batch_select_indices(which)
    answered = answer_inputs(asked.select(which), tokens, mask)
    outputs = model(**answered.arguments(), past_key_values=cache, use_cache=True)
    rest = outputs.logits if head else outputs.last_hidden_state
    return torch.cat([before_first, rest[:, :-1]], dim=1)


KNOWN_POSITIONS = 1024
"""Of so many prompts' shapes the positions are kept: 25 MB at a thousand tokens each."""


@dataclass(frozen=True, eq=False)
class Policy:
    """A language model, and how text and pictures become its inputs."""

    model: PreTrainedModel
    codec: Codec
    lora: Lora | None = None
    """The model's adapters, if these are trained instead of its weights."""
    adapter: str | None = POLICY
    """Which of them this policy is; None: the model without any."""

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        dtype: torch.dtype = torch.float32,
        trust_remote_code: bool = False,
        template: str | None = None,
    ) -> "Policy":
        """From a folder or a hub id; ``template`` takes the place of its chat template."""
        place, config = load_config(source, trust_remote_code)
        codec = load_codec(place, config, trust_remote_code, template)
        model = load_model(place, config, dtype, trust_remote_code)
        set_attention(model, "auto")
        return cls(model.eval(), codec)

    @classmethod
    def tiny(
        cls,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        seed: int = 0,
        **sizes: int | None,
    ) -> "Policy":
        """A small model of a real architecture with random weights."""
        config = tiny_config(name, tokenizer, **sizes)  # type: ignore[arg-type]
        kind = model_class(config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = kind.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        set_attention(model, "auto")
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.generation_config.pad_token_id = tokenizer.pad_token_id
        return cls(model.eval(), Codec.for_tiny(tokenizer, config))

    def save(self, folder: Path) -> None:
        """A plain Hugging Face folder, which every tool of that world loads.

        Adapters are added to the weights, rounded as these are.
        """
        whole = None
        if self.lora is not None:
            named = merged(self.model, self.model.state_dict().items())
            whole = {name: x.cpu() for name, x in named}
        self.model.save_pretrained(folder, state_dict=whole)
        self.codec.save(folder)

    def describe(self, folder: Path) -> None:
        """What such a folder holds beside the weights, for engines that are handed those."""
        config = type(self.model.config).from_dict(self.model.config.to_dict())
        config.architectures = [type(self.model).__name__]
        config.save_pretrained(folder)
        self.codec.save(folder)

    def with_lora(self, rank: int, alpha: float, **settings: Any) -> "Policy":
        """The same model, frozen, with matrices of low rank that are trained instead."""
        return replace(self, lora=Lora(self.model, rank, alpha, **settings))

    def active(self) -> AbstractContextManager[None]:
        """The context in which the model is this policy; without LoRA it always is."""
        return nullcontext() if self.lora is None else self.lora.using(self.adapter)

    def trained(self) -> dict[str, nn.Parameter]:
        """What an optimizer of this policy steps, by names that stay."""
        return trained_weights(self.model) if self.lora is None else self.lora.named(POLICY)

    def reference(self, copied: bool = False) -> "Policy":
        """π_ref: the policy as it is now, without gradients.

        With LoRA it takes no second model: it is the same one without adapters, or, if the policy
        has learned already, with a third one; with ``copied``, in any case with one, to go back to.
        """
        if self.lora is None:
            model = copy.deepcopy(self.model).eval()
            return Policy(model.requires_grad_(False), self.codec)
        if self.lora.is_nothing(POLICY) and not copied:
            return replace(self, adapter=None)
        self.lora.add_copy(REFERENCE)
        return replace(self, adapter=REFERENCE)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def packs(self) -> bool:
        """Whether rows are read end to end, without padding."""
        return packs(self.model)

    @cached_property
    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that end a response: the generation config may name several."""
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
        """Tokens of probability zero: those only prompts hold, and unused rows of the head."""
        width = self.model.get_output_embeddings().weight.shape[0]
        # by id, since a vocabulary may have gaps: its size says nothing about its largest id
        known = set(self.codec.tokenizer.get_vocab().values()) - set(self.codec.banned)
        banned = torch.tensor([token not in known for token in range(width)])
        return banned.to(self.device) if bool(banned.any()) else None

    def encode(self, prompt: Prompt) -> Encoded:
        """The prompt with its rotary positions."""
        tokens, vision = self.codec.encode(prompt, self.device)
        return Encoded(prompt, tokens, self._positions(tokens, vision), vision)

    def _positions(self, tokens: Tensor, vision: dict[str, Tensor]) -> Tensor:
        """By the model's own rule: images take a plane of positions (M-RoPE), text a line."""
        if not is_vision(self.model.config):
            return torch.arange(len(tokens))[None]
        if not vision:
            return torch.arange(len(tokens)).expand(3, -1)
        image = tokens == self.model.config.image_token_id
        grid = vision["image_grid_thw"]
        # they depend on where the pictures stand and on their sizes, and on no word
        key = (image.numpy().tobytes(), grid.numpy().tobytes())
        known = self._known_positions
        if (found := known.get(key)) is not None:
            return found
        trunk: Any = self.model.model
        # the keyword has no mention in older signatures' positional order, hence all by name
        positions, _ = trunk.get_rope_index(
            input_ids=tokens[None], mm_token_type_ids=image[None].long(), image_grid_thw=grid
        )
        if len(known) < KNOWN_POSITIONS:
            known[key] = positions[:, 0]
        return positions[:, 0]

    @cached_property
    def _known_positions(self) -> dict[tuple[bytes, bytes], Tensor]:
        """Of prompts that differ in their words alone."""
        return {}

    def score(
        self, rollouts: Rollouts, temperature: float, with_entropy: bool = False
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"] | None]:
        """log π of every response token at the sampling temperature, and H when asked."""
        with self.active():
            if not self.plain_head:  # the model's own forward pass is all there is
                return self._score(rollouts, temperature, with_entropy)
            return inside(self.model, lambda: self._score(rollouts, temperature, with_entropy))

    def _score(
        self, rollouts: Rollouts, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        tokens = rollouts.tokens[rollouts.mask]
        if self.plain_head:
            hidden = response_outputs(self.model.base_model, rollouts, head=False)
            head = self.model.get_output_embeddings()
            logp, h = head_logp_and_entropy(
                hidden,
                head.weight,
                tokens,
                temperature,
                self.banned,
                getattr(head, "bias", None),
            )
        else:
            logits = response_outputs(self.model, rollouts, head=True)
            logp, h = token_logp_and_entropy(logits, tokens, temperature, self.banned)
        return spread(logp, rollouts), spread(h, rollouts) if with_entropy else None

    @cached_property
    def plain_head(self) -> bool:
        """Whether logits are just W h + b, so that they need not be made: tried on some tokens.

        Some architectures scale or cap them.
        """
        tokens = torch.arange(4, device=self.device)[None]
        planes = 3 if is_vision(self.model.config) else 1
        positions = torch.arange(4, device=self.device).expand(planes, 1, 4)
        given = {"input_ids": tokens, "position_ids": positions if planes > 1 else positions[0]}
        head = self.model.get_output_embeddings()
        with torch.no_grad():
            logits = self.model(**given, use_cache=False).logits
            hidden = self.model.base_model(**given, use_cache=False).last_hidden_state
            expected = torch.nn.functional.linear(hidden, head.weight, getattr(head, "bias", None))
        return torch.allclose(logits.float(), expected.float(), rtol=1e-3, atol=1e-3)
