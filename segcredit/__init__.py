"""segcredit: reinforcement learning that assigns credit to segments of a response."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from segcredit.train.trainer import Trainer

__all__ = ["Trainer", "__version__"]
__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """The trainer on first use: importing the mathematics must not import transformers."""
    if name == "Trainer":
        from segcredit.train.trainer import Trainer

        return Trainer
    raise AttributeError(f"module 'segcredit' has no attribute {name!r}")
