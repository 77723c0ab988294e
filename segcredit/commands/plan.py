"""``segcredit plan``: predict memory and time of a training step, and settings that fit."""

from json import dumps
from typing import Annotated

import typer

from segcredit.commands.output import Overrides, RecipeName, exit_codes, quiet_libraries

EPILOG = """\
[bold]Examples[/bold]

segcredit plan geo3k/qwen2.5-vl-3b-sapo --gpus 1xH200

segcredit plan my.yaml memory.offload_optimizer=true --gpus 8xA100-80G --mean-length 600

segcredit plan my.yaml --prompt-tokens 240 --image-tokens 200 --gpus RTX-4090 --json

segcredit plan my.yaml  [dim]# for the GPUs of this machine[/dim]
"""


def plan(
    recipe: RecipeName,
    overrides: Overrides = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            help="GPUs, such as 8xA100-80G; default: the GPUs of this machine.",
            metavar="COUNTxNAME",
        ),
    ] = None,
    mean_length: Annotated[
        int | None,
        typer.Option(
            help="Mean response length in tokens; default: half of rollout.max_tokens.",
            min=1,
            metavar="TOKENS",
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            help="Mean prompt length in tokens, images included; default: from the data.",
            min=1,
            metavar="TOKENS",
        ),
    ] = None,
    longest_prompt: Annotated[
        int | None,
        typer.Option(
            help="Length of a batch's longest prompt in tokens; the others are padded to it.",
            min=1,
            metavar="TOKENS",
        ),
    ] = None,
    image_tokens: Annotated[
        int | None,
        typer.Option(help="Mean number of image tokens per prompt.", min=0, metavar="TOKENS"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict memory and time of a training step without loading weights."""
    from rich.console import Console

    from segcredit.config import load_recipe
    from segcredit.plan import plan as predict_plan
    from segcredit.plan.predict import show

    quiet_libraries()
    with exit_codes():
        found = predict_plan(
            load_recipe(recipe, overrides or []),
            gpus,
            mean_length=mean_length,
            prompt_tokens=prompt_tokens,
            longest_prompt=longest_prompt,
            image_tokens=image_tokens,
        )
    if json:
        typer.echo(dumps(found.as_dict(), indent=2, ensure_ascii=False))
        return
    show(Console(), found, recipe, overrides or [])
