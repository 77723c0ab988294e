"""Bad rows are collected, not met one by one: all are told at once, before anything trains."""

from collections.abc import Sequence
from dataclasses import dataclass

SHOWN = 20
ADVICE = (
    "Repair these rows, or go on without them: --skip-bad-rows (in Python, skip_bad_rows=True)."
)


class RowError(ValueError):
    """What is wrong with one row: what was expected, what came."""

    def __init__(self, problem: str, line: int = 1) -> None:
        super().__init__(problem)
        self.line = line
        """Where in the text that was parsed."""


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used."""

    where: str
    """``train.jsonl:3``, ``train.parquet row 3`` (both counted from 1) or ``rows[3]``."""
    problem: str
    """What was expected, what came."""

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}"


class BadRows(ValueError):  # noqa: N818
    """Every bad row of the data, in one message."""

    def __init__(self, bad: Sequence[BadRow], advice: str = ADVICE) -> None:
        lines = [f"{len(bad)} bad row{'s' if len(bad) > 1 else ''}:"]
        lines += [str(row) for row in bad[:SHOWN]]
        if len(bad) > SHOWN:
            lines.append(f"and {len(bad) - SHOWN} more")
        super().__init__("\n".join([*lines, advice]))
        self.bad = tuple(bad)
