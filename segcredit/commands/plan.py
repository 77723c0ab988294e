"""``segcredit plan``: predict memory and time of a training step, and settings that fit."""

from typing import Annotated

import typer

from segcredit.commands.output import complain

EPILOG = """\
[bold]Examples[/bold]

segcredit plan geo3k/qwen2.5-vl-3b-sapo --gpus 1xH200

segcredit plan my.yaml memory.offload_optimizer=true --gpus 8xA100-80G --mean-length 600

segcredit plan my.yaml --prompt-tokens 240 --picture-tokens 200 --gpus RTX-4090 --json

segcredit plan my.yaml  [dim]# for the GPUs of this machine[/dim]
"""


def plan(
    recipe: Annotated[str, typer.Argument(help="YAML file, or name of a built-in recipe.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Override settings with key.path=value.", metavar="[KEY=VALUE]…"),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            "--gpus",
            help="GPUs, such as 8xA100-80G; default: the GPUs of this machine.",
            metavar="COUNTxNAME",
        ),
    ] = None,
    mean_length: Annotated[
        int | None,
        typer.Option(
            "--mean-length",
            help="Mean response length in tokens; default: half of rollout.max_tokens.",
            min=1,
            metavar="TOKENS",
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            "--prompt-tokens",
            help="Mean prompt length in tokens, images included; default: from the data.",
            min=1,
            metavar="TOKENS",
        ),
    ] = None,
    longest_prompt: Annotated[
        int | None,
        typer.Option(
            "--longest-prompt",
            help="Length of a batch's longest prompt in tokens; the others are padded to it.",
            min=1,
            metavar="TOKENS",
        ),
    ] = None,
    picture_tokens: Annotated[
        int | None,
        typer.Option(
            "--picture-tokens",
            help="Mean number of image tokens per prompt.",
            min=0,
            metavar="TOKENS",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict memory and time of a training step without loading weights."""
    from rich.console import Console

    from segcredit.commands.output import quiet_libraries
    from segcredit.config import load_recipe
    from segcredit.plan import plan as predict_plan

    quiet_libraries()
    try:
        found = predict_plan(
            load_recipe(recipe, overrides or []),
            gpus,
            mean_length=mean_length,
            prompt_tokens=prompt_tokens,
            longest_prompt=longest_prompt,
            picture_tokens=picture_tokens,
        )
    except (ValueError, OSError) as error:
        complain(error)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if json:
        import json as writer

        typer.echo(writer.dumps(found.as_dict(), indent=2, ensure_ascii=False))
        return
    from segcredit.plan.predict import show

    show(Console(), found, recipe, overrides or [])
