"""Folders that are no model, or half of one: each said in one message, with the way out."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
from safetensors.torch import load_file, save_file
from tiny_policies import policy
from transformers import BertConfig, CLIPConfig, Qwen2Config, T5Config

from segcredit.models import ModelError, Policy
from segcredit.models.loading import load_config

KINDS = "Expected a causal language model (…ForCausalLM, as of Qwen2.5 or Llama) or a vision-"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Saved models, one of them in several files."""
    folder = tmp_path_factory.mktemp("whole")
    for name in ("qwen2", "qwen2_5_vl"):
        policy(name).save(folder / name)
    shutil.copytree(folder / "qwen2", folder / "parts")
    (folder / "parts" / "model.safetensors").unlink()
    policy("qwen2").model.save_pretrained(folder / "parts", max_shard_size="40kB")
    return {path.name: path for path in folder.iterdir()}


def refused(folder: Path) -> str:
    with pytest.raises(ModelError) as error:
        Policy.from_pretrained(folder)
    message = str(error.value)
    assert "\n" not in message
    assert str(folder) in message
    return message


def test_the_models_themselves_load(whole: dict[str, Path]) -> None:
    for folder in whole.values():
        Policy.from_pretrained(folder)
    assert len(list(whole["parts"].glob("*.safetensors"))) > 2


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def without_a_weight(file: Path) -> None:
    held = load_file(file)
    del held["model.layers.1.mlp.up_proj.weight"]
    save_file(held, file, metadata={"format": "pt"})


Damage = Callable[[Path], object]
DAMAGES: list[tuple[str, str, str, Damage, list[str]]] = [
    ("no config", "qwen2", "config.json", Path.unlink, ["has no config.json", "save_pretrained"]),
    (
        "no JSON",
        "qwen2",
        "config.json",
        lambda x: x.write_text("{"),
        ["the config.json of", "cannot be read: ", "copy it again"],
    ),
    (
        "cut off",
        "qwen2",
        "model.safetensors",
        cut,
        ["model.safetensors' is damaged or was cut off at", "bytes (", "Download or copy it again"],
    ),
    (
        "garbage",
        "qwen2",
        "model.safetensors",
        lambda x: x.write_bytes(b"\xff" * 999),
        ["model.safetensors' is damaged or was cut off at 999 bytes"],
    ),
    (
        "empty",
        "qwen2",
        "model.safetensors",
        lambda x: x.write_bytes(b""),
        ["model.safetensors' is damaged or was cut off at 0 bytes"],
    ),
    (
        "a pointer",
        "qwen2",
        "model.safetensors",
        lambda x: x.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        ["is a Git LFS pointer", "git -C ", " lfs pull"],
    ),
    ("no weights", "qwen2", "model.safetensors", Path.unlink, ["has no model.safetensors."]),
    (
        "a weight is missing",
        "qwen2",
        "model.safetensors",
        without_a_weight,
        ["lacks 1 of its model's weights, such as 'model.layers.1.mlp.up_proj.weight'", "random"],
    ),
    (
        "no tokenizer",
        "qwen2",
        "tokenizer.json",
        Path.unlink,
        ["has no tokenizer (none of tokenizer.json, ", "Copy the tokenizer's files"],
    ),
    (
        "half a tokenizer",
        "qwen2",
        "tokenizer.json",
        cut,
        ["the tokenizer of", "does not load: ", "Copy its files there again"],
    ),
    (
        "no image processor",
        "qwen2_5_vl",
        "preprocessor_config.json",
        Path.unlink,
        ["has no preprocessor_config.json, which the model needs to read images. Copy it"],
    ),
    (
        "no index",
        "parts",
        "model.safetensors.index.json",
        Path.unlink,
        ["has no model.safetensors.index.json, the index of 'model-00001-of-"],
    ),
    (
        "no good index",
        "parts",
        "model.safetensors.index.json",
        lambda x: x.write_text('{"weight_map": 3}'),
        ["model.safetensors.index.json' is damaged"],
    ),
]


@pytest.mark.parametrize(
    ("name", "file", "damage", "expected"),
    [x[1:] for x in DAMAGES],
    ids=[x[0] for x in DAMAGES],
)
def test_damage(
    whole: dict[str, Path],
    tmp_path: Path,
    name: str,
    file: str,
    damage: Damage,
    expected: list[str],
) -> None:
    folder = shutil.copytree(whole[name], tmp_path / "model")
    damage(folder / file)
    message = refused(folder)
    for part in expected:
        assert part in message


def test_a_part_is_missing(whole: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(whole["parts"], tmp_path / "model")
    parts = sorted(folder.glob("*.safetensors"))
    parts[1].unlink()
    assert f"lacks 1 of its {len(parts)} files of weights: '{parts[1].name}'." in refused(folder)
    cut(parts[0])
    parts[1].write_bytes((whole["parts"] / parts[1].name).read_bytes())
    assert f"'{parts[0]}' is damaged or was cut off at " in refused(folder)


@pytest.mark.parametrize(
    ("config", "architecture", "expected"),
    [
        (BertConfig(), "BertForMaskedLM", "is a BertForMaskedLM, which does not write text token"),
        (Qwen2Config(), "Qwen2ForSequenceClassification", "is a Qwen2ForSequenceClassification, "),
        (T5Config(), "T5ForConditionalGeneration", "is a T5ForConditionalGeneration, which does "),
        (
            CLIPConfig(),
            "CLIPModel",
            "is a CLIPModel, which transformers cannot load as a decoder that writes text about",
        ),
    ],
)
def test_kinds_that_cannot_be_policies(
    tmp_path: Path, config: transformers.PreTrainedConfig, architecture: str, expected: str
) -> None:
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    message = refused(tmp_path)
    assert expected in message
    assert KINDS in message


def test_kinds_that_nobody_knows(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "qwen9"}))
    message = refused(tmp_path)
    assert (
        f"of type 'qwen9', which transformers {transformers.__version__} does not know" in message
    )
    assert "pip install -U transformers" in message
    file.write_text("{}")
    assert "names no model_type. " + KINDS in refused(tmp_path)
    code = {"model_type": "mine", "auto_map": {"AutoConfig": "code.Config"}}
    file.write_text(json.dumps(code))
    assert "contains its own Python code. Read it; if you trust it, set model.trust" in refused(
        tmp_path
    )


def test_own_code_that_does_not_load_with_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like Kimi-VL's, which is loaded by AutoModelForCausalLM. This one is made up."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "x"))
    auto = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "sees", "auto_map": auto, "vision_config": {}}))
    (tmp_path / "code.py").write_text(
        "from transformers import PreTrainedConfig\n"
        "class Config(PreTrainedConfig):\n"
        "    model_type = 'sees'\n"
    )
    with pytest.raises(ModelError) as error:
        load_config(tmp_path, trust_remote_code=True)
    assert "must register a class for AutoModelForImageTextToText; it has classes for" in str(
        error.value
    )
    assert "'AutoModelForCausalLM'" in str(error.value)
    assert "set model.family=file.py:Name" in str(error.value)


def test_things_that_are_no_model_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"")
    assert refused(file) == f"'{file}' is a file. Pass the folder that contains it."
    missing = tmp_path / "model.gguff"
    assert refused(missing).endswith(f"Did you mean '{file}'?")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    assert "holds an adapter, not a model. Merge it into its base" in refused(tmp_path / "adapter")
    (tmp_path / "step" / "policy").mkdir(parents=True)
    (tmp_path / "step" / "policy" / "config.json").write_text("{}")
    assert f"Did you mean '{tmp_path / 'step' / 'policy'}'?" in refused(tmp_path / "step")
