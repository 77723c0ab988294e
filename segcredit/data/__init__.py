"""Prompts from the files that verl, TRL, EasyR1 and others write, and their pictures."""

from segcredit.data.formats import BadRow, BadRows, Keys, RowError
from segcredit.data.images import as_source
from segcredit.data.rows import CountTokens, Loaded, load_prompts, prompts_from_rows

__all__ = [
    "BadRow",
    "BadRows",
    "CountTokens",
    "Keys",
    "Loaded",
    "RowError",
    "as_source",
    "load_prompts",
    "prompts_from_rows",
]
