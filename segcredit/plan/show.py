"""A prediction as a person at a terminal reads it."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from segcredit.plan.memory import PARTS, needed
from segcredit.plan.predict import GIB, Prediction, Trial, assumptions, command, warnings

_NAMES = {"moments": "Adam moments", "cache": "KV cache"}


def show(console: Console, found: Prediction, recipe: str, overrides: Sequence[str] = ()) -> None:
    """Tables, verdict, advice, assumptions."""
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
    table = Table(title="GiB on each GPU, at each phase's fullest moment", title_justify="left")
    table.add_column("")
    for name in found.memory:
        table.add_column(name, justify="right")
    for part in PARTS:
        amounts = [moment.parts[part] for moment in found.memory.values()]
        if any(round(x / GIB, 2) for x in amounts):
            table.add_row(_NAMES.get(part, part), *(_amount(x) for x in amounts))
    table.add_section()
    totals = [
        Text(_amount(x.total), style="red" if name in found.over else "")
        for name, x in found.memory.items()
    ]
    table.add_row("together", *totals)
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
    table.add_row("together", f"{found.step:,.1f}", "")
    return table


def _verdict(found: Prediction, recipe: str, overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Lines and their styles."""
    job = found.job
    yield _totals(found), ""
    margin = needed(job) - found.peak
    sizes = f"{found.peak / GIB:.1f} GiB and {margin / GIB:.1f} of margin, of {job.gpu.memory:g}"
    if found.fits:
        yield f"fits: {sizes}", "green"
        yield f"type   {command(recipe, overrides, job.gpus)}", ""
        return
    yield f"does not fit: {sizes}; too much in {', '.join(found.over)}", "red"
    for trial in found.trials:
        yield _tried(trial), "green" if trial.fits else ""
    if found.trials and found.trials[-1].fits:
        settings = [*overrides, *found.trials[-1].settings]
        yield f"type   {command(recipe, settings, job.gpus)}", ""
        return
    yield from _beyond(found)


def _tried(trial: Trial) -> str:
    verdict = "fits" if trial.fits else "not enough"
    line = f"  {' '.join(trial.settings)}: {trial.peak / GIB:.1f} GiB, {verdict}"
    if "memory.offload_optimizer" in trial.changes:
        line += f"; {trial.main_memory / GIB:.0f} GiB of main memory"
    return f"{line}; a step {trial.seconds:,.0f} s"


def _beyond(found: Prediction) -> Iterator[tuple[str, str]]:
    """Where no setting that keeps results the same suffices."""
    if found.larger is None:
        yield "no GPU of the table would hold it whole: choose a smaller model", ""
    else:
        gpu, trial = found.larger
        change = f" with {' '.join(trial.settings)}" if trial else ""
        yield f"the smallest GPU of the table that would do: {gpu.name}{change}", ""
    for words, trial in found.others:
        settings = " ".join([*words, *trial.settings])
        yield f"or another experiment: {settings}: {trial.peak / GIB:.1f} GiB, fits", ""


def _totals(found: Prediction) -> str:
    job = found.job
    each = f"{found.main_memory_peak / GIB:.0f} GiB of main memory"
    line = f"needs {each}" + (f" per process, {job.gpus} processes" if job.gpus > 1 else "")
    if job.steps:
        line += f"; {job.steps} steps take {_duration(job.steps * found.step)}"
    return line


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
