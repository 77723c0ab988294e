"""``segcredit push``: upload a trained policy to the Hugging Face Hub."""

from pathlib import Path
from typing import Annotated

import typer

from segcredit.commands.output import exit_codes

EPILOG = """\
[bold]Examples[/bold]

segcredit push runs/geometry-20261115-101500 my-name/geometry --dry-run  [dim]# list the files[/dim]

segcredit push runs/geometry-20261115-101500 my-name/geometry --private

segcredit push runs/geometry-20261115-101500 my-name/geometry --checkpoint 150 --update
"""


def push(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    repo: Annotated[str, typer.Argument(help="Repository on the Hub: OWNER/NAME.")],
    checkpoint: Annotated[
        int | None,
        typer.Option(help="Step of the checkpoint.", min=0, show_default="the last complete one"),
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Make the new repository private.")
    ] = False,
    update: Annotated[
        bool, typer.Option("--update", help="Add a commit to a repository that exists.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the files and their sizes; upload nothing.")
    ] = False,
) -> None:
    """Upload a policy with its model card to the Hugging Face Hub.

    Optimizer states, the critic, rollouts and metrics are not uploaded.
    """
    from huggingface_hub import HfApi
    from rich.console import Console

    from segcredit.runlog import read_run
    from segcredit.runlog.publish import check_name, find_saved_policy, upload
    from segcredit.runlog.storage import CheckpointError

    console = Console(soft_wrap=True, markup=False, highlight=False)
    with exit_codes(CheckpointError):
        if private and update:
            raise ValueError(
                "expected a new repository for --private; got --update, which keeps the "
                "repository as public or private as it is. Leave one of them out."
            )
        check_name(repo)
        policy = find_saved_policy(read_run(run), checkpoint)
        for name, size in policy.sizes.items():
            console.print(f"{size:>15,} bytes  {name}")
        console.print(f"{sum(policy.sizes.values()):>15,} bytes  in all, of step {policy.step}")
        if not policy.card:
            console.print("no model card: an earlier version of segcredit saved this checkpoint")
        if paths := policy.local_paths:
            console.print(f"the model card names these local paths: {', '.join(paths)}")
        if dry_run:
            console.print(f"dry run: nothing was uploaded to {repo}")
            return
        with console.status("uploading…"):
            address = upload(policy, repo, private, update, HfApi())
        console.print(f"uploaded  {address}")
