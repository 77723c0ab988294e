"""Our reward functions in verl's signature: one response at a time, in verl's reward workers."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from segcredit.rewards import make_reward
from segcredit.types import Prompt, Response, RewardFn

NUM_TOKENS, TRUNCATED = "segcredit_num_tokens", "segcredit_truncated"
"""Keys that our reward manager adds to a row's extra_info."""
_made: dict[str, RewardFn] = {}
_lock = threading.Lock()  # verl calls from several threads; a grader serves one at a time


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    reward: str | Mapping[str, Any] | Sequence[Any] = "math",
    max_tokens: int = 0,
    **_: Any,
) -> dict[str, Any]:
    """Grade one response; the signature is verl's.

    Args:
        data_source: The row's data source.
        solution_str: The response's text.
        ground_truth: The row's answer.
        extra_info: The row's extra_info, with the response's length from our reward manager.
        reward: The recipe's reward: a name, a name with settings, or a list of these.
        max_tokens: Length limit of a response.
    """
    extra = dict(extra_info or {})
    num_tokens, truncated = extra.pop(NUM_TOKENS, None), extra.pop(TRUNCATED, None)
    if num_tokens is None or truncated is None:
        raise ValueError(
            "a reward may depend on the response's length, which verl's own reward manager "
            "does not pass. Set reward.reward_manager.source=importlib "
            "reward.reward_manager.name=CountingRewardManager reward.reward_manager.module.path="
            "pkg://segcredit.integrations.verl.reward_manager, as segcredit verl does."
        )
    question = str(extra.get("question") or "")
    prompt = Prompt(
        id=f"{data_source}-{extra.get('index', '')}",
        messages=({"role": "user", "content": question},) if question else (),
        answer=None if ground_truth is None else str(ground_truth),
        columns={"data_source": data_source, **extra},
    )
    response = Response(prompt, solution_str, int(num_tokens), bool(truncated), max_tokens)
    with _lock:
        (grade,) = _grader(reward)([response])
    scores: dict[str, Any] = {
        "score": grade.value,
        "reason": grade.reason,
        "no_verdict": float(not grade.complete),
        **{f"reward/{name}": x.value for name, x in grade.each.items()},
    }
    # without "acc", verl validates by the reward
    return scores if grade.correct is None else {**scores, "acc": float(grade.correct)}


def _grader(spec: str | Mapping[str, Any] | Sequence[Any]) -> RewardFn:
    known = repr(spec)
    if known not in _made:
        _made[known] = make_reward(_plain(spec))
    return _made[known]


def _plain(spec: str | Mapping[str, Any] | Sequence[Any]) -> Any:
    """Convert verl's configuration objects to dicts and lists."""
    if isinstance(spec, str):
        return spec
    return dict(spec) if isinstance(spec, Mapping) else [_plain(x) for x in spec]
