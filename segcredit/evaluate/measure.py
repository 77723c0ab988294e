"""Ask held-out prompts, grade the answers, sum up."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from segcredit.evaluate.peers import ALONE, Peers
from segcredit.evaluate.statistics import mean_interval, pass_at_k
from segcredit.inputs import as_responses, encode_all
from segcredit.types import Encoded, Prompt, Response, Reward, RewardFn, RolloutEngine, Sampling

EncodePrompt = Callable[[Prompt], Encoded]
Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class Evaluation:
    """What came out; shares lie in [0, 1]."""

    prompts: int
    samples: int
    greedy: float | None
    """Accuracy of the greedy response."""
    greedy_interval: tuple[float, float] | None
    sampled: float
    """avg@k: accuracy of sampled responses, averaged over k and the prompts."""
    sampled_interval: tuple[float, float]
    """95 %, prompts resampled."""
    pass_at: dict[int, float]
    """pass@1, 2, 4, … k."""
    pass_interval: dict[int, tuple[float, float]]
    reward: float
    answered: float
    """Share of sampled responses in which an answer was found."""
    truncated: float
    response_length: float
    sampling: Sampling
    rows: list[dict[str, Any]] = field(default_factory=list, repr=False)
    """Every response with its grade."""

    def as_dict(self) -> dict[str, Any]:
        """All numbers, and how the responses were drawn."""
        found = {x.name: getattr(self, x.name) for x in fields(self) if x.name != "rows"}
        return found | {"sampling": asdict(self.sampling)}

    def metrics(self) -> dict[str, float]:
        """Plain numbers, for the run's metrics."""
        found = {
            "sampled": self.sampled,
            "sampled_low": self.sampled_interval[0],
            "sampled_high": self.sampled_interval[1],
            "reward": self.reward,
            "answered": self.answered,
            "truncated": self.truncated,
            "response_length": self.response_length,
        }
        if self.greedy is not None and self.greedy_interval is not None:
            found["greedy"] = self.greedy
            found["greedy_low"], found["greedy_high"] = self.greedy_interval
        return found | {f"pass@{k}": x for k, x in self.pass_at.items() if k > 1}


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
    peers: Peers = ALONE,
) -> Evaluation:
    """``samples`` responses to each prompt and, if asked, the greedy one beside them.

    Each of several ``peers`` asks its part of the prompts, with the dice that it would have had
    alone, and all of them return the whole.
    """
    if not prompts:
        raise ValueError("nothing to evaluate on: got no prompts.")
    encoded = encode_all(encode, peers.own(prompts))
    generator = torch.Generator().manual_seed(seed)
    torch.rand(peers.before(prompts) * samples, sampling.max_tokens, generator=generator)
    repeated = [x for x in encoded for _ in range(samples)]
    drawn = peers.gather(_graded(repeated, engine, reward, decode, sampling, generator))
    right = [_accuracy(x) for _, x in drawn]
    per_prompt = [right[i : i + samples] for i in range(0, len(right), samples)]
    means = [sum(x) / samples for x in per_prompt]
    rows = list(_rows(drawn, samples, "sampled"))
    best, best_interval = None, None
    if greedy:
        argmax = Sampling(sampling.max_tokens, temperature=0.0)
        chosen = peers.gather(_graded(encoded, engine, reward, decode, argmax, generator))
        marks = [_accuracy(x) for _, x in chosen]
        best, best_interval = sum(marks) / len(marks), mean_interval(marks)
        rows += _rows(chosen, 1, "greedy")
    ks = [k for k in (1, 2, 4, 8, 16, 32, 64, 128, 256) if k < samples] + [samples]
    passed = {k: [pass_at_k(samples, round(sum(x)), k) for x in per_prompt] for k in ks}
    count = len(drawn)
    return Evaluation(
        prompts=len(prompts),
        samples=samples,
        greedy=best,
        greedy_interval=best_interval,
        sampled=sum(means) / len(means),
        sampled_interval=mean_interval(means),
        pass_at={k: sum(x) / len(x) for k, x in passed.items()},
        pass_interval={k: mean_interval(x) for k, x in passed.items()},
        reward=sum(x.value for _, x in drawn) / count,
        answered=sum(_answered(x) for _, x in drawn) / count,
        truncated=sum(x.truncated for x, _ in drawn) / count,
        response_length=sum(x.num_tokens for x, _ in drawn) / count,
        sampling=sampling,
        rows=rows,
    )


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
    return list(zip(responses, reward(responses), strict=True))


def _accuracy(reward: Reward) -> float:
    """Right or wrong; for rewards that do not say, right is a reward of at least ½."""
    return float(reward.value >= 0.5 if reward.correct is None else reward.correct)


def _answered(reward: Reward) -> bool:
    return reward.answered is not False


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
            "reason": reward.reason,
        }
