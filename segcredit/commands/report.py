"""``segcredit report``: write or serve the report page of runs."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from segcredit.commands.output import TrustRun, exit_codes, say
from segcredit.registry import load_object

if TYPE_CHECKING:
    from segcredit.report.page import Figures
    from segcredit.runlog import Run

EPILOG = """\
[bold]Examples[/bold]

segcredit report runs/demo-20261115-101500  [dim]# writes report.html into the run directory[/dim]

segcredit report runs/sapo-* runs/ppo-* -o comparison.html  [dim]# curves of several runs[/dim]

segcredit report --serve runs/demo-20261115-101500  [dim]# follow a run in progress[/dim]

segcredit report RUN --responses 200 --megabytes 60  [dim]# more responses[/dim]
"""


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.", metavar="RUN…")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="HTML file; default: RUN/report.html, or report.html for several runs.",
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=1, help="Recorded steps to show per run, evenly spaced.")
    ] = 20,
    responses: Annotated[int, typer.Option(min=1, help="Responses to show per step.")] = 24,
    megabytes: Annotated[
        float, typer.Option(min=0.1, help="Maximum size of all responses, in MB.")
    ] = 18.0,
    analyses: Annotated[
        bool,
        typer.Option("--analyses/--no-analyses", help="Include the results of segcredit analyze."),
    ] = True,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve the page on this machine and keep it up to date.")
    ] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port for --serve; 0: any free port.")
    ] = 0,
    trust_run: TrustRun = False,
) -> None:
    """Write one HTML page that shows segments, values, credit and curves of one or more runs."""
    from segcredit.runlog import read_run

    with exit_codes():
        _adopt_verl(runs)
        found = [read_run(path, trust_run) for path in runs]
        if serve:
            _serve(runs, port, trust_run)
            return
        path = output or (found[0].path if len(found) == 1 else Path()) / "report.html"
        _write(found, path, steps, responses, megabytes, analyses)


def _adopt_verl(runs: list[Path]) -> None:
    """Convert the files that verl wrote into a run directory to those of our own runs."""
    for folder in runs:
        if (folder / "verl").is_dir():
            from segcredit.integrations.verl.dumps import adopt

            adopt(folder)


def _write(
    runs: "list[Run]", path: Path, steps: int, responses: int, megabytes: float, analyses: bool
) -> None:
    from rich.console import Console

    from segcredit.report.data import Limits
    from segcredit.report.page import write_report

    console = Console()
    with console.status("Reading") as status:
        figures = draw_analyses(runs) if analyses else None
        write_report(
            runs, path, Limits(steps, responses, megabytes), figures, progress=status.update
        )
    size = path.stat().st_size / 1e6
    say(console, f"report  {path.absolute()}  ({size:.1f} MB)")


def _serve(folders: list[Path], port: int, trusted: bool) -> None:
    from segcredit.report.serve import Server

    try:
        server = Server(folders, port, trusted)
    except OSError as error:
        raise ValueError(
            f"port {port} cannot be used: {error.strerror}. Leave --port out to take a free one."
        ) from None
    typer.echo(f"Open {server.address} in a browser on this machine. Ctrl-C stops.")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        typer.echo("Stopped.")
    finally:
        server.server_close()


def draw_analyses(runs: "list[Run]") -> "Figures":
    """Draw the laboratory's analyses of these runs for the page."""
    return load_object("segcredit_lab.analysis.analyses:report_figures", "function")(runs)


def finish_report(folder: Path, failed: Callable[[str], object]) -> tuple[Path | None, Path | None]:
    """Draw the curves and write the page of a run that has just ended; a missing result is None.

    A problem is passed to ``failed`` and does not fail the finished run.
    """
    made: list[Path | None] = []
    for make, problem in (
        (draw_run_curves, "the curves could not be drawn"),
        (write_quick_report, "the report could not be written"),
    ):
        try:
            made.append(make(folder))
        except Exception as error:  # also from a defect of ours, since the run itself is complete
            made.append(None)
            reason = str(error) if isinstance(error, OSError | ValueError) else repr(error)
            failed(f"{problem}: {reason}. The run itself is complete and saved")
    curves, page = made
    return curves, page


def draw_run_curves(folder: Path) -> Path | None:
    """Draw the curves of a run that has just ended into its plots; None if there are none."""
    from segcredit.report.curves import draw_curves
    from segcredit.runlog import RunFolder, read_run

    return draw_curves(read_run(folder), RunFolder(folder).plots / "curves.png")


def write_quick_report(folder: Path) -> Path:
    """Write the page of a run that has just ended; its code has run already, so it is trusted."""
    from segcredit.report.data import Limits
    from segcredit.report.page import write_report
    from segcredit.runlog import read_run

    run = read_run(folder, trusted=True)
    return write_report([run], folder / "report.html", Limits(), draw_analyses([run]))
