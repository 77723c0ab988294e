"""``segcredit evaluate``: a checkpoint on held-out prompts."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from segcredit.commands.output import complain
from segcredit.commands.train import TrustRun

if TYPE_CHECKING:
    from rich.table import Table

    from segcredit.evaluate import Evaluation

EPILOG = """\
[bold]Examples[/bold]

segcredit evaluate runs/demo-20261115-101500  [dim]# a run: its last checkpoint, its test data[/dim]

segcredit evaluate runs/demo-20261115-101500 --samples 8 --temperature 0.6 --top-p 0.95

segcredit evaluate Qwen/Qwen2.5-VL-3B-Instruct --data geo3k --paper

segcredit evaluate my-model --data test.parquet --reward math -o said.jsonl --json > found.json
"""
PAPER: dict[str, Any] = {"temperature": 0.6, "top_p": 0.95, "greedy": False, "prompts": None}
"""Table 7 of the SAPO paper: sampled answers to the whole test set; how many each it leaves out."""


def evaluate(
    checkpoint: Annotated[
        str, typer.Argument(help="A run folder, a Hugging Face folder, or a hub id.")
    ],
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data", help="Files of prompts, or geo3k, gsm8k, math as prepared; a run has its own."
        ),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(
            "--reward",
            help="math, geo3k, geo3k_strict, gsm8k, exact or file.py:function; prepared "
            "data has its own.",
        ),
    ] = None,
    paper: Annotated[
        bool,
        typer.Option(
            "--paper",
            help="As the SAPO paper: --temperature 0.6 --top-p 0.95 --no-greedy, all prompts.",
        ),
    ] = False,
    prompts: Annotated[
        int | None,
        typer.Option("--prompts", help="How many prompts; 0: all.", min=0, show_default="512"),
    ] = None,
    samples: Annotated[int, typer.Option("--samples", "-k", help="Responses each.", min=1)] = 4,
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", help="A run has its own.", min=0.01, show_default="1.0"),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option("--top-p", help="A run has its own.", min=0.01, max=1, show_default="1.0"),
    ] = None,
    greedy: Annotated[
        bool | None,
        typer.Option("--greedy/--no-greedy", help="The greedy response, too.", show_default="yes"),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="Length limit; a run has its own.", min=1)
    ] = None,
    suffix: Annotated[str | None, typer.Option("--suffix", help="Added to each prompt.")] = None,
    template: Annotated[
        str | None,
        typer.Option(
            "--template",
            help="For models that know no chat: text with {question} in it; a run has its own.",
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            help="hf, vllm, or an engine of your own (file.py:Name). Default: the run's engine.",
            show_default="hf",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write every response to this jsonl.")
    ] = None,
    trust_run: TrustRun = False,
    allow_outside: Annotated[
        bool,
        typer.Option("--allow-outside", help="Allow image paths outside the data folder."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="The numbers as one JSON object, not as a table.")
    ] = False,
) -> None:
    """Accuracy on held-out prompts: greedy, avg@k, pass@k, with intervals.

    If the reward does not report correctness, only the mean reward is printed.
    """
    from rich.console import Console

    from segcredit.commands.output import quiet_libraries
    from segcredit.evaluate.checkpoint import evaluate_checkpoint
    from segcredit.runlog.storage import CheckpointError

    quiet_libraries()
    console = Console(stderr=as_json)
    chosen = {"temperature": temperature, "top_p": top_p, "greedy": greedy, "prompts": prompts}
    given: dict[str, Any] = {name: x for name, x in chosen.items() if x is not None}
    if prompts == 0:
        given["prompts"] = None
    try:
        with console.status("asking…"):
            found = evaluate_checkpoint(
                checkpoint,
                data=data,
                reward=reward,
                samples=samples,
                max_tokens=max_tokens,
                suffix=suffix,
                template=template,
                engine=engine,
                seed=seed,
                output=output,
                trust_run=trust_run,
                allow_outside=allow_outside,
                **(PAPER if paper else {}) | given,
            )
    except (ValueError, CheckpointError, OSError) as error:
        complain(error)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if as_json:
        typer.echo(json.dumps(found.as_dict()))
    else:
        console.print(_table(found))
    if found.warning is not None:
        console.print(found.warning, style="yellow", markup=False, highlight=False)
    if output is not None:
        console.print(f"responses  {output}", markup=False, highlight=False, soft_wrap=True)


def _table(found: "Evaluation") -> "Table":
    from rich.table import Table

    title = f"{found.prompts} prompts × {found.samples} samples"
    table = Table(title=title, title_justify="left")
    table.add_column("measure")
    table.add_column("value", justify="right")
    table.add_column("95 % interval", justify="right")
    if found.greedy is not None and found.greedy_interval is not None:
        table.add_row("greedy accuracy", f"{found.greedy:.1%}", _range(found.greedy_interval))
    if found.sampled is not None and found.sampled_interval is not None:
        average = f"{found.sampled:.1%}"
        table.add_row(f"avg@{found.samples}", average, _range(found.sampled_interval))
    for k, x in found.pass_at.items():
        if k > 1:
            table.add_row(f"pass@{k}", f"{x:.1%}", _range(found.pass_interval[k]))
    low, high = found.reward_interval
    table.add_row("reward", f"{found.reward:.3f}", f"{low:.3f} – {high:.3f}")
    if found.greedy_reward is not None:
        table.add_row("greedy reward", f"{found.greedy_reward:.3f}", "")
    if found.answered is not None:
        table.add_row("answer found", f"{found.answered:.1%}", "")
    table.add_row("no verdict", f"{found.no_verdict:.1%}", "")
    table.add_row("truncated", f"{found.truncated:.1%}", "")
    drawn = f"{found.sampling.temperature:g}, {found.sampling.top_p:g}"
    table.add_row("temperature, top-p", drawn, "")
    table.add_row("response length", f"{found.response_length:.0f} tokens", "")
    return table


def _range(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.1%} – {ends[1]:.1%}"
