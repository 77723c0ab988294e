"""``segcredit report``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from segcredit.commands.output import complain
from segcredit.registry import load_object

if TYPE_CHECKING:
    from segcredit.report.page import Figure
    from segcredit.runlog import Run

EPILOG = """\
[bold]Examples[/bold]

segcredit report runs/demo-20261115-101500  [dim]# writes report.html into the run's folder[/dim]

segcredit report runs/sapo-* runs/ppo-* -o comparison.html  [dim]# curves over one another[/dim]

segcredit report --serve runs/demo-20261115-101500  [dim]# follow a run in progress[/dim]

segcredit report RUN --responses 200 --megabytes 60  [dim]# more of it[/dim]
"""


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.", metavar="RUN…")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="The page; RUN/report.html, or report.html for several runs."
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option("--steps", min=1, help="Recorded steps shown, evenly spread.")
    ] = 20,
    responses: Annotated[
        int, typer.Option("--responses", min=1, help="Responses shown of each step.")
    ] = 24,
    megabytes: Annotated[
        float, typer.Option("--megabytes", min=0.1, help="Room for responses on the page.")
    ] = 18.0,
    analyses: Annotated[
        bool, typer.Option("--analyses/--no-analyses", help="Draw the analyses too.")
    ] = True,
    serve: Annotated[
        bool, typer.Option("--serve", help="Show it in a browser of this machine, and follow.")
    ] = False,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any free one.")] = 0,
) -> None:
    """One page on which to see segments, values and credit, and how runs compare."""
    from segcredit.runlog import read_run

    try:
        _adopt_verl(runs)
        found = [read_run(path) for path in runs]
        if serve:
            _serve(runs, port)
            return
        path = output or (found[0].path if len(found) == 1 else Path()) / "report.html"
        _write(found, path, steps, responses, megabytes, analyses)
    except (ValueError, OSError) as error:
        complain(error)
        raise typer.Exit(2) from None


def _adopt_verl(runs: list[Path]) -> None:
    """What verl wrote into a run's folder, in the words of our own runs."""
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

    console = Console(soft_wrap=True)
    with console.status("reading") as status:
        figures = draw_analyses(runs) if analyses else []
        write_report(
            runs, path, Limits(steps, responses, megabytes), figures, progress=status.update
        )
    size = path.stat().st_size / 1e6
    console.print(f"report  {path.absolute()}  ({size:.1f} MB)", markup=False, highlight=False)


def _serve(folders: list[Path], port: int) -> None:
    from segcredit.report.serve import Server

    try:
        server = Server(folders, port)
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


def draw_analyses(runs: "list[Run]") -> "list[Figure]":
    """Draw the laboratory's analyses of these runs for the page."""
    return load_object("segcredit_lab.analysis.analyses:report_figures", "function")(runs)


def write_quick_report(folder: Path) -> Path:
    """The page of a run that has just ended, into its folder."""
    from segcredit.report.data import Limits
    from segcredit.report.page import write_report
    from segcredit.runlog import read_run

    run = read_run(folder)
    return write_report([run], folder / "report.html", Limits(), draw_analyses([run]))
