"""A model and its tokenizer from memory: saved once, trained as a copy, resumed and evaluated."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from each import each
from tiny_policies import fresh_policy, picture, world
from tiny_runs import assert_same_run, metrics
from transformers import ProcessorMixin
from typer.testing import CliRunner

from segcredit import Callback
from segcredit.cli import app
from segcredit.config import RecipeError
from segcredit.models import Policy
from segcredit.train.trainer import Trainer

SETTINGS: dict[str, Any] = {
    "algorithm": {"name": "sapo", "kl": 0.01},  # with a critic and a reference model
    "steps": 3,
    "rollout": {"prompts": 4, "max_tokens": 8},
    "update": {"minibatches": 2},
    "optimizer": {"lr": 1e-3, "critic_lr": 1e-3},
    "evaluation": {"prompts": 2},
    "save": {"every": 2, "keep": 9},
    "threads": 1,
}


class Processor(ProcessorMixin):
    """Processor like those of transformers for Qwen-VL, which need torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, **rest: Any) -> None:
        super().__init__(image_processor, tokenizer, **rest)


def rows(folder: Path, name: str) -> list[Path]:
    """A file of rows, with images for a model that reads them."""
    found = []
    for x in world(name).prompts("train", 0, 6):
        row: dict[str, Any] = {"problem": x.messages[0]["content"], "answer": x.answer}
        if x.images:
            image = folder / f"{len(found)}.png"
            image.write_bytes(picture(56, 56, seed=len(found)))
            row["images"] = [image.name]
        found.append(row)
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in found))
    return [file]


@pytest.fixture
def text(tmp_path: Path) -> tuple[Policy, list[Path]]:
    return fresh_policy("qwen2"), rows(tmp_path, "qwen2")


def given(policy: Policy, how: str) -> Any:
    """What the user has for the model's inputs."""
    codec = policy.codec
    if how == "tokenizer":
        return codec.tokenizer
    both = (codec.image_processor, codec.tokenizer)
    return both if how == "pair" else Processor(*both)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "how"),
    [("qwen2", "tokenizer"), ("qwen2_5_vl", "pair"), ("qwen2_5_vl", "processor")],
)
def test_the_run_of_an_object_is_that_of_its_folder(tmp_path: Path, name: str, how: str) -> None:
    """Bit for bit; and the object is as it was."""
    policy, data = fresh_policy(name), rows(tmp_path, name)
    policy.save(tmp_path / "model")
    model = policy.model.train()
    weights = copy.deepcopy(model.state_dict())
    config, generation = model.config.to_dict(), model.generation_config.to_dict()

    settings = SETTINGS | {"data": data, "test": data, "reward": "exact"}
    trainer = Trainer(model, tokenizer=given(policy, how), **settings)
    result = trainer.train(tmp_path / "run", progress=False)
    Trainer(tmp_path / "model", **settings).train(tmp_path / "whole", progress=False)

    assert model.training
    assert model.config.to_dict() == config
    assert model.generation_config.to_dict() == generation
    for key, x in model.state_dict().items():
        assert torch.equal(x, weights[key]), key

    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    initial = tmp_path / "run" / "checkpoints" / "initial"
    assert written["model"]["path"] == str(initial)
    assert "given_in_python" not in written, "the folder stands for the objects"
    saved = Policy.from_pretrained(initial).model.state_dict()
    assert saved.keys() == weights.keys()
    assert all(torch.equal(saved[key], weights[key]) for key in saved)
    assert result.model is not None
    done = CliRunner().invoke(app, ["evaluate", str(tmp_path / "run"), "--data", str(data[0])])
    assert done.exit_code == 0, done.stderr

    shutil.rmtree(initial)
    for run in ("run", "whole"):
        file = tmp_path / run / "config.yaml"
        settings = yaml.safe_load(file.read_text())
        settings["model"].pop("path")
        file.write_text(yaml.safe_dump(settings))
        path = str(initial if run == "run" else tmp_path / "model")
        for card in (tmp_path / run).rglob("README.md"):  # names the model's folder
            card.write_text(card.read_text().replace(path, "MODEL"))
    assert_same_run(tmp_path / "run", tmp_path / "whole")


class StopsAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, step: int, metrics: dict[str, float]) -> None:
        if step == self.step:
            self.stop()


@pytest.mark.slow
def test_such_a_run_is_resumed_in_python_and_by_the_command(
    tmp_path: Path, text: tuple[Policy, list[Path]]
) -> None:
    policy, data = text
    settings = SETTINGS | {"data": data, "reward": "exact", "tokenizer": policy.codec.tokenizer}
    run = tmp_path / "run"
    Trainer(policy.model, callbacks=[StopsAt(1)], **settings).train(run, progress=False)
    Trainer(policy.model, callbacks=[StopsAt(2)], **settings).train(
        run, resume=True, progress=False
    )
    assert metrics(run)[-1]["step"] == 2
    done = CliRunner().invoke(app, ["train", "--resume", str(run)])
    assert done.exit_code == 0, done.stderr
    assert metrics(run)[-1]["step"] == 3


@pytest.mark.slow
def test_such_a_run_may_be_moved_and_its_first_model_evaluated(
    tmp_path: Path, text: tuple[Policy, list[Path]]
) -> None:
    policy, (data, *_) = text
    settings = SETTINGS | {"data": data, "reward": "exact", "tokenizer": policy.codec.tokenizer}
    old, run = tmp_path / "old", tmp_path / "new"
    Trainer(policy.model, callbacks=[StopsAt(1)], **settings).train(old, progress=False)
    old.rename(run)
    initial = run / "checkpoints" / "initial"
    options = ("--data", data, "--reward", "exact", "--prompts", 2, "--max-tokens", 8)
    done = CliRunner().invoke(app, ["evaluate", str(initial), *map(str, options)])
    assert done.exit_code == 0, done.stderr
    done = CliRunner().invoke(app, ["train", "--resume", str(run)])
    assert done.exit_code == 0, done.stderr
    assert metrics(run)[-1]["step"] == 3
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["model"]["path"] == str(initial)


@pytest.mark.slow
def test_a_run_that_died_before_its_model_was_saved_is_resumed_with_the_object(
    tmp_path: Path, text: tuple[Policy, list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, data = text
    settings = SETTINGS | {"data": data, "reward": "exact", "tokenizer": policy.codec.tokenizer}
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(type(policy.model), "save_pretrained", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Trainer(policy.model, **settings).train(run, progress=False)
    assert not (run / "checkpoints" / "initial").exists()
    result = Trainer(policy.model, **settings).train(run, resume=True, progress=False)
    assert result.model is not None
    assert (run / "checkpoints" / "initial" / "model.safetensors").is_file()


def test_a_run_that_started_from_a_folder_is_not_resumed_with_an_object(
    tmp_path: Path, text: tuple[Policy, list[Path]]
) -> None:
    policy, data = text
    policy.save(tmp_path / "model")
    settings = SETTINGS | {"data": data, "reward": "exact"}
    Trainer(tmp_path / "model", **settings).train(tmp_path / "run", progress=False)
    again = Trainer(policy.model, tokenizer=policy.codec.tokenizer, **settings)
    with pytest.raises(RecipeError, match=r"^model: expected the model that the run in .*'; got"):
        again.train(tmp_path / "run", resume=True, progress=False)


def test_settings_of_a_model_go_beside_it_and_its_dtype_is_its_own(
    text: tuple[Policy, list[Path]],
) -> None:
    policy, data = text
    model = policy.model.to(torch.bfloat16)
    more = {"data": data, "tokenizer": policy.codec.tokenizer}
    assert Trainer(model, **SETTINGS | more).recipe.model.dtype == "bfloat16"
    lora = {"path": model, "dtype": "float32", "lora": {"rank": 2}}
    trainer = Trainer(lora, **SETTINGS | more)
    assert trainer.recipe.model.dtype == "float32"
    assert trainer.recipe.model.lora is not None
    assert repr(trainer) == (
        "Trainer(model='Qwen2ForCausalLM', algorithm='sapo', prompts=6, steps=3)"
    )


def without_end(policy: Policy) -> dict[str, Any]:
    policy.model.generation_config.eos_token_id = None
    policy.model.config.eos_token_id = None
    tokenizer = copy.deepcopy(policy.codec.tokenizer)
    tokenizer.eos_token = None
    return {"model": policy.model, "tokenizer": tokenizer}


def quantized(policy: Policy) -> dict[str, Any]:
    policy.model.hf_quantizer = object()  # as from_pretrained(quantization_config=…) leaves it
    return {"model": policy.model}


def with_adapter(policy: Policy) -> dict[str, Any]:
    peft = pytest.importorskip("peft")
    policy.model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    return {"model": policy.model}


def wrapped_by_peft(policy: Policy) -> dict[str, Any]:
    peft = pytest.importorskip("peft")
    return {"model": peft.PeftModel(policy.model, peft.LoraConfig(r=2, target_modules=["q_proj"]))}


@pytest.mark.usefixtures("as_users_run_it")
@each(
    ("change", "error", "message"),
    [
        (lambda x: {"tokenizer": None}, TypeError, "tokenizer: expected the model's tokenizer or"),
        (lambda x: {"tokenizer": 5}, TypeError, "tokenizer: expected a tokenizer or processor"),
        (lambda x: {"tokenizer": type(x.codec.tokenizer)}, TypeError, "got the class"),
        (
            without_end,
            RecipeError,
            "FOLDER/tokenizer_config.json\nThe model was given as an object: save it and its",
        ),
        (lambda x: {"model": "somewhere"}, TypeError, "tokenizer: expected none, because the"),
        (quantized, TypeError, "got a quantized model. Load it without"),
        (lambda x: {"model": x.model.half()}, TypeError, "got torch.float16. Pass model.to("),
        (lambda x: {"model": x.model.get_input_embeddings()}, TypeError, "got Embedding. Save it"),
        (
            lambda x: {"model": x.model.model},
            TypeError,
            "got Qwen2Model. Load it with AutoModelFor",
        ),
        (
            lambda x: {"model": type(x.model)},
            TypeError,
            "got the class Qwen2ForCausalLM. Type, for",
        ),
        (with_adapter, TypeError, "got one with an adapter that add_adapter or load_adapter added"),
        (wrapped_by_peft, TypeError, "got PeftModel. Merge the adapter first, and pass the result"),
        (
            lambda x: {"model": fresh_policy("qwen2_5_vl").model},
            TypeError,
            "tokenizer: expected the model's processor, because the model reads images; got Tok",
        ),
    ],
)
def test_an_incomplete_model_is_refused_before_anything_is_saved(
    tmp_path: Path, change: Any, error: type[Exception], message: str
) -> None:
    policy = fresh_policy("qwen2")
    base = {"model": policy.model, "tokenizer": policy.codec.tokenizer}
    changes = change(policy)
    with pytest.raises(error) as told:
        Trainer(data=rows(tmp_path, "qwen2"), **SETTINGS | base | changes)
    assert message in str(told.value)
    if error is RecipeError:
        assert "/tmp/segcredit-" not in str(told.value), "a folder that is gone helps nobody"
