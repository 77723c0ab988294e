"""Studies: a table or figure as a list of runs, seeds and a summary, run by one command."""

from segcredit_lab.study.definition import SCALES, Arm, Scale, Study, load_study, shipped_studies
from segcredit_lab.study.store import Options, Store, StudyPlan

__all__ = [
    "SCALES",
    "Arm",
    "Options",
    "Scale",
    "Store",
    "Study",
    "StudyPlan",
    "load_study",
    "shipped_studies",
]
