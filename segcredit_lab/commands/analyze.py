"""``segcredit analyze``: figures and numbers from recorded runs."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from segcredit.commands.output import TrustRun, exit_codes, print_error, quiet_libraries, say

if TYPE_CHECKING:
    from rich.console import Console

    from segcredit.runlog import Run
    from segcredit_lab.analysis import Analysis, AnalysisResults

EPILOG = """\
[bold]Examples[/bold]

segcredit analyze runs/demo-20261115-101500  [dim]# writes RUN/analysis/[/dim]

segcredit analyze runs/sapo-* runs/ppo-* -o compared  [dim]# seeds of one recipe are averaged[/dim]

segcredit analyze runs/demo-20261115-101500 --only lift --only lift_probe --probe
"""


def analyze(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for the figures; default: RUN/analysis."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            help="lift, lift_probe, ratio_bias, segments, within, jumps, targets, value_loss, "
            "entropy or length. Repeat for several.",
            metavar="NAME",
        ),
    ] = None,
    probe: Annotated[
        bool,
        typer.Option("--probe", help="Also compute Lift by a value probe on the last checkpoint."),
    ] = False,
    trust_run: TrustRun = False,
    threshold: Annotated[
        float, typer.Option("--threshold", "-d", help="Quantile above which ΔV counts as large.")
    ] = 0.9,
    resamples: Annotated[
        int, typer.Option("--resamples", "-B", help="Bootstrap resamples.", min=1)
    ] = 1000,
    window: Annotated[
        int, typer.Option("--window", help="Steps in the moving average of curves.", min=1)
    ] = 5,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the bootstrap.", min=0)] = 0,
) -> None:
    """Analyze runs: Lift, ratio bias, segments, value loss, entropy and response length."""
    from rich.console import Console
    from rich.text import Text

    from segcredit.runlog import read_run
    from segcredit_lab.analysis import AnalysisSettings, analyze_runs

    console = Console()
    with exit_codes():
        found_runs = [read_run(path, trust_run) for path in runs]
        names = only or []
        settings = AnalysisSettings(
            threshold=threshold,
            resamples=resamples,
            window=window,
            seed=seed,
            probe=probe or "lift_probe" in names,
            trust_run=trust_run,
        )
        if settings.probe:
            quiet_libraries()
        with console.status("reading…") as status:

            def progress(what: str) -> None:
                status.update(Text(f"{what}…"))  # names are not markup

            found = analyze_runs(found_runs, settings, names, progress)
            folders = _write(found, found_runs, output, progress)
    _show(console, found, folders)
    if not found.done:
        print_error("no analysis could be made.")
        raise typer.Exit(2)


def _write(
    found: "AnalysisResults",
    runs: "list[Run]",
    output: Path | None,
    progress: Callable[[str], None],
) -> list[Path]:
    """Write the files of every analysis; return the folders."""
    from segcredit_lab.analysis import write
    from segcredit_lab.analysis.analyses import run_names

    own = dict(zip(run_names(runs), _folders(runs, output), strict=True))
    together = runs[0].path / "analysis" if output is None else output
    folders = []
    for analysis in found.done:
        progress(f"drawing {analysis.title}")
        folder = together if analysis.compares else own[analysis.runs[0]]
        write(analysis, folder)
        folders.append(folder)
    return list(dict.fromkeys(folders))


def _folders(runs: "list[Run]", output: Path | None) -> list[Path]:
    """Choose each run's output folder: in the run, or in --output (one per run if several)."""
    if output is None:
        return [run.path / "analysis" for run in runs]
    if len(runs) == 1:
        return [output]
    folders: list[Path] = []
    for run in runs:
        name, number = run.path.name, 1
        while output / name in folders:
            number += 1
            name = f"{run.path.name}-{number}"
        folders.append(output / name)
    return folders


def _show(console: "Console", found: "AnalysisResults", folders: list[Path]) -> None:
    for analysis in found.done:
        _show_one(console, analysis)
    for skipped in found.skipped:
        say(console, str(skipped), "yellow")
    for folder in folders:
        say(console, f"figures  {folder}")


def _show_one(console: "Console", analysis: "Analysis") -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(analysis.heading), title_justify="left")  # names are not markup
    for number, name in enumerate(analysis.table.columns):
        table.add_column(Text(name), justify="right" if number else "left")
    for row in analysis.table.rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
    console.print(analysis.note, style="dim", markup=False, highlight=False)
    console.print()
