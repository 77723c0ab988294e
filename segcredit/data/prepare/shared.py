"""Questions and pictures that occur twice: between training and held-out data, and within."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from segcredit.data.prepare.fingerprints import Fingerprint

TRAIN = "train"


@dataclass(frozen=True)
class Shared:
    """How many rows are not new, in each of four senses."""

    split: str
    """The rows that are counted."""
    within: str
    """Among which an equal one is looked for: another split, or the rows before it."""
    rows: int
    question: int
    """The same wording."""
    file: int
    """A picture with the same bytes."""
    picture: int
    """A picture with the same pixels."""
    both: int
    """The same wording and the same picture (or none) in one row."""


class _Seen:
    """What rows have shown so far."""

    def __init__(self, rows: Iterable[Fingerprint] = ()) -> None:
        self.questions: set[bytes] = set()
        self.files: set[bytes] = set()
        self.pictures: set[bytes] = set()
        self.pairs: set[tuple[bytes, bytes]] = set()
        for row in rows:
            self.add(row)

    def add(self, row: Fingerprint) -> None:
        self.questions.add(row.question)
        self.files.update(row.files)
        self.pictures.update(row.pictures)
        self.pairs.update(row.pairs)

    def compare(self, row: Fingerprint) -> tuple[bool, bool, bool, bool]:
        return (
            row.question in self.questions,
            not self.files.isdisjoint(row.files),
            not self.pictures.isdisjoint(row.pictures),
            not self.pairs.isdisjoint(row.pairs),
        )


def find_shared(splits: Mapping[str, Sequence[Fingerprint]]) -> list[Shared]:
    """Held-out rows that training data has, then rows that repeat an earlier one of their split."""
    train = _Seen(splits.get(TRAIN, ()))
    across = [
        _counted(split, TRAIN, [train.compare(row) for row in rows])
        for split, rows in splits.items()
        if split != TRAIN and TRAIN in splits
    ]
    return across + [_repeated(split, rows) for split, rows in splits.items()]


def leaking(splits: Mapping[str, Sequence[Fingerprint]]) -> set[int]:
    """The training rows whose question and picture a held-out row has, by their place."""
    held_out = _Seen(row for split, rows in splits.items() if split != TRAIN for row in rows)
    return {
        place
        for place, row in enumerate(splits.get(TRAIN, ()))
        if not held_out.pairs.isdisjoint(row.pairs)
    }


def _repeated(split: str, rows: Sequence[Fingerprint]) -> Shared:
    seen, found = _Seen(), []
    for row in rows:
        found.append(seen.compare(row))
        seen.add(row)
    return _counted(split, split, found)


def _counted(split: str, within: str, found: Sequence[tuple[bool, bool, bool, bool]]) -> Shared:
    question, file, picture, both = (sum(row[sense] for row in found) for sense in range(4))
    return Shared(split, within, len(found), question, file, picture, both)
