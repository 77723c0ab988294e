"""The one exception that the command line turns into one line."""

from difflib import get_close_matches


class InputError(Exception):
    """What the person at the terminal gave cannot be used; the message says what to type."""


def nearest(name: str, known: list[str]) -> str:
    """`` Did you mean 'entropy'?``, or nothing where no known name is near."""
    near = get_close_matches(name.lower(), known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
