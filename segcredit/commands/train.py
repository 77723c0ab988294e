"""``segcredit train`` and ``segcredit demo``."""

import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from segcredit.columns import resolve
from segcredit.commands.output import (
    Overrides,
    SkipBadRows,
    TrustRun,
    print_error,
    quiet_libraries,
    safe_stream,
    say,
)

if TYPE_CHECKING:
    from rich.console import Console

    from segcredit.train.trainer import Trainer

EPILOG = """\
[bold]Examples[/bold]

segcredit train demo  [dim]# a built-in recipe[/dim]

segcredit train my.yaml optimizer.lr=1e-6 algorithm=ppo seed=1

segcredit train my.yaml --check  [dim]# validate recipe, data and reward; load no model[/dim]

segcredit train --resume runs/my-20261115-101500
"""
DEMO_EPILOG = """\
[bold]Examples[/bold]

segcredit demo  [dim]# a tiny Qwen2.5-VL learns by SAPO, a few minutes[/dim]

segcredit demo algorithm=ppo seed=1

segcredit demo stages.3.steps=20  [dim]# fewer SAPO steps[/dim]
"""

GOES_ON = "Training continues; the run directory has all metrics."
PATIENCE = 2.0
"""Seconds for a clean stop; a Ctrl-C after that ends the process immediately."""

Folder = Annotated[
    Path | None, typer.Option("--folder", "-o", help="Run directory; default: runs/NAME-DATE.")
]


def demo(overrides: Overrides = None, folder: Folder = None) -> None:
    """Train a tiny vision-language model on this machine: imitation first, then SAPO."""
    _run("demo", overrides or [], folder)


def train(
    recipe: Annotated[
        str | None, typer.Argument(help="A YAML file, or the name of a built-in recipe.")
    ] = None,
    overrides: Overrides = None,
    folder: Folder = None,
    resume: Annotated[Path | None, typer.Option(help="Resume the run in this folder.")] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Validate recipe, data and reward, summarize them, and exit."),
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", help="With --check: print all settings, also the defaults."),
    ] = False,
    skip_bad_rows: SkipBadRows = False,
    trust_run: TrustRun = False,
) -> None:
    """Train a model from a recipe, or resume a run."""
    if resume is not None and recipe is not None and "=" not in recipe:
        raise typer.BadParameter("give a recipe or --resume RUN, not both")
    if resume is None and recipe is None:
        raise typer.BadParameter("name a recipe, for example: segcredit train demo")
    if resume is not None and folder is not None:
        raise typer.BadParameter("--resume already names the run directory: leave --folder out")
    if verbose and not check:
        raise typer.BadParameter("--verbose requires --check")
    if trust_run and resume is None:
        raise typer.BadParameter("--trust-run requires --resume RUN; a recipe is always trusted")
    given = [*([recipe] if resume is not None and recipe else []), *(overrides or [])]
    _run(recipe or "", given, folder, resume, check, skip_bad_rows, trust_run, verbose)


@contextmanager
def _one_interrupt() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt once.

    A second Ctrl-C within ``PATIENCE`` seconds is ignored, so that cleanup is not interrupted; a
    later one ends the process immediately.
    """
    raised: list[float] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if not raised:
            raised.append(time.monotonic())
            raise KeyboardInterrupt
        if time.monotonic() - raised[0] > PATIENCE:
            os._exit(130)

    try:
        before = signal.signal(signal.SIGINT, handle)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    except KeyboardInterrupt:  # before training started, or while its results were shown
        print("Stopped.", file=safe_stream(sys.stdout), flush=True)
        raise typer.Exit(130) from None
    finally:
        if not raised:  # otherwise the process is ending and must not be interrupted
            signal.signal(signal.SIGINT, before)


@_one_interrupt()
def _run(
    recipe: str,
    overrides: list[str],
    folder: Path | None,
    resume: Path | None = None,
    check: bool = False,
    skip_bad_rows: bool = False,
    trust_run: bool = False,
    verbose: bool = False,
) -> None:
    from rich.console import Console

    from segcredit.commands.report import finish_report
    from segcredit.config import load_recipe, load_run_recipe
    from segcredit.runlog import resume_command
    from segcredit.train.checkpoint import CheckpointError
    from segcredit.train.loop import StopTraining
    from segcredit.train.optim import NotFinite
    from segcredit.train.progress import Terminal, result_table
    from segcredit.train.trainer import Trainer

    console = Console(file=safe_stream(sys.stdout, GOES_ON), soft_wrap=True)
    terminal = Terminal(console)
    quiet_libraries()
    if skip_bad_rows:
        overrides = [*overrides, "data.skip_bad_rows=true"]
    try:
        if resume is None:
            chosen = load_recipe(recipe, overrides)
        else:
            chosen, folder = load_run_recipe(resume, overrides, trust_run), resume
        with console.status("checking the recipe") as status:
            trainer = Trainer.from_recipe(
                chosen, lambda rows: status.update(f"checking rows: {rows:,}")
            )
        for row in trainer.plan.bad:
            say(console, f"left out: {row}", "yellow")
        if check:
            named = recipe if resume is None else str(resume / "config.yaml")
            _print_plan(console, trainer, shlex.join([named, *overrides]), verbose)
            return
        result = trainer.train(folder, resume=resume is not None, watch=terminal)
    except StopTraining as stopped:
        say(console, str(stopped))
        raise typer.Exit(130) from None
    except KeyboardInterrupt:
        if terminal.run is None:
            raise
        say(
            console,
            f"Stopped at once, without saving; the last checkpoint is complete. To resume from "
            f"there: {resume_command(terminal.run)}",
        )
        raise typer.Exit(130) from None
    except (ValueError, CheckpointError, NotFinite, OSError) as error:
        print_error(error)
        raise typer.Exit(2) from None
    if result.folder is None:  # rank 0 writes and prints
        return
    if (table := result_table(result)) is not None:
        console.print(table)
    say(console, f"run     {result.folder}")  # first: the page takes a moment
    curves, page = finish_report(result.folder, print_error)
    files = {"curves": curves, "report": page, "model": result.model, "best": result.best}
    for name, place in files.items():
        if place is not None:
            say(console, f"{name:<7} {place}")


def _print_plan(console: "Console", trainer: "Trainer", given: str, verbose: bool) -> None:
    """Print a summary of the run, its settings, and what was checked.

    Args:
        given: The recipe and the overrides, as typed.
        verbose: Whether to print all settings and all parts of the method.
    """
    import yaml

    from segcredit.train.trainer import method_fact, stages_fact

    recipe, plan = trainer.recipe, trainer.plan
    needs = sorted(x.name for x in resolve(plan.algorithm.needs))
    epochs = f"{recipe.update.epochs} epoch{'s' * (recipe.update.epochs != 1)}"
    shown = recipe.as_dict() if verbose else recipe.changed_settings()
    settings = yaml.safe_dump(
        shown,
        sort_keys=False,
        allow_unicode=True,
        width=100,
        default_flow_style=False if verbose else None,
    )
    which = "all settings" if verbose else "settings that differ from the defaults (all: --verbose)"
    lines = [
        f"model: {_model(trainer)}",
        f"prompts: {_prompts(trainer)}",
        f"reward: {_rewards(recipe.reward)}",
        f"method: {method_fact(recipe.algorithm)}",
        *([f"parts: {plan.algorithm!r}"] if verbose else []),
        f"needs: {', '.join(needs) or 'nothing beside the rewards'}",
        f"stages: {stages_fact(recipe)}",
        f"a step: {_drawn(trainer)}, {epochs}",
        *_memory(trainer, given),
        f"{which}:",
        *(f"  {line}" for line in settings.splitlines()),
        *_first_prompt(trainer),
        "checks:",
        *(f"  {line}" for line in _checks(trainer)),
        "recipe, data and reward are valid; no model was loaded",
    ]
    for line in lines:
        say(console, line)


def _model(trainer: "Trainer") -> str:
    settings = trainer.recipe.model
    trained = "all weights" if settings.lora is None else f"LoRA of rank {settings.lora.rank}"
    name = settings.path or f"tiny {settings.tiny} with random weights"
    frozen = ", frozen vision tower" * settings.freeze_vision
    return f"{name}, {settings.dtype}, trains {trained}{frozen}"


def _prompts(trainer: "Trainer") -> str:
    """Describe the training prompts and the prompts of an evaluation."""
    recipe, train, test = trainer.recipe, trainer.plan.train.size, trainer.plan.test
    source = "generated" if train is None else f"{train}"
    source += f" ({recipe.data.world})" if recipe.data.world else ""
    if test is None:
        return f"{source}, none held out"
    count = recipe.evaluation.prompts
    count = count if test.size is None else min(count, test.size)
    return f"{source}, {count} held out for each evaluation"


def _rewards(spec: object) -> str:
    if isinstance(spec, list):
        return " + ".join(map(_rewards, spec))
    return str(spec["name"] if isinstance(spec, dict) else spec)


def _memory(trainer: "Trainer", given: str) -> list[str]:
    """Name what saves memory, and the command that predicts memory and time."""
    recipe = trainer.recipe
    if recipe.model.path is None:
        return []
    used = [name for name, x in recipe.memory.model_dump().items() if x]
    return [
        f"memory: {', '.join(used) or 'nothing offloaded'}; to predict it: segcredit plan {given}"
    ]


def _checks(trainer: "Trainer") -> list[str]:
    """Describe what was checked, with the results."""
    from segcredit.rewards import CustomReward, JudgeReward, ServerReward, parts_of

    plan = trainer.plan
    if plan.train.size is None or plan.world is not None:
        rows = "the first generated prompts fit the model"
    else:
        test = 0 if plan.test is None else plan.test.size or 0
        rows = f"{plan.train.size} training and {test} held-out rows fit the model"
        rows += f", {len(plan.bad)} left out" * bool(plan.bad)
    tried = []
    for part in parts_of(plan.reward):
        if isinstance(part, CustomReward):
            tried.append(f"{part.name} graded two responses to the first training row")
        elif isinstance(part, JudgeReward | ServerReward):
            tried.append(f"{part.url} can be reached")
    return ["settings: valid", f"rows: {rows}", *(f"reward: {x}" for x in tried)]


PROMPT_LINES, PROMPT_WIDTH = 12, 160
"""Maximum number of lines that are shown of the first prompt, and of characters of a line."""


def _first_prompt(trainer: "Trainer") -> list[str]:
    """Return the first training prompt as the model reads it, shortened in the middle."""
    from segcredit.models.template import LimitedChat
    from segcredit.printable import printable

    codec, prompt = trainer.plan.codec, trainer.plan.first_prompt
    with LimitedChat(codec.chat) as chat:
        count, text = codec.count_tokens(prompt, chat), codec.shown(prompt, chat)
    lines = [_shortened(printable(line)) for line in text.split("\n")]
    if (more := len(lines) - PROMPT_LINES + 1) > 1:
        half = PROMPT_LINES // 2
        lines[half : half + more] = [f"… {more} more lines …"]
    title = f"first training prompt as the model reads it ({prompt.id}, {count} tokens):"
    return [printable(title), *(f"  {line}".rstrip() for line in lines)]


def _shortened(line: str) -> str:
    half = PROMPT_WIDTH // 2
    return line if len(line) <= PROMPT_WIDTH else f"{line[:half]} … {line[-half:]}"


def _drawn(trainer: "Trainer") -> str:
    """Describe how many responses a step samples and how they are split into mini-batches."""
    recipe, algorithm = trainer.recipe, trainer.plan.algorithm
    count, tree = recipe.update.minibatches, recipe.rollout.tree
    if tree is not None:
        shape = "-".join(map(str, tree.branching))
        return f"{recipe.rollout.prompts} trees that branch {shape}, {count} mini-batches"
    rows = recipe.rollout.prompts * recipe.rollout.samples
    if not hasattr(algorithm, "credit"):
        return f"{rows} responses, up to {count} mini-batches of what the method selects from them"
    size, more = divmod(rows, count)
    sizes = f"{size} or {size + 1}" if more else f"{size}"
    return f"{rows} responses, {count} mini-batches of {sizes}"
