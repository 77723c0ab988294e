"""Text and pictures to model inputs and back, without torchvision."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.image_processing_auto import get_image_processor_class_from_name
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import is_torchvision_available

from segcredit.images import open_image
from segcredit.template import fill_template
from segcredit.types import Prompt

MARK = "<image>"
"""Where an image goes in a message."""
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Tokens that only a prompt may hold: a policy that writes one could not be scored afterwards."""
SMALL_PICTURE, SMALL_PICTURES = 100_000, 2048
"""Pictures of at most so many numbers, and so many of them, are read once and stay on the device:
0.8 GB at the most."""
WITHOUT_TORCHVISION = "Qwen2VLImageProcessorPil"
"""The image processor of every Qwen-VL, by Pillow alone."""


@dataclass(frozen=True)
class Codec:
    """A tokenizer and, for vision-language models, an image processor.

    transformers' own processors for Qwen-VL cannot be made without torchvision, because of video.
    This one makes the same tensors for text and images.
    """

    tokenizer: PreTrainedTokenizerBase
    image_processor: Any | None = None
    template: str | None = None
    """How a question is put to the model, instead of the tokenizer's chat template."""

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        vision: bool,
        trust_remote_code: bool = False,
        template: str | None = None,
    ) -> "Codec":
        """From a folder or a hub id."""
        tokenizer = load_tokenizer(source, trust_remote_code)
        images = load_image_processor(source, trust_remote_code) if vision else None
        return cls(tokenizer, images, template)

    @classmethod
    def for_tiny(cls, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> "Codec":
        """Of a model made in code; no picture is resized that fits its patches."""
        vision = getattr(config, "vision_config", None)
        if vision is None:
            return cls(tokenizer)
        kind = get_image_processor_class_from_name(WITHOUT_TORCHVISION)
        side = vision.patch_size * vision.spatial_merge_size
        images = kind(
            patch_size=vision.patch_size,
            temporal_patch_size=vision.temporal_patch_size,
            merge_size=vision.spatial_merge_size,
            size={"shortest_edge": side * side, "longest_edge": 1280 * side * side},
        )
        return cls(tokenizer, images)

    def save(self, folder: Path) -> None:
        """Ordinary Hugging Face files."""
        self.tokenizer.save_pretrained(folder)
        if self.image_processor is not None:
            self.image_processor.save_pretrained(folder)

    @cached_property
    def image_token(self) -> str:
        return str(getattr(self.tokenizer, "image_token", None) or "<|image_pad|>")

    @cached_property
    def banned(self) -> tuple[int, ...]:
        """Token ids that the policy must not write."""
        vocabulary = self.tokenizer.get_vocab()
        names = {*VISION_TOKENS, self.image_token} if self.image_processor is not None else ()
        return tuple(sorted(vocabulary[name] for name in names if name in vocabulary))

    def render(self, prompt: Prompt) -> str:
        """The prompt as one string, by the template, else by the tokenizer's chat template."""
        if prompt.images and self.image_processor is None:
            raise ValueError(
                f"prompt {prompt.id!r} has {len(prompt.images)} image(s), but this model reads "
                f"text alone. Choose a vision-language model, or rows without images."
            )
        if self.template is not None:
            return fill_template(self.template, prompt)
        self.require_template()
        messages = [self._message(message) for message in prompt.messages]
        return str(
            self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        )

    def require_template(self) -> None:
        """Refuse a tokenizer that does not say how a question is put to its model."""
        if self.template is None and self.tokenizer.chat_template is None:
            raise ValueError(
                "the tokenizer has no chat template, so nothing says how a question is put to this "
                "model. Set data.template (segcredit evaluate: --template) to the text it was "
                "taught with, or to '{question}' for the bare question; for prompts with pictures, "
                "put a chat_template.jinja into the model's folder."
            )

    def _message(self, message: Mapping[str, str]) -> dict[str, Any]:
        content = message["content"]
        if self.image_processor is None or MARK not in content:
            return {"role": message["role"], "content": content}
        parts: list[dict[str, str]] = []
        for number, text in enumerate(content.split(MARK)):
            if number:
                parts.append({"type": "image"})
            if text:
                parts.append({"type": "text", "text": text})
        return {"role": message["role"], "content": parts}

    def encode(
        self, prompt: Prompt, device: torch.device | str = "cpu"
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Token ids, and what the vision tower reads; small pictures are kept on the device."""
        text = self.render(prompt)
        vision: dict[str, Tensor] = {}
        if self.image_processor is not None:
            marks = sum(message["content"].count(MARK) for message in prompt.messages)
            found = text.count(self.image_token)
            if not marks == found == len(prompt.images):
                raise ValueError(
                    f"prompt {prompt.id!r} has {len(prompt.images)} image(s), but {marks} {MARK} "
                    f"mark(s), and {found} image token(s) once rendered. Write {MARK} once per "
                    f"image, and never {self.image_token} itself."
                )
            if prompt.images:
                vision = self._pixels(prompt.images, device)
                text = self._with_room(text, vision["image_grid_thw"])
        special = self.template is not None  # a chat template writes its own
        ids = self.tokenizer(text, add_special_tokens=special)["input_ids"]
        if not ids:
            reason = (
                "it has no text"
                if not text.strip()
                else "the tokenizer makes nothing of its text; are its files in the model's folder?"
            )
            raise ValueError(
                f"prompt {prompt.id!r} is empty: {reason}. The model needs a token to begin on."
            )
        return torch.tensor(ids, dtype=torch.long), vision

    def _pixels(
        self, images: Sequence[bytes | Path], device: torch.device | str
    ) -> dict[str, Tensor]:
        assert self.image_processor is not None
        kept, key = self._small_pictures, tuple(images)
        if (found := kept.get(key)) is not None:
            if found["pixel_values"].device.type != torch.device(device).type:
                kept[key] = found = {**found, "pixel_values": found["pixel_values"].to(device)}
            return dict(found)
        made = self.image_processor([open_image(x) for x in images], return_tensors="pt")
        pixels = {name: made[name] for name in ("pixel_values", "image_grid_thw")}
        if pixels["pixel_values"].numel() <= SMALL_PICTURE and len(kept) < SMALL_PICTURES:
            pixels["pixel_values"] = pixels["pixel_values"].to(device)
            kept[key] = dict(pixels)
        return pixels

    @cached_property
    def _small_pictures(self) -> dict[tuple[bytes | Path, ...], dict[str, Tensor]]:
        """Of a world that shows its pictures again and again; reading one takes milliseconds."""
        return {}

    def _with_room(self, text: str, grids: Tensor) -> str:
        """As many image tokens as the image has merged patches."""
        assert self.image_processor is not None
        room = (grids.prod(dim=1) // self.image_processor.merge_size**2).tolist()
        pieces = text.split(self.image_token)
        filled = [pieces[0]]
        for count, piece in zip(room, pieces[1:], strict=True):
            filled += [self.image_token * count, piece]
        return "".join(filled)

    def count_tokens(self, prompt: Prompt) -> int:
        """The prompt's length as the model reads it."""
        return len(self.encode(prompt)[0])

    def encode_response(self, text: str) -> Tensor:
        """A demonstration's token ids, with the end token."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return torch.tensor([*ids, self.tokenizer.eos_token_id], dtype=torch.long)

    def decode(self, tokens: Sequence[int] | Tensor) -> str:
        """The text, without special tokens."""
        return str(
            self.tokenizer.decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Each token's own text; special tokens are empty."""
        return [self._piece(token) for token in tokens]

    def _piece(self, token: int) -> str:
        known = self._known
        if token not in known:
            known[token] = self.decode([token])
        return known[token]

    @cached_property
    def _known(self) -> dict[int, str]:
        return {}


def load_image_processor(source: str | Path, trust_remote_code: bool = False) -> Any:
    """The stock image processor; without torchvision its twin, which some releases hide."""
    if is_torchvision_available():
        return AutoImageProcessor.from_pretrained(source, trust_remote_code=trust_remote_code)
    return get_image_processor_class_from_name(WITHOUT_TORCHVISION).from_pretrained(source)


def load_tokenizer(source: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer that was saved there.

    AutoTokenizer puts Qwen2's own splitting rules in place of a saved tokenizer's when the model is
    a Qwen2, without a word; so a tokenizer that says it is complete in tokenizer.json is taken so.
    """
    stated = get_tokenizer_config(source).get("tokenizer_class")
    if stated in ("TokenizersBackend", "PreTrainedTokenizerFast"):  # the second: its older name
        return PreTrainedTokenizerFast.from_pretrained(source)
    return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
