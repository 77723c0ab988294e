"""Find and load a model's files; errors name the missing or damaged file and what to do."""

import inspect
import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import (
    constants,
    get_hf_file_metadata,
    hf_hub_url,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils import logging

from segcredit.models.codec import Codec, load_tokenizer
from segcredit.models.families import (
    Family,
    GeneralVision,
    find_family,
    named_family,
    takes_images,
)
from segcredit.models.general import ProcessorCodec, notice
from segcredit.printable import listed, named, printable, shown

CONFIG = "config.json"
SECONDS = 5.0
"""Timeout of the first answer of the hub; otherwise transformers tries for 23 s per file."""
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
"""``name`` or ``owner/name``; text that begins with a dot is a path."""


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Hide transformers' own progress bars, such as those of each checkpoint."""
    shown_before = logging.is_progress_bar_enabled()
    if shown_before:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown_before:
            logging.enable_progress_bar()


class ModelError(ValueError):
    """A model that cannot be loaded; the message says why, and what to do."""


def locate(source: str | Path) -> str:
    """Resolve a folder or hub id; return the folder, the id, or its local copy if offline."""
    path = Path(source)
    if path.is_dir():
        return str(source)
    if path.is_file():
        raise ModelError(f"{named(path)} is a file. Pass the folder that contains it.")
    if (problem := not_found(str(source), "a Hugging Face folder")) is not None:
        raise ModelError(problem)
    return _ask_hub(str(source))


def not_found(source: str, expected: str) -> str | None:
    """Explain why a name is not a local path and cannot be a Hub id; None if it may be valid."""
    path = Path(source)
    beside = path.parent.is_dir() and path.parent != Path()  # owner/name, but owner is a folder
    here = path.exists() or path.is_symlink()
    if here or (isinstance(source, str) and HUB_ID.fullmatch(source) and not beside):
        return None
    others = [x.name for x in path.parent.iterdir()] if path.parent.is_dir() else []
    near = get_close_matches(path.name, others, n=1)
    hint = f" Did you mean {str(path.parent / near[0])!r}?" if near else ""
    return (
        f"there is no {named(source)}: expected {expected}, or a hub id such as "
        f"Qwen/Qwen2.5-VL-3B-Instruct.{hint}"
    )


def cached(source: str) -> Path | None:
    """Return the folder of a hub id in the local cache; None if it was not downloaded."""
    if Path(source).exists() or not HUB_ID.fullmatch(source):
        return None
    found = try_to_load_from_cache(source, CONFIG)
    return Path(found).parent if isinstance(found, str) else None


def _ask_hub(source: str) -> str:
    hub = constants.ENDPOINT
    try:
        get_hf_file_metadata(hf_hub_url(source, CONFIG), timeout=SECONDS)
    except GatedRepoError:
        raise ModelError(
            f"{source} is gated: you must accept its license first. Accept it at "
            f"{hub}/{source}, then type: hf auth login"
        ) from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"there is no folder {named(source)} here, and no model of that name at {hub}; check "
            f"its spelling. If it is private, type: hf auth login"
        ) from None
    except EntryNotFoundError:
        raise ModelError(
            f"{source} at {hub} has no {CONFIG}, so transformers cannot load it: is it an "
            f"adapter, a GGUF file or a data set? Pass the model it was made from."
        ) from None
    except HfHubHTTPError as error:
        code = getattr(error.response, "status_code", "an error")
        return _from_cache(source, f"{hub} answered {code}. Try again later")
    except OfflineModeIsEnabled:
        return _from_cache(source, "HF_HUB_OFFLINE is set, so the hub is not asked. Unset it")
    except Exception as error:  # HTTP libraries share no class of errors
        why = printable(" ".join(str(error).split()), 120) or type(error).__name__
        return _from_cache(
            source, f"{hub} cannot be reached ({why}). Check the connection, or HF_ENDPOINT"
        )
    return source


def _from_cache(source: str, why: str) -> str:
    """Use files from the local cache; raise ModelError if there are none."""
    folder = cached(source)
    if folder is None:
        raise ModelError(
            f"{source} is not a folder here, was not downloaded before, and {why}; or download it "
            f"elsewhere: hf download {source} --local-dir FOLDER; copy the FOLDER here and pass "
            f"its path."
        )
    warnings.warn(f"{why}. Using the downloaded copy of {source} in {folder}.", stacklevel=2)
    return str(folder)


WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "*.tiktoken",
    "tokenization_*.py",
)
"""Files that hold a tokenizer's vocabulary, or code that makes one."""
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
POINTER = b"version https://git-lfs"


def check_config_file(folder: Path) -> None:
    """Raise ModelError for a folder without a config.json."""
    if (folder / CONFIG).is_file():
        return
    if (folder / "adapter_config.json").is_file():
        raise ModelError(
            f"{named(folder)} holds an adapter, not a model. Merge it into its base first: peft's "
            f"merge_and_unload(), then save_pretrained(FOLDER)."
        )
    inner = sorted(x.parent.name for x in folder.glob(f"*/{CONFIG}"))
    hint = f" Did you mean {str(folder / inner[0])!r}?" if inner else ""
    raise ModelError(
        f"{named(folder)} has no {CONFIG}, so it is not a Hugging Face folder: expected what "
        f"save_pretrained or hf download writes.{hint}"
    )


def check_codec_files(folder: Path, vision: bool) -> None:
    """Raise ModelError for a folder without vocabulary or processor.

    Some tokenizers load without a vocabulary, silently, and encode every text as nothing.
    """
    if not any(True for pattern in TOKENIZERS for _ in folder.glob(pattern)):
        raise ModelError(
            f"{named(folder)} has no tokenizer (none of {', '.join(TOKENIZERS[:4])}). Copy the "
            f"tokenizer's files there from the model that this one was made from."
        )
    if vision and not any((folder / name).is_file() for name in PROCESSORS):
        raise ModelError(
            f"{named(folder)} has no {PROCESSORS[0]}, which the model needs to read images. Copy "
            f"it there from the model that this one was made from."
        )


def check_weight_files(folder: Path) -> None:
    """Raise ModelError for missing, truncated or damaged weight files."""
    for file in _weight_files(folder):
        check_file(file)


def _weight_files(folder: Path) -> list[Path]:
    if not (folder / INDEX).is_file():
        if (folder / WEIGHTS).is_file():
            return [folder / WEIGHTS]
        if any(folder.glob("*.bin")):
            return []  # the older format, which transformers reads
        parts = sorted(x.name for x in folder.glob("model-*-of-*.safetensors"))
        lacks = f"{INDEX}, the index of {listed(parts, 2)}" if parts else WEIGHTS
        raise ModelError(f"{named(folder)} has no {lacks}. {_again(folder)}")
    try:
        held = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(held.values()))
        missing = [name for name in names if not (folder / name).is_file()]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(
            f"{named(folder / INDEX)} is damaged: it does not say which file holds which weight. "
            f"{_again(folder, INDEX)}"
        ) from None
    if missing:
        raise ModelError(
            f"{named(folder)} lacks {len(missing)} of its {len(names)} files of weights: "
            f"{listed(missing, 3)}. {_again(folder, missing[0])}"
        )
    return [folder / name for name in names]


def check_file(file: Path) -> None:
    """Raise ModelError for a weight file that is truncated, damaged or only a Git LFS pointer."""
    with file.open("rb") as start:
        if start.read(len(POINTER)) == POINTER:
            raise ModelError(
                f"{named(file)} is a Git LFS pointer, not the weights. Type: "
                f"git -C {file.parent} lfs pull"
            )
    try:
        with safe_open(file, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        why = printable(" ".join(str(error).split()), 120)
        raise ModelError(
            f"{named(file)} is damaged or was cut off at {file.stat().st_size} bytes ({why}). "
            f"{_again(file.parent, file.name)}"
        ) from None


def _again(folder: Path, file: str | None = None) -> str:
    """Return how to download a file again; the cache folder's name contains the hub id."""
    owner = folder.parents[1].name if len(folder.parents) > 1 else ""
    if folder.parent.name != "snapshots" or not owner.startswith("models--"):
        return "Download or copy it again."
    words = ["hf", "download", owner.removeprefix("models--").replace("--", "/"), file or ""]
    return f"Download it again: {' '.join(x for x in words if x)} --force-download"


EXPECTED = (
    "Expected a causal language model (…ForCausalLM, as of Qwen2.5 or Llama) or a vision-language "
    "model (…ForConditionalGeneration, as of Qwen2.5-VL or InternVL)"
)


def context_window(config: PreTrainedConfig) -> int | None:
    """Return the model's context window in tokens; None if its configuration does not state it.

    Sliding-window attention does not limit the length. Scaled rotary positions extend the window by
    their factor.
    """
    text = config.get_text_config()
    stated = getattr(text, "max_position_embeddings", None)
    if type(stated) is not int or stated < 1 or getattr(text, "alibi", False):
        return None
    rope = getattr(text, "rope_parameters", None) or {}
    longest = stated
    for x in [rope, *rope.values()]:  # one set of settings, or one per layer type
        if isinstance(x, dict) and x.get("rope_type") in ("linear", "dynamic", "yarn"):
            first = x.get("original_max_position_embeddings") or stated
            longest = max(longest, int(first * (x.get("factor") or 1.0)))
    return longest


class WindowError(ValueError):
    """A prompt and its longest response exceed the context window."""

    def __init__(self, tokens: int, max_tokens: int, window: int, setting: str) -> None:
        room = window - tokens
        less = f"Set {setting}{room} or less, or shorten" if room > 0 else "Shorten"
        super().__init__(
            f"{tokens} tokens, which with {setting}{max_tokens} exceed the model's context window "
            f"of {window}. {less} the prompt"
        )
        self.tokens, self.max_tokens, self.window = tokens, max_tokens, window
        self.setting = setting


def require_window(tokens: int, max_tokens: int, window: int | None, setting: str) -> None:
    """Raise WindowError if a prompt and its longest response exceed the context window.

    ``setting`` is how ``max_tokens`` is written in the message: ``"--max-tokens "``.
    """
    if window is not None and tokens + max_tokens > window:
        raise WindowError(tokens, max_tokens, window, setting)


def load_config(
    source: str | Path, trust_remote_code: bool = False, family: str | None = None
) -> tuple[str, PreTrainedConfig]:
    """Return the model's location and configuration; raise ModelError if it cannot be used.

    ``family`` names a model family of your own, ``file.py:Name``; None: by the model's type.
    """
    own = None if family is None else named_family(family)  # its file may register new classes
    place = locate(source)
    if Path(place).is_dir():
        check_config_file(Path(place))
    try:
        stated, _ = PreTrainedConfig.get_config_dict(place)
        _check_known(source, stated, trust_remote_code)
        config = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code)
    except ModelError:
        raise
    except Exception as error:  # a wrong value fails in whichever code reads it
        why = printable(" ".join(str(error).split()), 200)
        raise ModelError(
            f"the {CONFIG} of {source} cannot be read: {why}. Download or copy it again."
        ) from None
    if own is not None:
        _check_family(source, config, own)
    elif not (trust_remote_code and "auto_map" in stated):
        _check_kind(source, config)
    elif takes_images(config):
        _check_own_code(source, config, stated["auto_map"])
    return place, config


def _check_family(source: str | Path, config: PreTrainedConfig, family: Family) -> None:
    """Raise ModelError if the named family is for other models."""
    if family.model_types and config.model_type not in family.model_types:
        raise ModelError(
            f"model.family is {family.name}, for models of type {', '.join(family.model_types)}; "
            f"{source} is of type {config.model_type!r}. Remove model.family, or choose another."
        )


def _check_known(source: str | Path, stated: dict[str, Any], trusted: bool) -> None:
    """Raise ModelError for a type of model that the installed transformers does not have."""
    name = stated.get("model_type")
    if name in CONFIG_MAPPING or (trusted and "auto_map" in stated):
        return
    if "auto_map" in stated:
        raise ModelError(
            f"{source} contains its own Python code. Read it; if you trust it, set "
            f"model.trust_remote_code=true."
        )
    if name is None:
        raise ModelError(f"the {CONFIG} of {source} names no model_type. {EXPECTED}.")
    raise ModelError(
        f"{source} is a model of type {shown(name)}, which transformers {transformers.__version__} "
        f"does not know. If it is new, type: pip install -U transformers. {EXPECTED}."
    )


def _check_own_code(source: str | Path, config: PreTrainedConfig, auto_map: Any) -> None:
    """Raise ModelError for a vision-language model whose own code registers no usable class."""
    wanted = AutoModelForImageTextToText.__name__
    known = config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    if known or (isinstance(auto_map, dict) and wanted in auto_map):
        return
    raise ModelError(
        f"{source} contains its own Python code, which must register a class for {wanted}; it has "
        f"classes for {listed(auto_map)}. Write a model family that loads it (docs/models.md) and "
        f"set model.family=file.py:Name."
    )


def _check_kind(source: str | Path, config: PreTrainedConfig) -> None:
    """Raise ModelError for models that do not generate text token by token."""
    stated = config.architectures or []
    if takes_images(config):
        known = config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        if known and not getattr(config, "is_encoder_decoder", False):
            return
        kind = stated[0] if stated else f"model of type {config.model_type!r}"
        raise ModelError(
            f"{source} is a {kind}, which transformers cannot load as a decoder that writes text "
            f"about images (AutoModelForImageTextToText). {EXPECTED}."
        )
    writes = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or (
        stated and not writes.intersection(stated)
    ):
        kind = stated[0] if stated else f"model of type {config.model_type!r}"
        raise ModelError(
            f"{source} is a {kind}, which does not write text token by token. {EXPECTED}."
        )
    forward = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].forward
    if "past_key_values" not in inspect.signature(forward).parameters:
        raise ModelError(
            f"{source} is a state-space model of type {config.model_type!r}: it has no "
            f"past_key_values, the cache that is used for sampling and in which rows are selected. "
            f"{EXPECTED}; hybrids such as Qwen3.5, Qwen3-Next and Falcon-H1 work."
        )


def empty_model(
    config: PreTrainedConfig, family: Family, trust_remote_code: bool = False, **settings: Any
) -> PreTrainedModel:
    """Make the model on the meta device, without memory for weights, to inspect its layers."""
    with torch.device("meta"):
        model: PreTrainedModel = family.auto_class.from_config(
            config, trust_remote_code=trust_remote_code, **settings
        )
    return model


def load_codec(
    place: str,
    config: PreTrainedConfig,
    trust_remote_code: bool,
    template: str | None,
    family: str | None = None,
) -> Codec:
    """Load the tokenizer and, for vision-language models, the image processor."""
    own = find_family(config, family)
    if Path(place).is_dir():
        check_codec_files(Path(place), own.reads_images)
    try:
        if not isinstance(own, GeneralVision):
            return Codec.from_pretrained(place, own, trust_remote_code, template)
        tokenizer = load_tokenizer(place, trust_remote_code)
        codec = ProcessorCodec.from_source(
            place, config, own, tokenizer, trust_remote_code, template
        )
    except ImportError as error:
        raise ModelError(
            f"the processor of {place} needs a package that is missing: {_first(error)}"
        ) from error
    except Exception as error:  # tokenizers, written in Rust, raise the base class
        parts = "tokenizer or image processor" if own.reads_images else "tokenizer"
        raise ModelError(
            f"the {parts} of {place} does not load: {_first(error)}. Copy its files there again "
            f"from the model that this one was made from."
        ) from error
    if type(own) is GeneralVision:
        notice(config.model_type)
    return codec


def end_tokens(place: str, config: PreTrainedConfig) -> list[int]:
    """Return the ids of the end tokens at which sampling stops; [] if there are none."""
    try:
        found = GenerationConfig.from_pretrained(place)
    except (OSError, ValueError):  # no such file: transformers derives the config
        found = GenerationConfig.from_model_config(config)
    stated = found.eos_token_id
    return [] if stated is None else list(stated) if isinstance(stated, list) else [stated]


def load_model(
    place: str,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    trust_remote_code: bool,
    family: Family,
) -> PreTrainedModel:
    """Load a model with all its weights; transformers would silently make missing ones random."""
    if Path(place).is_dir():
        check_weight_files(Path(place))
    try:
        model, info = family.auto_class.from_pretrained(
            place,
            config=config,
            dtype=dtype,
            # without a family, parts of the model may support no other than transformers' default
            attn_implementation=None if isinstance(family, GeneralVision) else "sdpa",
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except Exception as error:  # errors of files, memory and versions share no class
        downloaded = cached(place)
        if downloaded is not None:
            check_weight_files(downloaded)
        raise ModelError(f"{place} does not load: {_first(error)}") from error
    if missing := sorted(map(str, info.get("missing_keys") or ())):
        raise ModelError(
            f"{place} lacks {len(missing)} of its model's weights, such as {listed(missing, 3)}: "
            f"they would be random. Download or copy the model again; if it was saved without its "
            f"head, pass the model that it was made from."
        )
    train_padding_token(model)
    return model


def train_padding_token(model: PreTrainedModel) -> None:
    """Train the padding token's embedding if it is also an end token, as in many models.

    torch would drop its gradient, also where the token ends a turn of the prompt. Padding itself is
    masked, so it has no gradient anyway. Any other padding token keeps its embedding, so that a
    tiny model that is saved and loaded again trains as before.
    """
    ends: list[int] = []
    for config in (model.config, model.config.get_text_config()):
        found = getattr(config, "eos_token_id", None)
        ends += [found] if isinstance(found, int) else found or []
    embedding = model.get_input_embeddings()
    if isinstance(embedding, nn.Embedding) and embedding.padding_idx in ends:
        embedding.padding_idx = None


def _first(error: Exception) -> str:
    return printable(" ".join(str(error).split()), 300) or type(error).__name__
