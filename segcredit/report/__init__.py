"""Pages and pictures of runs, from their folders alone."""

from segcredit.report.build import Limits
from segcredit.report.curves import draw_curves
from segcredit.report.page import Figure
from segcredit.report.write import write_report

__all__ = ["Figure", "Limits", "draw_curves", "write_report"]
