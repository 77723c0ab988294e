"""``segcredit study``: reproduce a table or figure with one command."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from segcredit.commands.output import print_error, quiet_libraries, say

if TYPE_CHECKING:
    from rich.console import Console

    from segcredit.benchmarks.run import QuestionSet
    from segcredit_lab.study import Options, Store, StudyPlan
    from segcredit_lab.study.execute import RunStates
    from segcredit_lab.study.summary import Summary

EPILOG = """\
[bold]Examples[/bold]

segcredit study --list  [dim]# studies, arms and progress[/dim]

segcredit study table1 --scale smoke  [dim]# a test of the pipeline, in seconds[/dim]

segcredit study table1 table2 --scale mini --jobs 4  [dim]# four runs at a time[/dim]

segcredit study table1 --scale mini --no-run  [dim]# tables of the finished runs[/dim]

segcredit study mine.yaml --scale mini --only ppo --set optimizer.lr=1e-4
"""
ALL = "all"


def study(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Study names, YAML files, or all.", metavar="[NAME]…"),
    ] = None,
    scale: Annotated[str, typer.Option("--scale", help="smoke, mini, small or paper.")] = "smoke",
    folder: Annotated[
        Path, typer.Option("--folder", "-o", help="Folder for runs and results of all studies.")
    ] = Path("studies"),
    jobs: Annotated[
        int,
        typer.Option("--jobs", "-j", help="Parallel runs, spread over the visible GPUs.", min=1),
    ] = 1,
    seeds: Annotated[
        str | None, typer.Option("--seeds", help="Seeds, such as 0,1,2; default: the study's.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", help="Run this arm and the reference. Repeat for several.", metavar="ARM"
        ),
    ] = None,
    optional: Annotated[
        bool, typer.Option("--all", help="Include optional arms (see --list).")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Override a setting of every run. Repeat for several.",
            metavar="KEY=VALUE",
        ),
    ] = None,
    tune: Annotated[
        bool,
        typer.Option("--tune/--no-tune", help="Tune learning rates, or keep those of the recipes."),
    ] = True,
    listed: Annotated[
        bool, typer.Option("--list", help="List studies, arms and progress.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the recipes of all runs without running them.")
    ] = False,
    run: Annotated[
        bool,
        typer.Option(
            "--run/--no-run", help="Train missing runs, or only write tables of finished ones."
        ),
    ] = True,
    benchmark: Annotated[
        bool | None,
        typer.Option(
            "--benchmark/--no-benchmark",
            help="Score the final models on the study's benchmarks.",
            show_default="at scale paper",
        ),
    ] = None,
) -> None:
    """Run the missing runs of a study, then write its tables and figures."""
    from rich.console import Console

    from segcredit_lab.study import Options, Store, StudyPlan, load_study, shipped_studies
    from segcredit_lab.study.definition import scale_of
    from segcredit_lab.study.execute import recorded

    if not names and not listed:
        raise typer.BadParameter("name a study. To list them: segcredit study --list")
    console = Console()
    try:
        chosen = [*shipped_studies()] if not names or names == [ALL] else names
        chosen_arms = tuple(only or ())
        if chosen_arms and optional:
            raise ValueError("--only and --all cannot be combined. Leave one of them out.")
        options = Options(_seeds(seeds), chosen_arms, tuple(settings or ()), tune, optional)
        store = Store(folder / "runs")
        found = scale_of(scale)
        if listed:
            _list(console, chosen, scale, options, store)
            return
        plans = [StudyPlan(load_study(name), found, options, store) for name in chosen]
        if dry_run:
            _dry_run(console, plans, store)
            return
        wanted = scale == "paper" if benchmark is None else benchmark
        questions = _questions(console, plans) if wanted else {}
        states = _execute(console, plans, store, folder, jobs) if run else recorded(plans, store)
        _write(console, plans, states, folder)
        _benchmark(console, plans, store, folder, questions)
    except (ValueError, OSError) as error:
        print_error(error)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("Stopped.")
        raise typer.Exit(130) from None
    if run:
        _end(console, states)


def _seeds(text: str | None) -> tuple[int, ...]:
    try:
        found = tuple(int(x) for x in text.split(",")) if text is not None else ()
    except ValueError:
        found = (-1,)
    if any(seed < 0 for seed in found) or len({*found}) < len(found):
        raise ValueError(f"--seeds: expected different whole numbers, as 0,1,2; got {text!r}.")
    return found


def _execute(
    console: "Console", plans: "list[StudyPlan]", store: "Store", folder: Path, jobs: int
) -> "RunStates":
    from segcredit_lab.study.execute import execute, make_display

    with make_display(console) as display:
        return execute(plans, store, jobs, folder / "logs", display)


def _write(console: "Console", plans: "list[StudyPlan]", states: "RunStates", folder: Path) -> None:
    from segcredit_lab.study.summary import summarize
    from segcredit_lab.study.tables import write_study

    quiet_libraries()  # a value probe loads a model
    for plan in plans:
        place = folder / f"{plan.study.name}-{plan.scale.name}"
        summary = summarize(plan, states.failed)
        with console.status(f"{plan.study.name}: tables and figures…"):
            lacking = write_study(summary, place)
        _show(console, plan, summary)
        for reason in lacking:
            say(console, reason, "yellow")
        say(console, f"written  {place}")


def _questions(console: "Console", plans: "list[StudyPlan]") -> "dict[str, Sequence[QuestionSet]]":
    """Read the questions of each study's benchmarks before training, to find missing data."""
    from segcredit.benchmarks.run import load_questions
    from segcredit.benchmarks.table import set_names

    found: dict[str, Sequence[QuestionSet]] = {}
    with console.status("reading the questions of the benchmarks…"):
        for plan in plans:
            if plan.study.benchmarks:
                try:
                    found[plan.study.name] = load_questions(set_names(plan.study.benchmarks))
                except ValueError as error:
                    raise ValueError(
                        f"{error}\nOr run the study without benchmarks: --no-benchmark"
                    ) from None
    return found


def _benchmark(
    console: "Console",
    plans: "list[StudyPlan]",
    store: "Store",
    folder: Path,
    questions: "dict[str, Sequence[QuestionSet]]",
) -> None:
    """Score the finished runs of every study that has benchmarks, in the paper's layout."""
    from segcredit.benchmarks.run import BenchmarkSettings
    from segcredit.commands.benchmark import answer_sets, write_results
    from segcredit.commands.output import PAPER

    for plan in plans:
        finished = [run for run in plan.runs() if run.kind == "run" and store.finished(run)]
        if plan.study.name not in questions or not finished:
            continue
        place = folder / f"{plan.study.name}-{plan.scale.name}" / "benchmark"
        models = {
            f"{plan.study.label(run.arm)}, seed {run.seed}": str(store.folder(run))
            for run in finished
        }
        sets = questions[plan.study.name]
        settings = BenchmarkSettings(**PAPER)
        results = answer_sets(console, models, sets, place, settings, trust_run=True)
        write_results(console, results, plan.study.benchmarks, place)


def _show(console: "Console", plan: "StudyPlan", summary: "Summary") -> None:
    """Print the main columns of the results table."""
    from rich.table import Table
    from rich.text import Text

    from segcredit_lab.study.tables import results_table

    found = results_table(summary)
    table = Table(title=Text(plan.study.title), title_justify="left")
    shown = [place for place in range(8) if found.columns[place] != "start"]
    for place in shown:
        name = "−" if found.columns[place].startswith("−") else found.columns[place]
        table.add_column(name, justify="right" if place else "left")
    for row in found.rows:
        table.add_row(*(Text(row[place]) for place in shown))
    table.caption = Text(f"−: compared with {plan.study.label(plan.study.reference)}")
    console.print(table)


def _end(console: "Console", states: "RunStates") -> None:
    from segcredit_lab.study.execute import status_text

    failed: dict[str, list[str]] = {}
    for state in states.runs.values():
        if state.status == "failed":
            failed.setdefault(status_text(state), []).append(state.run.name)
    for reason, names in failed.items():
        print_error(f"{', '.join(names)}: {reason}")
    if states.stopping:
        console.print("Stopped. Run the same command again to continue.")
        raise typer.Exit(130)
    if failed:
        raise typer.Exit(1)


def _list(
    console: "Console", names: list[str], scale: str, options: "Options", store: "Store"
) -> None:
    """List studies, their arms and how many runs are done."""
    from rich.table import Table
    from rich.text import Text

    from segcredit_lab.study import StudyPlan, load_study
    from segcredit_lab.study.definition import scale_of

    table = Table(title=f"Studies, scale {scale}", title_justify="left")
    for name in ("study", "arms", "runs", "done"):
        table.add_column(name, justify="right" if name in ("runs", "done") else "left")
    wanted: dict[str, bool] = {}
    for name in names:
        study = load_study(name).at_scale(scale)
        arms = ", ".join(
            f"{key} (optional)" if arm.optional else key for key, arm in study.arms.items()
        )
        try:
            plan = StudyPlan(study, scale_of(scale), options, store)
            runs = {run.digest: store.finished(run) for run in plan.runs(guess=True)}
            wanted |= runs
            counts = (str(len(runs)), str(sum(runs.values())))
        except ValueError as error:
            arms, counts = f"{arms}\n{error}", ("–", "–")
        table.add_row(Text(study.name), Text(f"{study.title}\n{arms}"), *counts, end_section=True)
    if len(names) > 1:
        table.caption = (
            f"{len(wanted)} runs in total, {sum(wanted.values())} done; shared runs count once"
        )
        table.caption_justify = "left"
    console.print(table)


def _dry_run(console: "Console", plans: "list[StudyPlan]", store: "Store") -> None:
    """Print the complete recipe of every known run, and the command that trains it."""
    import yaml

    printed = set()
    for plan in plans:
        for run in plan.runs():
            if run.digest in printed:
                continue
            printed.add(run.digest)
            done = "done" if store.finished(run) else "to run"
            place = shlex.quote(str(store.folder(run)))
            recipe = store.recipe(run).as_dict()
            say(console, f"# {plan.study.name}: {run.name} ({done})")
            say(console, f"# segcredit train {run.name}.yaml --folder {place}")
            say(console, yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True) + "---")
        waiting = [arm for arm in plan.arms if plan.rate(arm) is None]
        if waiting:
            say(
                console,
                f"# {plan.study.name}: {len(waiting) * len(plan.seeds)} runs of "
                f"{', '.join(waiting)} follow when learning rates are tuned",
            )
