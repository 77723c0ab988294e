"""The policy: any causal language model of transformers, or a Qwen-VL, with its codec."""

import copy
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from segcredit.core.head import head_logp_and_entropy
from segcredit.core.logits import token_logp_and_entropy
from segcredit.models.codec import Codec
from segcredit.models.forward import response_outputs, spread
from segcredit.models.kinds import is_vision, load_config
from segcredit.models.loading import load_codec, load_model, model_class
from segcredit.models.lora import POLICY, REFERENCE, Lora
from segcredit.models.merged import merged
from segcredit.models.packed import packs, set_attention
from segcredit.models.sharded import inside
from segcredit.models.tiny import tiny_config
from segcredit.models.weights import trained_weights
from segcredit.types import Encoded, Prompt, Rollouts

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
