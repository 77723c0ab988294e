"""Where a model's configuration comes from: a folder, the hub, or code. Never its weights."""

from typing import TYPE_CHECKING

from segcredit.config import Recipe

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
        return tiny_config(settings.tiny, tokenizer, **settings.sizes)
    from segcredit.models import ModelError
    from segcredit.models.kinds import load_config

    try:
        return load_config(settings.path, settings.trust_remote_code)[1]
    except ModelError as error:
        raise ValueError(
            f"model.path: {error} A plan reads the model's config.json alone, which is a few kB: "
            f"in a folder of its own it will do, model.path=FOLDER."
        ) from None
