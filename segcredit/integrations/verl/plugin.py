"""The plugin that verl imports on every ``import verl``: it registers three trainers.

They are registered when verl's trainer table is first imported, so that processes which never
import it (workers, reward servers) pay nothing. verl swallows exceptions of a plugin while it
loads, and a later error would break verl itself. So a refusal is reported twice: immediately in the
log, and by a placeholder trainer when it is selected.
"""

import logging
import os
from typing import Any

from wrapt.importer import register_post_import_hook

TABLE = "verl.trainer.ppo.v1.trainer_base"
"""The module that holds verl's trainers by name."""
PREFIX = "segment_"
MODES = ("sync", "colocate_async", "separate_async")
"""verl's trainers; ours have the same names with the prefix."""

logger = logging.getLogger(__name__)


def conflict(table: Any) -> str | None:
    """Explain which other plugin has registered our names; None if there is no conflict."""
    for mode in MODES:
        other = table.TRAINER_REGISTRY.get(PREFIX + mode)
        if other is not None and not other.__module__.startswith("segcredit."):
            return (
                f"verl's trainer {PREFIX + mode!r} is already {other.__module__}.{other.__name__}, "
                f"so segcredit's plugin does not load. Uninstall one of the two, or name the "
                f"plugins to load in VERL_USE_EXTERNAL_PLUGINS."
            )
    return None


def placeholder(table: Any, message: str) -> type:
    """Make a trainer that raises the message when it is constructed."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(message)

    members = {"__init__": refuse, "on_step_end": refuse, "on_sample_end": refuse}
    return type("RefusingTrainer", (table.PPOTrainer,), {**members, "__module__": __name__})


def register(table: Any) -> None:
    """Register our trainers, or placeholders that explain why not."""
    import verl

    from segcredit.integrations.verl.settings import UNTESTED, refusal

    if problem := conflict(table):
        logger.error(problem)
        return
    if problem := refusal(verl.__version__, os.environ.get(UNTESTED) == "1"):
        logger.warning(problem)
        for mode in MODES:
            table.register_trainer(PREFIX + mode)(placeholder(table, problem))
        return
    from segcredit.integrations.verl.trainer import TRAINERS

    for mode, trainer in TRAINERS.items():
        table.register_trainer(PREFIX + mode)(trainer)


register_post_import_hook(register, TABLE)
