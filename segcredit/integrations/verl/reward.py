"""Our reward functions as verl calls them: one response at a time, in its reward workers."""

import threading
from collections.abc import Mapping
from typing import Any

from segcredit.rewards import make_reward
from segcredit.types import Prompt, Response, RewardFn

_made: dict[str, RewardFn] = {}
_lock = threading.Lock()  # verl asks from several threads; a grader's workers serve one at a time


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    reward: str | Mapping[str, Any] = "math",
    max_tokens: int = 0,
    **_: Any,
) -> dict[str, Any]:
    """verl's signature. ``reward`` is a recipe's: a name, or a name with settings."""
    extra = dict(extra_info or {})
    question = str(extra.get("question") or "")
    prompt = Prompt(
        id=f"{data_source}-{extra.get('index', '')}",
        messages=({"role": "user", "content": question},) if question else (),
        answer=None if ground_truth is None else str(ground_truth),
        columns={"data_source": data_source, **extra},
    )
    response = Response(prompt, solution_str, 0, False, max_tokens)
    with _lock:
        (found,) = _grader(reward)([response])
    return {
        "score": found.value,
        "acc": found.value if found.correct is None else float(found.correct),
        "reason": found.reason,
    }


def _grader(spec: str | Mapping[str, Any]) -> RewardFn:
    known = repr(spec)
    if known not in _made:
        _made[known] = make_reward(spec if isinstance(spec, str) else dict(spec))
    return _made[known]
