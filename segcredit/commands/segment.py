"""``segcredit segment``: show responses cut into segments."""

from typing import Annotated, Any

import typer

from segcredit.printable import printable
from segcredit.report.responses import EXAMPLE, CreditSettings, InputError, ValueAt

MAX_ROWS = 20
"""Rows shown on a terminal by default."""
MIN_WIDTH = 40

_CREDIT = CreditSettings()

EPILOG = r"""[bold]Partitions[/bold]
  segcredit segment --list describes them, with their settings
  [cyan]-s entropy -s newline[/cyan]         two of them
  [cyan]-s all[/cyan]                        every partition whose inputs the row has
  [cyan]-s my_partitions.py:Name[/cyan]      your own partition
  [cyan]-s '{name: fixed, size: 8}'[/cyan]   with settings, as in recipes

[bold]A line of FILE[/bold]
  {"tokens": \["So", " x", " =", " 2"], "entropy": \[1.2, 0.3, 0.1, 0.9]}

  "tokens" (a list) or "text" (a string) is required. Optional lists with one
  entry per token: "entropy", "prob" or "logp", "value" (V of the prefix before
  the token), "mask" (false at tool output). Optional per response: "reward",
  "id", "prompt". FILE can also be a file that training writes (in RUN/rollouts,
  RUN/watched or RUN/evaluations), or RUN itself for its last rollouts.

[bold]Examples[/bold]
  segcredit segment --example
  segcredit segment --example -s newline -s step
  segcredit segment rollouts.jsonl -s all --limit 1
  segcredit segment runs/demo-20261115-101500 -s all --limit 1
  segcredit segment rollouts.jsonl --fraction 0.1 --json | jq .segments

The responses of --example are hand-written, and their numbers are illustrative."""


def _option(panel: str, help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


def _setting(help: str, default: str) -> Any:
    return _option("Cutting", help, metavar="X", show_default=default)


def segment(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE",
            help="JSONL file, one response per line; or a run directory; - reads standard input.",
        ),
    ] = None,
    example: Annotated[
        bool, typer.Option("--example", help="Show the responses that come with segcredit.")
    ] = False,
    list_: Annotated[
        bool, typer.Option("--list", help="Describe the partitions and their settings.")
    ] = False,
    strategy: Annotated[
        list[str] | None,
        _option(
            "Cutting",
            "Partition, as in recipes: entropy, newline, … (--list), file.py:Name, or all. "
            "Repeat it for several.",
            "--strategy",
            "-s",
            metavar="NAME",
            show_default="entropy if the row has it, else newline",
        ),
    ] = None,
    fraction: Annotated[
        float | None,
        _setting("entropy, peaks, smooth, value: fraction of tokens to cut after.", "0.3"),
    ] = None,
    threshold: Annotated[
        float | None,
        _setting("probability, accumulate: tokens below this probability count.", "0.9"),
    ] = None,
    every: Annotated[
        int | None, _setting("probability, accumulate: number of such tokens per segment.", "5")
    ] = None,
    size: Annotated[int | None, _setting("fixed: tokens per segment.", "16")] = None,
    window: Annotated[
        int | None, _setting("smooth: number of tokens whose entropy is averaged.", "5")
    ] = None,
    gamma: Annotated[
        float, _option("Credit", "γ of the advantages, per segment.", metavar="γ")
    ] = _CREDIT.gamma,
    lam: Annotated[
        float, _option("Credit", "λ of the advantages, per segment.", metavar="λ")
    ] = _CREDIT.lam,
    value_at: Annotated[
        ValueAt,
        _option("Credit", "Read V before a segment's first token (paper) or last (authors' code)."),
    ] = _CREDIT.value_at,
    limit: Annotated[
        int | None,
        _option(
            "Output",
            "Maximum number of rows; 0: all.",
            metavar="N",
            show_default=f"{MAX_ROWS}; with --json all",
        ),
    ] = None,
    width: Annotated[
        int | None,
        _option("Output", "Width in columns.", metavar="N", show_default="the terminal's"),
    ] = None,
    as_json: Annotated[
        bool, _option("Output", "Print one JSON object per row and partition.", "--json")
    ] = False,
) -> None:
    """Show responses cut into segments, with each segment's entropy, value and credit."""
    settings = {
        "fraction": fraction,
        "threshold": threshold,
        "every": every,
        "size": size,
        "window": window,
    }
    try:
        _check_count("--limit", limit, 0, "0 shows all rows")
        _check_count("--width", width, MIN_WIDTH, "leave it out to use the terminal's")
        path = EXAMPLE if list_ else _source(file, example)

        from segcredit.core.checks import require_unit_interval  # torch loads here
        from segcredit.report.segments import load_partitions
        from segcredit.report.terminal import Viewer, show_partitions

        strategies = strategy or []
        given = {name: x for name, x in settings.items() if x is not None}
        partitions = load_partitions(strategies, given)
        if list_:
            show_partitions(partitions, width)
            return
        require_unit_interval("gamma", gamma, "Language tasks use 1.0.")
        require_unit_interval("lam", lam, "The paper uses 0.99 per segment.")
        credit = CreditSettings(gamma, lam, value_at)
        if limit is None and not as_json:
            limit = MAX_ROWS
        viewer = Viewer(path, strategies, partitions, credit, limit or None)
        viewer.to_json() if as_json else viewer.to_terminal(width)
    except (InputError, ValueError) as error:
        typer.echo(printable(str(error)), err=True)
        raise typer.Exit(2) from None


def _source(file: str | None, example: bool) -> str:
    if example and file is not None:
        raise InputError(f"expected FILE or --example; got both; leave out {file} or --example")
    if file is None and not example:
        raise InputError("expected FILE; got none; type segcredit segment --example to see one")
    return EXAMPLE if file is None else file


def _check_count(option: str, number: int | None, least: int, hint: str) -> None:
    if number is not None and number < least:
        raise InputError(f"{option} must be at least {least}; got {number}; {hint}")
