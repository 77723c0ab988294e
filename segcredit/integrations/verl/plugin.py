"""What verl loads on every ``import verl``: three names in its table of trainers, nothing else.

The names are entered when verl's table is first imported, so that processes which never see it
(workers, reward servers) pay nothing. verl swallows what a plugin raises while it loads, and an
error later would break verl itself; so a refusal is said twice: to the log at once, and by a
trainer that stands in place of ours when somebody asks for it.
"""

import logging
import os
from typing import Any

from wrapt.importer import register_post_import_hook

from segcredit.integrations.verl.versions import VARIABLE, refusal

TABLE = "verl.trainer.ppo.v1.trainer_base"
"""The module that holds verl's trainers by name."""
PREFIX = "segment_"
MODES = ("sync", "colocate_async", "separate_async")
"""verl's trainers, each with our credit under its own name behind the prefix."""

logger = logging.getLogger(__name__)


def taken(table: Any) -> str | None:
    """Why the names cannot be ours; None: they are free, or ours already."""
    for mode in MODES:
        other = table.TRAINER_REGISTRY.get(PREFIX + mode)
        if other is not None and not other.__module__.startswith("segcredit."):
            return (
                f"verl's trainer {PREFIX + mode!r} is {other.__module__}.{other.__name__} already, "
                f"so segcredit's plugin does not load. Uninstall one of the two, or name the "
                f"plugins to load in VERL_USE_EXTERNAL_PLUGINS."
            )
    return None


def refusing(table: Any, message: str) -> type:
    """A trainer that only says why it is none."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(message)

    members = {"__init__": refuse, "on_step_end": refuse, "on_sample_end": refuse}
    return type("RefusingTrainer", (table.PPOTrainer,), {**members, "__module__": __name__})


def register(table: Any) -> None:
    """Enter our trainers, or those that explain why not."""
    import verl

    if problem := taken(table):
        logger.error(problem)
        return
    if problem := refusal(verl.__version__, os.environ.get(VARIABLE) == "1"):
        logger.warning(problem)
        for mode in MODES:
            table.register_trainer(PREFIX + mode)(refusing(table, problem))
        return
    from segcredit.integrations.verl.trainer import TRAINERS

    for mode, trainer in TRAINERS.items():
        table.register_trainer(PREFIX + mode)(trainer)


register_post_import_hook(register, TABLE)
