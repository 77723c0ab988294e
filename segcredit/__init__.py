"""segcredit: reinforcement learning that assigns credit to segments of a response."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from segcredit.train.callbacks import Callback
    from segcredit.trainer import Trainer

__all__ = ["Callback", "Trainer", "__version__"]
__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """Load the trainer on first use: importing segcredit must not import transformers."""
    if name == "Trainer":
        from segcredit.trainer import Trainer

        return Trainer
    if name == "Callback":
        from segcredit.train.callbacks import Callback

        return Callback
    raise AttributeError(f"module 'segcredit' has no attribute {name!r}")
