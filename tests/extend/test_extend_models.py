"""A user's rollout engine and model family, exactly as docs/extending.md shows them."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from forked_cli import run
from test_extend_data import run_section, section

from segcredit.data.worlds import make_world
from segcredit.models import Critic, Policy, find_family
from segcredit.models.inputs import encode_all
from segcredit.models.lora import linear_layers
from segcredit.rollout import EngineSettings, engine_problem, make_engine
from segcredit.types import Sampling


@pytest.mark.slow
def test_an_engine(tmp_path: Path) -> None:
    runs = run_section("An engine", "my_engine", tmp_path)
    for folder in runs:
        config = yaml.safe_load((folder / "config.yaml").read_text())
        assert config["rollout"]["engine"] == "my_engine.py:TimedEngine"
    calls = [json.loads(x) for x in (tmp_path / "sampling.jsonl").read_text().splitlines()]
    assert len(calls) >= 2 * len(runs), "one call per step"
    assert all(x["tokens"] > 0 and x["seconds"] > 0 for x in calls)
    before = len(calls)
    spec = ("--engine", "my_engine.py:TimedEngine", "--prompts", 2, "--samples", 1)
    done = run(tmp_path, "evaluate", runs[0], *spec, "--trust-run")
    assert done.code == 0, done.complained
    assert len((tmp_path / "sampling.jsonl").read_text().splitlines()) > before


def test_mistakes_in_engines(tmp_path: Path) -> None:
    file = tmp_path / "engines.py"
    file.write_text(
        "class NoMethods:\n"
        "    @classmethod\n"
        "    def from_policy(cls, policy, settings):\n"
        "        return cls()\n"
        "    def sample(self): ...\n"
        "    @staticmethod\n"
        "    def problem():\n"
        "        return 'needs a quantum computer'\n"
        "class NoConstructor: ...\n"
    )
    policy = Policy.tiny("qwen2", make_world("derived_variables").tokenizer(), hidden=32)
    for name, message in (
        ("NoMethods", "sample, continue_from, load_weights, close; NoMethods has no continue_from"),
        ("NoConstructor", r"expected a class with from_policy\(policy, settings\)"),
        ("NoMethod", "has no rollout engine 'NoMethod'. Did you mean 'NoMethods'"),
    ):
        with pytest.raises(ValueError, match=message):
            make_engine(f"{file}:{name}", policy, EngineSettings())
    assert engine_problem(f"{file}:NoMethods") == "needs a quantum computer"
    assert engine_problem("hf") is None
    done = run(tmp_path, "train", "demo", "rollout.engine=vlm", "--check")
    assert done.code != 0
    assert "unknown rollout engine 'vlm'. Did you mean 'vllm'" in done.complained


@pytest.mark.slow
def test_a_family(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    runs = run_section("A model family", "my_family", tmp_path)
    for folder in runs:
        config = yaml.safe_load((folder / "config.yaml").read_text())
        assert config["model"]["family"] == "my_family.py:Llava"
    policy = max((runs[0] / "checkpoints").glob("step-*")) / "policy"
    assert json.loads((policy / "config.json").read_text())["model_type"] == "llava"
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    more = run(elsewhere, "train", "--resume", runs[0], "stages.1.steps=3", "--trust-run")
    assert more.code == 0, more.complained
    done = run(tmp_path, "evaluate", runs[0], "--prompts", 2, "--samples", 1, "--trust-run")
    assert done.code == 0, done.complained
    with pytest.raises(ValueError, match="LlavaProcessor fails on a blank image"):
        Policy.from_pretrained(policy)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "how many ?", "answer": "1"}\n')
    folder = ("evaluate", policy, "--data", "rows.jsonl", "--reward", "exact", "--samples", 1)
    done = run(tmp_path, *folder, "--max-tokens", 4, "--family", "my_family.py:Llava")
    assert done.code == 0, done.complained


def test_a_familys_model_is_sampled_and_scored_alike(tmp_path: Path) -> None:
    """With images, the trainer's log-probabilities are the sampler's, and the critic is a copy."""
    file = tmp_path / "my_family.py"
    file.write_text(section("A model family")["python"])
    world = make_world("shape_grid")
    spec = f"{file}:Llava"
    policy = Policy.tiny("llava", world.tokenizer(), 0, spec, hidden=32, layers=2, heads=4)
    assert policy.family.name == "llava"
    prompts = encode_all(policy.encode, world.prompts("train", 0, 3))
    assert all("pixel_values" in x.vision and len(x.positions) == 1 for x in prompts)
    counts = [int((x.tokens == policy.model.config.image_token_id).sum()) for x in prompts]
    assert counts == [16] * 3
    assert [policy.codec.count_tokens(x.prompt) for x in prompts] == [
        len(x.tokens) for x in prompts
    ]
    engine = make_engine("hf", policy, EngineSettings(rows=4))
    generator = torch.Generator().manual_seed(1)
    rollouts = engine.sample([*prompts, prompts[0]], Sampling(max_tokens=9), generator)
    image = policy.codec.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert not (rollouts.tokens[rollouts.mask] == image).any(), "never sampled"
    with torch.no_grad():
        logp, entropy = policy.score(rollouts, 1.0, with_entropy=True)
        critic = Critic.from_policy(policy)
        assert float(critic(rollouts).abs().max()) == 0.0
    assert entropy is not None
    assert rollouts.entropy is not None
    assert float((logp - rollouts.logp_old).abs().max()) < 1e-5
    assert float((entropy - rollouts.entropy).abs().max()) < 1e-5
    adapted = policy.with_lora(2, 2.0)
    assert adapted.lora is not None
    names = [name for name, _, _ in adapted.lora._pairs("policy")]
    assert names
    assert not any("vision_tower" in x for x in names)
    assert any("vision_tower" in x for x in linear_layers(policy.model))


def test_mistakes_in_families(tmp_path: Path) -> None:
    file = tmp_path / "families.py"
    file.write_text("class Mine: ...\n")
    policy = Policy.tiny("qwen2", make_world("derived_variables").tokenizer(), hidden=32)
    with pytest.raises(ValueError, match=r"expected a subclass of segcredit\.models\.Family"):
        find_family(policy.model.config, f"{file}:Mine")
    policy.save(tmp_path / "model")
    with pytest.raises(ValueError, match=r"for models of type qwen3_vl, qwen3_vl_moe; .*'qwen2'"):
        Policy.from_pretrained(tmp_path / "model", family="qwen3_vl")
    done = run(tmp_path, "train", "demo", "model.family=qwen3_vll", "--check")
    assert done.code != 0
    assert "unknown model family 'qwen3_vll'. Did you mean 'qwen3_vl'" in done.complained
