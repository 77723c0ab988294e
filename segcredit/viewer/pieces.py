"""Plain text as a list of pieces, for those who have no tokens at hand."""

import re

_PIECE = re.compile(
    r"""
      [^\S\n]* \S+     # a word with the blanks before it
    | [^\S\n]* \n      # a line's end
    | [^\S\n]+ \Z      # blanks at the very end
    """,
    re.VERBOSE,
)


def split_text(text: str) -> list[str]:
    """Words with the blanks before them, and line ends; joined, they are the text again."""
    return _PIECE.findall(text)
