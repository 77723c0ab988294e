"""Who else works on an evaluation: each has a part of the prompts, and all get all answers."""

from collections.abc import Sequence
from typing import Protocol, TypeVar, runtime_checkable

Item = TypeVar("Item")


@runtime_checkable
class Peers(Protocol):
    """Processes side by side, each with a contiguous part of every list."""

    def own(self, items: Sequence[Item]) -> Sequence[Item]:
        """This one's part."""
        ...

    def before(self, items: Sequence[Item]) -> int:
        """How many items those before it have."""
        ...

    def gather(self, items: Sequence[Item]) -> list[Item]:
        """Everyone's, in order."""
        ...


class _Alone:
    """No others."""

    def own(self, items: Sequence[Item]) -> Sequence[Item]:
        return items

    def before(self, items: Sequence[Item]) -> int:
        return 0

    def gather(self, items: Sequence[Item]) -> list[Item]:
        return list(items)


ALONE = _Alone()
