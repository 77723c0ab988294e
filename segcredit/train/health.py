"""Detect that a run learns nothing or processes prompts incorrectly; warn with cause and remedy."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from segcredit.algorithms.requirements import requirements
from segcredit.config import Recipe
from segcredit.evaluate.measure import MOST
from segcredit.models import Policy
from segcredit.runlog.records import WARNING
from segcredit.types import Algorithm, Prompt

STEPS = 5
"""Number of consecutive steps that must show a sign before it is reported."""
SHARE = 0.9
"""Share of prompts with equal rewards that counts as a sign."""
STAGES = ("pretrain_critic", "optimize")

Numbers = Mapping[str, Any]


class Sign(NamedTuple):
    """Sign of a problem in a step's metrics, and the warning to show if it persists."""

    name: str
    seen: Callable[[Numbers], bool]
    message: Callable[[str, Numbers], str]
    """Takes the words that say in which steps the sign was seen, and the newest metrics."""


class Health:
    """Counter of consecutive steps that show a sign; each sign is reported once per run."""

    def __init__(self, recipe: Recipe, algorithm: Algorithm) -> None:
        self._signs = _signs(recipe.rollout.max_tokens, requirements(algorithm).compares_groups)
        self._in_a_row = dict.fromkeys([sign.name for sign in self._signs], 0)
        self._reported: set[str] = set()
        self._newest: Numbers = {}

    def replay(self, lines: Iterable[Numbers]) -> None:
        """Restore the counts from the lines of metrics.jsonl of an earlier process."""
        for line in lines:
            if line.get("stage") == WARNING:
                self._reported.add(str(line.get("name")))
            else:
                self._count(str(line.get("stage")), line)

    def is_new(self, name: str) -> bool:
        """Return whether this warning is new, and mark it as reported."""
        new = name not in self._reported
        self._reported.add(name)
        return new

    def warnings(self, stage: str, metrics: Numbers) -> list[tuple[str, str]]:
        """List (name, message) of the warning signs that have now lasted long enough to report."""
        self._count(stage, metrics)
        return self._lasting(STEPS, f"In the last {STEPS} steps")

    def final_warnings(self, steps: int) -> list[tuple[str, str]]:
        """List the new warnings at the end of a stage with fewer than ``STEPS`` steps.

        A sign is reported if all steps of the stage show it.
        """
        if not 0 < steps < STEPS:
            return []
        where = "In the only step" if steps == 1 else f"In all {steps} steps"
        return self._lasting(steps, f"{where} of this stage")

    def _lasting(self, steps: int, where: str) -> list[tuple[str, str]]:
        """List the new warnings of the signs that the last ``steps`` steps show."""
        return [
            (sign.name, sign.message(where, self._newest))
            for sign in self._signs
            if self._in_a_row[sign.name] >= steps and self.is_new(sign.name)
        ]

    def _count(self, stage: str, metrics: Numbers) -> None:
        if stage not in STAGES:
            return
        self._newest = metrics
        for sign in self._signs:
            self._in_a_row[sign.name] = self._in_a_row[sign.name] + 1 if sign.seen(metrics) else 0


def _number(metrics: Numbers, name: str) -> float | None:
    x = metrics.get(name)
    return float(x) if isinstance(x, int | float) else None


def _constant(metrics: Numbers) -> bool:
    spread, mean = _number(metrics, "reward_std"), _number(metrics, "reward")
    return spread is not None and mean is not None and spread <= 1e-6 * max(1.0, abs(mean))


def _share(name: str, least: float = SHARE) -> Callable[[Numbers], bool]:
    return lambda metrics: (_number(metrics, name) or 0.0) >= least


def _signs(max_tokens: int, groups: bool) -> list[Sign]:
    found = [
        Sign("constant_reward", _constant, _constant_message),
        Sign(
            "truncated",
            _share("truncated", MOST),
            lambda where, x: (
                f"{where} at least {MOST:.0%} of the responses were cut off at rollout.max_tokens="
                f"{max_tokens} (now {x['truncated']:.0%}). Set a larger rollout.max_tokens. If "
                f"responses never end, check the end token: eos_token_id in the model's "
                f"generation_config.json must be the one that the model was taught."
            ),
        ),
        Sign(
            "nothing_selected",
            lambda x: _number(x, "selected/items") == 0.0 and not _constant(x),
            lambda where, _: (
                f"{where} the method found nothing to learn from (selected/items is 0): no "
                f"response to a prompt was good enough, or none was worse than another. Set a "
                f"larger rollout.samples, or train on prompts that the model solves sometimes."
            ),
        ),
    ]
    if groups:
        found.append(
            Sign(
                "groups_without_spread",
                lambda x: _share("groups/zero_std")(x) and not _constant(x),
                lambda where, x: (
                    f"{where} all responses to a prompt got the same reward for at least "
                    f"{SHARE:.0%} of the prompts (now {x['groups/zero_std']:.0%}), and this method "
                    f"learns only from differences between them. Set a larger rollout.samples, "
                    f"train on prompts that the model solves sometimes, or choose a method with a "
                    f"critic."
                ),
            )
        )
    return found


def _constant_message(where: str, metrics: Numbers) -> str:
    value = metrics["reward"]
    if abs(value) <= 1e-6:
        return (
            f"{where} every response got the reward 0, so there is nothing to learn from. Look at "
            f"rollouts/: if answers are right but not recognized, change the reward, or "
            f"data.suffix, which asks for the answer's format; if they are wrong, train on easier "
            f"prompts, begin with a warm_start stage, or set a larger rollout.max_tokens."
        )
    return (
        f"{where} every response got the same reward, {value:g}, so there is nothing to learn "
        f"from. If the reward function returns a constant, correct it; if every answer is right, "
        f"train on harder prompts."
    )


READ = 4
"""Number of prompts to read for the check of the begin token."""
WORSE = 1.0
"""Minimum loss of log-probability per token, in nats, for which a missing begin token is
reported."""


def begin_token_warning(policy: Policy, prompts: Sequence[Prompt]) -> str | None:
    """Return a warning if the model reads prompts much better after its begin token.

    Some models, such as Gemma, were trained with a begin token before every text, and are bad
    without it. Tokenizers that were converted from other formats may not add it.
    """
    tokenizer = policy.codec.tokenizer
    begin = tokenizer.bos_token_id
    texts = [x for x in prompts if not x.images]
    if begin is None or not texts:
        return None
    found = [policy.codec.encode(x)[0].to(policy.device) for x in texts]
    read = [x for x in found if int(x[0]) != begin and len(x) > 1]
    if not read:
        return None
    first = torch.tensor([begin], device=policy.device)
    with policy.active(), torch.no_grad():
        plain = torch.cat([_surprise(policy, x) for x in read]).mean()
        better = torch.cat([_surprise(policy, torch.cat([first, x]))[1:] for x in read]).mean()
    if not float(plain - better) >= WORSE:
        return None
    return (
        f"Prompts do not begin with the model's begin token {tokenizer.bos_token!r}, and the model "
        f"reads them badly without it: perplexity {float(plain.exp()):.0f} instead of "
        f"{float(better.exp()):.0f}. Begin data.template, or the model's chat template, with "
        f"{tokenizer.bos_token!r}; or add it to the post-processor in the model's tokenizer.json."
    )


def _surprise(policy: Policy, tokens: Tensor) -> Tensor:
    """Compute −log π of each token after the first."""
    logits = policy.model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float()
    return -logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]


def top_p_warning(recipe: Recipe) -> str | None:
    """Explain what top-p below 1 means for training; None if the run does not use it."""
    top_p = recipe.rollout.top_p
    if top_p == 1 or all(x.kind == "warm_start" for x in recipe.stages):
        return None
    return (
        f"responses are sampled with rollout.top_p={top_p:g}, but log-probabilities and ratios are "
        f"those of the whole policy, as in TRL and verl, so the gradient is biased toward tokens "
        f"that top-p keeps. For an unbiased one set rollout.top_p=1."
    )
