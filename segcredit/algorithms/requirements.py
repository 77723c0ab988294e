"""Requirements of a method: its columns, and optional attributes with their defaults."""

from dataclasses import dataclass

from segcredit.columns import INITIAL_POLICY, LOGP_OLD, Column, in_order, resolve
from segcredit.types import Algorithm


@dataclass(frozen=True)
class Requirements:
    """Requirements of one method, as returned by :func:`requirements`.

    A built-in or custom method sets the requirements that differ from the defaults as attributes.
    """

    columns: tuple[Column, ...]
    """Everything that is filled or prepared: ``needs``, log π_old unless the method is offline,
    and the initial policy if it sets ``restarts``."""
    offline: bool = False
    """Whether the loss reads only log π of the current model, not π_old (RestEM, DPO)."""
    draws: bool = False
    """Whether ``prepare`` takes the run's generator as ``generator`` (DPO samples pairs)."""
    own_temperature: float | None = None
    """``temperature`` of the method: that of log π in the loss. None: the sampling temperature."""
    assigns_credit: bool = False
    """Whether each token gets an advantage: the method has ``credit``, is not offline, and does not
    set ``fits_credit`` (in DVO the credit is a regression target)."""
    compares_responses: bool = False
    """Whether at least two responses per prompt are needed (GRPO, RLOO, DPO)."""
    compares_groups: bool = False
    """Whether credit is a difference between the responses to one prompt (GRPO, GSPO, RLOO)."""

    def needs(self, kind: type[Column]) -> bool:
        """Whether a column of this class is required."""
        return any(isinstance(x, kind) for x in self.columns)

    def temperature(self, sampling: float) -> float:
        """Temperature of log π in the loss, given the sampling temperature."""
        return sampling if self.own_temperature is None else self.own_temperature


def requirements(algorithm: Algorithm) -> Requirements:
    """Read a method's requirements; where an attribute is missing, the default applies."""
    offline = bool(getattr(algorithm, "offline", False))
    columns = set(resolve(algorithm.needs))
    if not offline:
        columns.add(LOGP_OLD)
    if getattr(algorithm, "restarts", False):
        columns.add(INITIAL_POLICY)
    credit = getattr(algorithm, "credit", None)
    fits_credit = bool(getattr(algorithm, "fits_credit", False))
    groups = bool(getattr(credit, "compares_groups", False))
    # an offline method without the attribute is computed at 1, the model's own distribution
    temperature = getattr(algorithm, "temperature", 1.0 if offline else None)
    return Requirements(
        columns=in_order(columns),
        offline=offline,
        draws=bool(getattr(algorithm, "draws", False)),
        own_temperature=None if temperature is None else float(temperature),
        assigns_credit=credit is not None and not offline and not fits_credit,
        compares_responses=groups or bool(getattr(algorithm, "compares_responses", False)),
        compares_groups=groups,
    )
