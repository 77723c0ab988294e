"""Convert text and images to model inputs and back, without torchvision."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateSyntaxError
from torch import Tensor
from transformers import (
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from segcredit.models.families import PIXELS, Family, VisionFamily, find_family
from segcredit.models.images import image_size, open_image
from segcredit.models.template import BrokenTemplate, Messages, fill_template
from segcredit.printable import printable, shown
from segcredit.types import Prompt

MARK = "<image>"
"""Placeholder of an image in a message."""
CACHED_NUMBERS, CACHED_IMAGES = 100_000, 2048
"""Maximum size of a cached processed image (numbers in its tensors), and maximum count of cached
images: at most 0.8 GB on the device."""
OTHER_TEMPLATE = (
    "Put a working chat_template.jinja into the model's folder, or set data.template (segcredit "
    "evaluate: --template)."
)


@dataclass(frozen=True)
class Codec:
    """A tokenizer and, for vision-language models, an image processor.

    The stock processors of transformers for Qwen-VL need torchvision, because of video. A codec
    makes the same tensors from text and images.
    """

    tokenizer: PreTrainedTokenizerBase
    image_processor: Any | None = None
    template: str | None = None
    """Text with ``{question}`` that replaces the tokenizer's chat template."""
    family: Family = field(default_factory=Family)

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        family: Family,
        trust_remote_code: bool = False,
        template: str | None = None,
    ) -> "Codec":
        """Load the tokenizer and image processor from a folder or hub id."""
        tokenizer = load_tokenizer(source, trust_remote_code)
        images = None
        if isinstance(family, VisionFamily):
            images = family.load_image_processor(source, trust_remote_code)
        return cls(tokenizer, images, template, family)

    @classmethod
    def for_tiny(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        config: PreTrainedConfig,
        family: Family | None = None,
    ) -> "Codec":
        """Make the codec of a tiny model."""
        family = find_family(config) if family is None else family
        images = None
        if isinstance(family, VisionFamily):
            images = family.tiny_image_processor(config)
        return cls(tokenizer, images, None, family)

    def save(self, folder: Path) -> None:
        """Save as ordinary Hugging Face files."""
        self.tokenizer.save_pretrained(folder)
        if self.image_processor is not None:
            self.image_processor.save_pretrained(folder)

    @cached_property
    def image_token(self) -> str:
        return str(getattr(self.tokenizer, "image_token", None) or self._vision.image_token)

    @property
    def _vision(self) -> VisionFamily:
        assert isinstance(self.family, VisionFamily)
        return self.family

    @cached_property
    def banned(self) -> tuple[int, ...]:
        """Token ids that the policy must not write."""
        vocabulary = self.tokenizer.get_vocab()
        names: set[str] = set()
        if self.image_processor is not None:
            names = {*self._vision.prompt_only_tokens, self.image_token}
        return tuple(sorted(vocabulary[name] for name in names if name in vocabulary))

    def render(self, prompt: Prompt, chat: Callable[[Messages], str] | None = None) -> str:
        """Render the prompt as one string with ``data.template``, or else the chat template.

        ``chat`` replaces :meth:`chat`, for example to run it under limits.
        """
        if prompt.images and self.image_processor is None:
            raise ValueError(
                f"prompt {prompt.id!r} has {len(prompt.images)} image(s), but this model reads "
                f"text only. Choose a vision-language model, or rows without images."
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

    def turn_end(self, chat: Callable[[Messages], str] | None = None) -> int | None:
        """Return the special token with which the chat template ends an assistant's turn.

        None if it ends a turn without one, or accepts no assistant's turn before a user's.
        """
        asked = {"role": "user", "content": "1 + 1 ?"}
        answered = {"role": "assistant", "content": "It-is-two"}
        try:
            text = (chat or self.chat)([asked, answered, asked])
        except ValueError:
            return None
        _, found, after = text.partition(answered["content"])
        if not found or self.tokenizer.chat_template is None:
            return None
        special, after = self._special_tokens, after.lstrip()
        names = [name for name in special if after.startswith(name)]
        return special[max(names, key=len)] if names else None

    def check_stop(self, strings: Sequence[str], setting: str) -> None:
        """Raise ValueError for a stop string with a special token, which no decoded text contains.

        Args:
            setting: Name of the setting, for the message.
        """
        for text in strings:
            found = [name for name in self._special_tokens if name in text]
            if found:
                token = max(found, key=len)
                raise ValueError(
                    f"{setting}: expected text of a response, which has no special tokens; got "
                    f"{shown(text)}, where {token!r} is one. Remove it, or put its id "
                    f"{self._special_tokens[token]} into eos_token_id in the model's "
                    f"generation_config.json: responses end at the tokens there."
                )

    @cached_property
    def _special_tokens(self) -> dict[str, int]:
        """Ids of the special tokens by their text."""
        added = self.tokenizer.added_tokens_decoder.items()
        return {x.content: n for n, x in added if x.special and x.content}

    def require_template(self) -> None:
        """Raise ValueError for a tokenizer without a chat template, if no template was given."""
        if self.template is None and self.tokenizer.chat_template is None:
            raise ValueError(
                "the tokenizer has no chat template, so the prompt format is unknown for this "
                "model. Set data.template (segcredit evaluate: --template) to the format it was "
                "trained with, or to '{question}' for the bare question; for prompts with images, "
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
        self, prompt: Prompt, device: torch.device | str = "cpu", cache: bool = True
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return token ids and the inputs of the vision tower.

        Args:
            cache: Keep small images on the device, for prompts that repeat.
        """
        text = self._rendered(prompt)
        images: dict[str, Tensor] = {}
        if prompt.images:
            process = partial(self._process_cached, device=device) if cache else self._process
            images = process(prompt.images)
            counts = self._vision.count_image_tokens(self.image_processor, images)
            text = self.repeat_image_tokens(text, counts)
        return torch.tensor(self._ids(prompt, text), dtype=torch.long), images

    def count_tokens(self, prompt: Prompt, chat: Callable[[Messages], str] | None = None) -> int:
        """Count the prompt's tokens; raise ValueError if the model cannot process the prompt.

        Image tokens are computed from the image size by the image processor's rule, without
        decoding.
        """
        text = self._rendered(prompt, chat)
        if prompt.images:
            counts = [self._count_image_tokens(image) for image in prompt.images]
            text = self.repeat_image_tokens(text, counts)
        return len(self._ids(prompt, text))

    def measure_images(self, images: Sequence[bytes | Path]) -> None:
        """Count the tokens of images ahead, if that is slow; threads may call it."""

    def shown(self, prompt: Prompt, chat: Callable[[Messages], str] | None = None) -> str:
        """Return the text that the model reads, with special tokens and one mark per image."""
        text = self._rendered(prompt, chat)
        if self._special(text):
            ids = self.tokenizer(text)["input_ids"]
            text = str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        return text.replace(self.image_token, MARK) if prompt.images else text

    def _rendered(self, prompt: Prompt, chat: Callable[[Messages], str] | None = None) -> str:
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
        ids: list[int] = self.tokenizer(text, add_special_tokens=self._special(text))["input_ids"]
        if not ids:
            reason = (
                "it has no text"
                if not text.strip()
                else "the tokenizer returns no tokens for it; are its files in the model's folder?"
            )
            raise ValueError(
                f"prompt {prompt.id!r} is empty: {reason}. The model needs at least one token."
            )
        return ids

    def _special(self, text: str) -> bool:
        """Whether the tokenizer adds special tokens; a chat template writes them itself."""
        return self.template is not None

    def _process_cached(
        self, images: Sequence[bytes | Path], device: torch.device | str
    ) -> dict[str, Tensor]:
        cache, key = self._image_cache, tuple(images)
        if (known := cache.get(key)) is not None:
            if known[PIXELS].device.type != torch.device(device).type:
                cache[key] = known = {**known, PIXELS: known[PIXELS].to(device)}
            return dict(known)
        inputs = self._process(images)
        if inputs[PIXELS].numel() <= CACHED_NUMBERS and len(cache) < CACHED_IMAGES:
            inputs[PIXELS] = inputs[PIXELS].to(device)
            cache[key] = dict(inputs)
        return inputs

    @cached_property
    def _image_cache(self) -> dict[tuple[bytes | Path, ...], dict[str, Tensor]]:
        """Cache of processed images, for data in which images repeat."""
        return {}

    def _process(self, images: Sequence[bytes | Path]) -> dict[str, Tensor]:
        assert self.image_processor is not None
        opened = [open_image(x) for x in images]
        try:
            outputs = self.image_processor(opened, return_tensors="pt")
        except Exception as error:
            sizes = ", ".join(f"{x.width}×{x.height}" for x in opened)
            raise ValueError(image_rejected(sizes, error)) from None
        return {name: outputs[name] for name in self._vision.image_inputs}

    def _count_image_tokens(self, image: bytes | Path) -> int:
        """Count the tokens of an image, from its size if the family has a rule for that."""
        processor, size = self.image_processor, image_size(image)
        if (known := self._tokens_by_size.get(size)) is not None:
            return known
        try:
            count = self._vision.image_tokens_for_size(processor, *size)
        except Exception as error:
            raise ValueError(image_rejected(f"{size[0]}×{size[1]}", error)) from None
        if count is None:
            return self._vision.count_image_tokens(processor, self._process([image]))[0]
        return self._tokens_by_size.setdefault(size, count)

    @cached_property
    def _tokens_by_size(self) -> dict[tuple[int, int], int]:
        return {}

    def repeat_image_tokens(self, text: str, counts: Sequence[int]) -> str:
        """Repeat each image's token ``counts`` times in the text."""
        pieces = text.split(self.image_token)
        filled = [pieces[0]]
        for count, piece in zip(counts, pieces[1:], strict=True):
            filled += [self.image_token * count, piece]
        return "".join(filled)

    def encode_response(self, text: str) -> Tensor:
        """Return the token ids of a demonstration, with the end token."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return torch.tensor([*ids, self.tokenizer.eos_token_id], dtype=torch.long)

    def decode(self, tokens: Sequence[int] | Tensor) -> str:
        """Decode to text, without special tokens."""
        return str(
            self.tokenizer.decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Return each token's own text; special tokens are empty."""
        return [self._piece(token) for token in tokens]

    def _piece(self, token: int) -> str:
        known = self._pieces
        if token not in known:
            text = self.decode([token])
            # Llama 2's decoder removes the space before the first word of a text
            word = str(self.tokenizer.convert_ids_to_tokens(token))
            spaced = word.startswith("\u2581") and text and not text.startswith(" ")
            known[token] = f" {text}" if spaced else text
        return known[token]

    @cached_property
    def _pieces(self) -> dict[int, str]:
        return {}


def image_rejected(sizes: str, error: Exception) -> str:
    """Describe why the image processor rejects images of these sizes."""
    return (
        f"the model's image processor rejects an image of {sizes} pixels "
        f"({printable(str(error) or type(error).__name__, 160)}). Crop or resize it"
    )


def load_tokenizer(source: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer exactly as it was saved.

    For a Qwen2 model, AutoTokenizer silently replaces a saved tokenizer's splitting rules by
    Qwen2's own. So a tokenizer whose tokenizer.json is complete is loaded directly.
    """
    stated = get_tokenizer_config(source).get("tokenizer_class")
    if stated in ("TokenizersBackend", "PreTrainedTokenizerFast"):  # the second: its older name
        return PreTrainedTokenizerFast.from_pretrained(source)
    return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
