"""Arguments of ``Trainer``: check their types, and convert objects to settings of a recipe."""

import copy
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from transformers import PreTrainedModel

from segcredit.config import RecipeError
from segcredit.models.families import takes_images
from segcredit.models.loading import PROCESSORS
from segcredit.printable import shown
from segcredit.types import Algorithm

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
STEPS = 100
"""Number of optimization steps unless given."""
FILES = "files, a list of rows, a datasets.Dataset or a data frame"


def kind(value: object) -> str:
    """Describe the type of a value for a message."""
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    if inspect.isroutine(value):
        return f"the function {getattr(value, '__name__', value)}"
    if isinstance(value, str | bool | int | float) or value is None:
        return f"{'None' if value is None else shown(value)} ({type(value).__name__})"
    return type(value).__name__


def stages_of_steps(steps: object, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the only stage of a run without ``stages``; raise TypeError for invalid ``steps``."""
    if steps is None:
        steps = STEPS
    elif "stages" in settings:
        raise TypeError(
            f"steps: expected none, because stages has the steps of each stage; got {kind(steps)}. "
            f"Remove steps"
        )
    if isinstance(steps, bool) or not isinstance(steps, SupportsIndex):
        raise TypeError(
            f"steps: expected a whole number; got {kind(steps)}. Type, for example, 100"
        )
    return [{"kind": "optimize", "steps": int(steps)}]


def check_algorithm(algorithm: object) -> None:
    """Raise TypeError unless this is a method, its name or its settings."""
    expected = "algorithm: expected a name such as 'sapo', settings or a method object"
    if isinstance(algorithm, str | dict):
        return
    if isinstance(algorithm, type) or inspect.isroutine(algorithm):
        raise TypeError(f"{expected}; got {kind(algorithm)}. Type {algorithm.__name__}()")
    if not isinstance(algorithm, Algorithm):
        raise TypeError(f"{expected}; got {kind(algorithm)}. Type, for example, algorithm='sapo'")


def check_reward(reward: object) -> None:
    """Raise TypeError unless the reward is a name, settings, a function, or a list of these."""
    if not isinstance(reward, str | dict | list | tuple) and not callable(reward):
        raise TypeError(
            f"reward: expected a name such as 'math', settings or a function; got {kind(reward)}. "
            f"Type, for example, reward='math'"
        )


def check_plain(name: str, settings: object) -> None:
    """Raise TypeError for an object inside settings, which config.yaml could not record."""
    if isinstance(settings, dict | list | tuple):
        parts = settings.items() if isinstance(settings, dict) else enumerate(settings)
        for key, part in parts:
            check_plain(f"{name}.{key}", part)
    elif settings is not None and not isinstance(settings, str | int | float):
        raise TypeError(
            f"{name}: expected a number, a text, a list or settings, which config.yaml can hold; "
            f"got {kind(settings)}. Give a name or a number, or the whole {name.partition('.')[0]} "
            f"as an object"
        )


def check_folder(folder: object, name: str = "folder") -> None:
    """Raise TypeError unless this is a path or None."""
    if folder is not None and not isinstance(folder, str | Path):
        raise TypeError(f"{name}: expected a path; got {kind(folder)}. Type {name}='runs/mine'")


def check_switch(name: str, value: object) -> None:
    """Raise TypeError unless the value is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False; got {kind(value)}. Type {name}=True")


@dataclass(frozen=True)
class LoadedModel:
    """A model and its tokenizer that are in memory; the run trains a copy of them."""

    model: PreTrainedModel
    parts: tuple[Any, ...]
    """Tokenizer, processor, or tokenizer and image processor."""

    def save(self, folder: Path) -> None:
        """Save as a Hugging Face folder, without changing the model's configuration."""
        self._unchanged().save_pretrained(folder)
        self._save_parts(folder)

    def save_without_weights(self, folder: Path) -> None:
        """Save the files that settings and rows are checked with."""
        model = self._unchanged()
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
        self._save_parts(folder)
        if takes_images(model.config) and not any((folder / x).is_file() for x in PROCESSORS):
            name = _name(model)
            raise TypeError(
                f"tokenizer: expected the model's processor, because the model reads images; got "
                f"{', '.join(kind(x) for x in self.parts)}. Type "
                f"tokenizer=AutoProcessor.from_pretrained({name!r}) or, without torchvision, "
                f"tokenizer=(AutoTokenizer.from_pretrained({name!r}), "
                f"AutoImageProcessor.from_pretrained({name!r}))"
            )

    def _save_parts(self, folder: Path) -> None:
        for part in self.parts:
            part.save_pretrained(folder)

    def _unchanged(self) -> PreTrainedModel:
        """Return a model with the same weights, and copies of what save_pretrained changes."""
        model = copy.copy(self.model)
        model.config = copy.deepcopy(self.model.config)
        model.generation_config = copy.deepcopy(self.model.generation_config)
        return model


PLACEHOLDER = "checkpoints/initial"
"""Path of a model that was given in Python, before its run has a directory."""


def model_settings(model: Any, tokenizer: Any) -> tuple[dict[str, Any], LoadedModel | None]:
    """Convert ``model`` to settings; the second value holds a model that is already in memory."""
    settings = dict(model) if isinstance(model, dict) else {"path": model}
    source = settings.get("path")
    if isinstance(source, PreTrainedModel):
        settings = {"dtype": _dtype(source), **settings, "path": PLACEHOLDER}
        return settings, LoadedModel(source, _parts(source, tokenizer))
    named = isinstance(source, str | Path)
    if not named and not (isinstance(model, dict) and source is None):
        raise TypeError(
            f"model: expected a folder, a hub id, a model of transformers, or settings such as "
            f"{{'path': …, 'dtype': …}}; got {kind(source)}. {_model_advice(source)}"
        )
    if tokenizer is not None:
        raise TypeError(
            f"tokenizer: expected none, because the model is not an object in memory but "
            f"{shown(source) if isinstance(source, str) else kind(source)}; got {kind(tokenizer)}. "
            f"Remove tokenizer: the model's folder contains it"
        )
    # without a path it is a tiny model; the recipe checks the rest
    return settings | ({"path": str(source)} if named else {}), None


def _model_advice(source: object) -> str:
    if hasattr(source, "merge_and_unload"):
        return "Merge the adapter first, and pass the result of merge_and_unload()"
    if isinstance(source, torch.nn.Module):
        return "Save it as a Hugging Face folder with its tokenizer, and type model='FOLDER'"
    return "Type, for example, model='Qwen/Qwen2.5-0.5B-Instruct'"


def _dtype(model: PreTrainedModel) -> str:
    if getattr(model, "_hf_peft_config_loaded", False):
        raise TypeError(
            "model: expected a model without an adapter; got one with an adapter that add_adapter "
            "or load_adapter added. Load the adapter with peft.PeftModel instead, and pass the "
            "result of merge_and_unload()"
        )
    if not model.can_generate():
        raise TypeError(
            f"model: expected a model with a language modeling head; got {type(model).__name__}. "
            f"Load it with AutoModelForCausalLM, or AutoModelForImageTextToText if it reads images"
        )
    if getattr(model, "hf_quantizer", None) is not None:
        raise TypeError(
            "model: expected weights in float32 or bfloat16; got a quantized model. Load it "
            "without quantization_config"
        )
    if model.dtype not in DTYPES:
        raise TypeError(
            f"model: expected weights in float32 or bfloat16; got {model.dtype}. Pass "
            f"model.to(torch.bfloat16)"
        )
    return DTYPES[model.dtype]


def _parts(model: PreTrainedModel, tokenizer: Any) -> tuple[Any, ...]:
    """Return the parts that must be saved with the model; raise TypeError if one is missing."""
    given = tuple(tokenizer) if isinstance(tokenizer, list | tuple) else (tokenizer,)
    name = _name(model)
    if tokenizer is None or not given:
        raise TypeError(
            f"tokenizer: expected the model's tokenizer or processor, because model is an object "
            f"in memory; got None. Type tokenizer=AutoTokenizer.from_pretrained({name!r}), or "
            f"AutoProcessor for a model that reads images"
        )
    for part in given:
        if isinstance(part, type) or not hasattr(part, "save_pretrained"):
            raise TypeError(
                f"tokenizer: expected a tokenizer or processor of transformers, or "
                f"(tokenizer, image_processor); got {kind(part)}. Type, for example, "
                f"tokenizer=AutoTokenizer.from_pretrained({name!r})"
            )
    return given


def _name(model: PreTrainedModel) -> str:
    """Return the folder or hub id that a model was loaded from, for messages."""
    return str(model.config.name_or_path or "Qwen/Qwen2.5-0.5B-Instruct")


def data_settings(data: Any, test: Any, objects: dict[str, Any]) -> dict[str, Any]:
    """Convert ``data`` and ``test`` to settings; rows given in Python go to ``objects``."""
    if isinstance(data, dict) and test is not None:
        raise RecipeError("give test inside data, as data={'train': …, 'test': …}")
    if isinstance(data, dict) and not {"train", "world"} & data.keys():
        raise TypeError(
            f"data: expected {FILES}, or settings such as {{'train': …}}; got a dictionary with "
            f"the keys {', '.join(map(repr, data)) or '(none)'}. Put a single row in a list, "
            f"data=[{{…}}]; choose a split of a DatasetDict, data=splits['validation']"
        )
    if isinstance(data, dict):
        others = [x for x, rows in data.items() if hasattr(rows, "column_names")]
        if unused := [x for x in others if x not in ("train", "test")]:
            raise TypeError(
                f"data: expected the splits train and test; got {', '.join(others)}. Choose them: "
                f"data={{'train': splits['train'], 'test': splits[{unused[0]!r}]}}"
            )
    found = dict(data) if isinstance(data, dict) else {"train": data, "test": test}
    labels = {} if isinstance(data, dict) else {"train": "data"}
    for name in ("train", "test"):
        source = found.pop(name, None)
        if source is None and not (name == "train" and labels):
            continue
        label = labels.get(name, name)
        some = [source] if isinstance(source, str | Path) else _rows(label, source)
        if some and all(isinstance(x, str | Path) for x in some):
            found[name] = [str(x) for x in some]
        else:
            objects[name] = some
            found[name] = [f"{name}: rows given in Python"]
    return found


def _rows(name: str, source: Any) -> list[Any]:
    """Read rows or paths from a list, an iterable, a ``datasets.Dataset`` or a data frame."""
    if hasattr(source, "to_dicts"):  # polars
        return list(source.to_dicts())
    if hasattr(source, "iloc") and hasattr(source, "columns"):  # pandas
        return list(source.to_dict("records"))
    if isinstance(source, dict | bytes | type) or not isinstance(source, Iterable):
        raise TypeError(
            f"{name}: expected {FILES}; got {kind(source)}. Type, for example, "
            f"{name}=[{{'problem': '1 + 1', 'answer': '2'}}]"
        )
    return list(source)
