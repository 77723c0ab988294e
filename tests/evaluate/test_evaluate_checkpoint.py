"""``segcredit evaluate`` on what lies on a disk: runs, checkpoints, models, and none of these."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from forked_cli import run
from tiny_runs import write_recipe
from typer.testing import CliRunner, Result

from segcredit.cli import app
from segcredit.data.prepare import prepare
from segcredit.evaluate.checkpoint import evaluate_checkpoint
from segcredit.models import Policy
from segcredit.runlog.storage import CheckpointError

OUTPUT = {"prompts": 4, "samples": 2}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    stages = [{"kind": "warm_start", "steps": 1}, {"kind": "optimize", "steps": 1}]
    recipe = write_recipe(folder, stages=stages, reward="exact", save__every=1)
    done = run(folder, "train", recipe, "--folder", "run")
    assert done.code == 0, done.complained
    return folder / "run"


@pytest.fixture
def damaged(trained: Path, tmp_path: Path) -> Path:
    """Its copy, of which the last checkpoint is truncated."""
    copy = shutil.copytree(trained, tmp_path / "run")
    weights = copy / "checkpoints" / "step-000002" / "policy" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    return copy


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    row = {"problem": "a = 1 ; a ?", "answer": "1"}
    path.write_text("".join(json.dumps({**row, "id": f"r{n}"}) + "\n" for n in range(3)))
    return path


def segcredit(*arguments: object) -> Result:
    runner = CliRunner(env={"FORCE_COLOR": None, "TTY_COMPATIBLE": None, "COLUMNS": "80"})
    return runner.invoke(app, ["evaluate", *(str(x) for x in arguments)])


def error_of(*arguments: object) -> str:
    result = segcredit(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout.strip() == ""
    assert result.stderr.startswith("error: ")
    return result.stderr.removeprefix("error: ").rstrip("\n")


# ── What it measures ─────────────────────────────────────────────────────────────────────────────


def test_a_run_brings_its_own_prompts_reward_and_limit(trained: Path, tmp_path: Path) -> None:
    said = tmp_path / "new" / "said.jsonl"
    found = evaluate_checkpoint(str(trained), output=said, **OUTPUT)
    assert (found.prompts, found.samples) == (4, 2)
    lines = [json.loads(line) for line in said.read_text().splitlines()]
    assert lines == found.rows
    assert [x["how"] for x in lines] == ["sampled"] * 8 + ["greedy"] * 4
    assert {x["prompt_id"] for x in lines} == {f"derived_variables/0/test/{n}" for n in range(4)}
    assert max(x["num_tokens"] for x in lines) <= 12, "the run's own limit"
    again = evaluate_checkpoint(str(trained), **OUTPUT)
    assert again.rows == found.rows
    other = evaluate_checkpoint(str(trained), seed=1, **OUTPUT)
    assert other.rows != found.rows
    short = evaluate_checkpoint(str(trained), max_tokens=3, **OUTPUT)
    assert max(x["num_tokens"] for x in short.rows) == 3


def test_it_repeats_the_evaluation_of_the_run(trained: Path) -> None:
    """The greedy responses at the end of training are those of the saved policy."""
    found = evaluate_checkpoint(str(trained), prompts=8, samples=1)
    path = trained / "evaluations" / "step-000002.jsonl"
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    greedy = [x for x in found.rows if x["how"] == "greedy"]
    assert len(greedy) == 8
    assert greedy == [x for x in kept if x["how"] == "greedy"]


def test_a_checkpoint_and_a_model_folder_serve_as_well(
    trained: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = trained / "checkpoints" / "step-000002"
    found = evaluate_checkpoint(str(trained), **OUTPUT)
    assert evaluate_checkpoint(str(last), **OUTPUT).rows == found.rows
    monkeypatch.chdir(last.parent)
    assert evaluate_checkpoint("step-000002", **OUTPUT).rows == found.rows
    first = evaluate_checkpoint("step-000001", **OUTPUT)
    assert first.rows != found.rows
    told = {"data": [str(rows)], "reward": "exact", "max_tokens": 12}
    model = evaluate_checkpoint(str(last / "policy"), **told)
    assert model.prompts == 3
    assert {x["answer"] for x in model.rows} == {"1"}
    asked = evaluate_checkpoint(str(trained), suffix="b ?", **told)
    assert {x["prompt"] for x in asked.rows} == {"a = 1 ; a ? b ?"}, "what is given goes first"


def test_a_damaged_checkpoint_is_refused_by_name(damaged: Path) -> None:
    with pytest.warns(UserWarning, match=r"checkpoint step-000002 is refused: .* is truncated: "):
        found = evaluate_checkpoint(str(damaged), **OUTPUT)
    earlier = damaged / "checkpoints" / "step-000001"
    assert found.rows == evaluate_checkpoint(str(earlier), **OUTPUT).rows
    with pytest.raises(CheckpointError, match=r"model.safetensors is truncated"):
        evaluate_checkpoint(str(damaged / "checkpoints" / "step-000002"), **OUTPUT)
    assert "is truncated" in error_of(damaged / "checkpoints" / "step-000002")


# ── On the command line ──────────────────────────────────────────────────────────────────────────


def test_the_table(trained: Path, tmp_path: Path) -> None:
    said = tmp_path / "said.jsonl"
    result = segcredit(trained, "--prompts", 4, "--samples", 2, "--output", said)
    assert result.exit_code == 0, result.output
    assert "4 prompts × 2 samples" in result.stdout
    assert re.search(r"temperature, top-p │ +1, 1 │", result.stdout)
    for measure in ("greedy accuracy", "avg@2", "pass@2", "answer found", "truncated", "12 tokens"):
        assert measure in result.stdout
    for measure in ("avg", "pass"):
        assert re.search(rf"{measure}@2 +│ +\d+\.\d% │ +\d+\.\d% – \d+\.\d%", result.stdout)
    assert result.stdout.endswith(f"responses  {said}\n")
    assert len(said.read_text().splitlines()) == 12


def test_numbers_for_programs(trained: Path) -> None:
    result = segcredit(trained, "--prompts", 4, "--samples", 2, "--json", "--paper")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["prompts"], found["samples"], found["greedy"]) == (4, 2, None)
    assert found["sampling"] == {"max_tokens": 12, "temperature": 0.6, "top_p": 0.95, "top_k": 0}
    low, high = found["sampled_interval"]
    assert 0 <= low <= found["sampled"] <= high <= 1
    assert "rows" not in found


def test_as_the_paper_asks(trained: Path, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is typed goes before the preset, and all prompts are asked."""
    asked: list[dict[str, Any]] = []

    def note(checkpoint: str, **settings: Any) -> None:
        asked.append(settings)
        raise ValueError

    monkeypatch.setattr("segcredit.evaluate.checkpoint.evaluate_checkpoint", note)
    names = ("temperature", "top_p", "greedy", "prompts")
    for options, expected in [
        ((), (None, None, None, None)),
        (("--paper",), (0.6, 0.95, False, None)),
        (("--paper", "--top-p", 0.9, "--greedy", "--prompts", 3), (0.6, 0.9, True, 3)),
        (("--prompts", 0), (None, None, None, None)),
    ]:
        error_of(trained, *options)
        assert tuple(asked[-1].get(name) for name in names) == expected
    assert [("prompts" in x) for x in asked] == [False, True, True, True], "left out: 512"


def test_a_runs_own_sampling(trained: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(trained, tmp_path / "run")
    config = (copy / "config.yaml").read_text()
    assert "  top_p: 1.0" in config
    (copy / "config.yaml").write_text(config.replace("  top_p: 1.0", "  top_p: 0.5"))
    found = evaluate_checkpoint(str(copy), **OUTPUT, greedy=False)
    assert (found.sampling.top_p, found.sampling.temperature, found.greedy) == (0.5, 1.0, None)
    assert evaluate_checkpoint(str(copy), top_p=0.9, **OUTPUT).sampling.top_p == 0.9


def test_prepared_data_by_name_brings_its_reward(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    policy = trained / "checkpoints" / "step-000002" / "policy"
    expected = (
        "--data gsm8k means data/gsm8k/test.parquet, which does not exist. Type: segcredit prepare"
    )
    assert error_of(policy, "--data", "gsm8k").startswith(expected)
    row = {"question": "a = 1 ; a ?", "answer": "#### 1"}
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    prepare("gsm8k", "data/gsm8k", source=["train.jsonl", "test.jsonl"])
    found = evaluate_checkpoint(str(policy), data=["gsm8k"], max_tokens=4, **OUTPUT)
    assert found.prompts == 1
    assert all("####" in x["reason"] for x in found.rows), "graded as GSM8K is"


@pytest.mark.parametrize("name", ["runs/{near}", "./nothing", "{folder}/nothing", "a/b/c", "a b"])
def test_a_place_that_is_not_there(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "demo-20261115").mkdir(parents=True)
    name = name.format(near="demo-20261114", folder=tmp_path)
    message = error_of(name)
    expected = f"there is no '{name}': expected a run directory, a Hugging Face folder"
    assert message.startswith(expected)
    assert ("Did you mean 'runs/demo-20261115'?" in message) == name.startswith("runs/")
    assert "Did you mean 'runs'?" in error_of("./rusn")


@pytest.mark.parametrize("name", ["nothing", "some/model"])
def test_a_name_that_only_the_hub_could_know(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError("connection refused")

    monkeypatch.setattr("segcredit.models.loading.get_hf_file_metadata", unreachable)
    assert error_of(name).startswith(
        f"{name} is not a folder here, was not downloaded before, and "
    )


def test_mistakes(trained: Path, tmp_path: Path, rows: Path) -> None:
    policy = trained / "checkpoints" / "step-000002" / "policy"
    assert error_of(policy) == f"{policy} has no test data on file: pass --data FILE"
    assert error_of(policy, "--data", rows) == f"{policy} has no reward setting: pass --reward NAME"
    assert error_of(trained, "--reward", "mth").startswith("unknown reward 'mth'. Did you mean")
    assert f"there is no '{tmp_path}/none.jsonl'" in error_of(
        trained, "--data", tmp_path / "none.jsonl"
    )
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"problem": "?"}\nx\n')
    assert [x.split(": ")[0] for x in error_of(trained, "--data", bad).splitlines()[1:3]] == [
        f"{bad}:1",
        f"{bad}:2",
    ]
    told = ("--data", rows, "--reward", "exact")
    message = error_of(tmp_path, *told)
    assert message == (
        f"expected a run directory, a checkpoint or a model; got {tmp_path}, a folder with neither "
        f"config.yaml nor config.json. Type, for example: segcredit evaluate runs/NAME-DATE-TIME"
    )
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "config.yaml").touch()
    inside = tmp_path / "runs" / "one"
    said = f"It contains: {inside}. Type, for example: segcredit evaluate {inside}"
    assert error_of(tmp_path).endswith(said), "also without --data"
    assert "\n" not in message


@pytest.mark.parametrize("damage", ["no weights", "half the weights", "no config"])
def test_half_a_model(trained: Path, tmp_path: Path, rows: Path, damage: str) -> None:
    model = tmp_path / "model"
    shutil.copytree(trained / "checkpoints" / "step-000002" / "policy", model)
    weights = model / "model.safetensors"
    if damage == "no weights":
        weights.unlink()
    elif damage == "half the weights":
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    else:
        (model / "config.json").unlink()
    message = error_of(model, "--data", rows, "--reward", "exact")
    expected = {
        "no weights": f"'{model}' has no model.safetensors. Download or copy it again.",
        "half the weights": f"'{weights}' is damaged or was cut off at ",
        "no config": f"'{model}' has no config.json, ",
    }
    assert message.startswith(expected[damage])


def test_a_run_without_test_data_or_checkpoints(trained: Path, tmp_path: Path, rows: Path) -> None:
    copy = shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(copy / "checkpoints")
    (copy / "checkpoints").mkdir()
    assert error_of(copy) == f"{copy} has no complete checkpoint yet. Resume it, or pass a model."
    config = (trained / "config.yaml").read_text()
    (copy / "config.yaml").write_text(re.sub(r"world: \w+", "wrld: x", config))
    assert "data.wrld: unknown key. Did you mean 'world'?" in error_of(copy)


@pytest.mark.parametrize(
    ("objects", "options", "missing"),
    [
        ({"reward": "f"}, {}, "reward setting: pass --reward NAME"),
        ({"test": "rows"}, {}, "test data on file: pass --data FILE"),
        ({"reward": "f", "test": "rows"}, {"data": True}, "reward setting: pass --reward NAME"),
        ({"train": "rows", "algorithm": "x"}, {}, None),
        ({"reward": "f", "test": "rows"}, {"data": True, "reward": "exact"}, None),
    ],
)
def test_what_a_run_had_as_objects_must_be_given(
    trained: Path, tmp_path: Path, rows: Path, objects: Any, options: Any, missing: str | None
) -> None:
    copy = shutil.copytree(trained, tmp_path / "run")
    with (copy / "config.yaml").open("a") as file:
        file.write(f"given_in_python: {json.dumps(objects)}\n")
    if options.get("data"):
        options = {**options, "data": [str(rows)]}
    if missing is None:
        assert evaluate_checkpoint(str(copy), **{**OUTPUT, **options}).samples == 2
        return
    with pytest.raises(ValueError, match=f"{copy} has no {missing}"):
        evaluate_checkpoint(str(copy), **options)


# ── The context window ───────────────────────────────────────────────────────────────────────────


def test_a_response_must_fit_into_the_context_window(
    trained: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shutil.copytree(trained / "checkpoints" / "step-000002" / "policy", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 40}))
    options = ("--data", rows, "--reward", "exact", "--samples", 1)
    assert segcredit(model, *options, "--max-tokens", 8).exit_code == 0
    monkeypatch.setattr(Policy, "from_pretrained", None)  # no weights are read before
    first, bad, advice = error_of(model, *options, "--max-tokens", 39).splitlines()
    assert first == "3 bad rows:"
    assert "which with --max-tokens 39 exceed the model's context window of 40" in bad
    assert re.match(r"all 3 rows: set --max-tokens to \d+ or less\.", bad)
    assert "remove them" in advice


# ── Prompts that the model cannot read ───────────────────────────────────────────────────────────


def test_prompts_that_the_model_cannot_read_are_told_together(
    trained: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Policy, "from_pretrained", None)  # no weights are read before
    model = shutil.copytree(trained / "checkpoints" / "step-000002" / "policy", tmp_path / "model")
    (model / "chat_template.jinja").write_text("{{ raise_exception('No.') }}")
    message = error_of(model, "--data", rows, "--reward", "exact")
    assert message.splitlines() == [
        "3 bad rows:",
        *(
            f"r{n}: prompt 'r{n}': the chat template rejects the messages (TemplateError: No.)"
            for n in range(3)
        ),
        "Repair these rows, or remove them from the file.",
    ]
    monkeypatch.setattr("segcredit.models.template.SECONDS", 0.5)
    (model / "chat_template.jinja").write_text("{{ 7 ** (7 ** 11) }}")
    message = error_of(model, "--data", rows, "--reward", "exact")
    assert message.startswith("prompt 'r0': the chat template did not finish within 0.5 s. Put a ")
