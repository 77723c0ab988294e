"""Whether a model's folder is whole: every file there, none cut off, before gigabytes are read."""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from segcredit.models.place import CONFIG, ModelError
from segcredit.printable import listed, named, printable

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
