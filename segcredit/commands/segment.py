"""``segcredit segment``: its options, and what it answers to mistakes."""

from typing import Annotated, Any

import typer

from segcredit.printable import one_line
from segcredit.report.responses import (
    ALL,
    EXAMPLE,
    STRATEGIES,
    InputError,
    Settings,
    ValueAt,
    check_names,
)

ROWS_ON_A_TERMINAL = 20
NARROWEST = 40

_DEFAULT = Settings()
_STRATEGIES = "\n".join(f"  [cyan]{name:<12}[/cyan]{way.about}" for name, way in STRATEGIES.items())

EPILOG = rf"""[bold]Strategies: where to cut[/bold]
{_STRATEGIES}
  [cyan]{ALL:<12}[/cyan]each of these for which the row has the numbers

[bold]A line of FILE[/bold]
  {{"tokens": \["So", " x", " =", " 2"], "entropy": \[1.2, 0.3, 0.1, 0.9]}}

  Instead of "tokens": "text", a string. One entry per token, as far as known:
  "entropy", "prob" or "logp", "value" (V of the prefix before the token),
  "mask" (false at tool output). Once: "reward", "id", "prompt".
  It also reads the files that training writes (RUN/rollouts, RUN/watched,
  RUN/evaluations); RUN alone shows its last rollouts.

[bold]Examples[/bold]
  segcredit segment --example
  segcredit segment --example -s newline -s step
  segcredit segment rollouts.jsonl -s all --limit 1
  segcredit segment runs/demo-20261115-101500 -s all --limit 1
  segcredit segment rollouts.jsonl --fraction 0.1 --json | jq .segments

The responses of --example are hand-made; their numbers are made up to illustrate."""


def _option(panel: str, help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


def segment(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE",
            help="JSONL, one response per line; a run (its last rollouts); - is standard input.",
        ),
    ] = None,
    example: Annotated[
        bool, typer.Option("--example", help="Show the responses that come with segcredit.")
    ] = False,
    strategy: Annotated[
        list[str] | None,
        _option(
            "Cutting",
            "Where to cut: see below. Repeat it for several.",
            "--strategy",
            "-s",
            metavar="NAME",
            show_default="entropy if the row has it, else newline",
        ),
    ] = None,
    fraction: Annotated[
        float,
        _option("Cutting", "entropy, peaks, smooth, value: share to cut after.", metavar="SHARE"),
    ] = _DEFAULT.fraction,
    threshold: Annotated[
        float,
        _option("Cutting", "probability, accumulate: unlikely is less than this.", metavar="P"),
    ] = _DEFAULT.threshold,
    every: Annotated[
        int, _option("Cutting", "probability, accumulate: unlikely tokens each.", metavar="N")
    ] = _DEFAULT.every,
    size: Annotated[
        int, _option("Cutting", "fixed: tokens per segment.", metavar="N")
    ] = _DEFAULT.size,
    window: Annotated[
        int, _option("Cutting", "smooth: tokens whose entropy is averaged.", metavar="N")
    ] = _DEFAULT.window,
    gamma: Annotated[
        float, _option("Credit", "γ of the advantages, per segment.", metavar="γ")
    ] = _DEFAULT.gamma,
    lam: Annotated[
        float, _option("Credit", "λ of the advantages, per segment.", metavar="λ")
    ] = _DEFAULT.lam,
    value_at: Annotated[
        ValueAt,
        _option("Credit", "V before a segment's first token (paper) or last (authors' code)."),
    ] = _DEFAULT.value_at,
    limit: Annotated[
        int | None,
        _option(
            "Output",
            "Rows to show; 0 is all.",
            metavar="N",
            show_default=f"{ROWS_ON_A_TERMINAL}; with --json all",
        ),
    ] = None,
    width: Annotated[
        int | None,
        _option("Output", "Columns to use.", metavar="N", show_default="the terminal's"),
    ] = None,
    as_json: Annotated[
        bool, _option("Output", "One JSON object per row and strategy.", "--json")
    ] = False,
) -> None:
    """Show responses cut into segments, with each segment's entropy, value and credit."""
    try:
        path = _source(file, example)
        strategies = strategy or []
        check_names(strategies)
        _check_count("--limit", limit, 0, "0 shows all rows")
        _check_count("--width", width, NARROWEST, "leave it out to use the terminal's")
        settings = Settings(fraction, threshold, every, size, window, gamma, lam, value_at)

        from segcredit.report.terminal import to_json, to_terminal  # torch takes its seconds here

        if as_json:
            to_json(path, strategies, settings, limit or None)
        else:
            rows = ROWS_ON_A_TERMINAL if limit is None else limit or None
            to_terminal(path, strategies, settings, rows, width)
    except InputError as error:
        typer.echo(one_line(str(error)), err=True)
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
