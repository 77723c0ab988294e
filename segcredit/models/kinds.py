"""Which models can be policies: those that write text token by token, and the Qwen-VLs."""

from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from segcredit.models.files import check_config_file
from segcredit.models.place import CONFIG, ModelError, locate
from segcredit.printable import printable, shown

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
