"""The two outputs: a page on the terminal, or JSON lines."""

import os
import sys
from collections.abc import Sequence

from rich.console import Console

from segcredit.viewer.as_json import as_json
from segcredit.viewer.cut import Cut, partitions
from segcredit.viewer.page import Page
from segcredit.viewer.reading import EXAMPLE, rollouts_of
from segcredit.viewer.rows import Row
from segcredit.viewer.run import run
from segcredit.viewer.settings import Settings
from segcredit.viewer.visible import one_line


def to_terminal(
    path: str, strategies: Sequence[str], settings: Settings, limit: int | None, width: int | None
) -> None:
    """Each row with its cuts, a legend, and how many rows were left out."""
    made = partitions(settings)  # first: a refused setting leaves the page empty
    page = Page(Console(width=width, highlight=False), settings)
    if path == EXAMPLE:
        page.note("Hand-made responses; the numbers are made up to illustrate.")
    file = rollouts_of(path)
    if file != path:
        page.note(f"The last rollouts of this run: {one_line(os.path.relpath(file, path))}")
    left_out = run(file, strategies, made, settings, limit, page.row)
    page.legend()
    if path == EXAMPLE:
        page.note("Next: segcredit segment --example -s all, then a file of yours (--help).")
    if left_out:
        page.note(_left_out(left_out))


def to_json(path: str, strategies: Sequence[str], settings: Settings, limit: int | None) -> None:
    """One line per row and strategy on standard output, and nothing else there."""

    def show(row: Row, label: str, cuts: list[Cut]) -> None:
        for cut in cuts:
            print(as_json(label, cut, settings))

    left_out = run(rollouts_of(path), strategies, partitions(settings), settings, limit, show)
    if left_out:
        print(_left_out(left_out), file=sys.stderr)


def _left_out(number: int) -> str:
    return f"{number} more {'row was' if number == 1 else 'rows were'} left out; --limit 0: all."
