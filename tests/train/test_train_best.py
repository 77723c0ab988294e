"""The best checkpoint (save.best) and early stopping (evaluation.patience)."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from each import each
from forked_cli import run, run_several
from safetensors.torch import load_file
from tiny_runs import REWARD, assert_same_run, changed, metrics, write_recipe
from train.test_train_resume import after_lines, finish, kill, make, undisturbed, while_saving
from typer.testing import CliRunner

from segcredit import Callback, Trainer
from segcredit.cli import app
from segcredit.config import RecipeError, parse_recipe
from segcredit.evaluate import Evaluation
from segcredit.runlog import read_run
from segcredit.train import loop
from segcredit.train.best import Best
from segcredit.train.state import State
from segcredit.train.trainer import Result

pytestmark = [
    pytest.mark.usefixtures("unchecked"),
    pytest.mark.filterwarnings("ignore:Settings changed"),
]
STAGES = [{"kind": "warm_start", "steps": 2, "batch": 4}, {"kind": "optimize", "steps": 8}]
BEST: dict[str, Any] = {
    "algorithm": {"name": "grpo", "kl": 0.0},
    "rollout__samples": 2,
    "stages": STAGES,
    "save__keep": 1,
    "save__best": True,
    "save__every": 3,
    "evaluation": {"every": 1, "prompts": 4, "greedy": False, "metric": "reward", "watch": 0},
}
"""Steps 3 to 9 are evaluated on the way, step 2 before and step 10 after optimization."""


@each(
    ("min_gain", "values", "best", "waited"),
    [
        (0.0, [0.5], (0.5, 0), 0),
        (0.0, [0.5, 0.4, 0.5, 0.3], (0.5, 0), 3),  # an equal value is no gain
        (0.0, [0.5, 0.4, 0.6, 0.3], (0.6, 2), 1),
        (0.25, [0.5, 0.625, 0.75], (0.75, 2), 0),  # small gains add up
        (0.25, [0.5, 0.625, 0.625, 0.625], (0.625, 1), 3),
        (0.25, [0.5, 0.75, 0.25, 0.875], (0.875, 3), 2),
    ],
)
def test_hand_numbers(
    min_gain: float, values: list[float], best: tuple[float, int], waited: int
) -> None:
    found = Best("reward", values[0], 0, values[0])
    for step, value in enumerate(values[1:], 1):
        found = found.after(value, step, min_gain)
    assert ((found.value, found.step), found.waited) == (best, waited)


def scripted(monkeypatch: pytest.MonkeyPatch, values: list[float]) -> None:
    """Let the evaluations return these mean rewards: before, then step 3, 4, …, 10."""
    whole = loop.evaluate_state

    def evaluate_state(state: State) -> Evaluation:
        found = whole(state)
        assert found is not None
        return replace(found, reward=values[state.step - 2])

    monkeypatch.setattr(loop, "evaluate_state", evaluate_state)


def train(
    folder: Path, resume: bool = False, callbacks: Sequence[Callback] = (), **changes: Any
) -> Result:
    made = changed(**{**BEST, **changes})
    reward = folder.parent / "reward.py"
    reward.write_text(REWARD)
    made["reward"] = f"{reward}:by_length"
    trainer = Trainer.from_recipe(parse_recipe(made), callbacks=callbacks)
    return trainer.train(folder, resume, progress=False)


def checkpoints(folder: Path) -> list[int]:
    return [int(x.name.removeprefix("step-")) for x in read_run(folder).checkpoints]


@pytest.mark.slow
def test_the_best_checkpoint_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The value before optimization is the highest, and does not count."""
    scripted(monkeypatch, [0.9, 0.1, 0.3, 0.2, 0.3, 0.6, 0.5, 0.4, 0.55])
    result = train(tmp_path / "run")
    assert checkpoints(tmp_path / "run") == [7, 10]
    assert read_run(tmp_path / "run").best == {"step": 7, "metric": "reward", "value": 0.6}
    assert result.best == tmp_path / "run" / "checkpoints" / "step-000007" / "policy"
    assert result.model == tmp_path / "run" / "checkpoints" / "step-000010" / "policy"
    other = train(tmp_path / "plain", save__best=False, evaluation=RECIPE_EVALUATION)
    assert other.best is None
    assert checkpoints(tmp_path / "plain") == [10]
    assert read_run(tmp_path / "plain").best is None
    assert same_weights(result.model, other.model)  # keeping it changes nothing else
    assert metrics(tmp_path / "run") == metrics(tmp_path / "plain")


RECIPE_EVALUATION = BEST["evaluation"] | {"metric": "auto"}


def same_weights(one: Path | None, other: Path | None) -> bool:
    assert one is not None
    assert other is not None
    x, y = (load_file(place / "model.safetensors") for place in (one, other))
    return x.keys() == y.keys() and all(bool((x[name] == y[name]).all()) for name in x)


@pytest.mark.slow
def test_the_last_may_be_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8])
    result = train(tmp_path / "run")
    assert checkpoints(tmp_path / "run") == [10]
    assert result.best == result.model


@pytest.mark.slow
def test_it_is_the_best_of_the_recorded_evaluations(tmp_path: Path) -> None:
    """Without a script: as metrics.jsonl has them."""
    train(tmp_path / "run")
    steps, values = read_run(tmp_path / "run").series("reward", "evaluation")
    later = dict(zip(steps[1:], values[1:], strict=True))
    best = max(later, key=lambda step: (later[step], -step))
    assert len(set(values)) > 2
    assert best not in (3, 10)
    assert read_run(tmp_path / "run").best == {
        "step": best,
        "metric": "reward",
        "value": later[best],
    }
    assert checkpoints(tmp_path / "run") == [best, 10]


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.02])
def test_killed_and_resumed_it_is_the_same_run(tmp_path: Path, delay: float) -> None:
    whole = undisturbed(make(tmp_path / "whole"), **BEST)
    folder = make(tmp_path / "killed")
    write_recipe(folder, **BEST)
    kill(folder, while_saving("step-*"), delay)
    kill(folder, after_lines(9), delay)
    finish(folder)
    assert_same_run(folder / "run", whole)
    assert (folder / "run" / "best.json").read_bytes() == (whole / "best.json").read_bytes()
    assert checkpoints(folder / "run") == checkpoints(whole)


@pytest.mark.slow
def test_a_lost_best_checkpoint_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resumed from before it, or without it: the best of what comes then."""
    scripted(monkeypatch, [0.0, 0.1, 0.9, 0.2, 0.3, 0.6, 0.5, 0.4, 0.1])
    place = tmp_path / "run"
    train(place, stages=[STAGES[0], {"kind": "optimize", "steps": 5}])
    assert checkpoints(place) == [4, 7]
    shutil.rmtree(place / "checkpoints" / "step-000004")
    result = train(place, resume=True)
    assert read_run(place).best == {"step": 8, "metric": "reward", "value": 0.5}
    assert checkpoints(place) == [8, 10]
    assert result.best is not None
    assert result.best.is_dir()


@pytest.mark.slow
def test_the_best_checkpoint_survives_steps_without_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turned on again, it was deleted with best.json as soon as the run was resumed."""
    scripted(monkeypatch, [0.0, 0.1, 0.9, 0.2, 0.3, 0.6, 0.5, 0.4, 0.1])
    place = tmp_path / "run"
    train(place, stages=[STAGES[0], {"kind": "optimize", "steps": 4}])
    plain = BEST["evaluation"] | {"metric": "auto"}
    stages = [STAGES[0], {"kind": "optimize", "steps": 6}]
    train(place, resume=True, stages=stages, save__best=False, evaluation=plain)
    assert checkpoints(place) == [4, 8]
    train(place, resume=True)
    assert read_run(place).best == {"step": 4, "metric": "reward", "value": 0.9}
    assert checkpoints(place) == [4, 10]


@pytest.mark.slow
def test_the_metric_may_change_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [0.0, 0.1, 0.9, 0.2, 0.3, 0.6, 0.5, 0.4, 0.1])
    place = tmp_path / "run"
    train(place, stages=[STAGES[0], {"kind": "optimize", "steps": 5}])
    before: list[Any] = []

    class First(Callback):
        def on_step_end(self, step: int, metrics: dict[str, float]) -> None:
            before.append((step, read_run(place).best, checkpoints(place)[0]))

    greedy = BEST["evaluation"] | {"greedy": True, "metric": "greedy_reward", "every": 2}
    train(place, resume=True, evaluation=greedy, callbacks=[First()])
    # the best by the old metric stays until there is one by the new metric
    assert before[0] == (8, {"step": 4, "metric": "reward", "value": 0.9}, 4)
    found = read_run(place).best
    assert found is not None
    assert found["metric"] == "greedy_reward"
    assert found["step"] >= 8


PATIENT = {**BEST, "save__best": False, "evaluation": BEST["evaluation"] | {"patience": 3}}


def test_it_stops_after_evaluations_without_a_gain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last improvement is at step 4; there is none at steps 5, 6 and 7."""
    scripted(monkeypatch, [0.9, 0.1, 0.3, 0.2, 0.3, 0.25, 0.9, 0.9, 0.9])
    with pytest.warns(UserWarning, match="Stopped early after step 7: 3 evaluations") as found:
        result = train(tmp_path / "run", **PATIENT)
    (message,) = [str(x.message) for x in found if "Stopped early" in str(x.message)]
    assert "without an improvement in reward, whose best value is 0.3 at step 4" in message
    assert message.endswith("evaluation.patience=null")
    assert "segcredit train --resume" in message
    assert checkpoints(tmp_path / "run") == [7]
    assert result.before["reward"] == 0.9
    assert result.after["reward"] == 0.25
    (warning,) = read_run(tmp_path / "run").warnings
    assert warning["name"] == "early_stop"
    assert [x["step"] for x in result.metrics if x["stage"] == "optimize"] == [3, 4, 5, 6, 7]


@pytest.mark.slow
def test_resumed_it_stops_again_or_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resumed without patience, it is the run that never stopped."""
    scripted(monkeypatch, [0.9, 0.1, 0.3, 0.2, 0.3, 0.25, 0.2, 0.9, 0.9])
    with pytest.warns(UserWarning, match="Stopped early after step 7"):
        train(tmp_path / "run", **PATIENT)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.warns(UserWarning, match="Stopped early after step 7"):
        again = train(tmp_path / "run", resume=True, **PATIENT)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    assert again.after["reward"] == 0.25
    assert checkpoints(tmp_path / "run") == [7]

    longer = {**PATIENT, "evaluation": PATIENT["evaluation"] | {"patience": 4}}
    copy = shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with pytest.warns(UserWarning, match="Stopped early after step 8: 4 evaluations"):
        train(copy, resume=True, **longer)
    off = {**PATIENT, "evaluation": BEST["evaluation"] | {"metric": "auto"}}
    result = train(tmp_path / "run", resume=True, **off)
    whole = train(tmp_path / "whole", **off)
    assert checkpoints(tmp_path / "run") == [10]
    assert result.after == whole.after
    assert same_weights(result.model, whole.model)
    numbers = [x for x in metrics(tmp_path / "run") if x["stage"] != "warning"]
    assert numbers == metrics(tmp_path / "whole")


@pytest.mark.slow
def test_patience_may_be_reduced_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two evaluations without an improvement: the run ends, with the results of its policy."""
    scripted(monkeypatch, [0.9, 0.3, 0.2, 0.25, 0.9, 0.9, 0.9, 0.9, 0.9])
    train(tmp_path / "run", callbacks=[StopsAfter(5)], **PATIENT)
    less = {**PATIENT, "evaluation": PATIENT["evaluation"] | {"patience": 2}}
    with pytest.warns(UserWarning, match="Stopped early after step 5: 2 evaluations"):
        result = train(tmp_path / "run", resume=True, **less)
    assert result.after["reward"] == 0.25
    assert [x["name"] for x in read_run(tmp_path / "run").warnings] == ["early_stop"]
    with pytest.warns(UserWarning, match="Stopped early after step 5"):
        again = train(tmp_path / "run", resume=True, **less)
    assert again.after == result.after


class StopsAfter(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, step: int, metrics: dict[str, float]) -> None:
        if step == self.step:
            self.stop()


@pytest.mark.slow
def test_results_of_an_earlier_end_are_not_those_of_a_later_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, [0.9, 0.3, 0.2, 0.25, 0.2, 0.9, 0.9, 0.9, 0.9])
    with pytest.warns(UserWarning, match="Stopped early after step 6"):
        ended = train(tmp_path / "run", **PATIENT)
    assert ended.after["reward"] == 0.2
    off = {**PATIENT, "evaluation": RECIPE_EVALUATION}
    result = train(tmp_path / "run", resume=True, callbacks=[StopsAfter(8)], **off)
    assert result.stopped is not None
    assert result.after == {}


@pytest.mark.slow
def test_both_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [0.9, 0.1, 0.3, 0.2, 0.3, 0.25, 0.9, 0.9, 0.9])
    evaluation = {"evaluation": BEST["evaluation"] | {"patience": 3}}
    with pytest.warns(UserWarning, match="Stopped early after step 7"):
        train(tmp_path / "run", **evaluation)
    assert checkpoints(tmp_path / "run") == [4, 7]


def test_from_the_terminal(tmp_path: Path) -> None:
    """It ends with exit code 0 and the usual results; evaluate --best finds the checkpoint."""
    settings = {**BEST, "evaluation": BEST["evaluation"] | {"patience": 1, "min_gain": 0.9}}
    recipe = write_recipe(tmp_path, **settings)
    done = run(tmp_path, "train", recipe, "--folder", "run")
    assert done.code == 0, done.complained
    assert "Stopped early after step 4" in done.said
    assert "best    " in done.said
    found = read_run(tmp_path / "run").best
    assert found is not None
    said = run(tmp_path, "train", "--resume", "run", "--trust-run")
    assert said.code == 0, said.complained
    assert "Stopped early after step 4" in said.said


def evaluated(*arguments: object) -> Any:
    runner = CliRunner(env={"FORCE_COLOR": None, "TTY_COMPATIBLE": None, "COLUMNS": "200"})
    return runner.invoke(app, ["evaluate", *(str(x) for x in arguments)])


@pytest.mark.slow
def test_evaluate_chooses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [0.9, 0.1, 0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1])
    place = tmp_path / "run"
    train(place)
    options = ("--trust-run", "--json", "--prompts", 4, "-k", 2)
    named = evaluated(place / "checkpoints" / "step-000004", *options)
    best, last = evaluated(place, "--best", *options), evaluated(place, *options)
    assert named.exit_code == best.exit_code == last.exit_code == 0, best.output
    assert json.loads(best.stdout) == json.loads(named.stdout)
    assert json.loads(best.stdout) != json.loads(last.stdout)
    for wrong, what in ((place / "checkpoints" / "step-000004", "a checkpoint"), ("gpt2", "")):
        refused = evaluated(wrong, "--best", *options)
        assert refused.exit_code == 2
        assert what in refused.stderr
    shutil.rmtree(place / "checkpoints" / "step-000004")
    refused = evaluated(place, "--best", *options)
    assert refused.exit_code == 2
    assert "step-000004; it was deleted or moved. Put it back, or" in refused.stderr
    (place / "best.json").unlink()
    refused = evaluated(place, "--best", *options)
    assert refused.exit_code == 2
    assert "save.best=true" in refused.stderr
    (place / "best.json").write_text("{}")
    assert "Delete it" in evaluated(place, "--best", *options).stderr


@each(
    ("changes", "message"),
    [
        ({"save__best": True, "evaluation__every": 0}, "evaluation.every is 0"),
        ({"evaluation__patience": 2, "evaluation__every": 0}, "evaluation.every is 0"),
        ({"evaluation__metric": "reward"}, "evaluation.metric has no effect without"),
        ({"evaluation__min_gain": 0.1}, "evaluation.min_gain has no effect without"),
        (
            {"save__best": True, "evaluation__metric": "greedy", "evaluation__greedy": False},
            "evaluation.metric is greedy, but evaluation.greedy is false",
        ),
        ({"evaluation__patience": 0}, "greater than or equal to 1"),
        (
            {"save__best": True, "data": {"train": ["rows.jsonl"]}, "model": {"path": "m"}},
            "save.best compares held-out results: set data.test",
        ),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        parse_recipe(changed(**changes))


@pytest.mark.slow
def test_a_reward_that_reports_no_correctness(tmp_path: Path) -> None:
    """Known after the first evaluation, before any step of optimization."""
    wrong = BEST["evaluation"] | {"metric": "sampled"}
    with pytest.raises(ValueError, match=r"got sampled, which needs .* evaluation\.metric=reward"):
        train(tmp_path / "run", evaluation=wrong)
    assert "optimize" not in {x["stage"] for x in read_run(tmp_path / "run").metrics}
    auto = train(tmp_path / "auto", evaluation=BEST["evaluation"] | {"metric": "auto"})
    found = read_run(tmp_path / "auto").best
    assert found is not None
    assert found["metric"] == "reward"
    assert auto.best is not None


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["false", "true"])
def test_two_processes_agree(tmp_path: Path, shard: str) -> None:
    settings = {
        **BEST,
        "stages": [STAGES[0], {"kind": "optimize", "steps": 12}],
        "evaluation": BEST["evaluation"] | {"patience": 2},
        "optimizer__eps": 1e-3,
    }
    made = write_recipe(tmp_path, **settings)
    run_several(tmp_path, 1, "train", made, "--folder", "one")
    run_several(tmp_path, 2, "train", made, "--folder", "two", f"memory.shard={shard}")
    one, two = (read_run(tmp_path / name) for name in ("one", "two"))
    for mine, its in zip(one.metrics, two.metrics, strict=True):
        assert [mine[x] for x in ("step", "stage")] == [its[x] for x in ("step", "stage")]
        assert mine.get("reward") == pytest.approx(its.get("reward"))
    assert one.best is not None
    assert one.best["step"] == two.best["step"]
    assert [x["name"] for x in one.warnings] == [x["name"] for x in two.warnings] == ["early_stop"]
    steps = [x["step"] for x in two.metrics if x["stage"] == "optimize"]
    assert len(steps) < 12
    assert all(b - a == 1 for a, b in pairwise(steps))
