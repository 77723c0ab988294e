"""Pictures of a run, from its folder alone."""

from segcredit.report.curves import draw_curves

__all__ = ["draw_curves"]
