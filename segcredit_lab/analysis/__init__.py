"""What a run's folder can tell after training: the paper's figures, with intervals and caveats."""

from segcredit_lab.analysis.analyses import Analysed, analyse, analyses
from segcredit_lab.analysis.drawing import INK, png, svg, write
from segcredit_lab.analysis.reading import Analysis, Settings, Skipped, Table

__all__ = [
    "INK",
    "Analysed",
    "Analysis",
    "Settings",
    "Skipped",
    "Table",
    "analyse",
    "analyses",
    "png",
    "svg",
    "write",
]
