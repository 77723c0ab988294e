"""What a preparation found and wrote."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from segcredit.data.prepare.shared import Shared
from segcredit.data.problems import BadRow


@dataclass
class SplitReport:
    """One split, one file."""

    name: str
    path: Path
    """What was written."""
    read: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Bad rows by reason."""
    dropped: int = 0
    """Training rows that held-out data has as well."""
    written: int = 0
    pictures: int = 0
    over_long: int = 0
    """Prompts whose text alone is beyond the limit."""
    longest: int = 0
    """Tokens of the longest text."""


@dataclass
class Report:
    """The whole of it."""

    data_sources: list[str]
    """Names of the rows' origin, by which verl chooses a scorer."""
    reward: str | None
    """Which reward of ours grades the answers, if the data set is a known one."""
    splits: list[SplitReport] = field(default_factory=list)
    shared: list[Shared] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)
    leaking: int = 0
    """Training rows whose question and picture held-out data has, dropped or not."""
    max_prompt_tokens: int | None = None
    """The limit that the lengths were compared to; None: not counted."""

    @property
    def with_pictures(self) -> bool:
        """Whether any row has one."""
        return any(split.pictures for split in self.splits)
