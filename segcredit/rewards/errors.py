"""The one error of rewards, and text that is safe to put into it."""

from collections.abc import Sequence

from segcredit.printable import printable
from segcredit.types import Reward


class RewardError(ValueError):
    """A reward could not be computed: what was expected, what came, what to do."""


def shown(text: str, limit: int = 80) -> str:
    """The beginning of a text in quotes, on one line, with nothing that could drive a terminal."""
    return f"'{printable(text, limit)}'"


MOST_WITHOUT_VERDICT = 0.05
"""Share of responses without a verdict in a batch above which a warning is shown."""


def no_verdict_warning(rewards: Sequence[Reward], where: str) -> str | None:
    """Warning with cause and remedy if too many responses got no verdict, else None.

    ``where`` completes the phrase "responses of".
    """
    reasons = [x.reason for x in rewards if not x.verdict]
    if len(reasons) <= MOST_WITHOUT_VERDICT * len(rewards):
        return None
    return (
        f"{len(reasons)} of {len(rewards)} responses of {where} got no verdict and count as not "
        f"correct. The first: {printable(reasons[0], 200)}. If answers take long to grade, raise "
        f"reward.deadline (seconds for one), reward.batch_seconds (for all of a batch) or "
        f"reward.workers (processes)."
    )
