"""Memory and time of a training step, predicted from a model's configuration alone."""

from segcredit.plan.advice import Trial, advise
from segcredit.plan.counting import shape_of
from segcredit.plan.gpus import GPUS, Gpu, parse_gpus
from segcredit.plan.job import Job, job_of
from segcredit.plan.lengths import Lengths
from segcredit.plan.memory import fits, memory
from segcredit.plan.predict import Prediction, command, plan, predict
from segcredit.plan.shape import Shape, Tower
from segcredit.plan.timing import seconds

__all__ = [
    "GPUS",
    "Gpu",
    "Job",
    "Lengths",
    "Prediction",
    "Shape",
    "Tower",
    "Trial",
    "advise",
    "command",
    "fits",
    "job_of",
    "memory",
    "parse_gpus",
    "plan",
    "predict",
    "seconds",
    "shape_of",
]
