"""Moments of eight bits: they learn, rest, are saved and go on, and take a quarter of the room."""

import copy
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forked_cli import run
from plan.small_models import batch_for, job_for, small_policy
from tiny_runs import assert_same_run, changed, write_recipe
from torch import nn

from segcredit.config import OptimizerSettings, RecipeError, parse_recipe
from segcredit.installing import install_command
from segcredit.plan.memory import memory
from segcredit.runlog.storage import load_state, save_state
from segcredit.train import optim as adam
from segcredit.train.build import make_plan
from segcredit.train.optim import LIBRARY, Optimizer, missing_requirement

EIGHT = OptimizerSettings(kind="adamw_8bit", weight_decay=0.1)
installed = pytest.mark.skipif(
    missing_requirement("adamw_8bit") is not None, reason=f"needs {LIBRARY}"
)


def layers(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Two matrices of eight bits; vectors and the last matrix are too small."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 2)
    ).to(dtype)


def task(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(256, 64, generator=generator)
    return x.to(dtype), torch.stack([x[:, 0] * x[:, 1], x[:, 2].abs()], dim=1).to(dtype)


def trained(model: nn.Module, optimizer: Optimizer, steps: int) -> list[float]:
    """The loss before every step."""
    x, y = task(next(model.parameters()).dtype)
    found = []
    for _ in range(steps):
        loss = (model(x) - y).float().square().mean()
        found.append(loss.item())
        with optimizer.on_device():
            loss.backward()
            optimizer.step()
    return found


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [x.detach().clone() for x in model.parameters()]


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(map(torch.equal, weights(a), weights(b)))


@installed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_learns_as_adamw_does(dtype: torch.dtype) -> None:
    ends = {}
    for kind in ("adamw", "adamw_8bit"):
        model = layers(dtype)
        settings = EIGHT.model_copy(update={"kind": kind})
        losses = trained(model, Optimizer("policy", model, 3e-3, settings), 60)
        assert losses[-1] < losses[0] / 3
        ends[kind] = losses[-1]
    assert ends["adamw_8bit"] == pytest.approx(ends["adamw"], rel=0.2)
    assert ends["adamw_8bit"] != ends["adamw"]


@installed
@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_and_loaded_it_goes_on_bit_for_bit(
    tmp_path: Path, dtype: torch.dtype, offload: bool
) -> None:
    model = layers(dtype)
    optimizer = Optimizer("policy", model, 3e-3, EIGHT, offload)
    trained(model, optimizer, 5)
    kinds = {x.dtype for each in optimizer._adam.state.values() for x in tensors(each)}
    assert torch.uint8 in kinds
    save_state(tmp_path, optimizer.state())
    other = copy.deepcopy(model)
    for x in other.parameters():
        x._post_accumulate_grad_hooks = None  # type: ignore[attr-defined]
    loaded = Optimizer("policy", other, 3e-3, EIGHT, offload)
    loaded.load(load_state(tmp_path))
    assert trained(model, optimizer, 5) == trained(other, loaded, 5)
    assert same(model, other)
    for a, b in zip(optimizer._adam.state.values(), loaded._adam.state.values(), strict=True):
        assert all(map(torch.equal, tensors(a), tensors(b)))


def tensors(state: dict[str, object]) -> list[torch.Tensor]:
    return [x for x in state.values() if isinstance(x, torch.Tensor)]


@installed
def test_offloading_changes_nothing() -> None:
    here, away = layers(), layers()
    trained(here, Optimizer("policy", here, 3e-3, EIGHT), 4)
    trained(away, Optimizer("policy", away, 3e-3, EIGHT, offload=True), 4)
    assert same(here, away)


@installed
def test_a_run_that_goes_on_is_the_run_that_was_never_stopped(tmp_path: Path) -> None:
    recipe = write_recipe(
        tmp_path,
        optimizer__kind="adamw_8bit",
        model__hidden=64,
        save__every=1,
        save__keep=99,
        stages=[{"kind": "warm_start", "steps": 2, "batch": 4}, {"kind": "optimize", "steps": 3}],
    )
    done = run(tmp_path, "train", recipe, "--folder", "whole")
    assert done.code == 0, done.complained
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    for step in (4, 5):
        shutil.rmtree(tmp_path / "again" / "checkpoints" / f"step-{step:06d}")
    done = run(tmp_path, "train", "--resume", "again")
    assert done.code == 0, done.complained
    assert_same_run(tmp_path / "whole", tmp_path / "again")


@installed
@pytest.mark.parametrize("half", [True, False])
def test_the_plan_counts_them(half: bool) -> None:
    policy = small_policy("qwen2", half, recompute=False)
    job = job_for(policy, batch_for(policy, "qwen2", 2), half=half, critic=False, eight_bit=True)
    optimizer = Optimizer("policy", policy.model, 1e-6, EIGHT)
    for x in optimizer.parameters:
        x.grad = torch.ones_like(x)
    optimizer.step()
    held = sum(
        x.nbytes
        for each in optimizer._adam.state.values()
        for name, x in each.items()
        if isinstance(x, torch.Tensor) and not name.startswith("qmap")  # one, shared by all
    )
    assert held == memory(job)["annotate"].parts["moments"]
    assert held < 0.4 * memory(replace(job, eight_bit=False))["annotate"].parts["moments"]


def test_without_the_library_the_recipe_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adam, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"optimizer.kind: adamw_8bit needs bitsandbytes\. Type:"):
        make_plan(parse_recipe(changed(optimizer__kind="adamw_8bit", reward="exact")))
    with pytest.raises(ValueError, match=re.escape(install_command("8bit"))):
        Optimizer("policy", layers(), 1e-3, EIGHT)
