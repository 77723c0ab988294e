"""One line of the file: a response, and what is known about its tokens."""

from functools import cached_property
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, model_validator

from segcredit.viewer.pieces import split_text


def _flag(x: object) -> object:
    return bool(x) if type(x) is int and x in (0, 1) else x


Flag = Annotated[bool, BeforeValidator(_flag)]
"""true or false; 1 or 0, as training frameworks store masks, will do."""
Probability = Annotated[FiniteFloat, Field(gt=0, le=1)]
LogProbability = Annotated[FiniteFloat, Field(le=0)]

PER_TOKEN = ("entropy", "prob", "logp", "value", "mask")


class Row(BaseModel):
    """A response. Each field's description says what is expected; its example, what to type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    tokens: list[str] | None = Field(
        None,
        description="a list of token texts, special tokens as ''",
        examples=['"tokens": ["The", " answer"]'],
    )
    text: str | None = Field(
        None,
        description="a string, the response where there are no 'tokens'",
        examples=['"text": "The answer"'],
    )
    entropy: list[FiniteFloat] | None = Field(
        None,
        description="a list of finite numbers, one per token",
        examples=['"entropy": [0.1, 2.3]'],
    )
    prob: list[Probability] | None = Field(
        None,
        description="a list of numbers in (0, 1], one per token",
        examples=['"prob": [0.98, 0.4]'],
    )
    logp: list[LogProbability] | None = Field(
        None,
        description="a list of finite numbers ≤ 0, one per token",
        examples=['"logp": [-0.02, -0.9]'],
    )
    value: list[FiniteFloat] | None = Field(
        None,
        description="a list of finite numbers, one per token: V of the prefix before it",
        examples=['"value": [0.5, 0.6]'],
    )
    mask: list[Flag] | None = Field(
        None,
        description="a list of true or false, one per token: false at tool output",
        examples=['"mask": [true, false]'],
    )
    reward: FiniteFloat | None = Field(
        None, description="a finite number", examples=['"reward": 1.0']
    )
    id: str | None = Field(None, description="a string", examples=['"id": "7"'])
    prompt: str | None = Field(None, description="a string", examples=['"prompt": "Find AB."'])

    @model_validator(mode="after")
    def _consistent(self) -> "Row":
        if (self.tokens is None) == (self.text is None):
            came = "neither" if self.tokens is None else "both"
            raise ValueError(
                f"expected either 'tokens' (a list of strings) or 'text' (a string); got {came}; "
                f'type e.g. {{"text": "The answer is 12."}}'
            )
        if not self.pieces:
            raise ValueError(
                "expected at least one token; the response is empty; drop this line, or fill "
                "'tokens' or 'text'"
            )
        if self.prob is not None and self.logp is not None:
            raise ValueError("expected 'prob' or 'logp'; got both; leave one out")
        for name in PER_TOKEN:
            self._check_length(name)
        if not any(self.on_mask):
            raise ValueError(
                "mask must be true at one token at least; got false everywhere; true marks the "
                "tokens that the model wrote"
            )
        return self

    def _check_length(self, name: str) -> None:
        numbers = getattr(self, name)
        if numbers is None or len(numbers) == len(self.pieces):
            return
        if self.tokens is None:
            raise ValueError(
                f"{name} must have one entry per piece of 'text', which splits into "
                f"{len(self.pieces)}; got {len(numbers)}; give the model's own 'tokens' instead"
            )
        raise ValueError(
            f"{name} must have one entry per token, {len(self.pieces)}; got {len(numbers)}; "
            f"make the two lists equally long"
        )

    @cached_property
    def pieces(self) -> list[str]:
        """The text of each token."""
        return split_text(self.text or "") if self.tokens is None else self.tokens

    @cached_property
    def on_mask(self) -> list[bool]:
        """True at the tokens that the model wrote."""
        return [True] * len(self.pieces) if self.mask is None else self.mask
