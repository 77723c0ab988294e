"""Reward for answers that equal the expected text, as in generated tasks; needs no process."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from segcredit.rewards.checks import quoted, require_extract
from segcredit.rewards.extract import READERS, expected, hash_answer
from segcredit.rewards.verify import right, same_number, wrong
from segcredit.types import Response, Reward


@dataclass(frozen=True)
class ExactReward:
    r"""Reward 1 if the ``\boxed{}`` text or the number after ``####`` is correct, else 0."""

    extract: Literal["boxed", "hash"] = "boxed"

    def __post_init__(self) -> None:
        require_extract(self.extract, ("boxed", "hash"))

    def __call__(self, responses: Sequence[Response]) -> list[Reward]:
        return [self._grade(response) for response in responses]

    def close(self) -> None:
        """Do nothing: there is no process."""

    def _grade(self, response: Response) -> Reward:
        find, _ = READERS[self.extract]
        gold, answer = gold_answer(response), find(response.text)
        if self.extract == "hash":
            gold = hash_answer(f"#### {gold}") or gold  # 1,234 and $1234 become 1234
        if answer is None:
            return Reward(0.0, no_answer(response, self.extract), False, False, {"accuracy": 0.0})
        same = answer == gold or (self.extract == "hash" and same_number(answer, gold))
        verdict = right(answer) if same else wrong(gold, answer)
        value = float(same)
        return Reward(value, verdict.reason, verdict.right, True, {"accuracy": value})


def gold_answer(response: Response) -> str:
    """Return the expected answer; raise ValueError if the prompt has none."""
    gold = response.prompt.answer
    if gold is None or not gold.strip():
        raise ValueError(
            f"every prompt needs an answer to be graded against; prompt "
            f"{quoted(response.prompt.id)} has {'none' if gold is None else 'an empty one'}. Add "
            f"an answer to its row, or use your own reward function: 'file.py:function'."
        )
    return expected(gold)


def no_answer(response: Response, extract: str) -> str:
    """Reason for the reward of a response without an answer."""
    reason = f"no {READERS[extract][1]}"
    if response.truncated:
        return f"{reason}: truncated at {response.max_tokens} tokens"
    return reason
