"""Sample responses to held-out prompts, grade them, and compute accuracies with intervals."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from math import comb
from pathlib import Path
from typing import Any, TypeVar

import torch

from segcredit.models.inputs import as_responses, encode_all
from segcredit.printable import printable
from segcredit.rewards.checks import grade, no_verdict_warning
from segcredit.types import (
    Encoded,
    Prompt,
    Response,
    Reward,
    RewardFn,
    RolloutEngine,
    Sampling,
    correctness,
)

EncodePrompt = Callable[[Prompt], Encoded]
Decode = Callable[[list[int]], str]
Item = TypeVar("Item")


class Peers:
    """Processes that each have a contiguous part of every list; here, a single process."""

    def own(self, items: Sequence[Item]) -> Sequence[Item]:
        """Return the part of this process."""
        return items

    def before(self, items: Sequence[Item]) -> int:
        """Return the number of items of the processes before this one."""
        return 0

    def gather(self, items: Sequence[Item]) -> list[Item]:
        """Gather the items of all processes in order."""
        return list(items)


SINGLE_PROCESS = Peers()
METRICS = (
    *("sampled", "greedy", "reward", "greedy_reward"),
    *("answered", "no_verdict", "truncated", "response_length"),
)
"""Results that are written to metrics.jsonl under their own name."""
MOST = 0.5
"""Minimum share of truncated responses for which a warning is shown."""
RESAMPLES = 2000
"""Number of bootstrap resamples."""
MOST_SETS, MOST_LETTERS = 16, 60
"""Maximum number of test sets that are reported separately, and length of their names."""


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Estimate the probability that one of k responses is right, from ``samples`` responses.

    1 − C(n − c, k) / C(n, k): unbiased, unlike 1 − (1 − c/n)^k.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@k needs k from 1 to the number of samples, {samples}; got k={k}.")
    return 1.0 - comb(samples - right, k) / comb(samples, k)


def mean_interval(values: Sequence[float], share: float = 0.95) -> tuple[float, float]:
    """Compute the confidence interval of the mean of shares, one per prompt.

    Bootstrap over prompts. If all shares are 0 or all are 1, resampling has no variance, so the
    exact binomial interval is used: 0 of 3 is 0 to 71 %, not 0 to 0.
    """
    if not values or min(values) != max(values) or values[0] not in (0, 1):
        return bootstrap_interval(values, share)
    far = ((1 - share) / 2) ** (1 / len(values))  # Clopper-Pearson
    return (0.0, 1 - far) if values[0] == 0 else (far, 1.0)


def bootstrap_interval(
    values: Sequence[float], share: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Compute a percentile bootstrap interval of the mean, with prompts resampled."""
    if not values:
        raise ValueError("an interval needs at least one value; got none.")
    x = torch.tensor(values, dtype=torch.float64)
    drawn = torch.randint(
        len(x), (RESAMPLES, len(x)), generator=torch.Generator().manual_seed(seed)
    )
    means = x[drawn].mean(dim=1)
    ends = torch.tensor([(1 - share) / 2, (1 + share) / 2], dtype=torch.float64)
    low, high = means.quantile(ends).tolist()
    return low, high


def truncation_warning(share: float, limit: str) -> str | None:
    """Return cause and remedy if most responses were truncated at ``limit``; None otherwise."""
    if share < MOST:
        return None
    return (
        f"{share:.0%} of the responses were cut off at {limit}. Set a larger limit. If responses "
        f"never end, check the end token: eos_token_id in the model's generation_config.json must "
        f"be the one that the model was taught."
    )


@dataclass(frozen=True)
class Evaluation:
    """Results of an evaluation; shares are in [0, 1]."""

    prompts: int
    samples: int
    greedy: float | None
    """Accuracy of the greedy response; None: not requested, or unknown (see ``sampled``)."""
    greedy_interval: tuple[float, float] | None
    sampled: float | None
    """avg@k: accuracy of sampled responses, averaged over k and the prompts; None: the reward does
    not report correctness, so only the mean reward is known."""
    sampled_interval: tuple[float, float] | None
    """95 % confidence interval, prompts resampled."""
    pass_at: dict[int, float]
    """pass@1, 2, 4, … k; empty if accuracy is unknown."""
    pass_interval: dict[int, tuple[float, float]]
    reward: float
    """Mean reward of the sampled responses."""
    reward_interval: tuple[float, float]
    greedy_reward: float | None
    """Mean reward of the greedy responses."""
    answered: float | None
    """Share of sampled responses in which an answer was found; None: not reported."""
    no_verdict: float
    """Share of sampled responses without a verdict from the grader; they count as not
    correct."""
    truncated: float
    response_length: float
    sampling: Sampling
    warning: str | None = None
    """Cause and remedy, if many responses got no verdict."""
    rows: list[dict[str, Any]] = field(default_factory=list, repr=False)
    """Every response with its grade."""
    by_source: dict[str, float] = field(default_factory=dict)
    """``sampled`` by test set, if the prompts come from several files."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Mean of each reward of a weighted sum, before its weight; empty for a single reward."""

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers and the sampling settings; ``by_source`` if there are several sets."""
        optional = ("by_source", "rewards")  # left out if empty
        left_out = {"rows", *(x for x in optional if not getattr(self, x))}
        found = {x.name: getattr(self, x.name) for x in fields(self) if x.name not in left_out}
        return found | {"sampling": self.sampling.as_dict()}

    def metrics(self) -> dict[str, float]:
        """Return the numbers for metrics.jsonl."""
        found: dict[str, float | None] = {name: getattr(self, name) for name in METRICS}
        for name in ("sampled", "greedy", "reward"):
            interval = getattr(self, f"{name}_interval")
            if interval is not None:
                found[f"{name}_low"], found[f"{name}_high"] = interval
        found |= {f"pass@{k}": x for k, x in self.pass_at.items() if k > 1}
        found |= {f"sampled/{source}": x for source, x in self.by_source.items()}
        found |= {f"reward/{name}": x for name, x in self.rewards.items()}
        return {name: x for name, x in found.items() if x is not None}


def evaluate(
    prompts: Sequence[Prompt],
    engine: RolloutEngine,
    reward: RewardFn,
    encode: EncodePrompt,
    decode: Decode,
    sampling: Sampling,
    samples: int = 1,
    greedy: bool = True,
    seed: int = 0,
    peers: Peers = SINGLE_PROCESS,
) -> Evaluation:
    """Evaluate ``samples`` sampled responses per prompt and, optionally, the greedy one.

    Each of several ``peers`` evaluates its part of the prompts, with the random numbers that a
    single process would use for them. All of them return the result for all prompts.
    """
    if not prompts:
        raise ValueError("nothing to evaluate on: got no prompts.")
    encoded = encode_all(encode, peers.own(prompts))
    generator = torch.Generator().manual_seed(seed)
    torch.rand(peers.before(prompts) * samples, sampling.max_tokens, generator=generator)
    repeated = [x for x in encoded for _ in range(samples)]
    drawn = peers.gather(_graded(repeated, engine, reward, decode, sampling, generator))
    rewards = [x for _, x in drawn]
    right = correctness(rewards)
    means = None if right is None else _per_prompt([float(x) for x in right], samples)
    rows = list(_rows(drawn, samples, "sampled"))
    best: list[float] | None = None
    best_reward = None
    if greedy:
        argmax = Sampling(sampling.max_tokens, temperature=0.0, stop=sampling.stop)
        chosen = peers.gather(_graded(encoded, engine, reward, decode, argmax, generator))
        marks = correctness([x for _, x in chosen])
        if right is not None and marks is not None:
            best = [float(x) for x in marks]
        best_reward = sum(x.value for _, x in chosen) / len(chosen)
        rows += _rows(chosen, 1, "greedy")
    ks = [k for k in (1, 2, 4, 8, 16, 32, 64, 128, 256) if k < samples] + [samples]
    passed = {
        k: [pass_at_k(samples, round(x * samples), k) for x in means]
        for k in ks
        if means is not None
    }
    count = len(drawn)
    found = [x.answered for x in rewards]
    return Evaluation(
        prompts=len(prompts),
        samples=samples,
        greedy=None if best is None else sum(best) / len(best),
        greedy_interval=None if best is None else mean_interval(best),
        sampled=None if means is None else sum(means) / len(means),
        sampled_interval=None if means is None else mean_interval(means),
        pass_at={k: sum(x) / len(x) for k, x in passed.items()},
        pass_interval={k: mean_interval(x) for k, x in passed.items()},
        reward=sum(x.value for x in rewards) / count,
        reward_interval=bootstrap_interval(_per_prompt([x.value for x in rewards], samples)),
        greedy_reward=best_reward,
        answered=None if None in found else sum(map(bool, found)) / count,
        no_verdict=sum(not x.complete for x in rewards) / count,
        truncated=sum(x.truncated for x, _ in drawn) / count,
        response_length=sum(x.num_tokens for x, _ in drawn) / count,
        sampling=sampling,
        rewards={
            name: sum(x.each[name].value for x in rewards) / count for name in rewards[0].each
        },
        warning=no_verdict_warning(rewards, "the evaluation"),
        rows=rows,
        by_source={} if means is None else mean_by_source(prompts, means),
    )


def mean_by_source(prompts: Sequence[Prompt], values: Sequence[float]) -> dict[str, float]:
    """Average one value per prompt over each test set (file); empty if there is only one set.

    A set has the name of its file, such as ``svamp``; if two files share a name, that of the file's
    folder; otherwise the whole path.
    """
    found: dict[str, list[float]] = {}
    for prompt, value in zip(prompts, values, strict=True):
        found.setdefault(prompt.source or "other", []).append(value)
    if not 1 < len(found) <= MOST_SETS:
        return {}
    paths = [Path(source) for source in found]
    for labels in ([x.stem for x in paths], [x.parent.name for x in paths], [*found]):
        if len({*labels}) == len(found):
            break
    return {
        printable(label, MOST_LETTERS): sum(each) / len(each)
        for label, each in zip(labels, found.values(), strict=True)
    }


def _per_prompt(values: Sequence[float], samples: int) -> list[float]:
    """Compute the mean of each prompt's samples."""
    return [sum(values[i : i + samples]) / samples for i in range(0, len(values), samples)]


def _graded(
    encoded: Sequence[Encoded],
    engine: RolloutEngine,
    reward: RewardFn,
    decode: Decode,
    sampling: Sampling,
    generator: torch.Generator,
) -> list[tuple[Response, Reward]]:
    if not encoded:  # more processes than prompts
        return []
    rollouts = engine.sample(encoded, sampling, generator)
    responses = as_responses(rollouts, decode, sampling.max_tokens)
    return list(zip(responses, grade(reward, responses), strict=True))


def _rows(
    graded: Sequence[tuple[Response, Reward]], samples: int, how: str
) -> Iterator[dict[str, Any]]:
    for number, (response, reward) in enumerate(graded):
        yield {
            "prompt_id": response.prompt.id,
            "prompt": "\n".join(x["content"] for x in response.prompt.messages),
            "how": how,
            "sample": number % samples,
            "response": response.text,
            "num_tokens": response.num_tokens,
            "truncated": response.truncated,
            "answer": response.prompt.answer,
            "reward": reward.value,
            "correct": reward.correct,
            "verdict": reward.complete,
            "reason": reward.reason,
        }
