"""A model's parts from where it lies; what is missing or damaged is named, with the way out."""

import json
import re
import warnings
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
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from segcredit.models.codec import Codec
from segcredit.printable import listed, named, printable, shown

CONFIG = "config.json"
SECONDS = 5.0
"""For the hub's first answer: transformers alone tries for 23 s, and again for every file."""
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
"""name or owner/name; what begins with a dot is a path."""


class ModelError(ValueError):
    """A model that cannot be loaded: why, and the way out, in one message."""


def locate(source: str | Path) -> str:
    """A folder as it is; an id if the hub has it, or, where the hub is out of reach, its cache."""
    path = Path(source)
    if path.is_dir():
        return str(source)
    if path.is_file():
        raise ModelError(f"{named(path)} is a file. Pass the folder that it lies in.")
    if (problem := nowhere(str(source), "a Hugging Face folder")) is not None:
        raise ModelError(problem)
    return _ask_hub(str(source))


def nowhere(source: str, expected: str) -> str | None:
    """Why a name is neither here nor could be an id on the hub; None: it is or could."""
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
    """The folder in which the hub's cache keeps an id."""
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
            f"{source} is gated: its authors want a licence accepted first. Accept it at "
            f"{hub}/{source}, then type: hf auth login"
        ) from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"there is no folder {named(source)} here, and no model of that name at {hub}; look at "
            f"its spelling. If it is private, type: hf auth login"
        ) from None
    except EntryNotFoundError:
        raise ModelError(
            f"{source} at {hub} has no {CONFIG}, so it is no model that transformers loads: an "
            f"adapter, a GGUF file or a data set? Pass the model it was made from."
        ) from None
    except HfHubHTTPError as error:
        code = getattr(error.response, "status_code", "an error")
        return _from_cache(source, f"{hub} answered {code}. Try again later")
    except OfflineModeIsEnabled:
        return _from_cache(source, "HF_HUB_OFFLINE is set, so the hub is not asked. Unset it")
    except Exception as error:  # of whichever library speaks HTTP: they share no class
        why = printable(" ".join(str(error).split()), 120) or type(error).__name__
        return _from_cache(
            source, f"{hub} cannot be reached ({why}). Look at the connection, or at HF_ENDPOINT"
        )
    return source


def _from_cache(source: str, why: str) -> str:
    """Go on with what was downloaded before, if anything was."""
    folder = cached(source)
    if folder is None:
        raise ModelError(
            f"{source} is no folder here, was not downloaded before, and {why}; or fetch it "
            f"elsewhere by: hf download {source} --local-dir FOLDER; copy the FOLDER here and pass "
            f"its path."
        )
    warnings.warn(f"{why}. Going on with {source} as it lies in {folder}.", stacklevel=2)
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
"""Any of these is a tokenizer's vocabulary, or code that makes one."""
PICTURES = ("preprocessor_config.json", "processor_config.json")
POINTER = b"version https://git-lfs"


def check_config_file(folder: Path) -> None:
    """Refuse a folder that holds no model of transformers."""
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
        f"{named(folder)} has no {CONFIG}, so it is no Hugging Face folder: expected what "
        f"save_pretrained or hf download writes.{hint}"
    )


def check_codec_files(folder: Path, vision: bool) -> None:
    """Refuse a folder without a vocabulary, of which some tokenizers make nothing, silently."""
    if not any(True for pattern in TOKENIZERS for _ in folder.glob(pattern)):
        raise ModelError(
            f"{named(folder)} has no tokenizer (none of {', '.join(TOKENIZERS[:4])}). Copy the "
            f"tokenizer's files there from the model that this one was made from."
        )
    if vision and not any((folder / name).is_file() for name in PICTURES):
        raise ModelError(
            f"{named(folder)} has no {PICTURES[0]}, which says how its model sees pictures. Copy "
            f"it there from the model that this one was made from."
        )


def check_weight_files(folder: Path) -> None:
    """Refuse missing, cut off or damaged files of weights, by name."""
    for file in _weight_files(folder):
        check_file(file)


def _weight_files(folder: Path) -> list[Path]:
    if not (folder / INDEX).is_file():
        if (folder / WEIGHTS).is_file():
            return [folder / WEIGHTS]
        if any(folder.glob("*.bin")):
            return []  # the older format, which transformers reads
        parts = sorted(x.name for x in folder.glob("model-*-of-*.safetensors"))
        lacks = f"{INDEX}, which says what is where in {listed(parts, 2)}" if parts else WEIGHTS
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
    """Refuse a file of weights that is damaged, cut off, or none."""
    with file.open("rb") as start:
        if start.read(len(POINTER)) == POINTER:
            raise ModelError(
                f"{named(file)} is a pointer of Git LFS, not the weights. Type: "
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
    """How to get it once more: the hub's cache says whose folder it is."""
    owner = folder.parents[1].name if len(folder.parents) > 1 else ""
    if folder.parent.name != "snapshots" or not owner.startswith("models--"):
        return "Download or copy it again."
    words = ["hf", "download", owner.removeprefix("models--").replace("--", "/"), file or ""]
    return f"Download it again: {' '.join(x for x in words if x)} --force-download"


VISION_MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Vision-language models that are sampled and scored alike here."""
EXPECTED = (
    "Expected a causal language model (…ForCausalLM, as of Qwen2.5 or Llama) or a vision-language "
    "model of the Qwen family (Qwen2-VL, Qwen2.5-VL, Qwen3-VL)"
)


def is_vision(config: PreTrainedConfig) -> bool:
    """Whether the model has a vision tower."""
    return getattr(config, "vision_config", None) is not None


def context_window(config: PreTrainedConfig) -> int | None:
    """Return the model's context window in tokens; None if its configuration does not state it.

    Sliding-window attention does not limit the length. Scaled rotary positions extend the window
    by their factor.
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


def load_config(
    source: str | Path, trust_remote_code: bool = False
) -> tuple[str, PreTrainedConfig]:
    """Where the model lies, and its configuration; a ModelError says why it cannot be used."""
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
    if not (trust_remote_code and "auto_map" in stated):
        _check_kind(source, config)
    return place, config


def _check_known(source: str | Path, stated: dict[str, Any], trusted: bool) -> None:
    """Refuse a kind of model that this transformers has no code for."""
    name = stated.get("model_type")
    if name in CONFIG_MAPPING_NAMES or (trusted and "auto_map" in stated):
        return
    if "auto_map" in stated:
        raise ModelError(
            f"{source} brings Python code of its own. Read it; if you trust it, set "
            f"model.trust_remote_code=true."
        )
    if name is None:
        raise ModelError(f"the {CONFIG} of {source} names no model_type. {EXPECTED}.")
    raise ModelError(
        f"{source} is a model of type {shown(name)}, which transformers {transformers.__version__} "
        f"does not know. If it is new, type: pip install -U transformers. {EXPECTED}."
    )


def _check_kind(source: str | Path, config: PreTrainedConfig) -> None:
    """Refuse what does not write text, and towers whose pictures nothing here can place."""
    if is_vision(config):
        if config.model_type not in VISION_MODELS:
            raise ModelError(
                f"{source} is a vision-language model of type {config.model_type!r}, whose "
                f"pictures cannot be read here. {EXPECTED}."
            )
        return
    stated = config.architectures or []
    writes = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or (
        stated and not writes.intersection(stated)
    ):
        kind = stated[0] if stated else f"model of type {config.model_type!r}"
        raise ModelError(
            f"{source} is a {kind}, which does not write text token by token. {EXPECTED}."
        )


def model_class(config: PreTrainedConfig) -> Any:
    """The class by which transformers loads such a policy."""
    return AutoModelForImageTextToText if is_vision(config) else AutoModelForCausalLM


def bare_model(config: PreTrainedConfig, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model's classes without memory for weights: its layers can be named and counted."""
    with torch.device("meta"):
        made: PreTrainedModel = model_class(config).from_config(
            config, trust_remote_code=trust_remote_code
        )
    return made


def load_codec(
    place: str, config: PreTrainedConfig, trust_remote_code: bool, template: str | None
) -> Codec:
    """The tokenizer and, for vision-language models, the image processor."""
    vision = is_vision(config)
    if Path(place).is_dir():
        check_codec_files(Path(place), vision)
    try:
        return Codec.from_pretrained(place, vision, trust_remote_code, template)
    except Exception as error:  # tokenizers, written in Rust, raise the bare class
        parts = "tokenizer or image processor" if vision else "tokenizer"
        raise ModelError(
            f"the {parts} of {place} does not load: {_first(error)}. Copy its files there again "
            f"from the model that this one was made from."
        ) from error


def end_tokens(place: str, config: PreTrainedConfig) -> list[int]:
    """Ids of the end tokens at which sampling stops once the model is loaded; [] if none."""
    try:
        found = GenerationConfig.from_pretrained(place)
    except (OSError, ValueError):  # no such file: transformers derives the config
        found = GenerationConfig.from_model_config(config)
    stated = found.eos_token_id
    return [] if stated is None else list(stated) if isinstance(stated, list) else [stated]


def load_model(
    place: str, config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool
) -> PreTrainedModel:
    """The weights, all of them: one that no file holds would be random without a word."""
    if Path(place).is_dir():
        check_weight_files(Path(place))
    try:
        model, found = model_class(config).from_pretrained(
            place,
            config=config,
            dtype=dtype,
            attn_implementation="sdpa",
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except Exception as error:  # of files, memory, versions: they share no class
        downloaded = cached(place)
        if downloaded is not None:
            check_weight_files(downloaded)
        raise ModelError(f"{place} does not load: {_first(error)}") from error
    if missing := sorted(map(str, found.get("missing_keys") or ())):
        raise ModelError(
            f"{place} lacks {len(missing)} of its model's weights, such as {listed(missing, 3)}: "
            f"they would begin at random. Download or copy the model again; if it was saved "
            f"without its head, pass the one that it was made from."
        )
    return model


def _first(error: Exception) -> str:
    return printable(" ".join(str(error).split()), 300) or type(error).__name__
