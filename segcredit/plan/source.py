"""Where a model's configuration comes from: a folder, the hub, or code. Never its weights."""

import logging
from typing import TYPE_CHECKING

from segcredit.config import Recipe
from segcredit.printable import printable, shown

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def config_of(recipe: Recipe) -> "PreTrainedConfig":
    """The configuration of the recipe's model."""
    settings = recipe.model
    if settings.path is None:
        from segcredit.data.worlds import make_world
        from segcredit.models.tiny import tiny_config

        assert settings.tiny is not None
        assert recipe.data.world is not None
        tokenizer = make_world(recipe.data.world, **recipe.data.settings).tokenizer()
        return tiny_config(
            settings.tiny, tokenizer, settings.hidden, settings.layers, settings.heads
        )
    from transformers import AutoConfig

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of every attempt
    try:
        return AutoConfig.from_pretrained(
            settings.path, trust_remote_code=settings.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ValueError(_missing(settings.path, error)) from None


def _missing(path: str, error: Exception) -> str:
    """One sentence, with what to do."""
    why = printable(" ".join(str(error).split()), 160)
    return (
        f"model.path: no configuration of {shown(path)}, neither in a folder of that name nor on "
        f"the hub ({why}); where the hub cannot be reached, copy the model's config.json, which is "
        f"a few kB, into a folder and type model.path=FOLDER."
    )
