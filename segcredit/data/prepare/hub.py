"""Data sets of the Hugging Face Hub, by the datasets library or else by plain download."""

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from segcredit.data.prepare.snapshot import SPLITS, data_files, in_order
from segcredit.data.prepare.tables import SUFFIXES, open_table
from segcredit.data.readers import Found, Source, table_rows
from segcredit.printable import printable, shown

_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_ROWS_AT_ONCE = 64


def is_hub_id(place: str) -> bool:
    """``owner/name``, unless a file or folder of this machine is meant."""
    path = Path(place)
    if not _ID.fullmatch(place) or path.suffix.lower() in SUFFIXES:
        return False
    return not path.exists() and not path.parent.exists()


def from_hub(name: str, config: str | None, usual: str | None) -> list[tuple[str, Source]]:
    """Splits and their rows; ``usual`` is the part that is meant where the user says nothing."""
    try:
        datasets = import_module("datasets")
    except ImportError:
        return _downloaded(name, config, usual)
    try:
        found = datasets.load_dataset(name, config or usual)
    except Exception as error:  # the library's errors share no class
        raise _unreachable(name, error) from None
    sources = [
        (SPLITS.get(split, split), _source(f"{name}:{split}", table))
        for split, table in found.items()
    ]
    return sorted(sources, key=lambda pair: in_order(pair[0]))


def _source(name: str, table: Any) -> Source:
    arrow = table.with_format("arrow")  # pictures stay encoded

    def rows() -> Iterator[Found]:
        number = 1
        for part in arrow.iter(batch_size=_ROWS_AT_ONCE):
            yield from table_rows(name, part, number)
            number += len(part)

    return Source(name, name, Path.cwd(), list(table.column_names), rows)


def _downloaded(name: str, config: str | None, usual: str | None) -> list[tuple[str, Source]]:
    """Its data files, into the Hub's own cache; from there on they are a folder like any other."""
    try:
        fetch = import_module("huggingface_hub").snapshot_download
        folder = fetch(name, repo_type="dataset", allow_patterns=[f"*{end}" for end in SUFFIXES])
    except Exception as error:  # no network, no such name, no right to read it
        raise _unreachable(name, error) from None
    splits = data_files(Path(folder), config, usual)
    return [(split, open_table(file)) for split, files in splits.items() for file in files]


def _unreachable(name: str, error: Exception) -> ValueError:
    folder = name.rpartition("/")[2]
    return ValueError(
        f"expected a file, a folder, or a data set of the Hub that can be reached; {shown(name)} "
        f"cannot be loaded: {printable(str(error), 300)}\nWhere there is a network, type: hf "
        f"download {name} --repo-type dataset --local-dir {folder}; then give that folder here "
        f"(geo3k, gsm8k, math: --from {folder})"
    )
