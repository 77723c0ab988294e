"""Greedy, avg@k and pass@k of an engine whose answers are known."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from segcredit.evaluate import bootstrap_interval, evaluate
from segcredit.evaluate.measure import mean_by_source
from segcredit.train.distributed import Parallel
from segcredit.types import Encoded, Prompt, Response, Reward, Rollouts, Sampling

END = 9
Answer = Callable[[int, int], list[int]]
"""(prompt's number, how often it was asked before) → tokens."""


@dataclass
class Scripted:
    """An engine that answers by a script, and remembers how it was asked."""

    sampled: Answer
    greedy: Answer = lambda number, times: [0, END]
    asked: list[tuple[Sampling, int]] = field(default_factory=list)

    def sample(
        self, prompts: Sequence[Encoded], sampling: Sampling, generator: torch.Generator
    ) -> Rollouts:
        self.asked.append((sampling, len(prompts)))
        answer = self.greedy if sampling.temperature == 0 else self.sampled
        times: dict[int, int] = {}
        written = []
        for x in prompts:
            number = int(x.tokens[0])
            written.append(torch.tensor(answer(number, times.setdefault(number, 0))))
            times[number] += 1
        tokens = torch.nn.utils.rnn.pad_sequence(written, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence(
            [torch.ones(len(x), dtype=torch.bool) for x in written], batch_first=True
        )
        return Rollouts(
            tokens,
            mask,
            torch.zeros(tokens.shape),
            torch.zeros(len(tokens)),
            torch.arange(len(tokens)),
            torch.tensor([int(x[-1]) != END for x in written]),
            prompts=list(prompts),
        )

    def continue_from(
        self,
        prompts: Sequence[Encoded],
        prefixes: Sequence[Tensor],
        sampling: Sampling,
        generator: torch.Generator,
    ) -> Rollouts:
        raise NotImplementedError

    def load_weights(self, policy: torch.nn.Module) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


@dataclass
class FirstToken:
    """1 is right, 0 wrong, 2 no answer, 3 a reward that does not say, 4 no verdict; 9 ends."""

    def __call__(self, responses: Sequence[Response]) -> list[Reward]:
        return [self._grade(x.text) for x in responses]

    def _grade(self, text: str) -> Reward:
        first = text.split()[0]
        if first == "3":
            return Reward(0.75, "who knows")
        if first == "4":
            return Reward(0.0, "stopped after 5 s", verdict=False)
        return Reward(float(first == "1"), f"it was {first}", first == "1", first != "2")

    def close(self) -> None: ...


def prompts(count: int) -> list[Prompt]:
    return [
        Prompt(f"p{n}", ({"role": "system", "content": "s"}, {"role": "user", "content": f"{n}?"}))
        for n in range(count)
    ]


def encode(prompt: Prompt) -> Encoded:
    return Encoded(prompt, torch.tensor([int(prompt.id[1:])]), torch.zeros(1, 1, dtype=torch.long))


def decode(tokens: list[int]) -> str:
    return " ".join(map(str, tokens))


def measured(engine: Scripted, count: int, samples: int, **more: Any) -> Any:
    sampling = Sampling(7, 0.6, 0.95)
    return evaluate(prompts(count), engine, FirstToken(), encode, decode, sampling, samples, **more)


def test_what_is_counted() -> None:
    """Prompt n has n right answers of four; the last sample of each is cut off."""
    engine = Scripted(
        sampled=lambda n, time: [int(time < n), 5, *([END] if time < 3 else [5, 5])],
        greedy=lambda n, time: [int(n >= 3), END],
    )
    found = measured(engine, 5, 4)
    assert (found.prompts, found.samples) == (5, 4)
    assert found.greedy == 2 / 5
    assert found.greedy_interval == bootstrap_interval([0, 0, 0, 1, 1])
    assert found.sampled == pytest.approx((0 + 1 + 2 + 3 + 4) / 20)
    assert found.sampled_interval == bootstrap_interval([0, 0.25, 0.5, 0.75, 1])
    assert found.pass_at.keys() == found.pass_interval.keys() == {1, 2, 4}
    assert found.pass_interval[4] == bootstrap_interval([0, 1, 1, 1, 1])
    assert found.pass_at[1] == pytest.approx(found.sampled)
    assert found.pass_at[2] == pytest.approx((0 + 1 / 2 + 5 / 6 + 1 + 1) / 5)
    assert found.pass_at[4] == pytest.approx(4 / 5)
    assert found.reward == pytest.approx(0.5)
    assert found.answered == 1.0
    assert found.truncated == 1 / 4
    assert found.response_length == pytest.approx((3 * 3 + 4) / 4)
    asked = [(x.temperature, x.top_p, x.max_tokens, count) for x, count in engine.asked]
    assert asked == [(0.6, 0.95, 7, 20), (0.0, 1.0, 7, 5)]


def test_accuracy_by_test_set() -> None:
    """Prompts 0, 2 of one set have 0 and 2 right answers of four; 1 and 3 of another 1 and 3."""
    engine = Scripted(lambda n, time: [int(time < n), END])
    sources = ["a/one.jsonl", "a/two\x1b[2J.jsonl"] * 2
    named = [
        replace(prompt, source=source) for prompt, source in zip(prompts(4), sources, strict=True)
    ]
    found = evaluate(named, engine, FirstToken(), encode, decode, Sampling(7), 4, greedy=False)
    first, second = found.by_source.items()
    assert first == ("one", pytest.approx(0.25))
    assert second[1] == pytest.approx(0.5)
    assert second[0].startswith("two")
    assert "\x1b" not in second[0], "it is printed"
    assert found.metrics()["sampled/one"] == pytest.approx(0.25)
    assert found.as_dict()["by_source"] == found.by_source
    assert "by_source" not in measured(engine, 2, 1).as_dict(), "one set, no list"
    assert found.sampled == pytest.approx(0.375)


def test_a_test_set_is_named_by_its_file_its_folder_or_its_path() -> None:
    def names(*sources: str | None) -> list[str]:
        each = [replace(prompts(1)[0], source=source) for source in sources]
        return [*mean_by_source(each, [0.0] * len(each))]

    assert names("data/test.parquet", "data/svamp.jsonl") == ["test", "svamp"]
    assert names("gsm8k/test.parquet", "words/test.parquet") == ["gsm8k", "words"]
    assert names("a/b/test.json", "c/b/test.json") == ["a/b/test.json", "c/b/test.json"]
    assert names("data/test.parquet", "data/test.parquet") == []
    assert names(None, "test.jsonl") == ["other", "test"]
    assert names(*(f"{n}.jsonl" for n in range(17))) == [], "too many to list"


def test_every_response_is_kept_with_its_grade() -> None:
    engine = Scripted(lambda n, time: [int(time == 1), END], lambda n, time: [2, END])
    rows = measured(engine, 2, 2).rows
    assert [(x["prompt_id"], x["how"], x["sample"], x["correct"]) for x in rows] == [
        ("p0", "sampled", 0, False),
        ("p0", "sampled", 1, True),
        ("p1", "sampled", 0, False),
        ("p1", "sampled", 1, True),
        ("p0", "greedy", 0, False),
        ("p1", "greedy", 0, False),
    ]
    assert rows[1] == {
        "prompt_id": "p0",
        "prompt": "s\n0?",
        "how": "sampled",
        "sample": 1,
        "response": "1 9",
        "num_tokens": 2,
        "truncated": False,
        "answer": None,
        "reward": 1.0,
        "correct": True,
        "verdict": True,
        "reason": "it was 1",
    }


def test_numbers_for_a_run() -> None:
    engine = Scripted(lambda n, time: [1, END])
    found = measured(engine, 3, 3).metrics()
    assert found["sampled"] == found["sampled_high"] == 1.0
    assert found["greedy"] == found["greedy_low"] == 0.0
    assert found["sampled_low"] == pytest.approx(0.025 ** (1 / 3)), "three prompts say little"
    assert found["greedy_high"] == pytest.approx(1 - 0.025 ** (1 / 3))
    assert [key for key in found if key.startswith("pass@")] == ["pass@2", "pass@3"]
    without = measured(engine, 3, 1, greedy=False)
    assert without.greedy is None
    assert not [key for key in without.metrics() if key.startswith(("greedy", "pass@"))]
    assert len(without.rows) == 3


def test_a_reward_that_does_not_say_what_is_correct_has_no_accuracy() -> None:
    found = measured(Scripted(lambda n, time: [3, END], lambda n, time: [3, END]), 2, 2)
    assert (found.reward, found.greedy_reward) == (0.75, 0.75)
    assert found.reward_interval == (0.75, 0.75)
    assert (found.sampled, found.sampled_interval, found.answered) == (None, None, None)
    assert (found.greedy, found.greedy_interval) == (None, None)
    assert (found.pass_at, found.pass_interval) == ({}, {})
    assert found.metrics().keys() == {
        *("reward", "reward_low", "reward_high", "greedy_reward"),
        *("no_verdict", "truncated", "response_length"),
    }


def test_no_accuracy_where_some_rewards_do_not_say() -> None:
    found = measured(Scripted(lambda n, time: [3 if n else 1, END]), 2, 1)
    assert found.sampled is None


def test_a_response_without_a_verdict_is_not_correct_and_is_counted() -> None:
    found = measured(Scripted(lambda n, time: [4 if n else 1, END]), 4, 1, greedy=False)
    assert (found.sampled, found.no_verdict) == (0.25, 0.75)
    assert found.metrics()["no_verdict"] == 0.75
    assert [row["verdict"] for row in found.rows] == [True, False, False, False]
    for part in ("3 of 4 responses of the evaluation got no verdict", "stopped after 5 s"):
        assert part in found.warning
    assert "reward.batch_seconds" in found.warning
    assert measured(Scripted(lambda n, time: [1, END]), 4, 1).warning is None


def test_responses_without_an_answer() -> None:
    found = measured(Scripted(lambda n, time: [2 if n else 1, END]), 4, 1)
    assert found.answered == 1 / 4


def test_the_seed_decides() -> None:
    def answer(generator: torch.Generator) -> list[int]:
        return [int(torch.randint(2, (), generator=generator)), END]

    class Drawn(Scripted):
        def sample(
            self, prompts: Sequence[Encoded], sampling: Sampling, generator: torch.Generator
        ) -> Rollouts:
            drawn = [answer(generator) for _ in prompts]
            self.sampled = lambda number, time: drawn[number]
            return super().sample(prompts, sampling, generator)

    def marks(seed: int) -> list[bool]:
        engine = Drawn(lambda number, time: [])
        return [x["correct"] for x in measured(engine, 40, 1, seed=seed, greedy=False).rows]

    assert marks(1) == marks(1) != marks(2)


def test_nothing_to_ask_and_a_reward_that_forgets_some() -> None:
    with pytest.raises(ValueError, match="nothing to evaluate on: got no prompts"):
        measured(Scripted(lambda n, time: [1, END]), 0, 1)

    class Forgets(FirstToken):
        def __call__(self, responses: Sequence[Response]) -> list[Reward]:
            return super().__call__(responses)[1:]

    engine = Scripted(lambda n, time: [1, END])
    with pytest.raises(ValueError, match="one Reward per response; it returned 1 for 2"):
        evaluate(prompts(2), engine, Forgets(), encode, decode, Sampling(3), 1)


# ── Several processes ────────────────────────────────────────────────────────────────────────────


class Dice(Scripted):
    """Answers with whether its chance is below a half."""

    def sample(
        self, prompts: Sequence[Encoded], sampling: Sampling, generator: torch.Generator
    ) -> Rollouts:
        chance = torch.rand(len(prompts), sampling.max_tokens, generator=generator)
        drawn = iter((chance[:, 0] < 0.5).int().tolist())
        greedy = sampling.temperature == 0
        self.sampled = lambda n, time: [n % 2 if greedy else next(drawn), END]
        self.greedy = self.sampled
        return super().sample(prompts, sampling, generator)


@dataclass(frozen=True)
class Thread(Parallel):
    """A process that is only a thread."""

    table: list[list[Any]] = field(default_factory=list)
    meeting: Barrier = field(default_factory=lambda: Barrier(1))

    def gather(self, items: Sequence[Any]) -> list[Any]:
        self.table[self.rank] = list(items)
        self.meeting.wait(10)
        found = [x for part in self.table for x in part]
        self.meeting.wait(10)
        return found


@pytest.mark.parametrize("size", [2, 3, 7])
def test_several_processes_find_what_one_would(size: int) -> None:
    engines = [Dice(lambda n, time: []) for _ in range(1 + size)]
    whole = measured(engines[0], 5, 4, seed=3)
    assert 0 < whole.sampled < 1
    table: list[list[Any]] = [[] for _ in range(size)]
    meeting = Barrier(size)

    def work(rank: int) -> Any:
        peers = Thread(rank, size, table, meeting)
        return measured(engines[1 + rank], 5, 4, seed=3, peers=peers)

    with ThreadPoolExecutor(size) as pool:
        assert all(found == whole for found in pool.map(work, range(size)))
    assert sum(count for engine in engines[1:] for _, count in engine.asked) == 5 * 4 + 5
