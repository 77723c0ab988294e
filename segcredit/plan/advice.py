"""What to change if a step does not fit: settings tried in the order of what they cost."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from segcredit.plan.gpus import GPUS, Gpu
from segcredit.plan.job import Job
from segcredit.plan.memory import fits, memory, over
from segcredit.plan.timing import seconds

SMALLEST_MICRO = 256


@dataclass(frozen=True)
class Trial:
    """Settings, and what they would lead to."""

    changes: dict[str, bool | int]
    """By the recipe's keys."""
    job: Job
    peak: float
    """Bytes."""
    fits: bool
    seconds: float
    """Of a step."""

    @property
    def settings(self) -> list[str]:
        """As one types them."""
        return [f"{key}={str(value).lower()}" for key, value in self.changes.items()]


def advise(job: Job) -> list[Trial]:
    """Trials until one fits, cheapest first; empty if the job fits as it is.

    Smaller micro-batches cost next to nothing, recomputed activations a third more arithmetic,
    offloading the way to main memory and back, and fewer rows at once as many more rounds of
    sampling; so rows come last.
    """
    if fits(job):
        return []
    tried: list[Trial] = []
    for fewer_rows in (False, True):
        for start in _switched(job):
            found = _smaller_micro(start)
            if fewer_rows:
                found = _fewer_rows(found)
            trial = _trial(job, found)
            if not trial.changes or any(x.changes == trial.changes for x in tried):
                continue
            tried.append(trial)
            if trial.fits:
                return tried
    return tried


def large_enough(job: Job) -> tuple[Gpu, Trial | None] | None:
    """The smallest GPU of the table that would do, and what must change there."""
    for gpu in sorted(GPUS.values(), key=lambda x: x.memory):
        if gpu.memory <= job.gpu.memory:
            continue
        there = replace(job, gpu=gpu)
        if fits(there):
            return gpu, None
        last = advise(there)[-1:]
        if last and last[0].fits:
            return gpu, last[0]
    return None


def _switched(job: Job) -> Iterator[Job]:
    """As it is, then with more and more given up."""
    yield job
    if not job.recompute:
        yield replace(job, recompute=True)
    if not job.offload:
        yield replace(job, offload=True)
        if not job.recompute:
            yield replace(job, offload=True, recompute=True)


def _smaller_micro(job: Job) -> Job:
    """Micro-batches halved until all but sampling fits; if that does not help, left alone."""
    smaller = job
    while set(over(smaller)) - {"sample"}:
        half = smaller.tokens_per_micro // 2
        if half < SMALLEST_MICRO or smaller.tokens_per_micro <= smaller.longest_row:
            return min((job, smaller), key=_later_peak)
        smaller = replace(smaller, tokens_per_micro=half)
    return smaller


def _fewer_rows(job: Job) -> Job:
    """Rows halved until sampling fits."""
    fewer = job
    while "sample" in over(fewer) and fewer.rows_at_once > 1:
        fewer = replace(fewer, rows=fewer.rows_at_once // 2)
    return fewer


def _later_peak(job: Job) -> float:
    return max(x.total for name, x in memory(job).items() if name != "sample")


def _trial(asked: Job, job: Job) -> Trial:
    keys = {
        "update.tokens_per_micro": "tokens_per_micro",
        "memory.recompute_activations": "recompute",
        "memory.offload_optimizer": "offload",
        "rollout.rows": "rows",
    }
    changes = {
        key: getattr(job, name)
        for key, name in keys.items()
        if getattr(job, name) != getattr(asked, name)
    }
    peak = max(x.total for x in memory(job).values())
    return Trial(changes, job, peak, fits(job), sum(seconds(job).values()))
