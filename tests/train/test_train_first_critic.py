"""A critic that one run saved is where another's begins."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import REWARD, assert_same_run, changed

from segcredit.config import Optimize, RecipeError, parse_recipe
from segcredit.models import Critic
from segcredit.train import stages, step
from segcredit.train.build import build, make_plan
from segcredit.train.collect import Context, collect
from segcredit.train.metrics import RolloutBatch
from segcredit.train.optim import Optimizer
from segcredit.train.stages import stage_of
from segcredit.train.trainer import Trainer
from segcredit.types import Prompt

PRETRAINED = [
    {"kind": "warm_start", "steps": 2, "batch": 4},
    {"kind": "pretrain_critic", "steps": 3, "lr": 2e-3},
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last checkpoint of a run that pretrains a critic and nothing else."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "reward.py").write_text(REWARD)
    recipe = changed(stages=PRETRAINED, reward=f"{folder}/reward.py:by_length")
    Trainer.from_recipe(parse_recipe(recipe)).train(folder / "run")
    return folder / "run" / "checkpoints" / "step-000005"


def rest(saved: Path, **changes: Any) -> dict[str, Any]:
    """The recipe of a run that begins there."""
    model = {"path": str(saved / "policy"), "critic": str(saved / "critic")}
    reward = f"{saved.parents[2]}/reward.py:by_length"
    stages = [{"kind": "optimize", "steps": 4}]
    return changed(**{"model": model, "stages": stages, "reward": reward} | changes)


@pytest.mark.slow
def test_it_begins_where_the_other_ended(saved: Path) -> None:
    state = build(make_plan(parse_recipe(rest(saved))))
    stage = state.recipe.stages[0]
    assert isinstance(stage, Optimize)
    stage_of(state, stage).enter()
    expected = Critic.from_saved(saved / "critic").state_dict()
    assert float(expected["head.weight"].abs().sum()) > 0, "it has learnt something"
    for name, x in state.learners["critic"].critic.state_dict().items():
        assert torch.equal(x, expected[name]), name
    lying = {x.data_ptr() for x in state.learners["critic"].critic.parameters()}
    assert not lying & {x.data_ptr() for x in state.policy.model.parameters()}


@pytest.mark.slow
def test_a_resumed_run_takes_its_own(saved: Path, tmp_path: Path) -> None:
    recipe = parse_recipe(rest(saved))
    Trainer.from_recipe(recipe).train(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-000004")
    Trainer.from_recipe(recipe).train(tmp_path / "cut", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_it_was_trained_on_prompts_of_its_own(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, set[str]] = {}

    def note(context: Context, prompts: list[Prompt], *others: Any, **more: Any) -> RolloutBatch:
        kind = context.state.recipe.stages[context.state.stage].kind
        asked.setdefault(kind, set()).update(x.id for x in prompts)
        return collect(context, prompts, *others, **more)

    for module in (stages, step):
        monkeypatch.setattr(module, "collect", note)
    shown = [{"kind": "pretrain_critic", "steps": 2}, {"kind": "optimize", "steps": 2}]
    state = build(make_plan(parse_recipe(rest(saved, stages=shown))))
    for number, stage in enumerate(state.recipe.stages):
        state.stage, state.stage_step = number, 0
        stage_of(state, stage).enter()
        for _ in range(stage.steps):
            stage_of(state, stage).step()
            state.stage_step += 1
    assert [len(x) for x in asked.values()] == [16, 16], "never the same twice"
    assert not asked["pretrain_critic"] & asked["optimize"]


def test_its_batches_and_its_rate_are_the_stages_own(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []

    def note(context: Context, prompts: list[Prompt], *others: Any, **more: Any) -> RolloutBatch:
        drawn.append(len(prompts))
        return collect(context, prompts, *others, **more)

    monkeypatch.setattr(stages, "collect", note)
    stepped: list[str] = []
    original = Optimizer.step

    def count(optimizer: Optimizer, factor: float) -> dict[str, float]:
        stepped.append(optimizer.name)
        return original(optimizer, factor)

    monkeypatch.setattr(Optimizer, "step", count)
    shown = {"kind": "pretrain_critic", "steps": 4, "lr": 1e-3, "schedule": "linear", "prompts": 5}
    shown["minibatches"] = 3
    state = build(make_plan(parse_recipe(rest(saved, stages=[shown]))))
    (stage,) = state.recipe.stages
    stage_of(state, stage).enter()
    rates = []
    for _ in range(stage.steps):
        metrics, _ = stage_of(state, stage).step()
        rates.append(metrics["critic/lr"])
        state.stage_step += 1
    assert drawn == [5] * 4
    assert stepped == ["critic"] * 3 * 4
    assert rates == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])


def test_a_head_that_was_cut_off_is_told_before_a_model_loads(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "critic", tmp_path / "critic")
    head = tmp_path / "critic" / "value_head.safetensors"
    head.write_bytes(head.read_bytes()[:-4])
    with pytest.raises(RecipeError, match=r"model\.critic: .*is damaged or was cut off"):
        make_plan(parse_recipe(rest(saved, model__critic=str(tmp_path / "critic"))))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"model__critic": "nowhere"},
            "model.critic: expected a folder that a critic was saved to",
        ),
        ({"algorithm": "grpo", "rollout__samples": 2}, "grpo has no critic: remove it"),
        ({"model__lora": {"rank": 2}}, "model.critic is a complete critic, but with model.lora"),
    ],
)
def test_what_is_none_is_told_before_a_model_loads(
    changes: dict[str, Any], expected: str, saved: Path
) -> None:
    with pytest.raises(RecipeError) as error:
        make_plan(parse_recipe(rest(saved, **changes)))
    assert expected in str(error.value)


def test_a_policys_folder_is_no_critics(saved: Path) -> None:
    with pytest.raises(RecipeError, match=r"has no value_head\.safetensors"):
        make_plan(parse_recipe(rest(saved, model__critic=str(saved / "policy"))))


def test_a_critic_for_other_tokens_is_refused(saved: Path) -> None:
    model = {"tiny": "qwen2", "hidden": 32, "layers": 1, "heads": 4}
    other = {"given": 2, "derived": 3, "needed": [1, 2], "modulus": 11}
    recipe = changed(
        model={**model, "critic": str(saved / "critic")},
        data={"world": "derived_variables", "settings": other},
        reward=f"{saved.parents[2]}/reward.py:by_length",
    )
    with pytest.raises(RecipeError, match=r"is a critic for another policy: its vocab_size is"):
        make_plan(parse_recipe(recipe))
