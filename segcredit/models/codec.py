"""Text and pictures to model inputs and back, without torchvision."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateSyntaxError
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

from segcredit.models.images import image_size, open_image
from segcredit.models.template import BrokenTemplate, Messages, fill_template
from segcredit.printable import printable
from segcredit.types import Prompt

MARK = "<image>"
"""Where an image goes in a message."""
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Tokens that only a prompt may hold: a policy that writes one could not be scored afterwards."""
SMALL_PICTURE, SMALL_PICTURES = 100_000, 2048
"""Pictures of at most so many numbers, and so many of them, are read once and stay on the device:
0.8 GB at the most."""
OTHER_TEMPLATE = (
    "Put a working chat_template.jinja into the model's folder, or set data.template (segcredit "
    "evaluate: --template)."
)
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

    def render(self, prompt: Prompt, chat: Callable[[Messages], str] | None = None) -> str:
        """Render the prompt as one string with ``data.template``, or else the chat template.

        ``chat`` replaces :meth:`chat`, for example to run it under limits.
        """
        if prompt.images and self.image_processor is None:
            raise ValueError(
                f"prompt {prompt.id!r} has {len(prompt.images)} image(s), but this model reads "
                f"text alone. Choose a vision-language model, or rows without images."
            )
        if self.template is not None:
            return fill_template(self.template, prompt)
        self.require_template()
        messages = [self._message(message) for message in prompt.messages]
        try:
            return (chat or self.chat)(messages)
        except BrokenTemplate as error:
            raise BrokenTemplate(f"prompt {prompt.id!r}: {error}. {OTHER_TEMPLATE}") from None
        except ValueError as error:
            raise ValueError(f"prompt {prompt.id!r}: {error}") from None

    def chat(self, messages: Messages) -> str:
        """Render messages with the tokenizer's chat template; raise ValueError if it fails.

        Templates may raise any exception, and some reject messages on purpose.
        """
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages), add_generation_prompt=True, tokenize=False
                )
            )
        except TemplateSyntaxError as error:
            why = printable(f"line {error.lineno}: {error.message}", 200)
            raise BrokenTemplate(f"the chat template has a syntax error in {why}") from None
        except MemoryError:
            raise BrokenTemplate("the chat template ran out of memory") from None
        except ImportError as error:
            raise BrokenTemplate(f"chat templates cannot be run: {error}") from None
        except Exception as error:
            why = printable(f"{type(error).__name__}: {error}", 200)
            raise ValueError(f"the chat template rejects the messages ({why})") from None

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
        text = self._marked(prompt)
        vision: dict[str, Tensor] = {}
        if prompt.images:
            vision = self._pixels(prompt.images, device)
            text = self._with_room(text, self._image_tokens(vision["image_grid_thw"]))
        return torch.tensor(self._ids(prompt, text), dtype=torch.long), vision

    def count_tokens(self, prompt: Prompt, chat: Callable[[Messages], str] | None = None) -> int:
        """Count the prompt's tokens; raise ValueError if the model cannot process the prompt.

        Image tokens are computed from the image size by the image processor's rule, without
        decoding.
        """
        text = self._marked(prompt, chat)
        if prompt.images:
            text = self._with_room(text, [self._tokens_of(image) for image in prompt.images])
        return len(self._ids(prompt, text))

    def _marked(self, prompt: Prompt, chat: Callable[[Messages], str] | None = None) -> str:
        """Render the prompt with one image token per image."""
        text = self.render(prompt, chat)
        if self.image_processor is None:
            return text
        marks = sum(message["content"].count(MARK) for message in prompt.messages)
        found = text.count(self.image_token)
        if not marks == found == len(prompt.images):
            raise ValueError(
                f"prompt {prompt.id!r} has {len(prompt.images)} image(s), but {marks} {MARK} "
                f"mark(s), and {found} image token(s) once rendered. Write {MARK} once per "
                f"image, and never {self.image_token} itself."
            )
        return text

    def _ids(self, prompt: Prompt, text: str) -> list[int]:
        special = self.template is not None  # a chat template writes its own
        ids: list[int] = self.tokenizer(text, add_special_tokens=special)["input_ids"]
        if not ids:
            reason = (
                "it has no text"
                if not text.strip()
                else "the tokenizer makes nothing of its text; are its files in the model's folder?"
            )
            raise ValueError(
                f"prompt {prompt.id!r} is empty: {reason}. The model needs a token to begin on."
            )
        return ids

    def _pixels(
        self, images: Sequence[bytes | Path], device: torch.device | str
    ) -> dict[str, Tensor]:
        assert self.image_processor is not None
        kept, key = self._small_pictures, tuple(images)
        if (found := kept.get(key)) is not None:
            if found["pixel_values"].device.type != torch.device(device).type:
                kept[key] = found = {**found, "pixel_values": found["pixel_values"].to(device)}
            return dict(found)
        made = self._processed(images)
        pixels = {name: made[name] for name in ("pixel_values", "image_grid_thw")}
        if pixels["pixel_values"].numel() <= SMALL_PICTURE and len(kept) < SMALL_PICTURES:
            pixels["pixel_values"] = pixels["pixel_values"].to(device)
            kept[key] = dict(pixels)
        return pixels

    @cached_property
    def _small_pictures(self) -> dict[tuple[bytes | Path, ...], dict[str, Tensor]]:
        """Of a world that shows its pictures again and again; reading one takes milliseconds."""
        return {}

    def _processed(self, images: Sequence[bytes | Path]) -> Any:
        assert self.image_processor is not None
        opened = [open_image(x) for x in images]
        try:
            return self.image_processor(opened, return_tensors="pt")
        except Exception as error:
            sizes = ", ".join(f"{x.width}×{x.height}" for x in opened)
            raise ValueError(_unfit(sizes, error)) from None

    def _tokens_of(self, image: bytes | Path) -> int:
        """Number of tokens of an image, from its size."""
        processor, size = self.image_processor, image_size(image)
        if (known := self._known_sizes.get(size)) is not None:
            return known
        rule = getattr(processor, "get_number_of_image_patches", None)
        patches = None
        if rule is not None and getattr(processor, "do_resize", True):
            try:
                patches = int(rule(size[1], size[0], {}))
            except Exception as error:
                raise ValueError(_unfit(f"{size[0]}×{size[1]}", error)) from None
        if patches is None or min(size) < 4:  # the processor mistakes so few rows for channels
            return self._image_tokens(self._processed([image])["image_grid_thw"])[0]
        assert processor is not None
        return self._known_sizes.setdefault(size, patches // processor.merge_size**2)

    @cached_property
    def _known_sizes(self) -> dict[tuple[int, int], int]:
        return {}

    def _image_tokens(self, grids: Tensor) -> list[int]:
        """Number of tokens of each image: its merged patches."""
        assert self.image_processor is not None
        counts: list[int] = (grids.prod(dim=1) // self.image_processor.merge_size**2).tolist()
        return counts

    def _with_room(self, text: str, counts: Sequence[int]) -> str:
        """Repeat each image's token ``counts`` times in the text."""
        pieces = text.split(self.image_token)
        filled = [pieces[0]]
        for count, piece in zip(counts, pieces[1:], strict=True):
            filled += [self.image_token * count, piece]
        return "".join(filled)

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


def _unfit(sizes: str, error: Exception) -> str:
    """Describe why the image processor rejects images of these sizes."""
    return (
        f"the model's image processor rejects an image of {sizes} pixels "
        f"({printable(str(error) or type(error).__name__, 160)}). Crop or resize it"
    )


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
