"""A weighted sum of several rewards, each of which is logged by its own name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from segcredit.printable import printable
from segcredit.rewards.checks import RewardError, quoted, require_grades
from segcredit.types import Response, Reward, RewardFn, correctness


@dataclass(frozen=True)
class WeightedRewards:
    """Weighted sum of rewards. The first reward that reports correctness decides what is correct.

    ``correct`` and ``answered`` come from that reward. A response for which any of the rewards
    gave no verdict counts in ``no_verdict``; the sum then has the value that this reward gave
    with its missing verdict (0 for the built-in ones).
    """

    rewards: Mapping[str, RewardFn]
    """Rewards by label."""
    weights: Mapping[str, float]
    """Weights by label; a reward with weight 0 is only logged."""

    def __call__(self, responses: Sequence[Response]) -> list[Reward]:
        if not responses:
            return []
        graded = {name: self._graded(name, responses) for name in self.rewards}
        judge = next((name for name, x in graded.items() if correctness(x) is not None), None)
        return [
            self._sum({name: x[row] for name, x in graded.items()}, judge)
            for row in range(len(responses))
        ]

    def close(self) -> None:
        """Stop the processes of all rewards."""
        for reward in self.rewards.values():
            reward.close()

    def __enter__(self) -> "WeightedRewards":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _graded(self, name: str, responses: Sequence[Response]) -> list[Reward]:
        """Call one reward; name it if it fails."""
        try:
            found = self.rewards[name](responses)
        except RewardError as error:
            raise RewardError(f"reward {name!r}: {error}") from error
        except Exception as error:
            first = responses[0]
            raise RewardError(
                f"the reward {name!r} raised {type(error).__name__}: {printable(str(error), 300)} "
                f"on {len(responses)} responses, beginning with prompt {quoted(first.prompt.id)}, "
                f"response {quoted(first.text)}. Correct it, or remove it from the list of rewards."
            ) from error
        return require_grades(f"the reward {name!r}", found, responses)

    def _sum(self, each: Mapping[str, Reward], judge: str | None) -> Reward:
        parts = {name: self.weights[name] * x.value for name, x in each.items()}
        says = None if judge is None else each[judge]
        return Reward(
            value=sum(parts.values()),
            reason="; ".join(f"{name} {x.value:g}: {x.reason}" for name, x in each.items()),
            correct=None if says is None else says.correct,
            answered=None if says is None else says.answered,
            parts=parts,
            verdict=all(x.verdict for x in each.values()) if says is None else says.verdict,
            each=each,
        )
