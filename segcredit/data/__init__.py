"""Load prompts and images from the files that verl, TRL, EasyR1 and others write."""

from segcredit.data.formats import BadRow, BadRows, Keys, RowError
from segcredit.data.images import as_source
from segcredit.data.rows import CountTokens, PromptSet, load_prompts, prompts_from_rows

__all__ = [
    "BadRow",
    "BadRows",
    "CountTokens",
    "Keys",
    "PromptSet",
    "RowError",
    "as_source",
    "load_prompts",
    "prompts_from_rows",
]
