"""A folder as the Hub or the datasets library lays it out: which files are which split."""

import os
import re
from difflib import get_close_matches
from pathlib import Path

from segcredit.data.prepare.tables import SUFFIXES
from segcredit.printable import listed, named, shown

SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
    **dict.fromkeys(("validation", "val", "valid", "dev"), "validation"),
}
"""What files and folders are called → the split."""
ORDER = ("train", "validation", "test")
_NO_DATA = re.compile(r"(dataset_infos?|dataset_dict|state|config)\.json|cache-.*\.arrow")


def split_of(name: str) -> str | None:
    """``train-00000-of-00002`` → train."""
    words = re.split(r"[^a-z]+", name.lower())
    return next((SPLITS[word] for word in words if word in SPLITS), None)


def data_files(
    folder: Path, config: str | None = None, usual: str | None = None
) -> dict[str, list[Path]]:
    """The files of each split, in a fixed order.

    A data set of several parts (GSM8K: ``main``, ``socratic``) has a folder for each: ``config``
    chooses; without it the files beside them, or ``usual``, or the only part. Files without a
    split in their name are for training.
    """
    files = _chosen(folder, _by_config(folder), config, usual)
    kinds = {file.suffix.lower() for file in files}
    kind = next(suffix for suffix in SUFFIXES if suffix in kinds)
    splits: dict[str, list[Path]] = {}
    for file in files:
        if file.suffix.lower() == kind:
            splits.setdefault(_split_below(folder, file), []).append(file)
    return {split: splits[split] for split in sorted(splits, key=in_order)}


def in_order(split: str) -> tuple[int, str]:
    """A key for sorting: training first, testing last, others behind."""
    return (ORDER.index(split) if split in ORDER else len(ORDER), split)


def _by_config(folder: Path) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for place, inner, names in os.walk(folder):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        for name in sorted(names):
            file = Path(place) / name
            if file.suffix.lower() not in SUFFIXES or name.startswith("."):
                continue
            if not _NO_DATA.fullmatch(name):
                above = file.relative_to(folder).parent.parts
                parts = [part for part in above if part != "data" and part not in SPLITS]
                found.setdefault("/".join(parts), []).append(file)
    return found


def _chosen(
    folder: Path, found: dict[str, list[Path]], config: str | None, usual: str | None
) -> list[Path]:
    if not found:
        raise ValueError(
            f"expected data ({', '.join(SUFFIXES)}) in the folder {named(folder)}; got none. Was "
            f"it downloaded whole?"
        )
    for name in [config] if config else ["", usual]:
        if name in found:
            return found[name]
    if len(found) == 1 and not config:
        return next(iter(found.values()))
    parts = [name for name in found if name]
    there = f"there are {listed(parts)}" if parts else "it has no parts: leave --config out"
    near = get_close_matches(config or "", parts, n=1) or parts
    raise ValueError(
        f"expected one part of the data set in {named(folder)}; got "
        f"{shown(config) if config else 'none'}, and {there}."
        f"{f' Choose: --config {near[0]}' if near else ''}"
    )


def _split_below(folder: Path, file: Path) -> str:
    """``test.jsonl``, ``test/data-0.arrow``: by the file's name, else by the folder between."""
    between = file.relative_to(folder).parent.name
    return split_of(file.stem) or split_of(between) or "train"
