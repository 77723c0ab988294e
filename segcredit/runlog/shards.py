"""Tensors of which every process writes some rows to a file of its own; read by any number.

A file is plain safetensors. Its header says of each tensor how many rows come before those that the
file has, and the whole tensor's shape: no pickle, and nothing that depends on who reads.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from segcredit.runlog.manifest import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

_KEY = "rows"


@dataclass(frozen=True)
class Part:
    """Some rows of a tensor."""

    rows: "Tensor"
    before: int
    """Rows of the tensor that come before these."""
    shape: tuple[int, ...]
    """Of the whole tensor."""


def file_name(name: str, number: int, writers: int) -> str:
    """Of one writer's file."""
    return f"{name}-{number:05d}-of-{writers:05d}.safetensors"


def save_parts(file: Path, parts: dict[str, Part]) -> None:
    """Write this process's rows, and bring them to the disk."""
    from safetensors.torch import save_file

    some = {name: part for name, part in parts.items() if len(part.rows)}
    header = {name: [part.before, list(part.shape)] for name, part in some.items()}
    tensors = {name: part.rows.detach().cpu().contiguous() for name, part in some.items()}
    save_file(tensors, file, metadata={_KEY: json.dumps(header)})
    with file.open("rb") as written:  # whoever seals the checkpoint may be another machine
        os.fsync(written.fileno())


class Parts:
    """All rows that several writers left."""

    def __init__(self, files: Iterable[Path]) -> None:
        from safetensors import SafetensorError, safe_open

        self._open: dict[Path, Any] = {}
        self._found: dict[str, list[tuple[int, int, Path]]] = {}
        for path in files:
            try:
                file: Any = safe_open(path, framework="pt")
                self._open[path] = file
                for name, (before, _) in json.loads((file.metadata() or {})[_KEY]).items():
                    count = file.get_slice(name).get_shape()[0]
                    self._found.setdefault(name, []).append((int(before), int(count), path))
            except FileNotFoundError:
                raise CheckpointError(f"{path} is missing.") from None
            except (ValueError, KeyError, TypeError, SafetensorError) as error:
                raise CheckpointError(f"{path} is damaged or not a part of ours: {error}.") from (
                    error
                )

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def read(self, name: str, before: int, count: int) -> "Tensor":
        """``count`` rows of a tensor, behind the first ``before`` ones, whoever wrote them."""
        import torch

        found, place = [], before
        for first, length, path in sorted(self._found.get(name, [])):
            last = min(first + length, before + count)
            if first <= place < last:
                rows = self._open[path].get_slice(name)[place - first : last - first]
                found.append(rows.clone())
                place = last
        if place != before + count:
            raise CheckpointError(
                f"rows {place} to {before + count - 1} of {name!r} are in none of "
                f"{', '.join(x.name for x in self._open)}."
            )
        if found:
            return torch.cat(found)
        _, _, path = self._found[name][0]
        return self._open[path].get_slice(name)[:0].clone()
