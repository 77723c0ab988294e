"""Runs with LoRA: they learn, go on where they were stopped, and leave an ordinary model."""

import copy
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_cli import run
from tiny_runs import assert_same_run, changed, metrics, write_recipe
from train.small import SMALL, after_warm_start, recipe
from train.test_train_invariance import collected, distance, gradients
from train.test_train_learning import MARGIN, ends
from train.test_train_resume import after_lines, finish, kill, make, undisturbed, while_saving

from segcredit.columns import LOGP_REF
from segcredit.config import parse_recipe
from segcredit.evaluate.checkpoint import evaluate_checkpoint
from segcredit.models import Policy
from segcredit.models.lora import CRITIC, POLICY, REFERENCE
from segcredit.train.build import build, make_plan
from segcredit.train.stages import stage_of
from segcredit.train.trainer import Trainer

LORA = {"rank": 4, "alpha": 8}
TINY = {**changed()["model"], "lora": LORA}


@pytest.mark.slow
@pytest.mark.parametrize("world", ["grid", "chains"])
def test_sapo_learns_with_adapters_alone(world: str, warm: Any) -> None:
    small = SMALL[world]
    made = recipe(
        small,
        {"name": "sapo", "kl": 0.001},
        model={"tiny": small.tiny, **small.sizes, "lora": {"rank": 8, "alpha": 16}},
        optimizer={"lr": 1e-2, "critic_lr": 1e-2},
    )
    base = Policy.from_pretrained(warm(world))
    state, found = after_warm_start(made, warm(world))
    first, last = ends(found)
    assert last > first + MARGIN, [x["accuracy"] for x in found]
    assert max(x["agreement/ratio_error"] for x in found) < 1e-4
    lora = state.policy.lora
    assert lora is not None
    assert (lora.names, state.providers[LOGP_REF].reference.adapter) == ([POLICY, CRITIC], None)
    trained = {name.replace(".base_layer", "") for name, _ in state.policy.model.named_parameters()}
    for name, x in base.model.named_parameters():
        assert name in trained
        where = name if name in dict(state.policy.model.named_parameters()) else None
        path, _, last_part = name.rpartition(".")
        own = state.policy.model.get_parameter(where or f"{path}.base_layer.{last_part}")
        assert torch.equal(own, x)


def lora_state(**memory: bool) -> Any:
    small = SMALL["chains"]
    made = recipe(
        small,
        {"name": "sapo", "kl": 0.01},
        model={"tiny": small.tiny, **small.sizes, "lora": LORA},
        rollout={"prompts": 24, "max_tokens": 16},
        update={"minibatches": 1},
        memory=memory,
    )
    state = build(make_plan(made))
    assert state.policy.lora is not None
    with torch.no_grad():
        for x in state.policy.trained().values():
            x.add_(0.1 * torch.randn(x.shape, generator=torch.manual_seed(1)))
    stage_of(state, made.stages[-1]).enter()
    torch.nn.init.normal_(
        state.learners["critic"].critic.head.weight, std=0.1, generator=torch.manual_seed(0)
    )
    return state


def test_optimizers_of_a_run_hold_adapters_alone() -> None:
    state = lora_state()
    lora, critic = state.policy.lora, state.learners["critic"].critic
    assert lora.names == [POLICY, CRITIC, REFERENCE]
    assert {id(x) for x in state.learners["policy"].optimizer.parameters} == {
        id(x) for x in lora.parameters(POLICY)
    }
    assert {id(x) for x in state.learners["critic"].optimizer.parameters} == {
        id(x) for x in [*lora.parameters(CRITIC), *critic.head.parameters()]
    }


@pytest.mark.parametrize("recompute", [False, True])
def test_out_of_memory_halves_the_micro_batches_and_keeps_the_gradient(
    recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = lora_state(recompute_activations=recompute)
    rollouts = collected(state)
    whole = gradients(copy.copy(state), rollouts, budget=10**6)
    forward = type(state.learners["critic"].critic).forward
    sizes: list[int] = []

    def limited(self: Any, given: Any) -> Any:
        sizes.append(len(given))
        found = forward(self, given)
        if len(given) > 8 and torch.is_grad_enabled():
            found.sum().backward()  # half a gradient is there already
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return found

    monkeypatch.setattr(type(state.learners["critic"].critic), "forward", limited)
    with pytest.warns(UserWarning, match=r"out of memory.*tokens_per_micro="):
        halved = gradients(state, rollouts, budget=4096)
    assert max(sizes) > 8 >= sizes[-1]
    assert distance(whole, halved) < 1e-5
    assert state.policy.lora.selected == POLICY


def test_recomputing_changes_no_update() -> None:
    plain = lora_state()
    rollouts = collected(plain)
    found = gradients(plain, rollouts, budget=512)
    again = gradients(lora_state(recompute_activations=True), rollouts, budget=512)
    assert distance(found, again) < 1e-5


@pytest.mark.slow
def test_killed_and_resumed_it_is_the_same_run(tmp_path: Path) -> None:
    """With a warm start, so that π_ref is an adapter of its own."""
    whole = undisturbed(make(tmp_path / "whole"), model=TINY)
    folder = make(tmp_path / "killed")
    write_recipe(folder, model=TINY)
    for moment in (after_lines(2), after_lines(6), while_saving("step-*"), after_lines(12)):
        kill(folder, moment, random.uniform(0.0, 0.03))
    finish(folder)
    assert_same_run(folder / "run", whole)
    last = folder / "run" / "checkpoints" / "step-000015"
    assert sorted(x.name for x in (last / "adapters").iterdir()) == [
        "critic",
        "policy",
        "reference",
    ]
    assert not (last / "critic").exists()
    assert not (last.parent / "reference").exists()
    assert any(line.get("kl", 0.0) for line in metrics(whole))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model on the disk."""
    folder = tmp_path_factory.mktemp("base")
    made = parse_recipe(changed())
    tiny = made.model
    plan = make_plan(parse_recipe(changed(reward="exact")))
    assert plan.world is not None
    assert tiny.tiny is not None
    tokenizer = plan.world.tokenizer()
    Policy.tiny(tiny.tiny, tokenizer, hidden=tiny.hidden, layers=1, heads=4).save(folder)
    return folder


def on_base(folder: Path, base: Path, **changes: Any) -> Path:
    given: dict[str, Any] = {
        "model": {"path": str(base), "lora": LORA},
        "stages": [{"kind": "optimize", "steps": 3}],
        "save__every": 1,
    }
    return write_recipe(folder, **(given | changes))


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on it, without a warm start: π_ref is the model itself."""
    folder = tmp_path_factory.mktemp("trained")
    done = run(folder, "train", on_base(folder, base), "--folder", "run")
    assert done.code == 0, done.complained
    return folder


def resumed(trained: Path, folder: Path, *overrides: str) -> Any:
    """Its copy, of which the last checkpoint is lost, goes on."""
    shutil.copytree(trained, folder, dirs_exist_ok=True)
    shutil.rmtree(folder / "run" / "checkpoints" / "step-000003")
    return run(folder, "train", "--resume", "run", *overrides)


@pytest.mark.slow
def test_a_run_without_a_warm_start_goes_on_the_same(trained: Path, tmp_path: Path) -> None:
    done = resumed(trained, tmp_path)
    assert done.code == 0, done.complained
    assert "Resuming after step 2 of 3." in done.said
    assert_same_run(tmp_path / "run", trained / "run")
    adapters = tmp_path / "run" / "checkpoints" / "step-000003" / "adapters"
    assert sorted(x.name for x in adapters.iterdir()) == ["critic", "policy"]


@pytest.mark.slow
def test_what_it_left_is_an_ordinary_model(trained: Path, base: Path) -> None:
    before = Policy.from_pretrained(base).model.state_dict()
    last = trained / "run" / "checkpoints" / "step-000003"
    after = Policy.from_pretrained(last / "policy").model.state_dict()
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert all(name.endswith("_proj.weight") for name in moved)
    measured = evaluate_checkpoint(str(trained / "run"), reward="exact", prompts=4, samples=1)
    assert len(measured.rows) == 8
    done = run(trained, "evaluate", "run", "--reward", "exact", "--prompts", "4")
    assert done.code == 0, done.complained


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "model.lora=null",
            r"was written with model.lora, so the run cannot be resumed without it",
        ),
        ("model.lora.rank=2", "rank 4 for 7 layers; model.lora sets rank 2 and 7 layers"),
        ("model.lora.targets=[q_proj]", "for 7 layers; model.lora sets rank 4 and 1 layers"),
    ],
)
def test_other_adapters_than_before_are_refused(
    trained: Path, tmp_path: Path, override: str, said: str
) -> None:
    done = resumed(trained, tmp_path, override)
    assert done.code == 2
    assert said in done.complained
    assert "Traceback" not in done.complained


def test_other_weights_than_before_are_refused(trained: Path, base: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    policy = Policy.from_pretrained(base)
    with torch.no_grad():
        policy.model.model.layers[0].self_attn.q_proj.weight.mul_(1.1)
    policy.save(other)
    done = resumed(trained, tmp_path / "on", f"model.path={other}")
    assert done.code == 2
    assert f"holds adapters for other base weights than those of {other}" in done.complained


@pytest.mark.slow
def test_the_trainer_in_python(base: Path, tmp_path: Path) -> None:
    tiny = changed(reward="exact")
    trainer = Trainer(
        {"path": str(base), "lora": {}},
        tiny["data"],
        reward="exact",
        steps=1,
        rollout=tiny["rollout"],
        update=tiny["update"],
    )
    result = trainer.train(tmp_path / "run")
    assert result.model is not None
    assert (result.model / "model.safetensors").is_file()
