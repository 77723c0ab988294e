"""``segcredit evaluate``: measure a checkpoint on held-out prompts."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from segcredit.commands.output import (
    PAPER,
    AllowOutside,
    Engine,
    MaxTokens,
    ModelFamily,
    Seed,
    Template,
    TopP,
    TrustRun,
    exit_codes,
    quiet_libraries,
    say,
)

if TYPE_CHECKING:
    from rich.table import Table

    from segcredit.evaluate import Evaluation

EPILOG = """\
[bold]Examples[/bold]

segcredit evaluate runs/demo-20261115-101500  [dim]# a run: its last checkpoint, its test data[/dim]

segcredit evaluate runs/demo-20261115-101500 --samples 8 --temperature 0.6 --top-p 0.95

segcredit evaluate Qwen/Qwen2.5-VL-3B-Instruct --data geo3k --paper

segcredit evaluate my-model --data test.parquet --reward math --json > result.json
"""


def evaluate(
    checkpoint: Annotated[
        str, typer.Argument(help="A run directory, a Hugging Face folder, or a Hub id.")
    ],
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Prompt files, or a prepared dataset: geo3k, gsm8k, math, words.",
            show_default="the run's test data",
        ),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(
            help="math, geo3k, geo3k_strict, gsm8k, exact or file.py:function.",
            show_default="the run's, or the prepared dataset's",
        ),
    ] = None,
    paper: Annotated[
        bool,
        typer.Option(
            "--paper",
            help="Evaluate as in the SAPO paper: --temperature 0.6 --top-p 0.95 --no-greedy "
            "--prompts 0.",
        ),
    ] = False,
    prompts: Annotated[
        int | None, typer.Option(help="Number of prompts; 0: all.", min=0, show_default="512")
    ] = None,
    samples: Annotated[
        int, typer.Option("--samples", "-k", help="Sampled responses per prompt.", min=1)
    ] = 4,
    temperature: Annotated[
        float | None,
        typer.Option(help="Sampling temperature.", min=0.01, show_default="the run's, or 1.0"),
    ] = None,
    top_p: TopP = None,
    greedy: Annotated[
        bool | None,
        typer.Option(
            "--greedy/--no-greedy", help="Also evaluate the greedy response.", show_default="yes"
        ),
    ] = None,
    max_tokens: MaxTokens = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="Stop string; may be repeated.", show_default="the run's"),
    ] = None,
    suffix: Annotated[str | None, typer.Option(help="Text appended to each question.")] = None,
    system: Annotated[
        str | None, typer.Option(help="System prompt.", show_default="the run's, on its own data")
    ] = None,
    template: Template = None,
    engine: Engine = None,
    family: ModelFamily = None,
    seed: Seed = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write all responses to this jsonl file.")
    ] = None,
    trust_run: TrustRun = False,
    allow_outside: AllowOutside = False,
    best: Annotated[
        bool,
        typer.Option(
            "--best", help="The run's best checkpoint (save.best), instead of its last one."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
) -> None:
    """Measure accuracy on held-out prompts: greedy, avg@k and pass@k, with 95 % intervals.

    If the reward does not report correctness, only the mean reward is printed.
    """
    from rich.console import Console

    from segcredit.evaluate.checkpoint import evaluate_checkpoint
    from segcredit.evaluate.measure import truncation_warning
    from segcredit.runlog.storage import CheckpointError

    quiet_libraries()
    console = Console(stderr=as_json)
    chosen = {"temperature": temperature, "top_p": top_p, "greedy": greedy, "prompts": prompts}
    given: dict[str, Any] = {name: x for name, x in chosen.items() if x is not None}
    if prompts == 0:
        given["prompts"] = None
    with exit_codes(CheckpointError), console.status("evaluating…"):
        result = evaluate_checkpoint(
            checkpoint,
            data=data,
            reward=reward,
            samples=samples,
            max_tokens=max_tokens,
            stop=stop,
            suffix=suffix,
            system=system,
            template=template,
            engine=engine,
            family=family,
            seed=seed,
            output=output,
            trust_run=trust_run,
            allow_outside=allow_outside,
            best=best,
            **(PAPER | {"greedy": False, "prompts": None} if paper else {}) | given,
        )
    if as_json:
        typer.echo(json.dumps(result.as_dict()))
    else:
        console.print(_table(result))
    limit = f"--max-tokens {result.sampling.max_tokens}"
    for warning in (result.warning, truncation_warning(result.truncated, limit)):
        if warning is not None:
            say(console, warning, "yellow")
    if output is not None:
        say(console, f"responses  {output}")


def _table(result: "Evaluation") -> "Table":
    from rich.table import Table
    from rich.text import Text

    title = f"{result.prompts} prompts × {result.samples} samples"
    table = Table(title=title, title_justify="left")
    table.add_column("measure")
    table.add_column("value", justify="right")
    table.add_column("95 % interval", justify="right")
    if result.greedy is not None and result.greedy_interval is not None:
        table.add_row("greedy accuracy", f"{result.greedy:.1%}", _range(result.greedy_interval))
    if result.sampled is not None and result.sampled_interval is not None:
        average = f"{result.sampled:.1%}"
        table.add_row(f"avg@{result.samples}", average, _range(result.sampled_interval))
    for source, x in result.by_source.items():
        table.add_row(Text(f"  {source}"), f"{x:.1%}", "")
    for k, x in result.pass_at.items():
        if k > 1:
            table.add_row(f"pass@{k}", f"{x:.1%}", _range(result.pass_interval[k]))
    low, high = result.reward_interval
    table.add_row("reward", f"{result.reward:.3f}", f"{low:.3f} – {high:.3f}")
    if result.greedy_reward is not None:
        table.add_row("greedy reward", f"{result.greedy_reward:.3f}", "")
    if result.answered is not None:
        table.add_row("answer found", f"{result.answered:.1%}", "")
    table.add_row("no verdict", f"{result.no_verdict:.1%}", "")
    table.add_row("truncated", f"{result.truncated:.1%}", "")
    drawn = f"{result.sampling.temperature:g}, {result.sampling.top_p:g}"
    table.add_row("temperature, top-p", drawn, "")
    table.add_row("response length", f"{result.response_length:.0f} tokens", "")
    return table


def _range(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.1%} – {ends[1]:.1%}"
