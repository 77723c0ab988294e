"""What changes when a run is resumed acts, or is refused before anything is written."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked_cli import Call, run
from tiny_runs import assert_same_run, metrics, write_recipe

from segcredit.config import parse_recipe
from segcredit.runlog.environment import describe_environment, environment_changes
from segcredit.runlog.storage import MANIFEST, seal
from segcredit.train.checkpoint import load_state
from segcredit.train.trainer import Trainer

STEPS: dict[str, Any] = {
    "stages": [
        {"kind": "warm_start", "steps": 2, "batch": 4, "lr": 1e-3, "beta2": 0.9},
        {"kind": "warm_start", "steps": 2, "batch": 4, "lr": 1e-3, "beta2": 0.8},
        {"kind": "pretrain_critic", "steps": 2},
        {"kind": "optimize", "steps": 3},
    ],
    "save": {"every": 1, "keep": 9},
    "evaluation": {"every": 0, "prompts": 2},
}
"""Two steps of each stage, and a checkpoint of each step: 1 and 2, 3 and 4, 5 and 6, 7 to 9."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    done = run(folder, "train", write_recipe(folder, **STEPS), "--folder", "run")
    assert done.code == 0, done.complained
    return folder / "run"


def stopped_at(step: int, whole: Path, folder: Path) -> Path:
    """A copy of the run that ended after this step."""
    write_recipe(folder, **STEPS)
    copy = shutil.copytree(whole, folder / "run")
    for later in range(step + 1, 10):
        shutil.rmtree(copy / "checkpoints" / f"step-{later:06d}")
    return copy


def resume(folder: Path, *overrides: str) -> Call:
    return run(folder, "train", "--resume", "run", *overrides)


def groups(run: Path, step: int, name: str) -> list[dict[str, Any]]:
    state = load_state(run / "checkpoints" / f"step-{step:06d}")
    return state["optimizers"][name]["adam"]["param_groups"]


# ── Settings that act ────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_settings_of_the_optimizers_act_within_a_stage(tmp_path: Path, whole: Path) -> None:
    copy = stopped_at(7, whole, tmp_path)
    call = resume(
        tmp_path,
        *("optimizer.lr=2e-4", "optimizer.critic_lr=3e-4", "optimizer.schedule=constant"),
        *("optimizer.beta1=0.7", "optimizer.beta2=0.6", "optimizer.eps=1e-5"),
        "optimizer.weight_decay=0.25",
    )
    assert call.code == 0, call.complained
    assert "Settings changed from this step on: optimizer.beta1, " in call.said
    last = [x for x in metrics(copy) if x["stage"] == "optimize"][1:]
    assert [x["policy/lr"] for x in last] == [2e-4] * 2
    assert [x["critic/lr"] for x in last] == [3e-4] * 2
    for name in ("policy", "critic"):
        matrices, vectors = groups(copy, 8, name)
        assert (matrices["betas"], matrices["eps"]) == ((0.7, 0.6), 1e-5)
        assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.25, 0.0)
        assert groups(copy, 7, name)[0]["betas"] == (0.9, 0.999)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "setting", "metric"),
    [
        (1, "stages.0.lr=5e-5", "policy/lr"),
        (3, "stages.1.lr=5e-5", "policy/lr"),
        (5, "stages.2.lr=5e-5", "critic/lr"),
        (5, "optimizer.critic_lr=5e-5", "critic/lr"),
    ],
)
def test_learning_rates_act_in_every_kind_of_stage(
    tmp_path: Path, whole: Path, step: int, setting: str, metric: str
) -> None:
    copy = stopped_at(step, whole, tmp_path)
    call = resume(tmp_path, setting)
    assert call.code == 0, call.complained
    (then,) = [x[metric] for x in metrics(whole) if x["step"] == step + 1 and metric in x]
    (now,) = [x[metric] for x in metrics(copy) if x["step"] == step + 1 and metric in x]
    assert now == pytest.approx(then * 0.05)


@pytest.mark.slow
def test_a_second_warm_start_has_its_own_beta(whole: Path) -> None:
    assert groups(whole, 2, "policy")[0]["betas"] == (0.9, 0.9)
    assert groups(whole, 4, "policy")[0]["betas"] == (0.9, 0.8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "said", "lower"),
    [
        (["stages.1.lr=1e36", "stages.1.steps=12"], "policy's gradient was NaN", "stages.1.lr"),
        (
            ["optimizer.lr=1e36", "update.minibatches=6"],
            "policy's gradient was NaN",
            "optimizer.lr",
        ),
        (["optimizer.lr=1e36", "update.minibatches=1"], "logits are not finite", "optimizer.lr"),
    ],
)
def test_the_advice_on_weights_that_overflow_works(
    tmp_path: Path, overrides: list[str], said: str, lower: str
) -> None:
    """A rate that breaks the model, and then what the message says, word for word."""
    recipe = write_recipe(tmp_path, **STEPS, optimizer__schedule="constant")
    call = run(tmp_path, "train", recipe, "--folder", "run", *overrides)
    moved = 0
    for _ in range(4):
        if call.code == 0:
            break
        assert said in call.complained, call.complained
        found = re.search(
            rf"run: segcredit (train --resume \S+ --trust-run {lower}=\S+)\n$", call.complained
        )
        assert found is not None, call.complained
        if broken := re.search(r"(\S+) was saved with these weights: move it", call.complained):
            shutil.move(broken[1], tmp_path / f"moved-{moved}")
            moved += 1
        *command, setting = shlex.split(found[1])
        assert setting == f"{lower}=1e+35" or moved
        call = run(tmp_path, *command, f"{lower}=1e-4")
    assert call.code == 0, call.complained
    assert moved <= 1
    done = [x for x in metrics(tmp_path / "run") if "policy/refused" in x]
    assert {x["policy/refused"] for x in done} == {0.0}
    assert done[-1]["step"] == sum(
        x["steps"] for x in yaml.safe_load((tmp_path / "run/config.yaml").read_text())["stages"]
    )


def test_nothing_is_saved_while_gradients_are_not_finite(tmp_path: Path) -> None:
    """Or the weights before, which may be good, would be deleted as too old."""
    recipe = write_recipe(tmp_path, **STEPS)
    changes = ["stages.1.lr=1e36", "stages.1.steps=12", "save.keep=2"]
    call = run(tmp_path, "train", recipe, "--folder", "run", *changes)
    assert call.code == 2, call.said
    saved = sorted(x.name for x in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert saved == ["step-000002", "step-000003"]


# ── Settings that are refused ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("step", "override", "said"),
    [
        (7, "model.layers=2", "model.layers was 1, and is 2: "),
        (7, "stages.0.lr=1e-5", "stages.0.lr: that stage is finished"),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in (
                (
                    7,
                    "model.hidden=64",
                    "model.hidden was 32, and is 64: weights and optimizer state in",
                ),
                (7, "model.heads=2", "model.heads was 4, and is 2: "),
                (7, "model.kv_heads=4", "model.kv_heads was None, and is 4: "),
                (7, "model.tiny=llama", "model.tiny was qwen2, and is llama: "),
                (7, "model.freeze_vision=true", "model.freeze_vision was False, and is True: "),
                (7, "stages.1.steps=9", "stages.1.steps: that stage is finished"),
                (
                    7,
                    "stages.3.kind=pretrain_critic",
                    "stages.3 is no longer optimize, but it has begun",
                ),
                (
                    8,
                    "stages.3.steps=1",
                    "stages.3.steps: expected at least 2, the steps of the stage that",
                ),
                (7, "data.settings.modulus=11", "make another vocabulary than that of"),
                (
                    9,
                    "optimizer.lr=1e-5",
                    "optimizer.lr: all 9 steps are done. To train on, also set stage",
                ),
            )
        ),
    ],
)
def test_settings_without_effect_are_refused_and_nothing_is_changed(
    tmp_path: Path, whole: Path, step: int, override: str, said: str
) -> None:
    copy = stopped_at(step, whole, tmp_path)
    before = {x: x.read_bytes() for x in copy.rglob("*") if x.is_file() and x.name != ".lock"}
    call = resume(tmp_path, override)
    assert call.code == 2, call.said
    assert said in call.complained, call.complained
    assert "Traceback" not in call.complained
    after = {x: x.read_bytes() for x in copy.rglob("*") if x.is_file() and x.name != ".lock"}
    assert after == before
    if override == "model.hidden=64":
        assert resume(tmp_path).code == 0
        assert_same_run(copy, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "said"),
    [("ppo", "this algorithm needs a critic"), ("single_stream_spo", "tracks a value for every")],
)
def test_a_method_whose_parts_were_never_made_is_refused(
    tmp_path: Path, algorithm: str, said: str
) -> None:
    recipe = write_recipe(
        tmp_path,
        algorithm="rloo",
        rollout={"prompts": 4, "samples": 2, "max_tokens": 8},
        stages=[{"kind": "warm_start", "steps": 1}, {"kind": "optimize", "steps": 2}],
        data__size=12,
        save={"every": 1, "keep": 2},
        evaluation={"every": 0, "prompts": 2},
    )
    assert run(tmp_path, "train", recipe, "--folder", "run").code == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000003")
    call = resume(tmp_path, f"algorithm={algorithm}", "rollout.samples=1")
    assert call.code == 2, call.said
    assert said in call.complained, call.complained
    assert resume(tmp_path).code == 0


@pytest.mark.slow
def test_a_reference_that_was_never_made_is_refused_and_the_run_can_go_on(
    tmp_path: Path, whole: Path
) -> None:
    copy = stopped_at(7, whole, tmp_path)
    shutil.rmtree(copy / "checkpoints" / "reference")
    call = resume(tmp_path)
    assert call.code == 2, call.said
    assert "put the folder back if it was moved" in call.complained, call.complained
    assert "cannot be resumed" not in call.complained
    assert resume(tmp_path, "algorithm.kl=0").code == 0


def test_the_advice_to_start_on_the_trained_policy_works(tmp_path: Path, whole: Path) -> None:
    """The advice also works for a model made in code: it replaces model.tiny by model.path."""
    stopped_at(7, whole, tmp_path)
    call = resume(tmp_path, "model.hidden=64")
    advice = re.search(r"segcredit (train .*) …", call.complained)
    assert advice is not None, call.complained
    started = run(tmp_path, *shlex.split(advice[1]), "--check")
    assert started.code == 0, started.complained


@pytest.mark.slow
def test_a_refused_resume_leaves_the_settings_as_they_were(tmp_path: Path, whole: Path) -> None:
    """Refused late: the reference model is damaged, and metrics.jsonl was changed."""
    copy = stopped_at(7, whole, tmp_path)
    config = (copy / "config.yaml").read_bytes()
    metrics_file, reference = copy / "metrics.jsonl", copy / "checkpoints" / "reference"
    for file, change in (
        (reference / "model.safetensors", lambda x: x[:-1]),
        (metrics_file, lambda x: b" " + x),
    ):
        kept = file.read_bytes()
        file.write_bytes(change(kept))
        call = resume(tmp_path, "optimizer.lr=1e-5", "save.every=3")
        assert call.code == 2, call.said
        assert (copy / "config.yaml").read_bytes() == config
        file.write_bytes(kept)
    assert resume(tmp_path).code == 0
    assert_same_run(copy, whole)


@pytest.mark.slow
def test_a_checkpoint_cannot_bring_another_chat_template(tmp_path: Path, whole: Path) -> None:
    """All rows were checked with the model's own; one that never ends would hang the run."""
    copy = stopped_at(7, whole, tmp_path)
    config = (copy / "config.yaml").read_bytes()
    last = max((copy / "checkpoints").glob("step-*"))
    template = last / "policy" / "chat_template.jinja"
    kept = template.read_text()
    template.write_text(
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    )
    (last / MANIFEST).unlink()
    seal(last)
    call = resume(tmp_path)
    assert call.code == 2, call.said
    assert "expected the chat template" in call.complained
    assert (copy / "config.yaml").read_bytes() == config
    template.write_text(kept)
    (last / MANIFEST).unlink()
    seal(last)
    assert resume(tmp_path).code == 0
    assert_same_run(copy, whole)


# ── Files of the run directory that are not as a run writes them ─────────────────────────────────


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("environment.json", "{"),
        ("best.json", '{"step": -1, "metric": "sampled", "value": 1}'),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in (
                ("environment.json", '{"resumed": 5}'),
                ("environment.json", '{"packages": 5}'),
                ("best.json", "{"),
                ("best.json", '{"step": 1e999, "metric": "sampled", "value": 1}'),
            )
        ),
    ],
)
def test_a_damaged_record_is_refused_before_anything_changes(
    tmp_path: Path, whole: Path, name: str, content: str
) -> None:
    copy = stopped_at(8, whole, tmp_path)
    (copy / name).write_text(content)
    before = {x: x.read_bytes() for x in copy.rglob("*") if x.is_file() and x.name != ".lock"}
    call = resume(tmp_path, "optimizer.lr=1e-4")
    assert call.code == 2
    assert name in call.complained
    assert {x: x.read_bytes() for x in before} == before


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl"])
def test_nothing_is_written_through_a_link(tmp_path: Path, whole: Path, name: str) -> None:
    """A run directory of another user could name any file of this one."""
    copy = stopped_at(8, whole, tmp_path)
    mine = tmp_path / "mine"
    mine.write_bytes((copy / name).read_bytes() + b"mine\n")
    before = mine.read_bytes()
    (copy / name).unlink()
    (copy / name).symlink_to(mine)
    call = resume(tmp_path)
    assert call.code == 2
    assert "got a link" in call.complained
    assert mine.read_bytes() == before


# ── Another environment ──────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_a_changed_environment_is_said_once_and_recorded(tmp_path: Path, whole: Path) -> None:
    copy = stopped_at(8, whole, tmp_path)
    file = copy / "environment.json"
    then = json.loads(file.read_text())
    now = dict(then["packages"])
    then["packages"] |= {"torch": "0.1", "transformers": "0.2", "segcredit": "0.0"}
    then["git"] = {"commit": "f" * 40, "dirty": False}
    file.write_text(json.dumps(then))
    call = resume(tmp_path)
    assert call.code == 0, call.complained
    (line,) = [x for x in call.said.splitlines() if "another environment" in x]
    for name in ("torch", "transformers", "segcredit"):
        assert f"{name} {then['packages'][name]} → {now[name]}" in line
    assert "segcredit's commit ffffffffffff → " in line
    recorded = json.loads(file.read_text())
    (resumed,) = recorded.pop("resumed")
    assert recorded == then, "how it began stays"
    assert (resumed["step"], resumed["packages"]) == (8, now)
    call = resume(tmp_path)
    assert "another environment" not in call.said
    assert len(json.loads(file.read_text())["resumed"]) == 1


def test_in_python_it_is_a_warning(tmp_path: Path, whole: Path) -> None:
    copy = stopped_at(9, whole, tmp_path)
    file = copy / "environment.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"python": "3.1"}))
    config = yaml.safe_load((copy / "config.yaml").read_text()) | {
        "reward": f"{tmp_path}/reward.py:by_length"
    }
    (copy / "config.yaml").write_text(yaml.safe_dump(config))
    trainer = Trainer.from_recipe(parse_recipe(config))
    with pytest.warns(UserWarning, match=r"resumed in another environment: python 3.1 → 3"):
        trainer.train(copy, resume=True)


def test_what_counts_as_a_change() -> None:
    now = describe_environment([])
    assert environment_changes(now, now) == []
    assert environment_changes({}, now) == [], "a run of which nothing was recorded"
    then = {**now, "packages": {"torch": "1", "gone": "2"}, "git": None}
    torch, commit = environment_changes(then, {**now, "git": {"commit": "a" * 40, "dirty": True}})
    assert torch == f"torch 1 → {now['packages']['torch']}"
    assert commit == "segcredit's commit none (installed) → aaaaaaaaaaaa with changes"
