"""Stop strings, top-p and system prompt as settings: in training, evaluation, data and checks."""

import json
from pathlib import Path
from typing import Any

import pytest
from each import each
from test_train_python import SETTINGS, rows_of
from tiny_runs import RECIPE, changed

from segcredit import Trainer
from segcredit.config import RecipeError, parse_recipe
from segcredit.data import BadRows, prompts_from_rows
from segcredit.data.worlds import World, make_world
from segcredit.evaluate.checkpoint import evaluate_checkpoint, sampling_settings
from segcredit.models import Policy
from segcredit.rollout.sampling import check_sampling
from segcredit.runlog import read_run
from segcredit.train.health import top_p_warning
from segcredit.types import Sampling


@pytest.fixture(scope="module")
def world() -> World:
    return make_world("derived_variables", **RECIPE["data"]["settings"])


@pytest.fixture(scope="module")
def model(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    Policy.tiny("qwen2", world.tokenizer(), hidden=32, layers=1, heads=4).save(folder)
    return folder


def by_length(num_tokens: list[int], **columns: Any) -> list[float]:
    return [(n % 4) / 3 for n in num_tokens]


@pytest.mark.slow
def test_a_run_stops_at_strings_and_warns_of_top_p_once(
    world: World, model: Path, tmp_path: Path
) -> None:
    rollout = {"prompts": 4, "max_tokens": 8, "stop": ["1", "a "], "top_p": 0.9}
    settings = {
        **SETTINGS,
        "rollout": rollout,
        "save": {"every": 1, "rollouts_every": 1},
        "evaluation": {"prompts": 3, "every": 1},
    }
    rows = rows_of(world, "train", 10)
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows[:3])))
    trainer = Trainer(
        model,
        rows,
        reward=by_length,
        test=str(tmp_path / "test.jsonl"),
        algorithm={"name": "ppo"},
        **settings,
    )
    with pytest.warns(UserWarning, match=r"sampled with rollout\.top_p=0\.9, but log-prob") as seen:
        result = trainer.train(tmp_path / "run", progress=False)
    assert len([x for x in seen if "top_p" in str(x.message)]) == 1
    assert result.folder is not None
    run = read_run(result.folder)
    assert [x["name"] for x in run.warnings if x["name"] == "top_p"] == ["top_p"]
    steps = [x for x in run.metrics if x["stage"] == "optimize"]
    # ratios are those of the policy that sampled, before its first update
    assert all(x["agreement/ratio_error"] < 1e-4 for x in steps)
    files = [*(result.folder / "rollouts").iterdir(), *(result.folder / "evaluations").iterdir()]
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    held = [x for x in rows if any(stop in x["response"] for stop in rollout["stop"])]
    assert len(files) >= 4
    assert {x.get("how", "training") for x in held} == {"training", "sampled", "greedy"}
    assert not any(x["truncated"] for x in held)
    for x in held:  # nothing follows the token with the string
        ends = [x["response"].find(stop) for stop in rollout["stop"] if stop in x["response"]]
        assert len(x["response"]) - min(ends) <= 12
    found = evaluate_checkpoint(str(result.folder), [str(tmp_path / "test.jsonl")], "exact")
    assert found.sampling == Sampling(8, 1.0, 1.0, stop=("1", "a "))
    assert found.as_dict()["sampling"]["stop"] == ("1", "a ")
    path = [str(tmp_path / "test.jsonl")]
    found = evaluate_checkpoint(str(result.folder), path, "exact", stop=[])
    assert "stop" not in found.as_dict()["sampling"]


def test_evaluations_share_the_stop_strings() -> None:
    recipe = parse_recipe(changed(rollout__stop=["x"], rollout__top_p=0.5))
    assert recipe.rollout.sampling() == Sampling(12, 1.0, 0.5, stop=("x",))
    assert recipe.rollout.sampling(3, 0.0) == Sampling(3, 0.0, 0.5, stop=("x",))
    assert recipe.evaluation_sampling == Sampling(12, 1.0, 1.0, stop=("x",))
    assert sampling_settings(recipe, None, 0.6, None) == Sampling(12, 0.6, 1.0, stop=("x",))
    assert sampling_settings(recipe, None, None, None, ["y"]).stop == ("y",)
    assert sampling_settings(None, None, None, None).stop == ()


def test_a_stop_string_that_no_text_contains_is_refused(
    world: World, model: Path, tmp_path: Path
) -> None:
    rows = rows_of(world, "train", 4)
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    name = world.tokenizer().eos_token
    message = rf"stop: expected text of a response, which has no special tokens; got '{name}\.', "
    settings = {**SETTINGS, "rollout": {"prompts": 2, "max_tokens": 4, "stop": ["1", f"{name}."]}}
    with pytest.raises(ValueError, match=f"rollout.{message}"):
        Trainer(model, rows, reward=by_length, algorithm={"name": "ppo"}, **settings).train(
            tmp_path / "run", progress=False
        )
    with pytest.raises(ValueError, match=message):
        evaluate_checkpoint(str(model), [str(tmp_path / "test.jsonl")], "exact", stop=[f"{name}."])


@pytest.mark.usefixtures("as_users_run_it")
def test_one_stop_string_is_not_a_list_of_characters() -> None:
    with pytest.raises(ValueError, match=r"got the single string 'END', .*Pass stop=\[…\]"):
        sampling_settings(None, None, None, None, "END")
    with pytest.raises(ValueError, match=r"a tuple of strings; got 'END'"):
        check_sampling(Sampling(4, stop="END"))  # type: ignore[arg-type]


def test_no_warning_without_top_p_or_without_training() -> None:
    assert top_p_warning(parse_recipe(changed())) is None
    only = [{"kind": "warm_start", "steps": 1}]
    assert top_p_warning(parse_recipe(changed(rollout__top_p=0.9, stages=only))) is None
    assert top_p_warning(parse_recipe(changed(rollout__top_p=0.9))) is not None


@each(
    ("settings", "message"),
    [
        ({"rollout__stop": [""]}, r"rollout\.stop\.0: String should have at least 1 character"),
        ({"rollout__stop": "END"}, r"rollout\.stop: Input should be a valid list"),
        ({"rollout__top_p": 0}, r"rollout\.top_p: .*greater than 0"),
        ({"rollout__top_p": 95}, r"rollout\.top_p: .*less than or equal to 1"),
        ({"data__system": "Think."}, "system is for rows; a world writes its own prompts"),
        (
            {
                "rollout__top_p": 0.9,
                "rollout__mismatch_cap": 2,
                "rollout__old_logp": "recompute",
            },
            r"rollout\.mismatch_cap .* the probability that top-p cuts off: set rollout\.top_p=1",
        ),
    ],
)
def test_checks(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        parse_recipe(changed(**settings))


@pytest.mark.slow
def test_a_system_prompt_is_the_first_message(world: World, model: Path, tmp_path: Path) -> None:
    rows = rows_of(world, "train", 10)
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows[:3])))
    data = {"train": str(tmp_path / "test.jsonl"), "test": str(tmp_path / "test.jsonl")}
    data = {key: [x] for key, x in data.items()} | {"system": "a = 3 ;"}
    settings = {**SETTINGS, "rollout": {"prompts": 2, "max_tokens": 4}, "save": {"every": 1}}
    settings["save"]["rollouts_every"] = 1
    trainer = Trainer(model, data, reward="exact", **settings)
    (first, *_) = trainer.plan.train.take(0, 1)
    assert [x["role"] for x in first.messages] == ["system", "user"]
    assert first.messages[0]["content"] == "a = 3 ;"
    result = trainer.train(tmp_path / "run", progress=False)
    lines = (tmp_path / "run" / "rollouts" / "step-000001.jsonl").read_text().splitlines()
    assert "system\na = 3 ;" in json.loads(lines[0])["prompt"]
    assert result.folder is not None
    shown = tmp_path / "shown.jsonl"
    evaluate_checkpoint(str(result.folder), samples=1, output=shown)
    assert shown.read_text().count("a = 3 ;\\n") == 6  # three prompts, sampled and greedy
    own = [str(tmp_path / "test.jsonl")]
    evaluate_checkpoint(str(result.folder), own, samples=1, output=shown)
    assert "a = 3 ;\\n" not in shown.read_text()
    evaluate_checkpoint(str(result.folder), own, samples=1, system="b = 4 ;", output=shown)
    assert shown.read_text().count("b = 4 ;\\n") == 6


def test_a_row_with_a_system_prompt_of_its_own_is_a_bad_row() -> None:
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "a ?"}]
    rows = [{"prompt": messages, "answer": "1"}] * 2
    with pytest.raises(BadRows, match=r"messages without a system prompt, since data\.system sets"):
        prompts_from_rows(rows, system="Think.")


def test_system_and_template_exclude_each_other(tmp_path: Path) -> None:
    data = {"train": ["x.jsonl"], "system": "Think.", "template": "{question}"}
    settings = changed(model={"path": "x"}, data=data, stages=[{"kind": "optimize", "steps": 1}])
    with pytest.raises(RecipeError, match=r"write the system prompt into template, before \{quest"):
        parse_recipe(settings)
