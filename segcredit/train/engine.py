"""The engine a recipe asks for."""

from segcredit.config import Recipe, RecipeError
from segcredit.models import Policy
from segcredit.models.weights import full_weights
from segcredit.rollout import HFEngine, VllmEngine
from segcredit.train.parallel import Parallel
from segcredit.types import RolloutEngine

LONGEST_PROMPT = 8192
"""Where data.max_prompt_tokens is not set."""


def make_engine(recipe: Recipe, policy: Policy, parallel: Parallel) -> RolloutEngine:
    """Ready to sample from the policy."""
    settings = recipe.rollout
    if settings.engine == "hf":
        return HFEngine(policy.model, policy.end_tokens, policy.banned, settings.rows)
    if parallel.size > 1:
        raise RecipeError(
            f"rollout.engine is vllm, which samples in one process so far; this run has "
            f"{parallel.size}. Set rollout.engine=hf, or start without torchrun."
        )
    prompt = recipe.data.max_prompt_tokens or LONGEST_PROMPT
    longest = policy.model.config.get_text_config().max_position_embeddings
    engine = VllmEngine(
        policy.model,
        policy.end_tokens,
        policy.describe,
        full_weights,
        window=min(prompt + settings.max_tokens, longest),
        banned=policy.banned,
        rows=settings.rows,
        memory=settings.vllm.memory,
        eager=settings.vllm.eager,
    )
    engine.start()
    return engine
