"""The command line. Heavy imports are delayed until a command runs, so that help is fast.

The commands of the laboratory (``study``, ``analyze``) are in ``segcredit_lab``.
"""

import sys
import warnings
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated

import typer

from segcredit import __version__
from segcredit.commands import benchmark as benchmarking
from segcredit.commands import evaluate as evaluation
from segcredit.commands import plan as planning
from segcredit.commands import prepare as preparing
from segcredit.commands import push as pushing
from segcredit.commands import report as reporting
from segcredit.commands import segment
from segcredit.commands import train as training
from segcredit.commands import verl as on_verl
from segcredit.printable import one_line

analysis = import_module("segcredit_lab.commands.analyze")
studying = import_module("segcredit_lab.commands.study")

app = typer.Typer(
    help="Reinforcement learning that assigns credit to segments of a response.",
    epilog="Try it: [bold]segcredit demo[/bold]",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command(epilog=training.DEMO_EPILOG)(training.demo)
app.command(epilog=training.EPILOG)(training.train)
app.command(epilog=evaluation.EPILOG)(evaluation.evaluate)
app.command(epilog=benchmarking.EPILOG)(benchmarking.benchmark)
app.command(epilog=reporting.EPILOG)(reporting.report)
app.command(epilog=analysis.EPILOG)(analysis.analyze)
app.command(epilog=studying.EPILOG)(studying.study)
app.command(epilog=preparing.EPILOG)(preparing.prepare)
app.command(epilog=planning.EPILOG)(planning.plan)
app.command(epilog=pushing.EPILOG)(pushing.push)
app.command(epilog=on_verl.EPILOG)(on_verl.verl)
app.command(epilog=segment.EPILOG)(segment.segment)


def _show_version(asked: bool) -> bool:
    if asked:
        typer.echo(f"segcredit {__version__}")
        raise typer.Exit
    return asked


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Show help or the version, or run a command."""


def main() -> None:
    """Run the command line; every usage error is one line and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # terminals that cannot show ↵ or 角
    # a message, not the line of code that wrote it
    warnings.formatwarning = lambda message, *_, **__: f"warning: {one_line(str(message))}\n"
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], standalone_mode=False))
    except Exception as error:
        if not hasattr(error, "format_message"):  # click's own errors; typer exports no base class
            raise
        context = getattr(error, "ctx", None)
        name = f" {context.info_name}" if context is not None and context.parent else ""
        message = one_line(error.format_message())
        then = " Type" if message.endswith("?") else "; type"
        typer.echo(f"{message}{then} segcredit{name} --help", err=True)
        sys.exit(2)
