"""Metrics of a step (docs/metrics.md), and the records of its responses."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from segcredit.config import RefillBy
from segcredit.core.advantages import explained_variance
from segcredit.core.ratios import geometric_mean_ratio
from segcredit.core.segments import Segments
from segcredit.models import Codec
from segcredit.runlog.records import save_image
from segcredit.types import Algorithm, Batch, Response, Reward, Rollouts, correctness


class Metrics:
    """Metrics of one step. Values added under one name are averaged, times are summed."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor | float] = {}
        self._counts: dict[str, int] = {}
        self._times: dict[str, float] = {}
        self._highest: dict[str, float] = {}
        self._inside: list[float] = []
        """For each phase in progress, the seconds of the phases inside it."""

    def highest(self, name: str, value: Tensor | float) -> None:
        """Add a value to a metric that keeps the maximum."""
        self._highest[name] = max(float(value), self._highest.get(name, -float("inf")))

    def add(self, values: Mapping[str, Tensor | float]) -> None:
        """Add values, which are averaged over the calls that name them."""
        for name, value in values.items():
            value = value.detach() if isinstance(value, Tensor) else value
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._counts[name] = self._counts.get(name, 0) + 1

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        """Measure a phase's wall time, including the device's work, and its peak memory.

        The time of a nested phase counts only for that phase. Copies to CPU memory that overlap
        with the next phase are not counted.
        """
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        self._inside.append(0.0)
        yield
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        took, inside = time.perf_counter() - begin, self._inside.pop()
        self._times[phase] = self._times.get(phase, 0.0) + took - inside
        if self._inside:
            self._inside[-1] += took
        used = torch.cuda.max_memory_allocated() if on_gpu else resident_bytes()
        if used is not None:
            self.highest(f"memory/{phase}", used / 2**30)

    def take_times(self, other: "Metrics") -> None:
        """Move the times and the memory of another step's phases here."""
        for phase, seconds in other._times.items():
            self._times[phase] = self._times.get(phase, 0.0) + seconds
            if (used := other._highest.pop(f"memory/{phase}", None)) is not None:
                self.highest(f"memory/{phase}", used)
        other._times.clear()

    @property
    def seconds(self) -> float:
        """Time of all phases."""
        return sum(self._times.values())

    def result(self) -> dict[str, float]:
        """Return all metrics as plain numbers."""
        means = {name: float(total) / self._counts[name] for name, total in self._sums.items()}
        return (
            means
            | self._highest
            | {f"time/{phase}": seconds for phase, seconds in self._times.items()}
        )


def resident_bytes() -> int | None:
    """Return this process's resident memory; None if the system does not report it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class RolloutBatch:
    """Rollouts, with the same responses as text and their rewards."""

    rollouts: Rollouts
    responses: list[Response]
    rewards: list[Reward]
    weight: Tensor | None = None
    """Weight of each row in means over responses; None: equal weights."""
    unfiltered: "RolloutBatch | None" = None
    """With dynamic sampling, the step's first batch, whose rewards are not selected."""
    refills: "tuple[RolloutBatch, ...]" = ()
    """With dynamic sampling, the batches that were sampled in addition, before selection."""

    @property
    def tokens(self) -> float:
        """Number of sampled response tokens, including those that dynamic sampling dropped."""
        sampled = (self.unfiltered or self, *self.refills)
        return float(sum(int(x.rollouts.mask.sum()) for x in sampled))

    def select(self, rows: Tensor) -> "RolloutBatch":
        """Return some of the responses, in the given order."""
        numbers = rows.tolist()
        return RolloutBatch(
            self.rollouts.select(rows.cpu()),
            [self.responses[x] for x in numbers],
            [self.rewards[x] for x in numbers],
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> "RolloutBatch":
        """Return a copy with a function applied to every tensor, including nested batches."""
        return replace(
            self,
            rollouts=self.rollouts.map(change),
            weight=None if self.weight is None else change(self.weight),
            unfiltered=None if self.unfiltered is None else self.unfiltered.map(change),
            refills=tuple(x.map(change) for x in self.refills),
        )

    @classmethod
    def join(cls, parts: "Sequence[RolloutBatch]") -> "RolloutBatch":
        """Join batches into one, with new group numbers."""
        return cls(
            Rollouts.join([x.rollouts for x in parts]),
            [response for x in parts for response in x.responses],
            [reward for x in parts for reward in x.rewards],
        )


@dataclass(frozen=True)
class StepResult:
    """The rollouts of a step with their credit, and its metrics."""

    sampled: RolloutBatch
    batch: Batch
    """All sampled responses; without credit if the method assigns none to single responses."""
    logp_new: Tensor
    """log π of each token when it last entered a gradient."""
    metrics: dict[str, float]


def describe_rewards(sampled: RolloutBatch) -> dict[str, float]:
    """Compute metrics of rewards and responses."""
    rollouts, rewards = sampled.rollouts, sampled.rewards
    if sampled.weight is not None:
        return _describe_tree(sampled, sampled.weight.double())
    length = rollouts.mask.sum(dim=1).float()
    values = rollouts.reward
    found = {
        "reward": float(values.mean()),
        "reward_std": float(values.std(correction=0)),
        "response_length": float(length.mean()),
        "response_length_max": float(length.max()),
        "truncated": float(rollouts.truncated.float().mean()),
        "no_verdict": sum(not x.complete for x in rewards) / len(rewards),
    }
    found |= _describe_each(rewards, lambda values: sum(values) / len(values))
    if (share := _zero_std(values, rollouts.group)) is not None:
        found["groups/zero_std"] = share
    if (right := correctness(rewards)) is not None:
        found["accuracy"] = sum(right) / len(right)
    return found


def varied_rewards(reward: Tensor, group: Tensor) -> Tensor:
    """True at responses to prompts whose responses have different rewards."""
    _, number, count = group.unique(return_inverse=True, return_counts=True)
    limits = [
        torch.zeros(len(count), device=reward.device).scatter_reduce(
            0, number, reward, how, include_self=False
        )
        for how in ("amax", "amin")
    ]
    return (limits[0] - limits[1] > 1e-6)[number]


def varied(rollouts: Rollouts, by: RefillBy) -> Tensor:
    """True at responses of groups that differ: in correctness (0 < correct < G), or in reward."""
    if by == "reward" or (by == "auto" and rollouts.correct is None):
        return varied_rewards(rollouts.reward, rollouts.group)
    if rollouts.correct is None:
        raise ValueError(
            "rollout.refill_by=correct compares which responses are correct, and this reward does "
            "not say so. Set rollout.refill_by=reward, or return {reward, correct} from the reward."
        )
    return varied_rewards(rollouts.correct.float(), rollouts.group)


def _zero_std(reward: Tensor, group: Tensor) -> float | None:
    """Compute the share of prompts whose responses have equal rewards; None if each has one."""
    _, number, count = group.unique(return_inverse=True, return_counts=True)
    if int(count.max()) < 2:
        return None
    equal = torch.zeros(len(count), device=reward.device)
    equal[number] = (~varied_rewards(reward, group)).float()
    return float(equal[count > 1].mean())


def _describe_tree(sampled: RolloutBatch, weight: Tensor) -> dict[str, float]:
    """Compute metrics of trees: means over finished responses, weighted by their probability.

    A plain mean would overweight prompts whose trees branched most often.
    """
    finished = (weight > 0).nonzero().flatten().tolist()
    share = weight[finished] / weight.sum()
    responses = [sampled.responses[row] for row in finished]
    rewards = [sampled.rewards[row] for row in finished]

    def mean(values: list[float]) -> float:
        return float((share * torch.tensor(values, dtype=torch.float64)).sum())

    average = mean([x.value for x in rewards])
    found = {
        "reward": average,
        "reward_std": mean([(x.value - average) ** 2 for x in rewards]) ** 0.5,
        "response_length": mean([float(x.num_tokens) for x in responses]),
        "response_length_max": float(max(x.num_tokens for x in responses)),
        "truncated": mean([float(x.truncated) for x in responses]),
        "no_verdict": mean([float(not x.complete) for x in rewards]),
        "tree/branches": float(len(weight)),
        "tree/responses": float(len(finished)),
        "tree/tokens": float(sampled.rollouts.mask.sum()),
    }
    found |= _describe_each(rewards, mean)
    if (right := correctness(rewards)) is not None:
        found["accuracy"] = mean([float(x) for x in right])
    return found


def _describe_each(
    rewards: Sequence[Reward], mean: Callable[[list[float]], float]
) -> dict[str, float]:
    """Compute the mean of each reward of a weighted sum, before its weight."""
    found = {}
    for name in rewards[0].each:
        each = [x.each[name] for x in rewards]
        found[f"reward/{name}"] = mean([x.value for x in each])
        if any(not x.verdict for x in each):
            found[f"no_verdict/{name}"] = mean([float(not x.verdict) for x in each])
    return found


def describe(batch: Batch, offline: bool = False) -> dict[str, float]:
    """Compute metrics of the policy's distribution, its credit and its critic.

    Args:
        offline: Whether log π_old and log π_ref may be at different temperatures; then there is
            no KL.
    """
    rollouts, mask = batch.rollouts, batch.rollouts.mask
    found: dict[str, float] = {}
    if rollouts.entropy is not None:
        found["entropy"] = float(rollouts.entropy[mask].mean())
    if rollouts.logp_ref is not None and not offline:
        found["kl"] = float((rollouts.logp_old - rollouts.logp_ref)[mask].mean())
    if batch.credit is None:
        return found
    credit = batch.credit
    advantage = credit.advantage[mask]
    found["advantage_mean"] = float(advantage.mean())
    found["advantage_std"] = float(advantage.std(correction=0))
    found["advantage_max"] = float(advantage.abs().max())
    segments = credit.segments
    found["segments"] = float(segments.num.float().mean())
    found["segment_length"] = float(segments.length[segments.mask].float().mean())
    if credit.value_target is not None and rollouts.value is not None:
        value = segments.read(rollouts.value, credit.value_at)[segments.mask]
        target = segments.read(credit.value_target, credit.value_at)[segments.mask]
        outcome = rollouts.reward[:, None].expand_as(segments.mask)[segments.mask]
        found["value_mean"] = float(value.mean())
        found["return_mean"] = float(target.mean())
        found["return_std"] = float(target.std(correction=0))
        found["explained_variance"] = explained_variance(value, outcome)
    return found


def rollout_rows(
    result: StepResult, algorithm: Algorithm, codec: Codec, count: int, images: Path
) -> Iterator[dict[str, Any]]:
    """Yield records of the first ``count`` responses of a step; images are saved to ``images``."""
    batch, sampled = result.batch, result.sampled
    rollouts = batch.rollouts
    columns: dict[str, Tensor] = {"logp_old": rollouts.logp_old}
    for name in ("entropy", "value", "image_kl"):
        if (column := getattr(rollouts, name)) is not None:
            columns[name] = column
    if batch.credit is not None:
        columns["advantage"] = batch.credit.advantage
        columns["segment"] = batch.credit.segments.index
    if batch.ratio_segments is not None:
        columns["ratio"] = _ratio(algorithm, batch, batch.ratio_segments, result.logp_new)
    for row in range(min(count, len(rollouts))):
        mask = rollouts.mask[row]
        tokens = rollouts.tokens[row][mask].tolist()
        response, reward = sampled.responses[row], sampled.rewards[row]
        yield {
            "prompt_id": response.prompt.id,
            "prompt": codec.render(response.prompt),
            "messages": [dict(x) for x in response.prompt.messages],
            "images": [save_image(images, x) for x in response.prompt.images],
            "response": response.text,
            "tokens": tokens,
            "pieces": codec.pieces(tokens),
            **{name: _plain(x[row][mask]) for name, x in columns.items()},
            "reward": reward.value,
            "reason": reward.reason,
            "parts": dict(reward.parts),
            **({"rewards": record_each(reward)} if reward.each else {}),
            "correct": reward.correct,
            "verdict": reward.complete,
            "truncated": response.truncated,
            "answer": response.prompt.answer,
        }


def record_each(reward: Reward) -> dict[str, dict[str, Any]]:
    """Return the rewards of a weighted sum for a record: value, correctness, verdict, reason."""
    return {
        name: {
            "reward": x.value,
            "correct": x.correct,
            "verdict": x.verdict,
            "reason": x.reason,
        }
        for name, x in reward.each.items()
    }


def _ratio(algorithm: Algorithm, batch: Batch, units: Segments, logp: Tensor) -> Tensor:
    """Compute the method's own ratio after the update; by default the geometric mean per unit."""
    if hasattr(algorithm, "recorded_ratio"):
        return algorithm.recorded_ratio(logp, batch)
    return geometric_mean_ratio(logp, batch.rollouts.logp_old, units)


def _plain(x: Tensor) -> list[float] | list[int]:
    """Convert to plain numbers, rounded to six digits."""
    if not x.is_floating_point():
        return x.tolist()
    return [float(f"{v:.6g}") for v in x.tolist()]
