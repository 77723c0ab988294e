"""Encode prompts with a vision-language model's stock processor, for models without a family."""

import inspect
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import (
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoProcessor,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.models.auto.image_processing_auto import get_image_processor_class_from_name
from transformers.models.auto.processing_auto import (
    PROCESSOR_MAPPING_NAMES,
    processor_class_from_name,
)
from transformers.utils import PushToHubMixin, cached_file, is_torchvision_available

from segcredit.models.codec import CACHED_IMAGES, CACHED_NUMBERS, MARK, Codec, image_rejected
from segcredit.models.families import PIXELS, GeneralVision
from segcredit.models.images import image_size, open_image
from segcredit.models.template import LimitedChat, Messages
from segcredit.printable import printable
from segcredit.types import Prompt

PROMPT_ONLY = re.compile(
    r"\w*(image|video|audio|vision|boi|eoi|boa|eoa)\w*(token|tag)(_id|_ids|_index)?|row_col_ids"
)
"""Attributes of configurations and processors that name tokens which only prompts may hold."""
TEXT = "segcredit"
"""Text of the message by which a chat template is tried."""
TRIED = 224
"""Width and height of the blank image on which a processor is tried when it is loaded."""
UNSUPPORTED = ("cross_attention_mask", "cross_attention_mask_indices")
"""Processor outputs that relate every token to every image, which padding cannot extend."""


class UnusedVideo(PushToHubMixin):  # type: ignore[misc]
    """Settings of the video processor, which needs torchvision; they are kept and saved again."""

    _auto_class = None
    model_input_names: tuple[str, ...] = ()

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = dict(settings)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as they were loaded."""
        return dict(self.settings)


@cache
def _without_video(kind: type[Any]) -> type[Any]:
    """Make a stock processor's class accept :class:`UnusedVideo`; the name is kept for saving."""

    def check(self: Any, name: str, argument: Any) -> Any:
        if isinstance(argument, UnusedVideo):
            return UnusedVideo
        return kind.check_argument_for_proper_class(self, name, argument)

    return type(kind.__name__, (kind,), {"check_argument_for_proper_class": check})


def load_processor(
    source: str | Path,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    trust_remote_code: bool = False,
) -> Any:
    """Load a model's stock processor with this tokenizer, without torchvision if necessary."""
    settings, _ = ProcessorMixin.get_processor_dict(source)
    if trust_remote_code and "auto_map" in settings:
        return AutoProcessor.from_pretrained(source, trust_remote_code=True)
    kind = _processor_class(source, config, settings, tokenizer)
    parts: dict[str, Any] = {}
    for name in kind.get_attributes():
        if name == "tokenizer":
            parts[name] = tokenizer
        elif name == "image_processor":
            parts[name] = _image_processor(source, settings)
        elif name == "video_processor":
            parts[name] = UnusedVideo(_video_settings(source, settings))
        else:
            parts[name] = AutoFeatureExtractor.from_pretrained(source)
    if "image_processor" not in parts:
        raise ValueError(
            f"{kind.__name__} has no image processor. Write a model family for this model "
            f"(docs/models.md)"
        )
    accepted = inspect.signature(kind.__init__).parameters
    others = {key: x for key, x in settings.items() if key in accepted and key not in parts}
    return _without_video(kind)(**parts, **others)


def _image_processor(source: str | Path, settings: Mapping[str, Any]) -> Any:
    """Load the stock image processor; without torchvision, its Pillow version."""
    nested = settings.get("image_processor")
    own = nested if isinstance(nested, dict) else _json(source, "preprocessor_config.json")
    stated = str(own.get("image_processor_type", "")).removesuffix("Pil").removesuffix("Fast")
    pillow = get_image_processor_class_from_name(f"{stated}Pil")
    # older releases of transformers let AutoImageProcessor run only with torchvision
    kind = AutoImageProcessor if is_torchvision_available() or pillow is None else pillow
    return kind.from_pretrained(source)


def _processor_class(
    source: str | Path,
    config: PreTrainedConfig,
    settings: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
) -> Any:
    images = _json(source, "preprocessor_config.json")
    stated = [x.get("processor_class") for x in (settings, images, tokenizer.init_kwargs)]
    for name in (*stated, PROCESSOR_MAPPING_NAMES.get(config.model_type)):
        kind = None if name is None else processor_class_from_name(name)
        if kind is not None:
            return kind
    raise ValueError(
        f"transformers has no processor for models of type {config.model_type!r}, and neither "
        f"processor_config.json nor preprocessor_config.json names a processor_class"
    )


def _video_settings(source: str | Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the video processor's settings from the file that transformers would read."""
    nested = settings.get("video_processor")
    own = nested if isinstance(nested, dict) else _json(source, "video_preprocessor_config.json")
    return own or _json(source, "preprocessor_config.json")


def _json(source: str | Path, name: str) -> dict[str, Any]:
    file = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    found = {} if file is None else json.loads(Path(file).read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class ProcessorCodec(Codec):
    """A codec that calls the model's unmodified stock processor for text and images."""

    config: PreTrainedConfig = field(default_factory=PreTrainedConfig)

    @classmethod
    def from_source(
        cls,
        source: str | Path,
        config: PreTrainedConfig,
        family: GeneralVision,
        tokenizer: PreTrainedTokenizerBase,
        trust_remote_code: bool = False,
        template: str | None = None,
    ) -> "ProcessorCodec":
        """Load the processor of a folder or hub id."""
        processor = load_processor(source, config, tokenizer, trust_remote_code)
        own = processor.tokenizer
        if own.chat_template is None:  # older files keep it beside the processor alone
            own.chat_template = getattr(processor, "chat_template", None)
        if getattr(processor, "image_token", None) is None:
            raise ValueError(
                f"{type(processor).__name__} has no image_token, so the positions "
                f"of images in the text are unknown. Write a model family for this model "
                f"(docs/models.md)"
            )
        codec = cls(own, processor, template, family, config)
        codec._try_out()
        return codec

    def _try_out(self) -> None:
        """Raise ValueError unless the processor turns a blank image into image tokens."""
        processor: Any = self.image_processor
        try:
            tokens = self._call(self.image_token, [Image.new("RGB", (TRIED, TRIED))])["input_ids"]
        except ValueError as error:
            raise ValueError(
                f"{type(processor).__name__} fails on a blank image of {TRIED}×{TRIED} pixels; "
                f"perhaps processor_config.json is missing or incomplete: {error}"
            ) from None
        number = GeneralVision().image_token_id(self.config)
        if not bool((tokens == number).any()):
            raise ValueError(
                f"expected {type(processor).__name__} to write the image token of config.json, "
                f"{self.tokenizer.convert_ids_to_tokens(number)!r} (id {number}); it wrote none, "
                f"since its own image token is {self.image_token!r}"
            )

    @cached_property
    def image_token(self) -> str:
        """Token that the chat template writes for an image and that the processor replaces."""
        names = [getattr(self.image_processor, key, None) for key in ("image_token", "boi_token")]
        marks = [str(name) for name in names if name is not None]
        written = [mark for mark in marks if self._rendered_image.count(mark) == 1]
        return (written or marks)[0]

    @cached_property
    def banned(self) -> tuple[int, ...]:
        """Token ids that the policy must not write: tokens of images, video and audio."""
        tokenizer = self.tokenizer
        vocabulary = tokenizer.get_vocab()
        found: set[Any] = set()
        for holder in (self.config, self.image_processor):
            for name in filter(PROMPT_ONLY.fullmatch, dir(holder)):
                value = getattr(holder, name)
                for one in value if isinstance(value, list | tuple) else (value,):
                    found.add(vocabulary.get(one) if isinstance(one, str) else one)
        # a processor looks tokens up by name, and gets <unk> for those that a model does not have
        plain = {tokenizer.unk_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
        return tuple(sorted(found.intersection(vocabulary.values()) - plain))

    def _message(self, message: Mapping[str, str]) -> dict[str, Any]:
        """Split a message into parts, or put image tokens into its text, as the template wants."""
        content = message["content"]
        if self._takes_parts:
            pieces = content.split(MARK)
            parts: list[dict[str, str]] = [{"type": "text", "text": pieces[0]}] if pieces[0] else []
            for text in pieces[1:]:
                parts.append({"type": "image"})
                if text:
                    parts.append({"type": "text", "text": text})
            return {"role": message["role"], "content": parts}
        return {"role": message["role"], "content": content.replace(MARK, self.image_token)}

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the chat template reads messages in parts; templates for text models do not."""
        shown = self._rendered_image
        return TEXT in shown and shown.count(self.image_token) == 1 and "'type'" not in shown

    @cached_property
    def _rendered_image(self) -> str:
        """Render a message with an image and text under limits; empty if that fails."""
        content = [{"type": "image"}, {"type": "text", "text": TEXT}]
        with LimitedChat(self.chat) as chat:
            try:
                return chat([{"role": "user", "content": content}])
            except ValueError:  # another template may be given: rendering a prompt reports it
                return ""

    def _rendered(self, prompt: Prompt, chat: Callable[[Messages], str] | None = None) -> str:
        """Render the prompt with one mark per image, and no other token of images."""
        for name in self._banned_names:
            if any(name in message["content"].replace(MARK, "") for message in prompt.messages):
                raise ValueError(
                    f"prompt {prompt.id!r} has the text {name!r}, which is a token of images for "
                    f"this model. Write {MARK} once per image, and never {name} itself."
                )
        return super()._rendered(prompt, chat)

    @cached_property
    def _banned_names(self) -> list[str]:
        return [str(self.tokenizer.convert_ids_to_tokens(token)) for token in self.banned]

    def _special(self, text: str) -> bool:
        """Whether the tokenizer adds its special tokens, by the rule of transformers' processors.

        A chat template that begins with the start token writes all special tokens itself.
        """
        start = self.tokenizer.bos_token
        return self.template is not None or not (start and text.startswith(start))

    def encode(
        self, prompt: Prompt, device: torch.device | str = "cpu", cache: bool = True
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return token ids and the model's other inputs, as :meth:`Codec.encode`."""
        text = self._rendered(prompt)
        if not prompt.images:
            return torch.tensor(self._ids(prompt, text), dtype=torch.long), {}
        key = (text, *prompt.images)
        if (known := self._prompt_cache.get(key)) is not None:
            return known[0], dict(known[1])
        made = self._call(text, [open_image(x) for x in prompt.images])
        tokens = made.pop("input_ids")[0]
        for name in ("attention_mask", "labels"):  # PaliGemma's processor makes labels, too
            made.pop(name, None)
        numbers = sum(x.numel() for x in made.values())
        if cache and numbers <= CACHED_NUMBERS and len(self._prompt_cache) < CACHED_IMAGES:
            made[PIXELS] = made[PIXELS].to(device)
            self._prompt_cache[key] = (tokens, dict(made))
        return tokens, made

    def marked_tokens(self, prompt: Prompt) -> list[int]:
        """Return the prompt's token ids with one mark per image."""
        return self._ids(prompt, self._rendered(prompt))

    @cached_property
    def _prompt_cache(self) -> dict[tuple[str | bytes | Path, ...], Any]:
        return {}

    def _call(self, text: str, images: list[Image.Image]) -> dict[str, Tensor]:
        """Call the stock processor for one prompt."""
        processor: Any = self.image_processor
        special = self._special(text)
        try:
            made = processor(
                text=[text], images=[images], add_special_tokens=special, return_tensors="pt"
            )
        except Exception as error:
            sizes = ", ".join(f"{x.width}×{x.height}" for x in images)
            raise ValueError(image_rejected(sizes, error)) from None
        for name, x in made.items():
            if name in UNSUPPORTED or not isinstance(x, Tensor):
                what = "relates tokens to images" if name in UNSUPPORTED else "is not one tensor"
                raise ValueError(
                    f"{type(processor).__name__} returns {name!r}, which {what}: models with such "
                    f"inputs are not supported"
                )
        return dict(made)

    def count_tokens(self, prompt: Prompt, chat: Callable[[Messages], str] | None = None) -> int:
        """Count the prompt's tokens; raise ValueError if the model cannot process the prompt.

        Images are not decoded: the processor gets blank images of the same sizes, once per
        combination of sizes.
        """
        text = self._rendered(prompt, chat)
        if not prompt.images:
            return len(self._ids(prompt, text))
        sizes = tuple(image_size(x) for x in prompt.images)
        if (more := self._more_tokens(sizes)) is not None:
            return len(self._ids(prompt, text)) + more
        return self._count_blank(text, sizes)

    def measure_images(self, images: Sequence[bytes | Path]) -> None:
        """Try the processor on these sizes ahead; threads may call it."""
        self._more_tokens(tuple(image_size(x) for x in images))

    def _more_tokens(self, sizes: tuple[tuple[int, int], ...]) -> int | None:
        """Count the tokens that images add to their marks; None if that depends on the text.

        That is the case if the processor puts plain text around an image, which may merge with the
        prompt's text.
        """
        known = self._more_by_sizes
        if sizes not in known:
            marks = self.image_token * len(sizes)
            tokens = self._call(marks, [Image.new("RGB", size) for size in sizes])["input_ids"][0]
            special = set(self.tokenizer.all_special_ids) | set(self.tokenizer.added_tokens_decoder)
            plain = self.tokenizer(marks, add_special_tokens=self._special(marks))["input_ids"]
            alone = {int(tokens[0]), int(tokens[-1])} <= special
            known[sizes] = len(tokens) - len(plain) if alone else None
        return known[sizes]

    @cached_property
    def _more_by_sizes(self) -> dict[tuple[tuple[int, int], ...], int | None]:
        return {}

    def _count_blank(self, text: str, sizes: tuple[tuple[int, int], ...]) -> int:
        blank = [Image.new("RGB", size) for size in sizes]
        return int(self._call(text, blank)["input_ids"].shape[1])


@cache
def notice(model_type: str) -> None:
    """Warn once that models of this type are read by the general path."""
    warnings.warn(
        f"no model family here describes models of type {printable(repr(model_type))}, so its "
        f"stock processor and padded batches are used: correct, but without packing, and slower. "
        f"memory.shard and segcredit plan do not support it (docs/models.md).",
        stacklevel=2,
    )
