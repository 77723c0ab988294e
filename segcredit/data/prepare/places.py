"""From what the user names (files, a folder, an id of the Hub) to the rows of each split."""

import re
from dataclasses import dataclass
from pathlib import Path

from segcredit.data.prepare.hub import from_hub, is_hub_id
from segcredit.data.prepare.snapshot import SPLITS, data_files, split_of
from segcredit.data.prepare.tables import open_table
from segcredit.data.readers import Source
from segcredit.printable import listed, named, shown

_ASSIGNED = re.compile(r"(?P<split>[A-Za-z]\w*)=(?P<place>.+)", re.DOTALL)


@dataclass(frozen=True)
class Part:
    """Rows of one split that lie together."""

    split: str
    source: Source
    place: str
    """As the user named it."""
    path: Path | None
    """The file, if it is one of this machine's own."""


def find_parts(place: str, config: str | None, usual: str | None) -> list[Part]:
    """The parts of a place; ``test=PLACE`` takes one split, or says which split a file is."""
    wanted, place = _assignment(place)
    path = Path(place)
    if path.is_dir():
        found = [
            Part(split, open_table(file), place, file)
            for split, files in data_files(path, config, usual).items()
            for file in files
        ]
        return _only(found, wanted, place)
    if is_hub_id(place):
        pairs = from_hub(place, config, usual)
        return _only([Part(split, source, place, None) for split, source in pairs], wanted, place)
    return [Part(wanted or split_of(path.stem) or "train", open_table(path), place, path)]


def _assignment(place: str) -> tuple[str | None, str]:
    match = _ASSIGNED.fullmatch(place)
    if match is None or Path(place).exists():
        return None, place
    split = match["split"].lower()
    return SPLITS.get(split, split), match["place"]


def _only(parts: list[Part], wanted: str | None, place: str) -> list[Part]:
    if wanted is None:
        return parts
    chosen = [part for part in parts if part.split == wanted]
    if not chosen:
        there = dict.fromkeys(part.split for part in parts)
        raise ValueError(
            f"expected a split {shown(wanted)} in {named(place)}; it has {listed(there)}."
        )
    return chosen
