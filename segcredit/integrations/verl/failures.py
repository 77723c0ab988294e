"""A worker's death, told in one message: who died, why, and how to go on."""

import re
from pathlib import Path

from ray.exceptions import ActorDiedError, RayActorError, RayTaskError

FACTS = {
    "name": re.compile(r"class_name: (\S+)"),
    "pid": re.compile(r"pid: (\d+)"),
    "ip": re.compile(r"ip: (\S+)"),
    "why": re.compile(r"Worker exit detail: (.{1,200}?)\. Some common causes", re.DOTALL),
}
"""Where they stand in Ray's account of an actor's death."""
MARK = "segcredit: the run stopped"
"""How the message begins, to be found among Ray's lines."""


def died(error: BaseException) -> bool:
    """Whether a worker's process is gone, or another lost its connection to it."""
    if isinstance(error, RayActorError):
        return True
    text = str(error)
    return isinstance(error, RayTaskError) and any(
        x in text
        for x in ("ActorDiedError", "Connection closed by peer", "Connection reset", "NCCL")
    )


def last_checkpoint(folder: str | Path) -> int | None:
    """The step of the last whole checkpoint, by verl's own note."""
    note = Path(folder) / "latest_checkpointed_iteration.txt"
    try:
        return int(note.read_text())
    except (OSError, ValueError):
        return None


def explain(error: BaseException, step: int, folder: str | Path, save_freq: int) -> str:
    """One message for the user."""
    reason = _reason(error)
    saved = last_checkpoint(folder)
    if saved is not None:
        hint = (
            f"Checkpoint {saved} is whole: type the same command again to go on from there "
            f"(trainer.resume_mode=auto, trainer.default_local_dir={folder})."
        )
    else:
        hint = (
            f"There is no checkpoint in {folder}, so the same command begins anew; "
            f"set trainer.save_freq (now {save_freq}) to keep some."
        )
    return f"{MARK} in step {step}, because {reason} {hint}"


def _reason(error: BaseException) -> str:
    if isinstance(error, ActorDiedError):
        text = str(error)
        found = {key: match[1] for key, x in FACTS.items() if (match := x.search(text))}
        who = found.get("name", "a worker").rpartition(".")[2]
        place = f"process {found.get('pid', '?')} on {found.get('ip', '?')}"
        why = found.get("why", text.strip().splitlines()[-1][:200].rstrip("."))
        return (
            f"a worker died ({who}, {place}): {why}. "
            f"Often that is memory: look for the process in that node's dmesg."
        )
    if isinstance(error, RayTaskError):
        return (
            "a worker lost its connection to another one, which most likely died (memory, node, "
            f"signal): {str(error.cause).strip().splitlines()[-1][:200].rstrip('.')}."
        )
    return f"a worker died: {str(error).strip().splitlines()[0].rstrip('.')}."
