"""How many tokens the text of a prompt has; pictures come on top, and only a model knows them."""

from collections.abc import Sequence
from typing import Any

from segcredit.data.formats import MARK
from segcredit.printable import printable, shown

USUAL_LIMIT = 1024


class TextLengths:
    """Counts by a tokenizer, its chat template included."""

    def __init__(self, tokenizer: str) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer)
        except Exception as error:  # it raises whatever the file made it stumble
            raise ValueError(
                f"--tokenizer: expected a folder with a tokenizer, or a model's id on the Hub; "
                f"{shown(tokenizer)} cannot be loaded: {printable(str(error), 200)}"
            ) from None

    def count(self, messages: Sequence[dict[str, str]]) -> int:
        """Tokens of a prompt without its pictures."""
        plain = [
            {"role": message["role"], "content": message["content"].replace(MARK, "")}
            for message in messages
        ]
        if not self._tokenizer.chat_template:
            text = "\n".join(message["content"] for message in plain)
            return len(self._tokenizer(text)["input_ids"])
        try:
            text = self._tokenizer.apply_chat_template(
                plain, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template may refuse system messages, for example
            raise ValueError(
                f"--tokenizer: its chat template refuses a prompt: {printable(str(error), 200)}"
            ) from None
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])
