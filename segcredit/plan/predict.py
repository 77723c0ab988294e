"""A recipe and GPUs in, a prediction out."""

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from segcredit.config import LoraSettings, Recipe
from segcredit.plan.calibration import (
    ANNOTATE_SHARE,
    CACHE_SHARE,
    COMPILED_ANNOTATE,
    COMPILED_UPDATE,
    CONTEXT,
    FRAGMENTED,
    LAUNCH,
    LINK_SHARE,
    UPDATE_SHARE,
    VLLM_TOKEN,
)
from segcredit.plan.gpus import GPUS, Gpu, parse_gpus, present_gpus
from segcredit.plan.host import main_memory, main_memory_peak
from segcredit.plan.job import Job, job_of, lengths_of
from segcredit.plan.memory import Moment, between, fits, memory, over
from segcredit.plan.model import adapter_on, config_of, shape_of
from segcredit.plan.timing import seconds, share_at

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


def assumptions(job: Job) -> list[str]:
    """Each in one line."""
    lengths = job.lengths
    wide = job.shape.hidden
    annotate = share_at(wide, ANNOTATE_SHARE * (COMPILED_ANNOTATE if job.compile else 1))
    update = share_at(wide, UPDATE_SHARE * (COMPILED_UPDATE if job.compile else 1))
    peak = job.gpu.bfloat16 if job.half else job.gpu.float32
    kind = "bfloat16" if job.half else "float32"
    here = "" if job.gpu.name == "H200" and job.half else ", carried over from bfloat16 on an H200"
    pictures = f", {lengths.pictures:.0f} of them pictures" if lengths.pictures else ""
    found = [
        f"prompts: {lengths.prompt:.0f} tokens{pictures}, the longest {lengths.longest} "
        f"({lengths.prompt_from})",
        f"responses: {lengths.response:.0f} tokens ({lengths.response_from}); memory counts all of "
        f"them at rollout.max_tokens={job.max_tokens}",
        f"forward passes reach {annotate:.1%}, updates {update:.1%} of {peak:,g} TFLOP/s in "
        f"{kind}{here}",
        f"sampling by vLLM: {VLLM_TOKEN * 1e6:g} µs of the host for every token"
        if job.vllm
        else f"sampling: {LAUNCH * 1e3:g} ms per layer and token on the host, the cache read at "
        f"{CACHE_SHARE:.0%} of {job.gpu.bandwidth:,g} GB/s; not measured since keys are no longer "
        f"copied",
        f"a GPU must have the peak, {FRAGMENTED:.0%} for fragments, and {CONTEXT / 2**30:.1f} GiB "
        f"for CUDA itself",
        "not counted: grading the responses, evaluations, checkpoints, decoding of pictures",
    ]
    found += [f"not counted either: {what}" for what in job.uncounted]
    if job.adapter:
        found.append(
            f"LoRA: one frozen model, and {job.adapter.numbers / 1e6:,.1f} M parameters in each "
            f"adapter; the host's work for them while sampling is not counted"
        )
    if job.compile:
        found.append("model.compile: its gain in speed is counted, its smaller memory is not")
    if job.shards:
        found.append(
            f"memory.shard: weights are gathered and gradients summed at {LINK_SHARE:.0%} of "
            f"{job.gpu.link:,g} GB/s while the GPU computes; counted, and never measured"
        )
    if not job.shape.full_attention:
        found.append(
            "this model has layers other than full attention; they are counted as if they were"
        )
    return found


def warnings(job: Job) -> list[str]:
    """What works, but not as one might think."""
    found = []
    if job.gpus > 1:
        if not job.shards:
            way_out = "" if job.adapter else "; memory.shard=true divides them"
            found.append(
                f"each of the {job.gpus} GPUs holds whole models and optimizers, so more GPUs save "
                f"time, not memory{way_out}"
            )
        micros = job.micro_count(job.per_minibatch, job.mean_row)
        if micros % job.gpus:
            turns = math.ceil(micros / job.gpus)
            found.append(
                f"a mini-batch makes {micros} micro-batches for {job.gpus} GPUs, so "
                f"{turns * job.gpus - micros} of {turns * job.gpus} turns are idle: set "
                f"update.tokens_per_micro so that they share out evenly"
            )
    if not job.half:
        found.append(
            f"float32: {job.gpu.name} multiplies bfloat16 "
            f"{job.gpu.bfloat16 / job.gpu.float32:.0f} times as fast; model.dtype=bfloat16 keeps "
            f"float32 originals in the optimizer"
        )
    if job.longest_row > job.tokens_per_micro:
        found.append(
            f"one prompt and response may have {job.longest_row:,} tokens, more than "
            f"update.tokens_per_micro={job.tokens_per_micro:,}: such a row is a micro-batch of its "
            f"own, and sets the peak"
        )
    return found


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
