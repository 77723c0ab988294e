"""``segcredit verl``: run a recipe on verl, on one machine or many."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from segcredit.commands.output import Overrides, RecipeName, exit_codes, print_error

ERROR = re.compile(r"^(?:ValueError|RuntimeError|AssertionError): (\S.*)$")
"""Last line of a traceback, with the reason."""
EPILOG = """\
[bold]Examples[/bold]

segcredit verl geo3k/qwen2.5-vl-3b-sapo --print  [dim]# print the verl command[/dim]

segcredit verl my.yaml --gpus 8 --out runs/mine  [dim]# run; repeat to resume[/dim]

segcredit verl my.yaml optimizer.lr=2e-6 --nodes 4 --verl trainer.save_freq=20

segcredit report runs/mine  [dim]# works during the run, too[/dim]
"""


def verl(
    recipe: RecipeName,
    overrides: Overrides = None,
    show: Annotated[
        bool, typer.Option("--print", help="Print the command instead of running it.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Run directory; default: runs/NAME-verl.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the Ray cluster.")] = 1,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of each node.")] = 8,
    rollout: Annotated[
        str, typer.Option(help="verl's rollout engine: vllm, sglang or trtllm.")
    ] = "vllm",
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="GPUs that share one copy of the model while sampling.")
    ] = 1,
    accept: Annotated[
        bool,
        typer.Option(
            "--accept-departures",
            help="Run verl's own form of a method without a critic (GRPO, RLOO, …) where it "
            "differs from the recipe's. The differences are printed.",
        ),
    ] = False,
    own: Annotated[
        list[str] | None,
        typer.Option("--verl", help="Override a verl setting; applied last.", metavar="KEY=VALUE"),
    ] = None,
) -> None:
    """Run a recipe on verl (Ray, FSDP, vLLM), or print the command that does."""
    from segcredit.config import load_recipe
    from segcredit.integrations.verl.dumps import METRICS, check_free
    from segcredit.integrations.verl.mapping import Cluster, arguments
    from segcredit.integrations.verl.translate import translate

    with exit_codes():
        found = load_recipe(recipe, overrides or [])
        folder = (out or Path("runs") / f"{found.name}-verl").absolute()
        check_free(folder)
        cluster = Cluster(nodes, gpus, rollout, tensor_parallel)
        translated = translate(found, folder, cluster, accept)
    for note in translated.notes:
        typer.echo(f"note: {note}", err=True)
    given = [*arguments(translated.settings), *(own or [])]
    log = (folder / METRICS).parent
    if show:
        typer.echo(f"mkdir -p {shlex.quote(str(log))}")
        typer.echo(" \\\n  ".join(["python -m verl.trainer.main_ppo", *map(shlex.quote, given)]))
        return
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *given]
    raise typer.Exit(_run(folder, found.as_dict(), command))


def _run(folder: Path, config: dict[str, object], command: list[str]) -> int:
    from importlib.util import find_spec

    from segcredit.installing import install_command
    from segcredit.integrations.verl.dumps import METRICS, rotate_log
    from segcredit.runlog import describe_environment
    from segcredit.runlog.files import write_json_atomically, write_yaml_atomically

    if find_spec("verl") is None:
        print_error(
            "verl is not installed in this environment; it needs its own environment. Type: "
            "python -m venv .venv-verl && "
            f"{install_command('verl', '.venv-verl/bin/pip')}"
        )
        return 2
    rotate_log(folder / METRICS)
    write_yaml_atomically(folder / "config.yaml", config)
    write_json_atomically(folder / "environment.json", describe_environment(command))
    code, last = _echo(command)
    if code not in (0, 130) and last:
        print_error(last)  # repeat it at the end, since Ray and hydra print many lines after it
    return code


def _echo(command: list[str]) -> tuple[int, str]:
    """Run the command and forward its output; return its exit code and last error message."""
    last = ""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                sys.stdout.write(line)
                sys.stdout.flush()
                if found := ERROR.search(line):
                    last = found[1].strip()
        except KeyboardInterrupt:
            process.wait()  # it received the same signal
            return 130, last
    return process.returncode, last
