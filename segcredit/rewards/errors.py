"""The one error of rewards, and text that is safe to put into it."""


class RewardError(ValueError):
    """A reward could not be computed: what was expected, what came, what to do."""


def shown(text: str, limit: int = 80) -> str:
    """The beginning of a text in quotes, on one line, with nothing that could drive a terminal."""
    begun = "".join(c if c.isprintable() else _escaped(c) for c in text[:limit])
    return f"'{begun}{'…' if len(text) > limit else ''}'"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
