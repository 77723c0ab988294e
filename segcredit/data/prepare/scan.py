"""The first reading: every row checked and compared, nothing kept of it but its fingerprint."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from segcredit.data.prepare.columns import Columns
from segcredit.data.prepare.fingerprints import Fingerprint, Fingerprints
from segcredit.data.prepare.items import Item, LeftOut, Making
from segcredit.data.prepare.kinds import Kinds
from segcredit.data.prepare.lengths import TextLengths
from segcredit.data.prepare.places import Part
from segcredit.data.prepare.report import SplitReport
from segcredit.data.problems import BadRow
from segcredit.data.readers import Found, no_rows
from segcredit.printable import printable

Watch = Callable[[str], None]
"""Is told what is being done."""


@dataclass
class Scan:
    """What the first reading of all splits has learnt."""

    columns: Columns
    lengths: TextLengths | None
    max_prompt_tokens: int
    kinds: Kinds = field(default_factory=Kinds)
    bad: list[BadRow] = field(default_factory=list)
    data_sources: dict[str, None] = field(default_factory=dict)
    """In the order of their first row."""
    rows: dict[str, list[Fingerprint]] = field(default_factory=dict)
    """The good rows of each split."""
    numbers: dict[str, list[int]] = field(default_factory=dict)
    """And their numbers, from 0 on, among all rows of the split."""
    _fingerprints: Fingerprints = field(default_factory=Fingerprints)

    def read(self, report: SplitReport, parts: list[tuple[Part, Making]], watch: Watch) -> None:
        """All rows of a split."""
        rows = self.rows.setdefault(report.name, [])
        numbers = self.numbers.setdefault(report.name, [])
        seen: dict[str, dict[str, None]] = {}  # file → its columns
        for part, making, number, found in all_rows(parts):
            columns = seen.setdefault(part.source.name, {})
            if isinstance(found.content, Mapping):
                columns.update(dict.fromkeys(map(str, found.content)))
            report.read += 1
            if report.read % 100 == 0:
                watch(f"reading {report.name}, row {report.read}")
            try:
                item = making.item(found, part.source.folder, number)
                fingerprint = self._fingerprints.of(item)
            except LeftOut as error:
                report.left_out[error.reason] += 1
                self.bad.append(BadRow(printable(found.where), str(error)))
                continue
            rows.append(fingerprint)
            numbers.append(number)
            self._note(item, report)
        self._check_columns(parts, seen)

    def _note(self, item: Item, report: SplitReport) -> None:
        report.pictures += len(item.pictures)
        self.kinds.see(item.kept)
        self.data_sources[item.data_source] = None
        if self.lengths is not None:
            length = self.lengths.count(item.messages)
            report.longest = max(report.longest, length)
            report.over_long += length > self.max_prompt_tokens

    def _check_columns(
        self, parts: list[tuple[Part, Making]], seen: dict[str, dict[str, None]]
    ) -> None:
        for part, _ in parts:
            source = part.source
            if source.name not in seen:
                raise no_rows(source.name)
            if seen[source.name]:
                self.columns.check(source.name, list(seen[source.name]))


def all_rows(parts: list[tuple[Part, Making]]) -> Iterator[tuple[Part, Making, int, Found]]:
    """The rows of a split, numbered through from 0 on."""
    number = 0
    for part, making in parts:
        for found in part.source.rows():
            yield part, making, number, found
            number += 1
