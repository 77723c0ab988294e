"""The one error of rewards, and text that is safe to put into it."""

from segcredit.printable import printable


class RewardError(ValueError):
    """A reward could not be computed: what was expected, what came, what to do."""


def shown(text: str, limit: int = 80) -> str:
    """The beginning of a text in quotes, on one line, with nothing that could drive a terminal."""
    return f"'{printable(text, limit)}'"
