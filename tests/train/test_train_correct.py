"""What a reward calls correct: in the rollouts, in the metrics, and nowhere if it does not say."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tiny_runs import RECIPE, metrics
from train.small import SMALL, recipe

from segcredit.data.worlds import make_world
from segcredit.models import Policy
from segcredit.report.overview import overview
from segcredit.runlog import read_run
from segcredit.train.build import build, make_plan
from segcredit.train.collect import Context, collect
from segcredit.train.metrics import Metrics, describe_rewards
from segcredit.train.progress import Terminal, result_table
from segcredit.train.state import State
from segcredit.train.trainer import Trainer
from segcredit.types import Response, Reward


@pytest.fixture(scope="module")
def state() -> State:
    made = recipe(SMALL["chains"], rollout={"prompts": 4, "max_tokens": 4})
    return build(make_plan(made))


@dataclass
class Told:
    """Grades the first responses with these rewards, the others with the last of them."""

    rewards: Sequence[Reward]

    def __call__(self, responses: Sequence[Response]) -> list[Reward]:
        rest = len(responses) - len(self.rewards)
        return [*self.rewards, *[self.rewards[-1]] * rest][: len(responses)]

    def close(self) -> None: ...


RIGHT, WRONG = Reward(1.0, "", True), Reward(0.0, "", False)
NO_VERDICT = Reward(0.0, "stopped after 5 s", False, verdict=False)
SILENT = Reward(0.5, "")


def collected(state: State, *rewards: Reward) -> Any:
    graded = replace(state, reward=Told(rewards))
    return collect(Context(graded, Metrics(), ("test",)), state.train.take(0, 4), ())


def test_rollouts_carry_what_is_correct(state: State) -> None:
    assert collected(state, RIGHT, WRONG).rollouts.correct.tolist() == [True, False, False, False]
    assert collected(state, SILENT).rollouts.correct is None
    assert collected(state, RIGHT, SILENT).rollouts.correct is None


def test_accuracy_is_measured_only_where_every_reward_says_what_is_correct(state: State) -> None:
    found = describe_rewards(collected(state, RIGHT, WRONG))
    assert (found["accuracy"], found["no_verdict"]) == (0.25, 0.0)
    assert "accuracy" not in describe_rewards(collected(state, SILENT))
    assert "accuracy" not in describe_rewards(collected(state, RIGHT, SILENT))


def test_responses_without_a_verdict_are_counted_and_not_correct(state: State) -> None:
    unknown = Reward(0.0, "stopped after 5 s", None, verdict=False)
    for none in (NO_VERDICT, unknown):
        batch = collected(state, RIGHT, none)
        assert batch.rollouts.correct.tolist() == [True, False, False, False]
        found = describe_rewards(batch)
        assert (found["accuracy"], found["no_verdict"]) == (0.25, 0.75)


def trained(folder: Path, reward: Any) -> tuple[Any, str]:
    """A run of one step with this reward, and what its terminal showed."""
    world = make_world("derived_variables", **RECIPE["data"]["settings"])
    Policy.tiny("qwen2", world.tokenizer(), hidden=32, layers=1, heads=4).save(folder / "model")
    rows = [
        {"problem": x.messages[0]["content"], "answer": x.answer}
        for x in world.prompts("train", 0, 8)
    ]
    trainer = Trainer(
        folder / "model",
        rows,
        reward=reward,
        test=rows[:3],
        algorithm={"name": "grpo", "kl": 0.0},
        steps=1,
        rollout={"prompts": 2, "samples": 2, "max_tokens": 4},
        threads=1,
    )
    console = Console(width=200, record=True, quiet=False, force_terminal=False)
    result = trainer.train(folder / "run", watch=Terminal(console))
    if table := result_table(result):
        console.print(table)
    return result, console.export_text()


def half(completions: list[str], **columns: Any) -> list[float]:
    return [0.5] * len(completions)


def test_a_run_whose_reward_does_not_say_shows_the_reward_and_no_accuracy(tmp_path: Path) -> None:
    result, shown = trained(tmp_path, half)
    assert result.before == result.after == {"reward": 0.5, "greedy_reward": 0.5}
    assert "accuracy" not in shown
    assert "100.0" not in shown
    assert "100 %" not in shown
    for step in (0, 1):  # numbered as in the progress bar and on the report page
        assert f"1 reinforce, step {step}/1: held-out reward sampled 0.500" in shown
    assert "Held-out reward, 3 prompts" in shown
    evaluated = [x for x in metrics(tmp_path / "run") if x["stage"] == "evaluation"]
    assert evaluated
    assert all(x["reward"] == 0.5 for x in evaluated)
    for line in metrics(tmp_path / "run"):
        assert not [x for x in line if x.startswith(("sampled", "greedy_l", "pass@", "accuracy"))]
    page = overview(read_run(tmp_path / "run"))
    assert [x["label"] for x in page["results"]][:2] == ["sampled reward", "greedy reward"]
    assert "sampled" not in page["curves"]["evaluation"]


def test_a_run_warns_once_of_responses_without_a_verdict(tmp_path: Path) -> None:
    def undecided(completions: list[str], **columns: Any) -> list[dict[str, Any]]:
        return [{"reward": 0.0, "verdict": False, "reason": "the judge is down"}] * len(completions)

    _, shown = trained(tmp_path, undecided)
    text = " ".join(shown.split())
    assert text.count("got no verdict and count as not correct") == 1
    assert "the judge is down" in text
    assert "no verdict 100.0%" in text
    trained_steps = [x for x in metrics(tmp_path / "run") if x["stage"] == "optimize"]
    assert [x["no_verdict"] for x in trained_steps] == [1.0]
    page = overview(read_run(tmp_path / "run"))
    assert "no verdict" in [x["label"] for x in page["results"]]
