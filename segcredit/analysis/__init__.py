"""What a run's folder can tell after training: the paper's figures, with intervals and caveats."""

from segcredit.analysis.analyses import Analysed, analyse, analyses
from segcredit.analysis.drawing.save import png, svg, write
from segcredit.analysis.drawing.style import INK
from segcredit.analysis.result import Analysis, Skipped, Table
from segcredit.analysis.settings import Settings

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
