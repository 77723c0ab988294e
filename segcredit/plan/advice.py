"""What to change if a step does not fit: settings tried in the order of what they cost."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from segcredit.config import LoraSettings
from segcredit.plan.adapter import adapter_on
from segcredit.plan.gpus import GPUS, Gpu
from segcredit.plan.host import main_memory_peak
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
    main_memory: float
    """Bytes, of each process."""

    @property
    def settings(self) -> list[str]:
        """As one types them."""
        return [f"{key}={str(value).lower()}" for key, value in self.changes.items()]


def advise(job: Job) -> list[Trial]:
    """Trials until one fits, cheapest first, the best one last; empty if the job fits as it is.

    Smaller micro-batches cost little as long as they are not tiny, recomputed activations a third
    more arithmetic, sharding what GPUs then tell each other, offloading the way to main memory and
    back, and fewer rows at once as many more rounds of sampling; so rows come last. Where small
    micro-batches fit, what allows larger ones is tried too, and told if it is faster.
    """
    if fits(job):
        return []
    tried: list[Trial] = []
    for start in _switched(job):
        trial = _trial(job, _smaller_micro(start))
        found = tried[-1] if tried and tried[-1].fits else None
        faster = found is None or (trial.fits and trial.seconds < found.seconds)
        if trial.changes and faster:
            tried.append(trial)
        if trial.fits and "update.tokens_per_micro" not in trial.changes:
            break
    if tried and tried[-1].fits:
        return tried
    for start in _switched(job):
        smaller = _smaller_micro(start)
        if over(smaller) == ["sample"]:
            trial = _trial(job, _fewer_rows(smaller))
            tried.append(trial)
            if trial.fits:
                break
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


def other_experiments(job: Job) -> list[tuple[list[str], Trial]]:
    """Settings that change what is trained, and what more they need to fit; only those that do."""
    asked: list[tuple[list[str], Job]] = []
    if job.adapter is None and job.shape.linears:
        adapter = adapter_on(job.shape, LoraSettings(), not job.freeze_vision)
        words = ["model.lora={}", *(["memory.shard=false"] if job.shard else [])]
        asked.append((words, replace(job, adapter=adapter, shard=False)))
    if job.shape.tower is not None and not job.tower_rests:
        asked.append((["model.freeze_vision=true"], replace(job, freeze_vision=True)))
    if job.critic:
        samples = max(8, job.samples)
        prompts = max(1, job.responses // samples)
        words = ["algorithm=grpo", f"rollout.samples={samples}", f"rollout.prompts={prompts}"]
        asked.append((words, replace(job, critic=False, samples=samples, prompts=prompts)))
    found = [(words, (advise(other) or [_trial(other, other)])[-1]) for words, other in asked]
    return [(words, trial) for words, trial in found if trial.fits]


def _switched(job: Job) -> Iterator[Job]:
    """As it is, then with more and more given up."""
    yield job
    if not job.recompute:
        yield replace(job, recompute=True)
    divided = replace(job, shard=job.gpus > 1 and not job.adapter)
    if divided.shards and not job.shards:
        yield divided
        if not job.recompute:
            yield replace(divided, recompute=True)
    if not job.offload:
        for begun in (job, divided) if divided.shards != job.shards else (job,):
            yield replace(begun, offload=True)
            if not job.recompute:
                yield replace(begun, offload=True, recompute=True)


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
        "memory.shard": "shard",
        "rollout.rows": "rows",
    }
    changes = {
        key: getattr(job, name)
        for key, name in keys.items()
        if getattr(job, name) != getattr(asked, name)
    }
    peak = max(x.total for x in memory(job).values())
    return Trial(changes, job, peak, fits(job), sum(seconds(job).values()), main_memory_peak(job))
