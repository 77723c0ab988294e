"""Predict a step's memory and time, advise settings that fit, and print the result."""

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from segcredit.config import Recipe
from segcredit.plan import timing
from segcredit.plan.job import GPUS, Job, job_of, lengths_of, parse_gpus, present_gpus
from segcredit.plan.memory import (
    CONTEXT,
    FRAGMENTED,
    PARTS,
    MemoryUse,
    between,
    fits,
    memory,
    needed,
    over,
)
from segcredit.plan.model import config_of, shape_of
from segcredit.plan.timing import seconds

SMALLEST_MICRO = 256
GIB = 2.0**30


@dataclass(frozen=True)
class Prediction:
    """Predicted memory and time of one training step."""

    job: Job
    changes: dict[str, bool | int] = field(default_factory=dict)
    """Settings, by recipe key, that differ from the requested ones."""
    trials: "list[Prediction]" = field(default_factory=list)
    """Predictions with changed settings until one fits; empty if none is needed."""
    larger: "Prediction | None" = None
    """If no change suffices: the smallest GPU that fits, and the settings to change on it."""

    @cached_property
    def memory(self) -> dict[str, MemoryUse]:
        """Peak of each phase on each GPU."""
        return memory(self.job)

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Time of each phase."""
        return seconds(self.job)

    @property
    def peak(self) -> float:
        """Bytes on each GPU."""
        return max(x.total for x in self.memory.values())

    @property
    def between(self) -> float:
        """Bytes held on each GPU between the phases."""
        return between(self.job)

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    @cached_property
    def fits(self) -> bool:
        """Whether every phase fits."""
        return fits(self.job)

    @property
    def over(self) -> list[str]:
        """Phases that do not fit."""
        return over(self.job)

    @property
    def settings(self) -> list[str]:
        """The changes as command-line overrides."""
        return [f"{key}={str(value).lower()}" for key, value in self.changes.items()]

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers for JSON, in GiB and seconds."""
        job, gpu = self.job, self.job.gpu
        return {
            "model": {
                "class": job.shape.kind,
                "parameters": job.shape.parameters,
                "critic_parameters": job.shape.critic_parameters if job.critic else 0,
                "adapter_parameters": job.adapter.numbers if job.adapter else 0,
                "reference": job.reference,
                "vision_parameters": job.shape.tower_parameters,
            },
            "gpus": {"name": gpu.name, "count": job.gpus, "memory_gib": gpu.memory},
            "memory_gib": {
                name: {part: _gib(x) for part, x in use.parts.items()}
                | {"total": _gib(use.total), "when": use.when}
                for name, use in self.memory.items()
            },
            "between_phases_gib": _gib(self.between),
            "peak_gib": _gib(self.peak),
            "fits": self.fits,
            "over": self.over,
            "seconds": {name: round(x, 3) for name, x in self.seconds.items()}
            | {"step": round(self.step, 3)},
            "steps": job.steps,
            "assumptions": assumptions(job),
            "warnings": warnings(job),
            "advice": [_as_dict(x) for x in self.trials],
            "larger_gpu": None
            if self.larger is None
            else {"name": self.larger.job.gpu.name, "settings": self.larger.settings},
        }


def advise(job: Job) -> list[Prediction]:
    """Try changes until one fits, cheapest first; the best is last. Empty if the job fits as is.

    Smaller micro-batches cost little unless they are tiny, gradient checkpointing a third more
    arithmetic, offloading copies to CPU memory and back, and
    fewer rows at once more rounds of sampling; so rows come last. If small micro-batches fit,
    settings that allow larger ones are tried too and listed if they are faster.
    """
    if fits(job):
        return []
    tried: list[Prediction] = []
    for start in _with_switches(job):
        trial = _trial(job, _smaller_micro(start))
        found = tried[-1] if tried and tried[-1].fits else None
        faster = found is None or (trial.fits and trial.step < found.step)
        if trial.changes and faster:
            tried.append(trial)
        if trial.fits and "update.tokens_per_micro" not in trial.changes:
            break
    if tried and tried[-1].fits:
        return tried
    for start in _with_switches(job):
        smaller = _smaller_micro(start)
        if over(smaller) == ["sample"]:
            trial = _trial(job, _fewer_rows(smaller))
            tried.append(trial)
            if trial.fits:
                break
    return tried


def large_enough(job: Job) -> Prediction | None:
    """Find the smallest GPU of the table that fits, and the settings to change on it."""
    for gpu in sorted(GPUS.values(), key=lambda x: x.memory):
        if gpu.memory > job.gpu.memory:
            there = replace(job, gpu=gpu)
            best = [Prediction(there), *advise(there)][-1]
            if best.fits:
                return best
    return None


def _with_switches(job: Job) -> Iterator[Job]:
    """Yield the job unchanged, then with settings that save memory, the fastest ones first."""
    yield job
    if not job.recompute:
        yield replace(job, recompute=True)
    if not job.offload:
        yield replace(job, offload=True)
        if not job.recompute:
            yield replace(job, offload=True, recompute=True)


def _smaller_micro(job: Job) -> Job:
    """Halve micro-batches until all phases but sampling fit; keep them if that does not help."""
    smaller = job
    while set(over(smaller)) - {"sample"}:
        half = smaller.tokens_per_micro // 2
        if half < SMALLEST_MICRO or smaller.tokens_per_micro <= smaller.longest_row:
            return min((job, smaller), key=_later_peak)
        smaller = replace(smaller, tokens_per_micro=half)
    return smaller


def _fewer_rows(job: Job) -> Job:
    """Halve the rows until sampling fits."""
    fewer = job
    while "sample" in over(fewer) and fewer.rows_at_once > 1:
        fewer = replace(fewer, rows=fewer.rows_at_once // 2)
    return fewer


def _later_peak(job: Job) -> float:
    return max(x.total for name, x in memory(job).items() if name != "sample")


def _trial(asked: Job, job: Job) -> Prediction:
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
    return Prediction(job, changes)


def assumptions(job: Job) -> list[str]:
    """List the assumptions behind a prediction, one line each."""
    lengths = job.lengths
    kind = "bfloat16" if job.half else "float32"
    here = "" if job.gpu.name == "H200" and job.half else "; not measured: bfloat16 on an H200 was"
    images = f", {lengths.images:.0f} of them images" if lengths.images else ""
    lines = [
        f"prompts: {lengths.prompt:.0f} tokens{images}, the longest {lengths.longest} "
        f"({lengths.prompt_from})",
        f"responses: {lengths.response:.0f} tokens ({lengths.response_from}); memory counts all of "
        f"them at rollout.max_tokens={job.max_tokens}",
        f"forward passes reach {timing.annotate_share(job):.1%}, updates "
        f"{timing.update_share(job):.1%} of {timing.peak_flops(job):,g} TFLOP/s in {kind}{here}",
        f"sampling by vLLM: {timing.VLLM_TOKEN * 1e6:g} µs of CPU time per token"
        if job.vllm
        else f"sampling: {timing.LAUNCH * 1e3:g} ms of CPU time per layer and token, the KV cache "
        f"read at {timing.CACHE_SHARE:.0%} of {job.gpu.bandwidth:,g} GB/s; not measured since keys "
        f"are no longer copied",
        f"a GPU must have the peak, {FRAGMENTED:.0%} for fragmentation, and "
        f"{CONTEXT / GIB:.1f} GiB for the CUDA context",
        "not counted: grading the responses, evaluations, checkpoints, decoding of images",
    ]
    lines += [f"not counted either: {what}" for what in job.uncounted]
    if job.adapter:
        lines.append(
            f"LoRA: one frozen model, and {job.adapter.numbers / 1e6:,.1f} M parameters in each "
            f"adapter; their CPU time while sampling is not counted"
        )
    if job.compile:
        lines.append("model.compile: the speed-up is counted, the memory it saves is not")
    if job.gpus > 1:
        lines.append("several GPUs: not measured; communication between them is not counted")
    return lines


def warnings(job: Job) -> list[str]:
    """Return warnings about settings that work, but cost more than expected."""
    lines = []
    if job.gpus > 1:
        remedy = "" if job.adapter else "; memory.shard=true divides them, which is not predicted"
        lines.append(
            f"each of the {job.gpus} GPUs is counted with whole models and optimizers, so more "
            f"GPUs save time, not memory{remedy}"
        )
        micros = job.micro_count(job.per_minibatch, job.mean_row)
        if micros % job.gpus:
            slots = math.ceil(micros / job.gpus) * job.gpus
            lines.append(
                f"a mini-batch has {micros} micro-batches for {job.gpus} GPUs, so {slots - micros} "
                f"of {slots} slots are idle: set update.tokens_per_micro so that they divide evenly"
            )
    if not job.half:
        lines.append(
            f"float32: {job.gpu.name} multiplies bfloat16 "
            f"{job.gpu.bfloat16 / job.gpu.float32:.0f} times as fast; model.dtype=bfloat16 keeps "
            f"fp32 master weights in the optimizer"
        )
    if job.longest_row > job.tokens_per_micro:
        lines.append(
            f"one prompt and response may have {job.longest_row:,} tokens, more than "
            f"update.tokens_per_micro={job.tokens_per_micro:,}: such a row is a micro-batch of its "
            f"own and determines the peak"
        )
    return lines


def _gib(x: float) -> float:
    return round(x / GIB, 3)


def _as_dict(trial: Prediction) -> dict[str, Any]:
    return {
        "settings": trial.settings,
        "peak_gib": _gib(trial.peak),
        "fits": trial.fits,
        "step_seconds": round(trial.step, 3),
    }


def predict(job: Job) -> Prediction:
    """Predict memory and time, and advise if it does not fit."""
    trials = advise(job)
    enough = [Prediction(job), *trials][-1].fits
    return Prediction(job, trials=trials, larger=None if enough else large_enough(job))


def plan(
    recipe: Recipe,
    gpus: str | None = None,
    *,
    mean_length: float | None = None,
    prompt_tokens: float | None = None,
    longest_prompt: int | None = None,
    image_tokens: float | None = None,
) -> Prediction:
    """Predict a recipe's step on these GPUs (``8xA100-80G``; None: this machine's).

    No weights are loaded.
    """
    count, gpu = present_gpus() if gpus is None else parse_gpus(gpus)
    shape = shape_of(config_of(recipe), recipe.model.trust_remote_code, recipe.model.family)
    lengths = lengths_of(
        recipe, shape.tower, prompt_tokens, longest_prompt, image_tokens, mean_length
    )
    return predict(job_of(recipe, shape, lengths, gpu, count))


def command(recipe: str, settings: Sequence[str], gpus: int = 1) -> str:
    """Return the training command."""
    words = ["segcredit", "train", recipe, *settings]
    if gpus > 1:
        words = ["torchrun", "--nproc-per-node", str(gpus), "--no-python", *words]
    return shlex.join(words)


_NAMES = {"originals": "master weights", "moments": "Adam moments", "cache": "KV cache"}


def show(console: Console, found: Prediction, recipe: str, overrides: Sequence[str] = ()) -> None:
    """Print tables, verdict, advice and assumptions."""
    console.print(_headline(found), markup=False, highlight=False, soft_wrap=True)
    console.print(_memory(found))
    console.print(_time(found))
    for line, style in _verdict(found, recipe, overrides):
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
    for warning in warnings(found.job):
        console.print(warning, style="yellow", markup=False, highlight=False, soft_wrap=True)
    console.print("Assumed", style="dim", highlight=False)
    for line in assumptions(found.job):
        console.print(f"· {line}", style="dim", markup=False, highlight=False, soft_wrap=True)


def _headline(found: Prediction) -> str:
    job = found.job
    models = ["policy", *(["critic"] if job.critic else []), *(["reference"] * job.reference)]
    lora = f", LoRA of {_count(job.adapter.numbers)} each" if job.adapter else ""
    return (
        f"{job.shape.kind}, {_count(job.shape.parameters)} parameters; {', '.join(models)}{lora}; "
        f"{job.responses} responses a step on {job.gpus} × {job.gpu.name}"
    )


def _count(x: int) -> str:
    return f"{x / 1e9:,.2f} B" if x >= 1e8 else f"{x / 1e6:,.2f} M"


def _memory(found: Prediction) -> Table:
    table = Table(title="GiB on each GPU at the peak of each phase", title_justify="left")
    table.add_column("")
    for name in found.memory:
        table.add_column(name, justify="right")
    for part in PARTS:
        amounts = [use.parts[part] for use in found.memory.values()]
        if any(round(x / GIB, 2) for x in amounts):
            table.add_row(_NAMES.get(part, part), *(_amount(x) for x in amounts))
    table.add_section()
    totals = [
        Text(_amount(x.total), style="red" if name in found.over else "")
        for name, x in found.memory.items()
    ]
    table.add_row("total", *totals)
    table.add_row(
        "", *(Text(x.when.removeprefix("in "), style="dim") for x in found.memory.values())
    )
    return table


def _amount(x: float) -> str:
    rounded = f"{x / GIB:.2f}"
    return "" if rounded == "0.00" else rounded


def _time(found: Prediction) -> Table:
    table = Table(title="Time of a step", title_justify="left")
    table.add_column("phase")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    for name, x in found.seconds.items():
        table.add_row(name, f"{x:,.1f}", f"{x / found.step:.0%}")
    table.add_section()
    table.add_row("total", f"{found.step:,.1f}", "")
    return table


def _verdict(found: Prediction, recipe: str, overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    job = found.job
    if job.steps:
        yield f"{job.steps} steps take {_duration(job.steps * found.step)}", ""
    margin = needed(job) - found.peak
    sizes = f"{found.peak / GIB:.1f} GiB and {margin / GIB:.1f} GiB margin, of {job.gpu.memory:g}"
    if found.fits:
        yield f"fits: {sizes}", "green"
        yield f"type   {command(recipe, overrides, job.gpus)}", ""
        return
    yield f"does not fit: {sizes}; too much in {', '.join(found.over)}", "red"
    for trial in found.trials:
        yield _trial_line(trial), "green" if trial.fits else ""
    if found.trials and found.trials[-1].fits:
        settings = [*overrides, *found.trials[-1].settings]
        yield f"type   {command(recipe, settings, job.gpus)}", ""
        return
    yield from _alternatives(found)


def _trial_line(trial: Prediction) -> str:
    verdict = "fits" if trial.fits else "not enough"
    line = f"  {' '.join(trial.settings)}: {trial.peak / GIB:.1f} GiB, {verdict}"
    return f"{line}; a step {trial.step:,.0f} s"


def _alternatives(found: Prediction) -> Iterator[tuple[str, str]]:
    """Suggest a larger GPU, and settings that save memory but change the results."""
    job = found.job
    if found.larger is None:
        yield "no GPU of the table fits it: choose a smaller model", ""
    else:
        name, settings = found.larger.job.gpu.name, " ".join(found.larger.settings)
        change = f" with {settings}" if settings else ""
        yield f"the smallest GPU of the table that fits: {name}{change}", ""
    others = {
        "model.lora={}": job.adapter is None,
        "model.freeze_vision=true": job.shape.tower is not None and not job.tower_frozen,
        "algorithm=grpo": job.critic,
    }
    if less := [setting for setting, helps in others.items() if helps]:
        yield f"or another experiment, which takes less memory: {', '.join(less)}", ""


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
