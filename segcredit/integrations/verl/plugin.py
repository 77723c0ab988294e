"""What verl loads on every ``import verl``: three names in its table of trainers, nothing else.

verl swallows whatever a plugin raises while it loads. So a refusal is said twice: to the log at
once, and by the trainer that is registered in place of ours when somebody asks for it.
"""

import logging
import os

import verl
from verl.trainer.ppo.v1 import trainer_base

from segcredit.integrations.verl.versions import VARIABLE, refusal

PREFIX = "segment_"
MODES = ("sync", "colocate_async", "separate_async")
"""verl's trainers, each with our credit under its own name behind the prefix."""

logger = logging.getLogger(__name__)


def taken() -> str | None:
    """Why the names cannot be ours; None: they are free, or ours already."""
    for mode in MODES:
        other = trainer_base.TRAINER_REGISTRY.get(PREFIX + mode)
        if other is not None and not other.__module__.startswith("segcredit."):
            return (
                f"verl's trainer {PREFIX + mode!r} is {other.__module__}.{other.__name__} already, "
                f"so segcredit's plugin does not load. Uninstall one of the two, or name the "
                f"plugins to load in VERL_USE_EXTERNAL_PLUGINS."
            )
    return None


def refusing(message: str) -> type[trainer_base.PPOTrainer]:
    """A trainer that only says why it is none."""

    class RefusingTrainer(trainer_base.PPOTrainer):  # type: ignore[misc]
        """Stands where ours would stand."""

        def __init__(self, config: object) -> None:
            raise RuntimeError(message)

        def on_step_end(self) -> None: ...

        def on_sample_end(self) -> None: ...

    return RefusingTrainer


def register() -> None:
    """Enter our trainers, or those that explain why not."""
    problem = taken()
    if problem is not None:
        logger.error(problem)
        raise RuntimeError(problem)
    problem = refusal(verl.__version__, os.environ.get(VARIABLE) == "1")
    if problem is not None:
        logger.warning(problem)
        for mode in MODES:
            trainer_base.register_trainer(PREFIX + mode)(refusing(problem))
        return
    from segcredit.integrations.verl.trainer import TRAINERS

    for mode, trainer in TRAINERS.items():
        trainer_base.register_trainer(PREFIX + mode)(trainer)


register()
