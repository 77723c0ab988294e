"""The whole way: lines of a file, rows, cuts, and to the terminal or as JSON."""

from collections.abc import Callable, Mapping, Sequence

from segcredit.partition import Partition
from segcredit.viewer.cut import Cut, cut
from segcredit.viewer.errors import InputError
from segcredit.viewer.reading import STDIN, filled_lines, open_lines, parse_row
from segcredit.viewer.rows import Row
from segcredit.viewer.settings import Settings
from segcredit.viewer.strategies import choose

Show = Callable[[Row, str, list[Cut]], None]
"""Called with each row, its name and its cuts."""


def run(
    path: str,
    asked: Sequence[str],
    made: Mapping[str, Partition],
    settings: Settings,
    limit: int | None,
    show: Show,
) -> int:
    """Show the file's first ``limit`` rows; return how many were left out."""
    name = "stdin" if path == STDIN else path
    left_out = 0
    with open_lines(path) as lines:
        for position, (number, line) in enumerate(filled_lines(name, lines)):
            if limit is not None and position >= limit:
                left_out += 1
                continue
            try:
                row = parse_row(line)
                cuts = [cut(row, way, made[way], settings) for way in choose(asked, row)]
            except InputError as error:
                raise InputError(f"{name}:{number}: {error}") from None
            show(row, row.id or f"line {number}", cuts)
    return left_out
