"""What a run's config.yaml says of its method: clip range, γ and λ, and the units of the ratio."""

from typing import TYPE_CHECKING

from segcredit.analysis.result import CannotAnalyseError
from segcredit.runlog import Run

if TYPE_CHECKING:
    from segcredit.algorithms import PolicyGradient


def method_of(run: Run) -> "PolicyGradient":
    """The run's policy-gradient method, made again from its settings."""
    from segcredit.algorithms import PolicyGradient
    from segcredit.config import GIVEN_IN_PYTHON
    from segcredit.config.recipe import algorithm_of

    given = run.config.get(GIVEN_IN_PYTHON)
    if isinstance(given, dict | list) and "algorithm" in given:
        raise CannotAnalyseError(
            "its method came from Python as an object, which config.yaml cannot hold."
        )
    spec = run.config.get("algorithm")
    if not isinstance(spec, str | dict) or (isinstance(spec, dict) and "name" not in spec):
        raise CannotAnalyseError("its config.yaml names no algorithm.")
    try:
        made = algorithm_of(spec)
    except (ValueError, TypeError) as error:
        raise CannotAnalyseError(
            f"the algorithm of its config.yaml is not known: {error}"
        ) from None
    if not isinstance(made, PolicyGradient):
        raise CannotAnalyseError(f"{type(made).__name__} has neither segments nor a ratio.")
    return made
