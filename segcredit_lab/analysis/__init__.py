"""Analyses of run directories after training: the paper's figures, with intervals and caveats."""

from segcredit_lab.analysis.analyses import AnalysisResults, analyses, analyze_runs
from segcredit_lab.analysis.drawing import INK, png, svg, write
from segcredit_lab.analysis.reading import Analysis, AnalysisSettings, SkippedAnalysis, Table

__all__ = [
    "INK",
    "Analysis",
    "AnalysisResults",
    "AnalysisSettings",
    "SkippedAnalysis",
    "Table",
    "analyses",
    "analyze_runs",
    "png",
    "svg",
    "write",
]
