"""A worker's death, told in one message: who died, why, and how to go on."""

from pathlib import Path

from ray.exceptions import ActorDiedError, RayActorError, RayTaskError

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
        lines = [x.strip() for x in str(error).splitlines() if x.strip()]
        facts = {key: value for key, _, value in (x.partition(": ") for x in lines)}
        who = ", ".join(f"{x} {facts[x]}" for x in ("class_name", "pid", "ip") if x in facts)
        why = next((x for x in lines if "Worker exit" in x or "exit detail" in x), lines[-1])
        return f"a worker died ({who}): {why.rstrip('.')}."
    if isinstance(error, RayTaskError):
        return (
            "a worker lost its connection to another one, which most likely died (memory, node, "
            f"signal): {str(error.cause).strip().splitlines()[-1][:200].rstrip('.')}."
        )
    return f"a worker died: {str(error).strip().splitlines()[0].rstrip('.')}."
