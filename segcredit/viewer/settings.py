"""What can be set on the command line, apart from the strategies themselves."""

from dataclasses import dataclass
from enum import StrEnum


class ValueAt(StrEnum):
    """Where V(s_m) is read: before the segment's first token, or before its last."""

    START = "start"
    END = "end"


@dataclass(frozen=True)
class Settings:
    """Settings of the partitions and of the credit; the defaults are the library's own."""

    fraction: float = 0.30
    threshold: float = 0.9
    every: int = 5
    size: int = 16
    window: int = 5
    gamma: float = 1.0
    lam: float = 0.99
    value_at: ValueAt = ValueAt.START
