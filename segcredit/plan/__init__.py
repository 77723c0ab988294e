"""Predict memory and time of a training step from a model's configuration alone."""

from segcredit.plan.job import GPUS, Gpu, Job, Lengths, job_of, parse_gpus
from segcredit.plan.memory import fits, memory
from segcredit.plan.model import Shape, Tower, shape_of
from segcredit.plan.predict import Prediction, advise, command, plan, predict
from segcredit.plan.timing import seconds

__all__ = [
    "GPUS",
    "Gpu",
    "Job",
    "Lengths",
    "Prediction",
    "Shape",
    "Tower",
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
