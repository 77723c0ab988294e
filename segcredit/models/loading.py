"""A model's parts from where it lies; what is missing or damaged is named, with the way out."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from segcredit.models.codec import Codec
from segcredit.models.files import check_codec_files, check_weight_files
from segcredit.models.kinds import is_vision
from segcredit.models.place import ModelError, cached
from segcredit.printable import listed, printable


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
