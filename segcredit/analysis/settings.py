"""What may be chosen about the analyses."""

from dataclasses import dataclass

QUANTILES = tuple(n / 100 for n in range(50, 100, 5))
"""q = .50, .55, …, .95, the axis of the paper's Figure 3."""
OTHER_THRESHOLDS = (0.8, 0.95)
"""Reported beside the chosen one, since the paper does not say which jumps of V are large."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Of all analyses at once."""

    threshold: float = 0.9
    """d: a jump of V is large from this quantile on."""
    resamples: int = 1000
    """B, draws of each bootstrap."""
    window: int = 5
    """Recorded steps that are averaged into one point of a smooth curve."""
    seed: int = 0
    """Of the bootstrap and the probe's folds."""
    steps: int | None = None
    """Recorded steps that are read, evenly spread; None: all."""
    responses: int | None = None
    """Responses of each that are read, evenly spread; None: all."""
    probe: bool = False
    """Whether to fit a value probe, for which the last checkpoint is loaded."""
    trust_run: bool = False
    """Whether the probe may run code that the run's config.yaml requests (trust_remote_code)."""

    def __post_init__(self) -> None:
        if not 0.0 < self.threshold < 1.0:
            raise ValueError(
                f"threshold must be a quantile between 0 and 1; got {self.threshold}. "
                f"For the largest tenth of the jumps pass 0.9."
            )
        for name in ("resamples", "window", "steps", "responses"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise ValueError(f"{name} must be at least 1; got {given}.")

    @property
    def thresholds(self) -> tuple[float, ...]:
        """The chosen one first."""
        return self.threshold, *(d for d in OTHER_THRESHOLDS if d != self.threshold)
