"""The engine that the settings ask for, ready to sample from a policy."""

from segcredit.config import RolloutSettings
from segcredit.models import Policy
from segcredit.models.weights import full_weights
from segcredit.rollout import HFEngine, VllmEngine

LONGEST_PROMPT = 8192
"""Where nobody says how long prompts may be."""

COMPARED = 1 / 8
"""Of the prompts, where vLLM's log π is at most compared with the trainer's."""


def make_engine(
    policy: Policy,
    settings: RolloutSettings,
    longest_prompt: int | None,
    continues: bool = False,
    reads_drawn: bool = False,
) -> HFEngine | VllmEngine:
    """vLLM is started for prompts and responses up to the lengths that are set.

    ``continues``: whether begun responses are continued, each several times. ``reads_drawn``:
    whether log π as drawn is used; otherwise vLLM need not tell it of every response.
    """
    if settings.engine == "hf":
        return HFEngine(
            policy.model, policy.end_tokens, policy.banned, settings.rows, settings.graphs
        )
    wanted = (longest_prompt or LONGEST_PROMPT) + settings.max_tokens
    possible = policy.model.config.get_text_config().max_position_embeddings
    engine = VllmEngine(
        policy.model,
        policy.end_tokens,
        policy.describe,
        full_weights,
        window=min(wanted, possible),
        banned=policy.banned,
        rows=settings.rows,
        memory=settings.vllm.memory,
        eager=settings.vllm.eager,
        shared=settings.samples > 1 or continues,
        compared=1.0 if reads_drawn else COMPARED,
    )
    engine.start()
    return engine
