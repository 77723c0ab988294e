"""A recipe and GPUs in, a prediction out."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from segcredit.config import Recipe
from segcredit.plan.advice import Trial, advise, large_enough, other_experiments
from segcredit.plan.counting import shape_of
from segcredit.plan.gpus import Gpu, parse_gpus, present_gpus
from segcredit.plan.host import main_memory, main_memory_peak
from segcredit.plan.job import Job, job_of
from segcredit.plan.lengths import lengths_of
from segcredit.plan.memory import Moment, between, fits, memory, over
from segcredit.plan.notes import assumptions, warnings
from segcredit.plan.source import config_of
from segcredit.plan.timing import seconds

GIB = 2.0**30


@dataclass(frozen=True)
class Prediction:
    """Of one training step."""

    job: Job
    memory: dict[str, Moment]
    """On each GPU, the fullest moment of each phase."""
    between: float
    """Bytes held on each GPU between the phases."""
    main_memory: dict[str, float]
    """Of each process, bytes by part."""
    main_memory_peak: float
    seconds: dict[str, float]
    """Of each phase."""
    fits: bool
    over: list[str]
    """Phases that do not fit."""
    trials: list[Trial] = field(default_factory=list)
    """Changes of settings until one fits; empty if none is needed."""
    larger: tuple[Gpu, Trial | None] | None = None
    """Where no change suffices: the smallest GPU that would do."""
    others: list[tuple[list[str], Trial]] = field(default_factory=list)
    """And settings that would, but change what is trained; with what more they need."""

    @property
    def peak(self) -> float:
        """Bytes on each GPU."""
        return max(x.total for x in self.memory.values())

    @property
    def step(self) -> float:
        """Seconds."""
        return sum(self.seconds.values())

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON: GiB and seconds."""
        job, gpu = self.job, self.job.gpu
        return {
            "model": {
                "class": job.shape.kind,
                "parameters": job.shape.parameters,
                "critic_parameters": job.shape.critic_parameters if job.critic else 0,
                "adapter_parameters": job.adapter.numbers if job.adapter else 0,
                "reference": job.reference,
                "vision_parameters": job.shape.tower.parameters if job.shape.tower else 0,
            },
            "gpus": {"name": gpu.name, "count": job.gpus, "memory_gib": gpu.memory},
            "memory_gib": {
                name: {part: _gib(x) for part, x in moment.parts.items()}
                | {"total": _gib(moment.total), "when": moment.when}
                for name, moment in self.memory.items()
            },
            "between_phases_gib": _gib(self.between),
            "peak_gib": _gib(self.peak),
            "fits": self.fits,
            "over": self.over,
            "main_memory_gib": {name: _gib(x) for name, x in self.main_memory.items()}
            | {"peak_per_process": _gib(self.main_memory_peak)},
            "seconds": {name: round(x, 3) for name, x in self.seconds.items()}
            | {"step": round(self.step, 3)},
            "steps": job.steps,
            "assumptions": assumptions(job),
            "warnings": warnings(job),
            "advice": [_as_dict(x) for x in self.trials],
            "larger_gpu": None
            if self.larger is None
            else {
                "name": self.larger[0].name,
                "settings": self.larger[1].settings if self.larger[1] else [],
            },
            "other_experiments": [
                {"change": words} | _as_dict(trial) for words, trial in self.others
            ],
        }


def _gib(x: float) -> float:
    return round(x / GIB, 3)


def _as_dict(trial: Trial) -> dict[str, Any]:
    return {
        "settings": trial.settings,
        "peak_gib": _gib(trial.peak),
        "fits": trial.fits,
        "step_seconds": round(trial.seconds, 3),
        "main_memory_gib": _gib(trial.main_memory),
    }


def predict(job: Job) -> Prediction:
    """Memory, time, and advice if it does not fit."""
    trials = advise(job)
    fitting = fits(job) or bool(trials and trials[-1].fits)
    return Prediction(
        job=job,
        memory=memory(job),
        between=between(job),
        main_memory=main_memory(job),
        main_memory_peak=main_memory_peak(job),
        seconds=seconds(job),
        fits=fits(job),
        over=over(job),
        trials=trials,
        larger=None if fitting else large_enough(job),
        others=[] if fitting else other_experiments(job),
    )


def plan(
    recipe: Recipe,
    gpus: str | None = None,
    *,
    mean_length: float | None = None,
    prompt_tokens: float | None = None,
    longest_prompt: int | None = None,
    picture_tokens: float | None = None,
) -> Prediction:
    """Of a recipe's step on these GPUs (``8xA100-80G``; None: this machine's). No weights load."""
    count, gpu = present_gpus() if gpus is None else parse_gpus(gpus)
    shape = shape_of(config_of(recipe), recipe.model.trust_remote_code)
    lengths = lengths_of(
        recipe, shape.tower, prompt_tokens, longest_prompt, picture_tokens, mean_length
    )
    return predict(job_of(recipe, shape, lengths, gpu, count))


def command(recipe: str, settings: Sequence[str], gpus: int = 1) -> str:
    """What to type to train."""
    words = ["segcredit", "train", recipe, *settings]
    if gpus > 1:
        words = ["torchrun", "--nproc-per-node", str(gpus), "--no-python", *words]
    return shlex.join(words)
