"""Several rewards: their weighted sum, what is correct, what is logged, and who failed."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from each import each
from grading import boxed, response
from tiny_runs import changed

from segcredit import Trainer
from segcredit.config import RecipeError, apply_overrides, parse_recipe
from segcredit.evaluate.checkpoint import evaluate_checkpoint
from segcredit.report.overview import facts
from segcredit.rewards import (
    CustomReward,
    ExactReward,
    RewardError,
    WeightedRewards,
    compares_answers,
    functions_in,
    make_reward,
)
from segcredit.rewards.checks import no_verdict_warning
from segcredit.runlog import read_run
from segcredit.runlog.untrusted import requests_of
from segcredit.types import Response, Reward, correctness

FILE = """
def format(completions, **columns):
    return [float("so" in text) for text in completions]

def by_length(num_tokens, **columns):
    return [(n % 4) / 3 for n in num_tokens]

def nan(completions, **columns):
    return [float("nan")] * len(completions)
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(FILE)
    return str(tmp_path / "mine.py")


class Fixed:
    """A reward object that returns what it was made with."""

    def __init__(self, *rewards: Reward) -> None:
        self.rewards = list(rewards)
        self.closed = 0

    def __call__(self, responses: Sequence[Response]) -> list[Reward]:
        return self.rewards

    def close(self) -> None:
        self.closed += 1


RIGHT, WRONG = boxed("12"), response("7 \\boxed{7}")


def test_the_sum_is_weighted_and_each_is_kept(file: str) -> None:
    spec = [{"name": "exact", "weight": 0.9}, {"name": f"{file}:format", "weight": 0.1}]
    with make_reward(spec) as reward:
        right, wrong = reward([RIGHT, WRONG])
    assert (right.value, wrong.value) == (pytest.approx(1.0), pytest.approx(0.0))
    assert right.parts == {"exact": pytest.approx(0.9), "format": pytest.approx(0.1)}
    assert {name: x.value for name, x in right.each.items()} == {"exact": 1.0, "format": 1.0}
    assert (right.correct, wrong.correct) == (True, False)
    assert right.answered
    assert right.reason.startswith("exact 1: right: 12; format 1: mine.py:format: 1")


def test_a_reward_is_a_number_or_a_dict_in_the_sum() -> None:
    def grade(completions: list[str], **columns: Any) -> list[dict[str, Any]]:
        return [{"reward": 2.0, "correct": "7" in x, "reason": "sevens"} for x in completions]

    def number(completions: list[str], **columns: Any) -> list[float]:
        return [0.5] * len(completions)

    first, second = make_reward([number, grade], [1.0, 0.25])([RIGHT, WRONG])
    assert (first.value, second.value) == (1.0, 1.0)
    assert (first.correct, second.correct) == (False, True)  # the first that says so: grade
    assert first.reason.endswith("grade 2: sevens")


def test_the_first_that_says_what_is_correct_defines_it() -> None:
    silent, yes, no = (Fixed(Reward(1.0, "", x)) for x in (None, True, False))
    (made,) = make_reward([silent, {"name": "exact"}], None)([RIGHT])
    assert made.correct is True
    weighed = WeightedRewards(
        {"silent": silent, "no": no, "yes": yes}, dict.fromkeys(("silent", "no", "yes"), 1.0)
    )
    assert weighed([RIGHT])[0].correct is False
    assert correctness(make_reward([silent], [2.0])([RIGHT])) is None


def test_a_weight_of_zero_logs_and_teaches_nothing() -> None:
    logged = {"name": "exact", "weight": 0, "label": "accuracy"}
    (made,) = make_reward([logged, Fixed(Reward(0.5, "", None))])([RIGHT])
    assert (made.value, made.correct, made.each["accuracy"].value) == (0.5, True, 1.0)


def test_no_verdict_of_any_is_counted_and_named() -> None:
    lost = Fixed(Reward(0.0, "the judge is slow", None, verdict=False))
    (made,) = make_reward(["exact", lost])([RIGHT])
    assert made.verdict  # that of the reward that says what is correct
    assert made.correct
    assert not made.complete
    warning = no_verdict_warning([made], "step 3")
    assert warning is not None
    assert "Fixed: the judge is slow" in warning
    assert "got no verdict from one of the rewards" in warning, "it is correct, as exact says"
    (made,) = make_reward([lost])([RIGHT])
    assert not made.verdict
    assert correctness([made]) is None


def raises(completions: list[str]) -> list[float]:
    raise KeyError("two")


@each(
    ("item", "message"),
    [
        (Fixed(Reward(float("nan"), "")), "reward 'Fixed' must return finite numbers; it returned"),
        (Fixed(), "reward 'Fixed' must return one Reward per response; it returned 0 for 1"),
        (lambda responses: 1 / 0, "reward 'lambda': the reward function"),
        (raises, "reward 'raises': the reward function raises raised KeyError: 'two'"),
    ],
)
def test_the_one_that_fails_is_named(item: object, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        make_reward(["exact", item])([RIGHT])


def test_an_object_that_raises_is_named(file: str) -> None:
    class Broken(Fixed):
        def __call__(self, responses: Sequence[Response]) -> list[Reward]:
            raise OSError("no disk")

    with pytest.raises(RewardError, match="the reward 'Broken' raised OSError: no disk on 1 resp"):
        make_reward(["exact", Broken()])([RIGHT])
    with (
        make_reward(["exact", f"{file}:nan"]) as reward,
        pytest.raises(RewardError, match=r"reward 'nan': .* must return finite numbers; it ret"),
    ):
        reward([RIGHT])


def test_a_label_may_have_the_letters_of_any_language() -> None:
    def länge(completions: list[str], **columns: Any) -> list[float]:
        return [1.0] * len(completions)

    made = make_reward([länge, {"name": "math", "label": "数学"}])
    assert isinstance(made, WeightedRewards)
    assert list(made.rewards) == ["länge", "数学"]


def test_all_are_closed() -> None:
    both = Fixed(), Fixed()
    make_reward([both[0], ExactReward(), {"name": "math", "label": "m"}]).close()
    assert [x.closed for x in both] == [1, 0]


def test_what_a_sum_is_made_of(file: str) -> None:
    reward = make_reward(["exact", f"{file}:format"])
    assert compares_answers(reward)
    (function,) = functions_in(reward)
    assert isinstance(function, CustomReward)
    assert not compares_answers(make_reward([f"{file}:format"]))


@pytest.mark.usefixtures("as_users_run_it")
@each(
    ("spec", "weights", "message"),
    [
        ([], None, "at least one; got an empty list"),
        ([5], None, "a reward is a name, a name with settings, a function or .*; got 5"),
        (None, None, "a reward is a name, a name with settings, a function or .*; got None"),
        (["math", "math"], None, "'math' twice. Set another one: {name: …, label: math_2}"),
        ([{"name": "math", "weight": -1}], None, "weight of reward 1 must be a finite numb"),
        ([{"name": "math", "weight": True}], None, "weight of reward 1 must be a finite"),
        ([{"name": "math", "label": "a b"}], None, "letters, digits, '_', '.' and '-'; got 'a b'"),
        (["math"], [1.0, 2.0], "one number per reward; got 2 for 1"),
        (["math"], 0.5, r"must be a list with .* got 0.5 for 1. Pass, for example, .*=\[1.0\]"),
        ("math", [1.0], "reward_weights belong to a list of rewards"),
        ([{"name": "math", "weight": 1}], [1.0], "set only once; got reward_weights and"),
        ({"name": "math", "weight": 1}, None, r"Write \[{name: math, weight: 1}, …\], or remove"),
        ([{"name": "math", "wieght": 1}], None, "no setting 'wieght'"),
    ],
)
def test_mistakes(spec: Any, weights: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_reward(spec, weights)


def test_a_recipe_checks_them_and_overrides_reach_them() -> None:
    listed = ["math", {"name": "later.py:format", "weight": 0.1}]
    settings = apply_overrides(changed(reward=listed), ["reward.0.deadline=2", "reward.1.weight=1"])
    assert parse_recipe(settings).reward == [
        {"name": "math", "deadline": 2},
        {"name": "later.py:format", "weight": 1},
    ]
    for wrong, message in (
        ([{"weight": 1}], "expected a name, or settings with a name"),
        ([], "expected a name, or settings with a name"),
        (["exact", {"name": "later.py:exact"}], "'exact' twice"),
        ([{"name": "later.py:format", "weight": -1}], "weight of reward 1 must be a finite"),
        ([{"name": "math", "deadlin": 2}], "no setting 'deadlin'. Did you mean 'deadline'"),
    ):
        with pytest.raises(RecipeError, match=message):
            parse_recipe(changed(reward=wrong))


def test_a_run_directory_names_every_function() -> None:
    asked = requests_of({"reward": ["math", "a.py:f", {"name": "b.py:g", "weight": 0.5}]})
    assert asked == {"reward": "a.py:f", "reward.name": "b.py:g"}
    assert requests_of({"reward": ["a.py:f", "b.py:g"]}) == {"reward": "a.py:f, b.py:g"}


def by_length(num_tokens: list[int], **columns: Any) -> list[float]:
    return [(n % 4) / 3 for n in num_tokens]


def one_step(file: str, tmp_path: Path, **rewards: Any) -> Path:
    settings = changed(
        stages=[{"kind": "warm_start", "steps": 1, "batch": 2}, {"kind": "optimize", "steps": 1}],
        save__rollouts_every=1,
        evaluation__samples=1,
    )
    model, data = settings.pop("model"), settings.pop("data")
    settings.pop("reward")
    name = settings.pop("name")
    trainer = Trainer(model, data, reward=rewards.pop("reward"), name=name, **settings, **rewards)
    result = trainer.train(tmp_path / "run", progress=False)
    assert result.folder is not None
    return result.folder


def test_a_single_reward_that_is_no_number_ends_a_run(file: str, tmp_path: Path) -> None:
    class Broken(Fixed):
        def __call__(self, responses: Sequence[Response]) -> list[Reward]:
            return [Reward(float("nan"), "")] * len(responses)

    for reward, named in ((Broken(), "reward 'Broken'"), (f"{file}:nan", "function mine.py:nan")):
        with pytest.raises(ValueError, match=f"{named} must return finite numbers; it returned"):
            one_step(file, tmp_path / named[-3:], reward=reward)


@pytest.mark.slow
def test_each_is_logged_recorded_and_evaluated(file: str, tmp_path: Path) -> None:
    spec = ["exact", f"{file}:by_length"]
    path = one_step(file, tmp_path, reward=spec, reward_weights=[0.9, 0.1])
    run = read_run(path)
    assert run.config["reward"] == [
        {"name": "exact", "weight": 0.9},
        {"name": f"{file}:by_length", "weight": 0.1},
    ]
    (step,) = [x for x in run.metrics if x["stage"] == "optimize"]
    each_one = 0.9 * step["reward/exact"] + 0.1 * step["reward/by_length"]
    assert step["reward"] == pytest.approx(each_one)
    assert step["accuracy"] == step["reward/exact"]
    held_out = [x for x in run.metrics if x["stage"] == "evaluation"][-1]
    each_one = 0.9 * held_out["reward/exact"] + 0.1 * held_out["reward/by_length"]
    assert held_out["reward"] == pytest.approx(each_one)
    lines = (path / "rollouts" / "step-000002.jsonl").read_text().splitlines()
    row = json.loads(lines[0])
    assert set(row["rewards"]) == {"exact", "by_length"}
    assert row["reward"] == pytest.approx(
        0.9 * row["rewards"]["exact"]["reward"] + 0.1 * row["rewards"]["by_length"]["reward"]
    )
    assert "by_length" in row["reason"]
    assert ["reward", f"exact, {file}:by_length"] in facts(run)
    found = evaluate_checkpoint(str(path), prompts=2, samples=1, greedy=False, trust_run=True)
    assert set(found.rewards) == {"exact", "by_length"}
    assert found.as_dict()["rewards"] == found.rewards


@pytest.mark.slow
def test_functions_of_python_have_weights(file: str, tmp_path: Path) -> None:
    path = one_step(file, tmp_path, reward=["exact", by_length], reward_weights=[0.5, 2])
    config = yaml.safe_load((path / "config.yaml").read_text())
    assert "by_length" in json.dumps(config["given_in_python"])
    (step,) = [x for x in read_run(path).metrics if x["stage"] == "optimize"]
    each_one = 0.5 * step["reward/exact"] + 2 * step["reward/by_length"]
    assert step["reward"] == pytest.approx(each_one)


@each(
    ("rewards", "message"),
    [
        ({"reward": "math", "reward_weights": [1.0]}, "reward: reward_weights belong to a list"),
        ({"reward": ["math", by_length], "reward_weights": [1.0]}, "reward: reward_weights must"),
        ({"reward": []}, "reward: a list of rewards needs at least one; got an empty list"),
        ({"reward": ["math", by_length, by_length]}, "reward: each reward of a list needs a label"),
    ],
)
def test_mistakes_in_python(rewards: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Trainer("no-model", "no-data.jsonl", **rewards)
