"""Problems of recipe, data and model together are reported before a model loads, all at once."""

import json
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from each import each
from PIL import Image
from tiny_runs import REWARD, changed
from transformers import (
    BloomConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from segcredit.config import RecipeError, load_recipe, parse_recipe
from segcredit.data import BadRows, load_prompts
from segcredit.data.worlds import make_world
from segcredit.installing import install_command
from segcredit.models import Codec, Family, Policy, lora
from segcredit.models.loading import context_window, end_tokens, load_config
from segcredit.train import build
from segcredit.train.build import make_plan
from segcredit.train.source import PromptList, WorldPrompts
from segcredit.types import Prompt

OPTIMIZE = [{"kind": "optimize", "steps": 1}]
FEW: dict[str, Any] = {"rollout__prompts": 1, "update__minibatches": 1, "stages": OPTIMIZE}
"""Steps for which one row is enough."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = make_world("derived_variables").tokenizer()
    Policy.tiny("qwen2", tokenizer, hidden=32, layers=1, heads=4).save(folder)
    return folder


@pytest.fixture(autouse=True)
def no_model_is_loaded(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever builds a policy here fails."""

    def refuse(*arguments: Any, **settings: Any) -> None:
        raise AssertionError("a model was loaded")

    for name in ("tiny", "from_pretrained", "__init__"):
        monkeypatch.setattr(Policy, name, refuse)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)


def problems(**changes: Any) -> str:
    with pytest.raises(RecipeError) as error:
        make_plan(parse_recipe(changed(**changes)))
    return str(error.value)


@pytest.mark.parametrize("name", ["demo", "mini/text", "mini/vision"])
def test_recipes_on_generated_data_can_be_planned(name: str) -> None:
    assert make_plan(load_recipe(name, ["evaluation.prompts=8"])).train.take(0, 1)


def test_a_plan_has_its_parts() -> None:
    plan = make_plan(parse_recipe(changed()))
    assert isinstance(plan.train, WorldPrompts)
    assert isinstance(plan.test, PromptList)
    assert plan.test.size == 8
    plan = make_plan(parse_recipe(changed(data__size=5, rollout__prompts=5)))
    assert isinstance(plan.train, PromptList)
    assert plan.train.size == 5
    asked, held_out = plan.train.take(0, 5), plan.test.take(0, 8) if plan.test else []
    assert not {x.id for x in asked} & {x.id for x in held_out}


@each(
    ("changes", "expected"),
    [
        ({"model__tiny": "qwen-2"}, "model: no tiny model 'qwen-2'. Did you mean 'qwen2'?"),
        ({"model__hidden": 33}, "model: hidden must be heads × a multiple of 8"),
        ({"model__device": "gpu"}, "model.device: expected auto, cpu, cuda or cuda:0 …; got 'gpu'"),
        (
            {"model__device": "cuda:99"},
            "model.device: expected a GPU of this machine",
        ),
        ({"stages__0__phase": "look"}, "stages.0.phase: derived_variables has the phases solve; "),
        ({"reward": "none.py:f"}, "reward: there is no file "),
        ({"reward": "reward.py:by_lenght"}, "reward.py has no function 'by_lenght'. Did you mean "),
        ({"reward": "reward.py"}, "reward: unknown reward 'reward.py'. "),
        (
            {"algorithm": "single_stream_spo", "stages__2": {"kind": "warm_start", "steps": 1}},
            "single_stream_spo tracks a value per prompt, so prompts must repeat: set data.size",
        ),
    ],
)
def test_what_does_not_fit(changes: Any, expected: str) -> None:
    assert expected in problems(**changes)


def test_a_limit_on_what_is_not_drawn() -> None:
    expected = "rollout.prefixes limits the prefixes that are continued, but sapo samples no cont"
    assert expected in problems(rollout__prefixes=4)


def test_what_a_tree_asks_for() -> None:
    """It is reported before training, and not after hours of imitation."""
    stages = [{"kind": "warm_start", "steps": 1}, *OPTIMIZE]
    expected = "spo_tree compares branches of a tree: set rollout.tree, as in rollout.tree='{branch"
    assert expected in problems(algorithm="spo_tree", stages=stages)
    expected = "rollout.tree is for methods that compare branches (spo_tree), which sapo does not: "
    assert expected in problems(rollout__tree={"tokens": 2})


@pytest.mark.parametrize(
    ("tree", "samples", "expected"),
    [
        ({"tokens": 6}, 1, "all levels but the last need 12 tokens (tree.tokens × levels), "),
        (
            {"tokens": 2},
            2,
            "tree.branching sets the number of responses per prompt: set samples to ",
        ),
        ({"branching": []}, 1, "rollout.tree.branching: List should have at least 1 item"),
        ({"branching": [1]}, 1, "rollout.tree.branching.0: Input should be greater than or equal"),
    ],
)
def test_trees_that_cannot_grow(tree: Any, samples: int, expected: str) -> None:
    with pytest.raises(RecipeError) as error:
        parse_recipe(changed(rollout__tree=tree, rollout__samples=samples))
    assert expected in str(error.value)


def test_weights_for_credit_that_is_a_target() -> None:
    changes = {"rollout__mismatch_cap": 2.0, "rollout__old_logp": "recompute"}
    stages = [{"kind": "warm_start", "steps": 1}, *OPTIMIZE]
    for name in ("dvo", "restem"):
        expected = f"rollout.mismatch_cap weights advantages, but {name} computes none: remove it"
        assert expected in problems(algorithm=name, stages=stages, **changes)


def test_a_tracker_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    expected = "save.trackers: mlflow is not installed. Type: pip install mlflow"
    assert expected in problems(save__trackers=["mlflow"])


def test_what_tracking_prompts_asks_for() -> None:
    message = problems(
        algorithm="single_stream_spo",
        data__size=5,
        rollout__samples=2,
        stages=[{"kind": "warm_start", "steps": 1}, *OPTIMIZE],
    )
    assert message.splitlines()[1:] == [
        "  rollout.prompts: expected at most 5, the number of training prompts, since the prompts "
        "of a step are distinct; got 8. Set rollout.prompts=5 or less, or set data.size=8",
        "  single_stream_spo needs exactly one response per prompt: set rollout.samples=1; got 2",
    ]


def test_a_step_draws_no_prompt_twice(tmp_path: Path, model: Path) -> None:
    """Distinct prompts are promised, so a set that is too small is refused."""
    train = write_rows(tmp_path / "train.jsonl", *[GOOD] * 7)
    given: dict[str, Any] = {"model": {"path": str(model)}, "data": {"train": [train]}}
    message = problems(**given, stages=OPTIMIZE)
    assert message.splitlines()[1:] == [
        "  rollout.prompts: expected at most 7, the number of training prompts, since the prompts "
        "of a step are distinct; got 8. Set rollout.prompts=7 or less, or add rows"
    ]
    make_plan(parse_recipe(changed(**given, stages=OPTIMIZE, rollout__prompts=7)))
    stages = [{"kind": "pretrain_critic", "steps": 1, "prompts": 9}, *OPTIMIZE]
    message = problems(**given, stages=stages, rollout__prompts=7)
    assert "  stages.0.prompts: expected at most 7, " in message
    make_plan(parse_recipe(changed(data__size=8)))
    assert "got 8. Set rollout.prompts=7 or less, or set data.size=8" in problems(data__size=7)


@pytest.mark.parametrize(("count", "first"), [(4, 0), (6, 0), (7, 0), (5, 3), (3, 1)])
def test_steps_across_the_end_of_a_pass_have_distinct_prompts(count: int, first: int) -> None:
    prompts = make_world("derived_variables").prompts("train", 0, 7)
    source = PromptList(prompts, seed=3)
    steps = [source.take(first + i * count, count) for i in range(40)]
    for step in steps:
        assert len({x.id for x in step}) == count
    taken = [x.id for step in steps for x in step][(-first) % 7 :]
    for turn in range(len(taken) // 7):
        assert len(set(taken[turn * 7 : turn * 7 + 7])) == 7, "each prompt once in a pass"
    again = PromptList(prompts, seed=3)  # as after a resume
    assert [again.take(first + i * count, count) for i in range(30, 40)] == steps[30:]
    assert len({tuple(taken[i * 7 : i * 7 + 7]) for i in range(9)}) == 9, "shuffled anew"


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("empty", "model.path: '{folder}' has no config.json, so it is not a Hugging Face folder"),
        ("not a config", "model.path: the config.json of {folder} cannot be read: "),
        ("another kind", "model.path: {folder} is a model of type 'no_such_model', which "),
        ("half a model", "model.path: '{folder}/model.safetensors' is damaged or was cut off at "),
    ],
)
def test_a_folder_that_holds_no_model(
    tmp_path: Path, model: Path, what: str, expected: str
) -> None:
    folder = tmp_path / "model"
    if what == "half a model":
        shutil.copytree(model, folder)
        (folder / "model.safetensors").write_bytes(b"half")
    else:
        folder.mkdir()
    if what in ("not a config", "another kind"):
        text = "{" if what == "not a config" else '{"model_type": "no_such_model"}'
        (folder / "config.json").write_text(text)
    message = problems(model={"path": str(folder)}, data={"train": ["rows.jsonl"]}, stages=OPTIMIZE)
    assert message.startswith(expected.format(folder=folder))


def write_rows(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


GOOD = {"problem": "a = 1 ; a ?", "answer": "1"}


def test_bad_rows_of_all_files_by_file_and_line(tmp_path: Path, model: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", GOOD, {"problem": "?"}, 3)
    test = write_rows(tmp_path / "test.jsonl", [], GOOD)
    data = {"train": [train], "test": [test]}
    made = changed(model={"path": str(model)}, data=data, **FEW)
    with pytest.raises(BadRows) as error:
        make_plan(parse_recipe(made))
    lines = str(error.value).splitlines()
    assert lines[0] == "3 bad rows:"
    assert [line.split(": ")[0] for line in lines[1:4]] == [f"{train}:2", f"{train}:3", f"{test}:1"]
    made["data"]["skip_bad_rows"] = True
    plan = make_plan(parse_recipe(made))
    assert [row.where for row in plan.bad] == [f"{train}:2", f"{train}:3", f"{test}:1"]
    assert (plan.train.size, plan.test.size if plan.test else 0) == (1, 1)


def test_prompts_too_long_for_the_model_are_bad_rows(tmp_path: Path, model: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", GOOD, GOOD | {"problem": "a = 1 ; " * 30 + "a ?"})
    data = {"train": [train], "max_prompt_tokens": 40}
    with pytest.raises(BadRows, match=rf"{train}:2: expected a prompt of at most 40 tokens; got 1"):
        make_plan(parse_recipe(changed(model={"path": str(model)}, data=data, stages=OPTIMIZE)))


def test_all_that_is_wrong_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    train = write_rows(tmp_path / "train.jsonl", 3)
    message = problems(
        model={"path": str(folder)},
        data={"train": [train], "max_prompt_tokens": 3},
        reward="none.py:f",
        stages=OPTIMIZE,
    )
    starts = [line.split(" ")[0] for line in message.splitlines()]
    assert starts[:4] == ["reward:", "model.path:", "1", f"{train}:1:"]


def without_chat(model: Path, folder: Path) -> str:
    """The model with a tokenizer that knows no chat."""
    copy = shutil.copytree(model, folder / "no-chat")
    (copy / "chat_template.jinja").unlink()
    return str(copy)


@pytest.mark.parametrize("limit", [None, 40])
def test_a_model_without_a_chat_template_asks_for_one(
    tmp_path: Path, model: Path, limit: int | None
) -> None:
    path = without_chat(model, tmp_path)
    train = write_rows(tmp_path / "train.jsonl", GOOD, GOOD)
    data: dict[str, Any] = {"train": [train], "max_prompt_tokens": limit}
    message = problems(model={"path": path}, data=data, stages=OPTIMIZE)
    assert message.startswith(f"model.path: {path}: the tokenizer has no chat template, so ")
    assert "Set data.template" in message
    assert "\n" not in message, "not once for every row"
    data["template"] = "{question}"
    plan = make_plan(parse_recipe(changed(model={"path": path}, data=data, **FEW)))
    assert plan.codec.render(plan.train.take(0, 1)[0]) == "a = 1 ; a ?"


@pytest.mark.parametrize("limit", [None, 40])
def test_a_template_and_rows_that_are_no_questions(
    tmp_path: Path, model: Path, limit: int | None
) -> None:
    talk = [{"role": "system", "content": "a"}, {"role": "user", "content": "a ?"}]
    more = {"prompt": talk, "answer": "1"}
    train = write_rows(tmp_path / "train.jsonl", GOOD, GOOD, more, more)
    data: dict[str, Any] = {"train": [train], "max_prompt_tokens": limit, "template": "{question}"}
    made = changed(model={"path": str(model)}, data=data, stages=OPTIMIZE)
    with pytest.raises(ValueError, match=r"2 of 4 prompts hold more: prompt 'train:3' has 2 mess"):
        make_plan(parse_recipe(made))


@pytest.mark.parametrize("template", ["Problem: {problem}", "{question}{question}", ""])
def test_a_template_without_its_place(template: str) -> None:
    with pytest.raises(RecipeError, match=r"data\.template: a template holds \{question\} exactly"):
        parse_recipe(changed(data__template=template))


# ── Rows that the model cannot process ───────────────────────────────────────────────────────────


def edited(model: Path, folder: Path, name: str, **settings: Any) -> str:
    """A copy of the model, with other settings in one of its JSON files."""
    copy = folder / f"edited-{name}"
    shutil.copytree(model, copy)
    found = json.loads((copy / name).read_text()) if (copy / name).exists() else {}
    (copy / name).write_text(json.dumps(found | settings))
    return str(copy)


def with_chat_template(model: Path, folder: Path, template: str) -> str:
    copy = shutil.copytree(model, folder / "templated")
    (copy / "chat_template.jinja").write_text(template)
    return str(copy)


def bad_rows(path: object, data: dict[str, Any], **changes: Any) -> list[str]:
    """What is said of each; with skip_bad_rows they are left out."""
    made = changed(**{**FEW, "model": {"path": str(path)}, "data": data, **changes})
    with pytest.raises(BadRows) as error:
        make_plan(parse_recipe(made))
    made["data"]["skip_bad_rows"] = True
    assert [x.where for x in make_plan(parse_recipe(made)).bad] == [
        x.where for x in error.value.bad
    ]
    return [str(row) for row in error.value.bad]


def test_pictures_for_a_text_model_are_bad_rows(tmp_path: Path, model: Path) -> None:
    Image.new("RGB", (28, 28)).save(tmp_path / "a.png")
    seen = {"problem": "<image>a ?", "answer": "1", "images": ["a.png"]}
    train = write_rows(tmp_path / "train.jsonl", GOOD, GOOD, seen)
    test = write_rows(tmp_path / "test.jsonl", GOOD, seen)
    said = (
        "expected a prompt the model can process; got prompt '{}:{}' has 1 image(s), but this model"
    )
    first, second = bad_rows(model, {"train": [train], "test": [test]})
    assert first.startswith(f"{train}:3: {said.format('train', 3)}")
    assert second.startswith(f"{test}:2: {said.format('test', 2)}")


def test_prompts_made_in_python_are_checked_too(model: Path) -> None:
    prompts = make_world("derived_variables").prompts("train", 0, 3)
    prompts[1] = replace(prompts[1], messages=({"role": "user", "content": "a = 1 ; " * 30},))
    data = {"train": ["rows given in Python"], "max_prompt_tokens": 125}
    recipe = parse_recipe(changed(**{**FEW, "model": {"path": str(model)}, "data": data}))
    with pytest.raises(BadRows, match=r"^1 bad row:\nrows\[1\]: expected a prompt of at most 125 "):
        make_plan(recipe, train=prompts)


def test_prompts_beyond_the_context_window(tmp_path: Path, model: Path) -> None:
    small = edited(model, tmp_path, "config.json", max_position_embeddings=60)
    train = write_rows(tmp_path / "train.jsonl", GOOD, GOOD | {"problem": "a = 1 ; " * 5 + "a ?"})
    tokens = len(make_plan_codec(small).encode(prompt_of(train, 1))[0])
    (row,) = bad_rows(small, {"train": [train]}, rollout__max_tokens=61 - tokens)
    assert row == (
        f"{train}:2: expected a prompt the model can process; got {tokens} tokens, which with "
        f"rollout.max_tokens={61 - tokens} exceed the model's context window of 60. Set "
        f"rollout.max_tokens={60 - tokens} or less, or shorten the prompt"
    )
    data = {"train": [train]}
    made = changed(**FEW, model={"path": small}, data=data, rollout__max_tokens=60 - tokens)
    make_plan(parse_recipe(made))
    message = problems(**FEW, model={"path": small}, data=data, rollout__max_tokens=60)
    assert message == (
        "rollout.max_tokens: expected less than the model's context window of 60 tokens, since "
        "the prompt also takes tokens; got 60. Set for example rollout.max_tokens=30"
    )


def test_many_prompts_beyond_the_window_are_one_line(tmp_path: Path, model: Path) -> None:
    small = edited(model, tmp_path, "config.json", max_position_embeddings=60)
    longer = GOOD | {"problem": "a = 1 ; " * 5 + "a ?"}
    train = write_rows(tmp_path / "train.jsonl", *[GOOD] * 25, longer)
    few, most = (len(make_plan_codec(small).encode(prompt_of(train, n))[0]) for n in (0, 25))

    def message(*rows: Any, test: Sequence[Any] = ()) -> list[str]:
        data = {"train": [write_rows(tmp_path / "train.jsonl", *rows)]}
        if test:
            data["test"] = [write_rows(tmp_path / "test.jsonl", *test)]
        made = changed(**FEW, model={"path": small}, data=data, rollout__max_tokens=59)
        with pytest.raises(BadRows) as error:
            make_plan(parse_recipe(made))
        return str(error.value).splitlines()

    line = (
        f"set rollout.max_tokens to {60 - most} or less. Their prompts have {few} to {most} "
        f"tokens, which with rollout.max_tokens=59 exceed the model's context window of 60"
    )
    assert message(*[GOOD] * 25, longer) == ["26 bad rows:", f"all 26 rows: {line}"]
    # skipping bad rows would leave nothing of either file
    both = message(*[GOOD] * 25, test=[longer])
    assert both == ["26 bad rows:", f"all 26 rows: {line}"]
    found = message(*[GOOD] * 25, longer, {"problem": "?"}, longer | {"problem": "a = 1 ; " * 30})
    assert found[:2] == ["28 bad rows:", f"26 of these rows: {line}"]
    assert [x.partition(": ")[0] for x in found[2:4]] == [f"{train}:27", f"{train}:28"]
    assert found[3].endswith("Shorten the prompt")
    assert len(found) == 5, "and the advice"
    data = {"train": [write_rows(tmp_path / "train.jsonl", *[GOOD] * 25, longer)]}
    fits = changed(**FEW, model={"path": small}, data=data, rollout__max_tokens=60 - most)
    make_plan(parse_recipe(fits))


def make_plan_codec(path: str) -> Codec:
    return Codec.from_pretrained(path, Family())


def prompt_of(file: str, number: int) -> Prompt:
    return load_prompts(file).prompts[number]


@pytest.mark.parametrize(
    ("config", "window"),
    [
        (LlamaConfig(max_position_embeddings=2048), 2048),
        (MistralConfig(max_position_embeddings=32768, sliding_window=4096), 32768),
        (GPT2Config(n_positions=1024), 1024),
        (BloomConfig(), None),
        (
            Qwen2Config(
                max_position_embeddings=32768,
                rope_parameters={
                    "rope_type": "yarn",
                    "rope_theta": 1e6,
                    "factor": 4.0,
                    "original_max_position_embeddings": 32768,
                },
            ),
            131072,
        ),
    ],
    ids=lambda x: type(x).__name__ if not isinstance(x, int) else str(x),
)
def test_context_windows(config: PreTrainedConfig, window: int | None) -> None:
    """A sliding window is no limit; scaled positions reach further."""
    assert context_window(config) == window


WARM = [{"kind": "warm_start", "steps": 1}, *OPTIMIZE]
SHOWN = GOOD | {"response": "a = 1 ;"}


def test_demonstrations_must_be_there_and_fit(tmp_path: Path, model: Path) -> None:
    small = edited(model, tmp_path, "config.json", max_position_embeddings=60)
    wrong = [SHOWN | {"response": x} for x in (None, " ", [3], "a = 1 ; " * 20)]
    train = write_rows(tmp_path / "train.jsonl", SHOWN, *wrong, SHOWN | {"response": 1})
    rows = bad_rows(small, {"train": [train]}, stages=WARM, rollout__max_tokens=4)
    start = "expected a prompt the model can process; got "
    assert [x.partition(start)[2].split(";")[0] for x in rows[:3]] == [
        "a 'response' to imitate that is not text: nothing (null)",
        "a 'response' to imitate that is not text: ' '",
        "a 'response' to imitate that is not text: a list of 1",
    ]
    assert " tokens with its 'response', more than the model's context window of 60" in rows[3]
    train = write_rows(tmp_path / "train.jsonl", SHOWN, GOOD, SHOWN)
    message = problems(
        **{**FEW, "stages": WARM}, model={"path": str(model)}, data={"train": [train]}
    )
    assert "'response'; 1 of 3 rows, such as ['train:2'], have none" in message


def test_an_end_token_at_which_sampling_does_not_stop(tmp_path: Path, model: Path) -> None:
    tokenizer = make_plan_codec(str(model)).tokenizer
    end, other = tokenizer.eos_token_id, 20
    train = write_rows(tmp_path / "train.jsonl", SHOWN)
    given = {**FEW, "data": {"train": [train]}}
    path = edited(model, tmp_path, "generation_config.json", eos_token_id=[other])
    assert problems(**{**given, "stages": WARM}, model={"path": path}) == (
        f"stages.0: expected demonstrations to end with a token at which sampling stops, which by "
        f"the model's generation config is {other} ({tokenizer.convert_ids_to_tokens(other)!r}); "
        f"the tokenizer's end token is {end} ({tokenizer.eos_token!r}), so responses would run to "
        f'rollout.max_tokens. Set "eos_token_id": [{end}, {other}] in {path}/generation_config.json'
        f", or eos_token in {path}/tokenizer_config.json"
    )
    message = (
        f"model.path: expected responses to end with a token at which sampling stops, which by the "
        f"model's generation config is {other} ({tokenizer.convert_ids_to_tokens(other)!r}); the "
        f"{{}} {end} ({tokenizer.eos_token!r}), so responses would run to rollout.max_tokens. Set "
        f'"eos_token_id": [{end}, {other}] in {path}/generation_config.json'
    )
    expected = message.format("chat template ends a turn with")
    assert problems(**given, model={"path": path}) == expected
    expected = message.format("tokenizer's end token is")
    plain = {**given, "data": {"train": [train], "template": "{question}"}}
    expected += f", or eos_token in {path}/tokenizer_config.json"
    assert problems(**plain, model={"path": path}) == expected
    shutil.rmtree(path)
    path = edited(model, tmp_path, "generation_config.json", eos_token_id=[other, end])
    make_plan(parse_recipe(changed(**{**given, "stages": WARM}, model={"path": path})))


@pytest.mark.parametrize("kept", [True, False], ids=["generation config", "config"])
def test_end_tokens_are_those_of_the_loaded_model(
    tmp_path: Path, model: Path, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    path = edited(model, tmp_path, "generation_config.json", eos_token_id=[7, 9])
    if not kept:
        (Path(path) / "generation_config.json").unlink()
    config = load_config(path)[1]
    assert tuple(end_tokens(path, config)) == Policy.from_pretrained(path).end_tokens


# ── Chat templates that fail ─────────────────────────────────────────────────────────────────────


def test_messages_that_the_chat_template_refuses_are_bad_rows(tmp_path: Path, model: Path) -> None:
    template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}{{ m['content'] }}"
        "{% endfor %}"
    )
    path = with_chat_template(model, tmp_path, template)
    talk = [{"role": "system", "content": "a"}, {"role": "user", "content": "a ?"}]
    train = write_rows(tmp_path / "train.jsonl", GOOD, {"prompt": talk, "answer": "1"})
    assert bad_rows(path, {"train": [train]}) == [
        f"{train}:2: expected a prompt the model can process; got prompt 'train:2': the chat "
        f"template rejects the messages (TemplateError: System role not supported)"
    ]


def children() -> set[str]:
    tasks = Path("/proc/self/task").glob("*/children")
    return {child for task in tasks for child in task.read_text().split()}


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages %}\n{{ m['content'] ", "has a syntax error in line 2: unexpected "),
        pytest.param(ENDLESS, "did not finish within 0.5 s", marks=pytest.mark.slow),
        ("{{ 7 ** (7 ** 11) }}", "did not finish within 0.5 s"),  # one operation, without a loop
        ("{{ 'x' * (20000000 * messages|length) }}", "wrote 20,000,000 characters for a prompt"),
        ("{{ 'x' * 10 ** 11 }}", "ran out of memory"),
    ],
)
@pytest.mark.parametrize("skip", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_chat_templates_that_cannot_be_used(
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    template: str,
    said: str,
    skip: bool,
) -> None:
    """One message with the template's error, the row, and what to do; without waiting for ever."""
    if "0.5 s" in said:
        monkeypatch.setattr("segcredit.models.template.SECONDS", 0.5)
    path = with_chat_template(model, tmp_path, template)
    train = write_rows(tmp_path / "train.jsonl", *[GOOD] * 8)
    made = changed(**FEW, model={"path": path}, data={"train": [train], "skip_bad_rows": skip})
    begun, before = time.monotonic(), children()
    with ThreadPoolExecutor(1) as thread:  # with signals, and where there are none
        plan = thread.submit(make_plan, parse_recipe(made)).result if skip else make_plan
        with pytest.raises(ValueError, match="chat template") as error:
            plan(*([] if skip else [parse_recipe(made)]))
    assert time.monotonic() - begun < 8
    (message,) = str(error.value).splitlines()
    assert message.startswith(f"{train}:1: prompt 'train:1': the chat template {said}")
    assert message.endswith(
        ". Put a working chat_template.jinja into the model's folder, or set data.template "
        "(segcredit evaluate: --template)."
    )
    assert children() <= before, "the process that ran it is gone"


# ── LoRA ─────────────────────────────────────────────────────────────────────────────────────────

TINY = changed()["model"]


def test_adapters_are_planned_for_text_and_pictures(model: Path) -> None:
    make_plan(parse_recipe(changed(model={**TINY, "lora": {}})))
    make_plan(parse_recipe(changed(model={**TINY, "lora": {"targets": ["q_proj", "mlp.up_proj"]}})))
    make_plan(parse_recipe(changed(model={"path": str(model), "lora": {"targets": "all-linear"}})))


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"rank": 0}, "model.lora.rank: Input should be greater than or equal to 1; got 0"),
        ({"alpha": 0}, "model.lora.alpha: Input should be greater than 0; got 0"),
        ({"rnak": 4}, "model.lora.rnak: unknown key. Did you mean 'rank'?"),
        ({"dropout": 0.1}, "model.lora.dropout: unknown key. Known keys: alpha, rank, targets."),
        (True, "model.lora: expected settings, such as {alpha: …}; got True"),
    ],
)
def test_settings_of_adapters_that_mean_nothing(lora: Any, said: str) -> None:
    assert said in problems(model={**TINY, "lora": lora})


def test_adapters_and_divided_weights_are_refused_together() -> None:
    message = problems(model={**TINY, "lora": {}}, memory={"shard": True})
    assert message.splitlines()[1:] == [
        "  memory.shard shards all weights, but model.lora trains adapters on a full copy of them: "
        "remove one of the two"
    ]


def test_layers_that_the_model_does_not_have(model: Path) -> None:
    for given in (TINY, {"path": str(model)}):
        message = problems(model={**given, "lora": {"targets": ["q_prj"]}})
        assert message == (
            "model.lora.targets: expected language, all-linear, or names of linear layers below "
            "the head; no linear layer is called 'q_prj'. This model has q_proj, k_proj, v_proj, "
            "o_proj, gate_proj, up_proj, down_proj."
        )


def test_a_problem_of_adapters_comes_with_the_others() -> None:
    message = problems(model={**TINY, "lora": {"targets": ["x"]}}, reward="missing.py:f")
    assert "model.lora.targets" in message
    assert "missing.py" in message


def test_without_peft_one_is_told_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "find_spec", lambda name: None)
    message = problems(model={**TINY, "lora": {}})
    assert message == (
        "model.lora: LoRA needs the package peft, which is not installed. "
        f"Type: {install_command('lora')}"
    )


@pytest.mark.parametrize(
    ("dtype", "engine", "asked", "again"),
    [
        ("float32", "hf", "auto", False),
        ("bfloat16", "hf", "auto", True),
        ("float32", "vllm", "auto", True),
        ("float32", "hf", "recompute", True),
        ("bfloat16", "hf", "sampler", False),
    ],
)
def test_old_log_probabilities_are_computed_again_where_two_computations_round_differently(
    dtype: str, engine: str, asked: str, again: bool
) -> None:
    changes = {"model__dtype": dtype, "rollout__engine": engine, "rollout__old_logp": asked}
    assert parse_recipe(changed(**changes)).recomputes is again
