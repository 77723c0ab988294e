"""Models divided among processes (memory.shard): the run of one process, saved and resumed by any
number, whole whoever is killed."""

import errno
import json
import random
import shutil
import signal
import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from each import each
from forked_cli import run, run_several, several
from safetensors.torch import load_file
from tiny_policies import fresh_policy, picture, world
from tiny_runs import metrics, write_recipe
from train.small import SMALL, recipe

from segcredit.config import RecipeError
from segcredit.runlog.folder import later_than
from segcredit.runlog.records import read_rollouts
from segcredit.train import checkpoint
from segcredit.train.build import build, make_plan
from segcredit.train.checkpoint import CheckpointError, find_latest
from segcredit.train.collect import Context, collect
from segcredit.train.distributed import CollectiveWrite, Parallel, _columns
from segcredit.train.metrics import Metrics
from segcredit.train.stages import next_prompts, stage_of
from segcredit.train.state import State
from segcredit.train.step import update

TOLERANCE = 1e-5
SHORT: dict[str, Any] = {
    "stages": [
        {"kind": "warm_start", "steps": 2, "batch": 4},
        {"kind": "pretrain_critic", "steps": 2},
        {"kind": "optimize", "steps": 4},
    ],
    "rollout__prompts": 9,
    "rollout__max_tokens": 11,  # rewards of truncated responses, too, differ from the others'
    "update__tokens_per_micro": 150,  # several micro-batches, and not as many for everyone
    "optimizer__eps": 1e-3,  # or weights without a gradient would go where rounding sends them
    "evaluation": {"prompts": 2, "every": 0, "greedy": False, "watch": 1},
    "save__every": 3,
    "save__keep": 9,
}


def assert_close(one: Path, other: Path) -> None:
    """What both measured in every step, and the weights they ended with."""
    for mine, its in zip(metrics(one), metrics(other), strict=True):
        assert mine.keys() == its.keys(), mine.keys() ^ its.keys()
        if mine["stage"] == "warning":
            assert mine == its
            continue
        assert mine.pop("stage") == its.pop("stage")
        assert its == pytest.approx(mine, rel=TOLERANCE, abs=TOLERANCE)
    last = find_latest(one / "checkpoints").path
    assert last is not None
    files = sorted(last.glob("*/*.safetensors"))
    assert {"policy", "critic"} >= {x.parent.name for x in files} >= {"policy"}
    for file in files:
        ours, theirs = load_file(file), load_file(other / file.relative_to(one))
        assert ours.keys() == theirs.keys()
        for name, x in ours.items():
            difference = float((x - theirs[name]).float().norm())
            assert difference <= TOLERANCE * float(x.float().norm()), (file, name)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes that nobody disturbed."""
    folder = tmp_path_factory.mktemp("two")
    run_several(
        folder, 2, "train", write_recipe(folder, **SHORT), "--folder", "run", "memory.shard=true"
    )
    return folder / "run"


@pytest.mark.slow
def test_two_make_the_run_of_one(tmp_path: Path, two: Path) -> None:
    done = run(tmp_path, "train", write_recipe(tmp_path, **SHORT), "--folder", "run")
    assert done.code == 0, done.complained
    assert_close(tmp_path / "run", two)
    moved = [x["policy/grad_norm"] for x in metrics(two) if "policy/grad_norm" in x]
    moved += [x["critic/grad_norm"] for x in metrics(two) if "critic/grad_norm" in x]
    assert min(moved) > 0.0
    for file in sorted((two / "rollouts").iterdir()):
        ours, theirs = (read_rollouts(x / "rollouts" / file.name) for x in (tmp_path / "run", two))
        for mine, its in zip(ours, theirs, strict=True):
            assert its["ratio"] == pytest.approx(mine["ratio"], rel=1e-4)


def test_each_saves_its_half_of_the_optimizers(two: Path) -> None:
    last = find_latest(two / "checkpoints").path
    assert last is not None
    for name in ("policy", "critic"):
        whole = sum(x.stat().st_size for x in (last / name).glob("*.safetensors"))
        for part in (0, 1):  # two moments of half the weights each; the names take their place
            file = last / f"{name}-optimizer-{part:05d}-of-00002.safetensors"
            assert file.stat().st_size == pytest.approx(whole, rel=0.2)
    assert (last / "state.safetensors").stat().st_size < 1000


def mixed_data(folder: Path) -> dict[str, Any]:
    """A model whose head is its embedding, and prompts of which some have no picture."""
    policy = fresh_policy("qwen2_5_vl")
    config = policy.model.config
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = True
    policy.model.tie_weights()
    policy.save(folder / "model")
    (folder / "picture.png").write_bytes(picture(56, 84))
    asked = world("qwen2_5_vl").prompts("train", 0, 1)[0].messages[-1]["content"]
    words = asked.replace("<image>", "")
    rows = [
        {"prompt": f"<image>{words}", "images": [str(folder / "picture.png")], "answer": "1"}
        if i % 3 == 0
        else {"prompt": words[: 20 + 9 * i], "answer": "1"}
        for i in range(9)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {
        "model": {"path": str(folder / "model")},
        "data": {"train": [str(folder / "rows.jsonl")]},
        "stages": [{"kind": "optimize", "steps": 2}],
        "update__tokens_per_micro": 1,
    }


@pytest.mark.slow
def test_a_vision_model_some_of_whose_prompts_have_pictures(tmp_path: Path) -> None:
    """With all that saves memory: recomputed activations, moments in main memory."""
    made = write_recipe(tmp_path, **{**SHORT, **mixed_data(tmp_path)})
    run_several(tmp_path, 1, "train", made, "--folder", "one", "memory.shard=true")
    saving = ["memory.recompute_activations=true", "memory.offload_optimizer=true"]
    run_several(tmp_path, 2, "train", made, "--folder", "two", "memory.shard=true", *saving)
    assert_close(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_responses_that_share_prompts(tmp_path: Path) -> None:
    group = {"algorithm": "grpo", "rollout__prompts": 3, "rollout__samples": 3}
    made = write_recipe(tmp_path, **{**SHORT, **group, "stages": SHORT["stages"][::2]})
    run_several(tmp_path, 1, "train", made, "--folder", "one", "memory.shard=true")
    run_several(tmp_path, 2, "train", made, "--folder", "two", "memory.shard=true")
    assert_close(tmp_path / "one", tmp_path / "two")


def begun(whole: Path, to: Path, step: int) -> Path:
    """A copy of a run that ended after this step."""
    shutil.copytree(whole, to)
    for path in later_than(to / "checkpoints", step):
        shutil.rmtree(path)
    assert find_latest(to / "checkpoints").path == to / "checkpoints" / f"step-{step:06d}"
    return to


@pytest.mark.slow
@pytest.mark.parametrize(("size", "settings"), [(1, ()), (4, ()), (2, ("memory.shard=false",))])
def test_saved_by_two_any_number_goes_on(
    tmp_path: Path, two: Path, size: int, settings: tuple[str, ...]
) -> None:
    (tmp_path / "reward.py").write_bytes((two.parent / "reward.py").read_bytes())
    begun(two, tmp_path / "run", 6)
    run_several(tmp_path, size, "train", "--resume", "run", *settings)
    assert_close(two, tmp_path / "run")


@pytest.mark.slow
def test_saved_by_one_three_go_on_in_half_precision(tmp_path: Path, two: Path) -> None:
    """Float32 originals are rows too, whoever wrote them."""
    model = find_latest(two / "checkpoints").path
    assert model is not None
    half = {**SHORT, "model": {"path": str(model / "policy"), "dtype": "bfloat16"}}
    made = write_recipe(tmp_path, **half)
    run_several(tmp_path, 1, "train", made, "--folder", "one")
    begun(tmp_path / "one", tmp_path / "three", 6)
    run_several(tmp_path, 3, "train", "--resume", "three", "memory.shard=true")
    assert_close(tmp_path / "one", tmp_path / "three")


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_killed_while_it_saves(tmp_path: Path, two: Path, victim: int) -> None:
    (tmp_path / "reward.py").write_bytes((two.parent / "reward.py").read_bytes())
    place = begun(two, tmp_path / "run", 6) / "checkpoints"
    calls = several(tmp_path, 2, "train", "--resume", "run")
    saving = ".tmp-step-*/*"
    assert calls[victim].wait_until(lambda: any(place.glob(saving))), calls[0].complained
    time.sleep(random.uniform(0.0, 0.02))
    calls[victim].signal(signal.SIGKILL)
    assert calls[victim].wait() == -signal.SIGKILL
    calls[1 - victim].wait()  # it cannot go on alone
    found = find_latest(place)
    assert found.path is not None
    assert found.path.name in ("step-000006", "step-000008")
    assert found.refused == []
    run_several(tmp_path, 2, "train", "--resume", "run")
    assert_close(two, tmp_path / "run")


@dataclass(frozen=True)
class Imagined(Parallel):
    """One of two processes; what the other one says is given."""

    size: int = 2
    others: list[Any] = field(default_factory=list)

    def gather(self, items: Any) -> list[Any]:
        return [*items, self.others.pop(0)] if self.others else [*items]

    def share(self, item: Any) -> Any:
        return item

    def add(self, values: Any) -> Any:
        return values

    def add_gradients(self, parameters: Any) -> None: ...

    def maximum(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_a_full_disk_of_another_process_is_everyones(tmp_path: Path) -> None:
    def write(place: Path, rank: int = 0) -> None:
        told = (1, errno.ENOSPC, "No space left on device")
        with CollectiveWrite(Imagined(rank, others=[told]), place) as together:
            together.write(lambda: (together.place / "part").write_text("mine"))

    with pytest.raises(
        CheckpointError, match=r"disk full at .* There is no complete checkpoint yet"
    ):
        checkpoint.save_checkpoint(tmp_path, "step-000001", write)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointError, match="process 1 could not write its part: No space left"):
        write(tmp_path, rank=1)


def test_after_a_failure_nothing_more_is_written(tmp_path: Path) -> None:
    with (  # noqa: PT012
        pytest.raises(ZeroDivisionError),
        CollectiveWrite(Imagined(), tmp_path) as together,
    ):
        together.write(lambda: 1 // 0)
        together.write(lambda: (tmp_path / "more").touch())
        together.parallel.gather([])  # what everyone must do is still done
    assert list(tmp_path.iterdir()) == []


def small_state() -> State:
    made = recipe(
        SMALL["chains"],
        "rloo",
        rollout={"prompts": 4, "samples": 2, "max_tokens": 8},
        update={"minibatches": 1, "tokens_per_micro": 64},
    )
    state = build(make_plan(made))
    stage_of(state, made.stages[-1]).enter()
    return state


def test_out_of_memory_in_another_process_halves_everyones_micro_batches() -> None:
    state = small_state()
    found = collect(Context(state, Metrics(), ("test",)), next_prompts(state), state.columns)
    batch = state.algorithm.prepare(found.rollouts)
    for told, halved in ((False, 0), (True, 1)):
        state.parallel = Imagined(others=[told])
        said = pytest.warns(UserWarning, match="continuing with micro-batches of 32 tokens")
        with said if told else nullcontext():
            trained = [x.name for x in state.optimizers()]
            update(Context(state, Metrics(), ("test",)), state.algorithm, batch, trained, epochs=1)
        assert state.micro_batches_halved == halved


def test_log_probs_of_an_update_are_those_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    state = small_state()
    found = collect(Context(state, Metrics(), ("test",)), next_prompts(state), state.columns)
    batch = state.algorithm.prepare(found.rollouts)
    expected = batch.rollouts.logp_old
    # a batch of another policy, so that old and new log π differ
    older = batch.rollouts.replace(
        logp_old=torch.full_like(expected, -1.0).where(batch.rollouts.mask, 0.0)
    )
    batch = replace(batch, rollouts=older)
    weights = [x.detach().clone() for x in state.policy.model.parameters()]

    def updated(parallel: Parallel) -> torch.Tensor:
        with torch.no_grad():
            for x, kept in zip(state.policy.model.parameters(), weights, strict=True):
                x.copy_(kept)
        state.parallel = parallel
        context = Context(state, Metrics(), ("test",))
        return update(context, state.algorithm, batch, ("policy",), epochs=1)

    one, (first, second) = updated(Parallel()), (updated(Imagined(rank)) for rank in (0, 1))
    assert torch.allclose(one, expected, atol=1e-5)
    assert not torch.allclose(first, expected, atol=1e-2)  # half of it
    assert torch.equal(torch.where(first == older.logp_old, second, first), one)


def test_out_of_memory_of_a_sharded_update_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = small_state()

    score = type(state.policy).score

    def never(*given: Any) -> Any:
        if torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return score(*given)

    monkeypatch.setattr(type(state.policy), "score", never)
    monkeypatch.setattr(type(state), "shards", True)
    with pytest.raises(ValueError, match=r"process 0: .* Resume with: update.tokens_per_micro=32$"):
        stage_of(state, state.recipe.stages[-1]).step()


def test_a_named_gpu_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(device: torch.device) -> None:
        raise KeyError(device)

    second = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "set_device", chosen)
    monkeypatch.setattr("segcredit.train.build.device_of", lambda _: second)
    with pytest.raises(KeyError) as found:
        build(make_plan(recipe(SMALL["chains"], "sapo")))
    assert found.value.args == (second,)


def test_several_processes_cannot_share_a_named_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    made = recipe(SMALL["chains"], "sapo")
    made = made.model_copy(update={"model": made.model.model_copy(update={"device": "cuda:0"})})
    with pytest.raises(RecipeError, match="cannot share 'cuda:0'; set it to cuda"):
        make_plan(made)


@each("count", range(7))
def test_everybody_has_as_many_turns(count: int) -> None:
    ranks = [Parallel(rank, 3).turns(list(range(count)), spare=-1) for rank in range(3)]
    assert {len(x) for x in ranks} == {-(-count // 3)}
    assert [x for turns in ranks for x, counts in turns if counts] == list(range(count))
    assert {x for turns in ranks for x, counts in turns if not counts} <= {-1}


def test_a_process_without_responses_gets_all_on_the_device_that_trains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gathered(found: list[Any], own: Any) -> None:
        found[:] = [own, _columns(rollouts)]

    state = build(make_plan(recipe(SMALL["chains"], "sapo")))
    assert state.device == state.policy.device
    rollouts = Context(state, Metrics(), ("test",)).sample(next_prompts(state, 2)).rollouts
    monkeypatch.setattr(torch.distributed, "all_gather_object", gathered)
    assert rollouts.prompts is not None
    # "meta" stands for a GPU; prompts are in CPU memory
    found = Parallel(0, 2).gather_rollouts(None, rollouts.prompts, torch.device("meta"))
    assert found.mask.shape == rollouts.mask.shape
    assert {found.mask.device.type, found.logp_old.device.type, found.group.device.type} == {"meta"}
