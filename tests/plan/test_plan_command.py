"""``segcredit plan`` as it is typed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
import typer
from accuracy import MODELS
from each import each
from typer.testing import CliRunner

from segcredit.commands import plan as planning

RECIPE = """\
name: geometry
model: {path: Qwen/Qwen2.5-VL-3B-Instruct, dtype: bfloat16}
data: {train: [train.parquet]}
stages: [{kind: optimize, steps: 200}]
rollout: {prompts: 512, max_tokens: 2048}
"""
TEXT = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}

app = typer.Typer()
app.command(epilog=planning.EPILOG)(planning.plan)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a recipe, and configurations where weights would be; loading any is an error."""

    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("the plan loads weights")

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", load)
    shutil.copytree(MODELS, tmp_path, dirs_exist_ok=True)
    (tmp_path / "geometry.yaml").write_text(RECIPE)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "config.json").write_text(json.dumps(TEXT))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def typed(*words: str) -> tuple[int, str, str]:
    """Exit code, output, complaints."""
    found = CliRunner().invoke(app, [*words], env={"COLUMNS": "100"})
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found.exit_code, found.stdout, found.stderr


def numbers(*words: str) -> dict[str, Any]:
    code, said, complained = typed(*words, "--json")
    assert (code, complained) == (0, "")
    return json.loads(said)


def test_what_does_not_fit_is_said_with_what_to_type():
    code, said, complained = typed("geometry.yaml", "--gpus", "1xH200")
    assert (code, complained) == (0, "")
    assert "3.75 B parameters; policy, critic, reference" in said
    assert "does not fit" in said
    command = next(x for x in said.splitlines() if x.startswith("type "))
    _, *words = command.split()
    assert words[:3] == ["segcredit", "train", "geometry.yaml"]
    assert numbers(*words[2:], "--gpus", "1xH200")["fits"]


def test_what_fits_is_said():
    code, said, _ = typed("geometry.yaml", "memory.recompute_activations=true", "--gpus", "B200")
    assert code == 0
    assert "\nfits: " in said
    assert "type   segcredit train geometry.yaml memory.recompute_activations=true" in said


def test_json_holds_every_number():
    found = numbers("geometry.yaml", "--gpus", "8xA100-80G", "--mean-length", "600")
    assert found["model"]["parameters"] == 3_754_622_976
    assert found["gpus"] == {"name": "A100-80G", "count": 8, "memory_gib": 79.1}
    for phase in ("sample", "annotate", "update policy", "update critic"):
        parts = dict(found["memory_gib"][phase])
        assert parts.pop("when")
        assert parts.pop("total") == pytest.approx(sum(parts.values()), abs=0.01)
    assert found["seconds"]["step"] == pytest.approx(
        sum(x for name, x in found["seconds"].items() if name != "step"), abs=0.01
    )
    assert found["fits"] is False
    assert "memory.offload_optimizer=true" in found["advice"][-1]["settings"]
    assert found["larger_gpu"]["name"] == "H200"
    assert any("memory.shard=true divides them" in x for x in found["warnings"])
    assert any("--mean-length 600" in x for x in found["assumptions"])


def test_sharded_models_are_not_predicted():
    words = ("geometry.yaml", "memory.recompute_activations=true", "--gpus", "8xA100-80G")
    whole, sharded = numbers(*words), numbers(*words, "memory.shard=true")
    assert sharded["memory_gib"] == whole["memory_gib"]
    assert any("memory.shard: sharded models take less" in x for x in sharded["assumptions"])


def test_what_fits_no_gpu_is_told_what_would_take_less():
    code, said, _ = typed("geometry.yaml", "rollout.max_tokens=400000", "--gpus", "B200")
    assert code == 0
    assert "no GPU of the table fits it" in said
    assert "model.lora={}, model.freeze_vision=true, algorithm=grpo" in said


def test_a_method_without_a_critic():
    found = numbers("geometry.yaml", "algorithm=grpo", "rollout.samples=4", "--gpus", "H200")
    assert "update critic" not in found["memory_gib"]
    assert found["model"]["critic_parameters"] == 0
    assert found["model"]["reference"] is True


def test_a_text_model():
    found = numbers("geometry.yaml", "model.path=text", "--gpus", "L4")
    assert found["model"]["class"] == "Qwen2ForCausalLM"
    assert found["model"]["vision_parameters"] == 0
    assert found["fits"] is True


def test_the_recipe_that_comes_along():
    found = numbers("demo", "--gpus", "RTX-4090")
    assert found["fits"] is True
    assert found["steps"] == 40


def test_several_gpus_are_typed_with_torchrun():
    words = ("model.path=text", "--gpus", "2xL4")
    _, said, _ = typed("geometry.yaml", *words)
    command = "torchrun --nproc-per-node 2 --no-python segcredit train geometry.yaml"
    assert f"type   {command} model.path=text" in said


def test_the_hub_cannot_be_reached(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError("connection refused\nby everyone")

    shutil.rmtree(folder / "Qwen")
    monkeypatch.setattr("segcredit.models.loading.get_hf_file_metadata", unreachable)
    code, said, complained = typed("geometry.yaml", "--gpus", "H200")
    assert (code, said) == (2, "")
    assert complained.count("\n") == 1
    assert (
        "Qwen/Qwen2.5-VL-3B-Instruct is not a folder here, was not downloaded before" in complained
    )
    assert "cannot be reached (connection refused by everyone)" in complained
    assert "config.json" in complained
    assert "model.path=FOLDER" in complained


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("geometry.yaml", "--gpus", "A100"), "Did you mean A100-80G or A100-40G?"),
        (("geometri.yaml", "--gpus", "H200"), "no recipe 'geometri.yaml'"),
        (("geometry.yaml", "rollout.promts=3", "--gpus", "H200"), "Did you mean 'prompts'?"),
        (
            ("geometry.yaml", "model.path=/no/such/folder", "--gpus", "H200"),
            "there is no '/no/such/folder'",
        ),
        (("geometry.yaml", "--mean-length", "9999", "--gpus", "H200"), "--mean-length"),
        (
            ("geometry.yaml", "model.path=broken", "--gpus", "H200"),
            "the config.json of broken cannot be",
        ),
        (("geometry.yaml", "model.path=experts", "--gpus", "H200"), "mixture of experts"),
    ],
)
def test_mistakes_are_told_in_one_message(words: tuple[str, ...], said: str, folder: Path):
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text("{")
    (folder / "experts").mkdir()
    experts = {"model_type": "qwen2_moe", "num_hidden_layers": 2, "num_experts": 8}
    (folder / "experts" / "config.json").write_text(json.dumps(experts))
    code, out, complained = typed(*words)
    assert (code, out) == (2, "")
    assert complained.startswith("error: ")
    assert said in complained


def test_a_machine_without_gpus_asks_for_their_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, _, complained = typed("geometry.yaml")
    assert code == 2
    assert "--gpus 1xH200" in complained


def test_help_has_examples():
    code, said, _ = typed("--help")
    assert code == 0
    assert "segcredit plan geo3k/qwen2.5-vl-3b-sapo --gpus 1xH200" in said


@each(
    ("method", "settings", "said"),
    [
        ("vineppo", [], "continuations from prefixes, most of what is sampled"),
        ("dvo", ["rollout.prefixes=900"], "from prefixes, at most 900 prefixes per step, most"),
        ("spo_chain", [], "continuations from prefixes, most of what is sampled"),
        ("spo_tree", ["rollout.tree={}"], "as if each prompt had one response instead of a tree"),
        ("restem", ["rollout.samples=8"], "as if every response were used once"),
        ("dpo_positive", ["rollout.samples=8"], "as if every response were used once"),
        ("grpo", ["rollout.samples=8"], None),
    ],
)
def test_what_a_method_draws_beside_responses_is_said_not_to_count(
    method: str, settings: list[str], said: str | None
) -> None:
    words = ["geometry.yaml", f"algorithm={method}", *settings, "--gpus", "H200"]
    found = numbers(*words, "--prompt-tokens", "220")
    notes = [x for x in found["assumptions"] if x.startswith("not counted either: ")]
    assert len(notes) == (said is not None)
    assert all(said is not None and said in note for note in notes)
    assert found["model"]["reference"], "restem goes back to it"
