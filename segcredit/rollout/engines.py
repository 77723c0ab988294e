"""Rollout engines by name: ``rollout.engine`` is hf, vllm, or one of your own (``file.py:Name``).

An engine is a class with the methods of :class:`segcredit.types.RolloutEngine` and a class method
``from_policy(policy, settings)``. The easiest way to write one is to subclass :class:`HFEngine`
(docs/extending.md).
"""

from dataclasses import dataclass
from typing import Any, Literal

from segcredit.models import Policy
from segcredit.registry import Registry
from segcredit.types import RolloutEngine

DEFAULT_PROMPT_TOKENS = 8192
"""Longest prompt, if data.max_prompt_tokens is not set."""


@dataclass(frozen=True)
class EngineSettings:
    """Settings of an engine, besides the policy."""

    rows: int = 256
    """Maximum number of responses that are sampled at once."""
    max_tokens: int = 2048
    """Maximum number of response tokens."""
    max_prompt_tokens: int = DEFAULT_PROMPT_TOKENS
    repeats_prompts: bool = True
    """Whether the same prompt or prefix is sampled from several times."""
    needs_logp: bool = True
    """Whether every response needs log π as sampled; otherwise a share of them is enough."""
    graphs: bool | Literal["auto"] = "auto"
    """Whether the hf engine uses CUDA graphs; auto: for small models on a GPU."""
    vllm_memory: float = 0.4
    """Share of the GPU's memory that vLLM may use while it samples."""
    vllm_eager: bool = False
    """Run vLLM without CUDA graphs."""


ENGINES: Registry[Any] = Registry(
    "rollout engine",
    {"hf": "segcredit.rollout.hf:HFEngine", "vllm": "segcredit.rollout.vllm:VllmEngine"},
)


def make_engine(name: str, policy: Policy, settings: EngineSettings) -> RolloutEngine:
    """Make an engine that samples from the policy."""
    kind = ENGINES[name]
    if not hasattr(kind, "from_policy"):
        raise ValueError(
            f"rollout.engine: expected a class with from_policy(policy, settings); got {kind!r}."
        )
    engine = kind.from_policy(policy, settings)
    if not isinstance(engine, RolloutEngine):
        methods = [x for x in vars(RolloutEngine) if not x.startswith("_")]
        lacking = [x for x in methods if not hasattr(engine, x)]
        raise ValueError(
            f"rollout.engine: an engine needs the methods {', '.join(methods)}; "
            f"{type(engine).__name__} has no {lacking[0]}."
        )
    return engine


def engine_problem(name: str) -> str | None:
    """Explain why an engine cannot run on this machine; None if it can."""
    problem = getattr(ENGINES[name], "problem", None)
    return None if problem is None else problem()
