"""Studies: a table or figure as a list of runs, seeds and a summary, run by one command."""

from segcredit.study.definition import Arm, Study, load_study, shipped_studies
from segcredit.study.plan import Options, Plan
from segcredit.study.scales import SCALES, Scale
from segcredit.study.store import Store

__all__ = [
    "SCALES",
    "Arm",
    "Options",
    "Plan",
    "Scale",
    "Store",
    "Study",
    "load_study",
    "shipped_studies",
]
