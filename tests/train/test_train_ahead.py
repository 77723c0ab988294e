"""The next batch, sampled during the update: a delayed run, bit for bit, that resumes exactly."""

import copy
import gc
import shutil
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from each import each
from forked_cli import run, run_several
from tiny_runs import assert_same_run, changed, metrics, write_recipe
from torch import Tensor
from train.small import SMALL, after_warm_start
from train.small import recipe as small_recipe
from train.test_train_resume import after_lines, finish, kill, make, undisturbed
from train.test_train_sharded import assert_close

from segcredit.algorithms import ALGORITHMS
from segcredit.algorithms.credit import Case, LeaveOneOut
from segcredit.config import RecipeError, parse_recipe
from segcredit.core.advantages import Credit
from segcredit.models import Policy
from segcredit.models.layers import copy_weights
from segcredit.rollout import HFEngine
from segcredit.runlog.folder import later_than
from segcredit.train import ahead, checkpoint, step
from segcredit.train.ahead import Background, Lookahead, PendingBatch, RemotePolicy, StopSampling
from segcredit.train.build import build, make_plan
from segcredit.train.collect import Context, IndependentSampler, collect, current_logp
from segcredit.train.metrics import Metrics
from segcredit.train.provider import OwnColumn
from segcredit.train.source import next_prompts
from segcredit.train.stages import stage_of
from segcredit.train.state import State
from segcredit.train.step import update
from segcredit.train.trainer import Trainer
from segcredit.types import Encoded, Response, Reward, Rollouts, Sampling

STEPS = 4
TEXT: dict[str, Any] = {
    "stages": [{"kind": "optimize", "steps": STEPS}],
    "model": {"tiny": "llama", "hidden": 32, "layers": 1, "heads": 2},
    "data__settings": {"given": 2, "derived": 1, "needed": [1, 1], "modulus": 5},
    "rollout": {"prompts": 6, "samples": 1, "max_tokens": 8},
    "optimizer": {"lr": 1e-2, "critic_lr": 1e-2},
    "reward": "exact",
}
IMAGES = {
    "model": {"tiny": "qwen2_5_vl", "hidden": 32, "layers": 1, "heads": 2},
    "data": {
        "world": "shape_grid",
        "settings": {"size": 2, "colors": 2, "shapes": 2, "terms": 1, "twice": False},
    },
}
SAPO = {"name": "sapo", "kl": 0.01}
GRPO = {"name": "grpo", "kl": 0.01}


class ByLength:
    """A reward that an untrained model gets, too."""

    def __call__(self, responses: Sequence[Response]) -> list[Reward]:
        return [Reward(x.num_tokens % 4 / 3, "length", x.num_tokens % 2 == 0) for x in responses]

    def close(self) -> None: ...


def begun(algorithm: Any = SAPO, plan: Any = None, **changes: Any) -> State:
    """The state at the start of reinforcement learning."""
    made = changed(**copy.deepcopy({**TEXT, "algorithm": algorithm, **changes}))
    made["stages"] = [{"kind": "warm_start", "steps": 1, "batch": 4}, *made["stages"]]
    state = build(make_plan(parse_recipe(made)) if plan is None else plan)
    state.reward = ByLength()
    state.stage = 1
    stage_of(state).enter()
    if "critic" in state.learners:
        head = state.learners["critic"].critic.head.weight  # type: ignore[attr-defined]
        drawn = torch.empty(head.shape).normal_(std=0.1, generator=torch.manual_seed(0))
        head.data.copy_(drawn)  # drawn on the CPU, for a head on any device
    return state


def stepped(state: State) -> tuple[dict[str, float], Any]:
    found = stage_of(state).step()
    state.step += 1
    state.stage_step += 1
    return found


def weights(state: State) -> list[Tensor]:
    return [x.detach().clone() for o in state.optimizers() for x in o.parameters]


def assert_equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    for one, other in zip(some, others, strict=True):
        assert torch.equal(one, other)


def delayed(state: State) -> list[Rollouts]:
    """The same run without threads: sample n + 1 by a copy of θ_n, learn n, complete n + 1."""
    columns = state.providers_of(state.columns)
    context = Context(state, Metrics(), ("optimize", 0))
    batch, learned = collect(context, next_prompts(state), state.columns), []
    for number in range(STEPS):
        if number + 1 < STEPS:
            lagged = copy.copy(state)
            lagged.policy = Policy(copy.deepcopy(state.policy.model), state.policy.codec)
            settings = state.recipe.rollout.engine_settings()
            lagged.engine = HFEngine.from_policy(lagged.policy, settings)
            lagged.step = number + 1
            prompts = next_prompts(lagged)
            state.position = lagged.position
            after = Context(lagged, Metrics(), ("optimize", number + 1))
            sampler = IndependentSampler()
            drawn = sampler.sample(after, prompts)
        context = Context(state, Metrics(), ("optimize", number))
        learned.append(batch.rollouts)
        credited = columns.before_update(context, state.algorithm.prepare(batch.rollouts))
        update(context, state.algorithm, credited, ("policy", *columns.learners), epochs=1)
        columns.after_update(context, batch.rollouts)
        if number + 1 < STEPS:
            graded = sampler.grade(after, drawn)
            batch = replace(graded, rollouts=columns.fill(after, graded.rollouts))
        state.step += 1
    return learned


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sapo": (SAPO, {}),
    "grpo": (GRPO, {"rollout__prompts": 3, "rollout__samples": 3}),
    "sapo, images": (SAPO, IMAGES),
    "recomputed": (SAPO, {"rollout__old_logp": "recompute"}),
    "vppo, images": ("vppo", {**IMAGES, "rollout__prompts": 3, "rollout__samples": 2}),
    "single_stream_spo": ("single_stream_spo", {"data__size": 12}),
}


@pytest.mark.parametrize(
    "name", [x if x == "sapo" else pytest.param(x, marks=pytest.mark.slow) for x in CASES]
)
def test_it_is_the_delayed_run(name: str) -> None:
    algorithm, changes = CASES[name]
    state = begun(algorithm, rollout__ahead=1, **changes)
    before, found = weights(state), [stepped(state) for _ in range(STEPS)]
    reference = begun(algorithm, **changes)
    assert_equal(before, weights(reference))
    learned = delayed(reference)
    for (_, result), rollouts in zip(found, learned, strict=True):
        assert torch.equal(result.sampled.rollouts.tokens, rollouts.tokens)
        assert torch.equal(result.sampled.rollouts.logp_old, rollouts.logp_old)
        assert torch.equal(result.sampled.rollouts.reward, rollouts.reward)
    assert_equal(weights(state), weights(reference))
    assert state.position == reference.position
    assert any(not torch.equal(x, y) for x, y in zip(before, weights(state), strict=True))
    assert [x["ahead/lag"] for x, _ in found] == [0.0, 1.0, 1.0, 1.0]
    assert ["agreement/ratio_error" in x for x, _ in found] == [True, False, False, False]
    assert ["ahead/sample_seconds" in x for x, _ in found] == [True, True, True, False]
    assert all(x["tokens_per_second"] > 0.0 for x, _ in found)
    assert state.pending is None, "nothing is sampled for a step that does not come"


@each("lora", [None, {"rank": 4}])
def test_log_pi_old_is_that_of_the_policy_before_the_update(lora: Any) -> None:
    model = {**TEXT["model"], **({} if lora is None else {"lora": lora})}
    state = begun(model=model, rollout__ahead=1)
    stepped(state)
    for _ in range(2):
        pending = state.pending
        assert pending is not None
        assert state.lookahead is not None
        rollouts = pending.sampled.rollouts
        lagged = copy.copy(state)
        lagged.policy = state.lookahead.policy
        old = current_logp(lagged, rollouts).masked_fill(~rollouts.mask, 0.0)
        now = current_logp(state, rollouts).masked_fill(~rollouts.mask, 0.0)
        assert torch.allclose(old, rollouts.logp_old, atol=1e-5)
        assert not torch.allclose(now, rollouts.logp_old, atol=1e-4)
        _, result = stepped(state)
        assert result.sampled is pending.sampled


def test_the_copy_has_weights_of_its_own() -> None:
    state = begun(GRPO, rollout__samples=2, rollout__ahead=1)
    earlier = weights(state)
    stepped(state)
    assert state.lookahead is not None
    policy = state.lookahead.policy
    assert all(x.grad is None for x in policy.model.parameters())
    assert_equal([x.detach() for x in policy.model.parameters()], earlier)
    mine = {x.data_ptr() for x in state.policy.model.parameters()}
    assert mine.isdisjoint(x.data_ptr() for x in policy.model.parameters())


def test_a_remote_policy_scores_as_the_policy_does() -> None:
    state = begun(rollout__ahead=1)
    stepped(state)
    assert state.pending is not None
    rollouts = state.pending.sampled.rollouts
    with torch.no_grad():
        here = state.policy.score(rollouts, 1.0, with_entropy=True)
        remote = RemotePolicy(state.policy.model, state.policy.codec)
        there = remote.score(rollouts, 1.0, with_entropy=True)
    for one, other in zip(here, there, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


class Apart(HFEngine):
    """An engine with its own copy of the weights, as one that runs elsewhere has."""

    @classmethod
    def from_policy(cls, policy: Policy, settings: Any) -> "Apart":
        engine = super().from_policy(policy, settings)
        engine.model = copy.deepcopy(policy.model)
        assert isinstance(engine, cls)
        return engine

    def load_weights(self, policy: torch.nn.Module) -> None:
        copy_weights(policy, self.model)


@pytest.mark.slow
def test_an_engine_with_weights_of_its_own_gets_those_of_each_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference = begun(rollout__ahead=1)
    expected = [stepped(reference)[1].sampled.rollouts for _ in range(STEPS)]
    monkeypatch.setattr(
        "segcredit.train.models.make_engine", lambda _, policy, x: Apart.from_policy(policy, x)
    )
    state = begun(rollout__ahead=1)
    for rollouts in expected:
        _, result = stepped(state)
        assert torch.equal(result.sampled.rollouts.tokens, rollouts.tokens)
        assert torch.equal(result.sampled.rollouts.logp_old, rollouts.logp_old)


@pytest.mark.gpu
@each("rollout", [{}, {"graphs": True}, {"device": "cpu"}, {"old_logp": "recompute"}])
def test_on_a_gpu(rollout: dict[str, Any]) -> None:
    state = begun(model={**TEXT["model"], "device": "cuda"}, rollout__ahead=1)
    settings = state.recipe.rollout.model_copy(update=rollout)
    state.recipe = state.recipe.model_copy(update={"rollout": settings})
    for _ in range(STEPS - 1):
        stepped(state)
        assert state.pending is not None
        assert state.lookahead is not None
        rollouts = state.pending.sampled.rollouts
        assert rollouts.logp_old.device == state.policy.device
        lagged = state.lookahead.view(state)
        old = current_logp(lagged, rollouts).masked_fill(~rollouts.mask, 0.0)
        assert torch.allclose(old, rollouts.logp_old, atol=1e-4)


# ── Dynamic sampling, curricula, columns of one's own ────────────────────────────────────────────


@dataclass(frozen=True)
class Greedy(OwnColumn):
    """The length of the greedy response, which the column samples while it is filled."""

    name = "greedy"
    description = "length of the greedy response to the same prompt"

    def fill(self, context: Context, rollouts: Rollouts) -> Rollouts:
        assert rollouts.prompts is not None
        prompts = {x.prompt.id: x.prompt for x in rollouts.prompts}
        found = context.within("greedy").sample([*prompts.values()], 1, temperature=0.0)
        long = dict(zip(prompts, found.rollouts.logp_old.sum(dim=1).tolist(), strict=True))
        column = torch.tensor([long[x.prompt.id] for x in rollouts.prompts])
        return rollouts.with_column(self.name, column)


@dataclass(frozen=True)
class WithGreedy(LeaveOneOut):
    column: Greedy = Greedy()

    @property
    def needs(self) -> frozenset[Any]:
        return frozenset({self.column})

    def __call__(self, case: Case) -> Credit:
        credit, column = super().__call__(case), case.rollouts.column("greedy", "the test")
        return replace(credit, advantage=credit.advantage + 0.1 * column[:, None])


def test_a_column_that_samples_asks_the_lagged_policy() -> None:
    algorithm = replace(ALGORITHMS["rloo"](kl=0.0), credit=WithGreedy())
    made = changed(**copy.deepcopy({**TEXT, "rollout__samples": 2, "rollout__ahead": 1}))
    made["stages"] = [{"kind": "warm_start", "steps": 1, "batch": 4}, *made["stages"]]
    state = begun(plan=make_plan(parse_recipe(made), algorithm))
    stepped(state)
    assert state.pending is not None
    assert state.lookahead is not None
    rollouts = state.pending.sampled.rollouts
    lagged = state.lookahead.view(state)
    lagged.step = state.step  # the step that learns them
    for context, same in (
        (Context(lagged, Metrics(), ("optimize", 1)), True),
        (Context(state, Metrics(), ("optimize", 1)), False),
    ):
        again = Greedy().fill(context, rollouts).column("greedy", "the test")
        assert torch.equal(again, rollouts.column("greedy", "the test")) == same
    stepped(state)


class Counting(IndependentSampler):
    """A sampler that reports how many prompts it was asked."""

    def sample(self, context: Context, prompts: Sequence[Any]) -> Any:
        context.log.add({"asked": float(len(prompts))})
        return super().sample(context, prompts)


@dataclass(frozen=True)
class Counted(Greedy):
    sampler = Counting()


def test_metrics_of_a_sampler_belong_to_the_step_that_learns_its_batch() -> None:
    algorithm = replace(ALGORITHMS["rloo"](kl=0.0), credit=WithGreedy(Counted()))
    made = changed(**copy.deepcopy({**TEXT, "rollout__samples": 2, "rollout__ahead": 1}))
    made["stages"] = [{"kind": "warm_start", "steps": 1, "batch": 4}, *made["stages"]]
    state = begun(plan=make_plan(parse_recipe(made), algorithm))
    assert [stepped(state)[0].get("asked") for _ in range(STEPS)] == [6.0] * STEPS


def test_refills_and_a_curriculum() -> None:
    rollout = {"prompts": 4, "samples": 2, "max_tokens": 2, "refills": 2, "ahead": 1}
    state = begun(GRPO, data__size=24, data__curriculum=True, rollout=rollout)
    found = [stepped(state)[0] for _ in range(2)]
    pending = state.pending
    assert pending is not None
    assert {"refill/batches", "refill/groups_found"} <= pending.metrics.keys()
    assert not any(name.startswith(("time/", "memory/")) for name in pending.metrics)
    found.append(stepped(state)[0])
    assert found[2]["refill/batches"] == pending.metrics["refill/batches"]
    assert all(x["curriculum/seen"] > 0.0 for x in found)
    seen = [x["curriculum/seen"] for x in found]
    assert seen == sorted(seen)


# ── Checkpoints ──────────────────────────────────────────────────────────────────────────────────

SHORT: dict[str, Any] = {
    "stages": [
        {"kind": "warm_start", "steps": 1, "batch": 4},
        {"kind": "pretrain_critic", "steps": 1},
        {"kind": "optimize", "steps": 4},
    ],
    "rollout__ahead": 1,
    "evaluation": {"prompts": 2, "every": 2, "greedy": False, "watch": 2},
    "save": {"every": 1, "keep": 9, "rollouts_every": 1, "rollouts": 2},
}
NO_CRITIC = {"stages": SHORT["stages"][::2], "rollout__samples": 2, "rollout__prompts": 4}
METHODS: dict[str, dict[str, Any]] = {
    "sapo": {},
    "grpo, refills, curriculum": {
        **NO_CRITIC,
        "algorithm": "grpo",
        "data__size": 24,
        "data__curriculum": True,
        "rollout__refills": 2,
        "rollout__max_tokens": 2,
    },
    "images": {**NO_CRITIC, **IMAGES, "algorithm": "vppo"},
    "tracker": {
        "algorithm": "single_stream_spo",
        "stages": SHORT["stages"][::2],
        "data__size": 12,
    },
    "lora": {
        "model": {"tiny": "qwen2", "hidden": 32, "layers": 1, "heads": 4, "lora": {"rank": 4}},
    },
    "recomputed": {"rollout__old_logp": "recompute"},
    "restem": {**NO_CRITIC, "algorithm": {"name": "restem", "threshold": 0.5}},
    "several rewards": {
        **NO_CRITIC,
        "algorithm": "grpo",
        "reward": [
            {"name": "reward.py:by_length", "weight": 0.9},
            {"name": "exact", "weight": 0.1},
        ],
    },
}


def short(**changes: Any) -> dict[str, Any]:
    """Changes of the recipe, for one test alone."""
    return copy.deepcopy({**SHORT, **changes})


def until(whole: Path, to: Path, number: int) -> Path:
    """A copy of a run that ended after this step."""
    shutil.copytree(whole, to)
    for path in later_than(to / "checkpoints", number):
        shutil.rmtree(path)
    return to


def resumed(folder: Path, *changes: str) -> None:
    done = run(folder.parent, "train", "--resume", folder, *changes)
    assert done.code == 0, done.complained


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["sapo", *(pytest.param(x, marks=pytest.mark.slow) for x in [*METHODS][1:])]
)
def test_resumed_at_every_step_it_is_the_same_run(method: str, tmp_path: Path) -> None:
    changes = short(**METHODS[method])
    whole = undisturbed(make(tmp_path / "whole"), **changes)
    last = sum(x["steps"] for x in changes["stages"])
    with_batch = []
    for number in range(1, last):
        place = until(whole, make(tmp_path / f"after-{number}") / "run", number)
        (place.parent / "reward.py").write_bytes((tmp_path / "whole" / "reward.py").read_bytes())
        saved = place / "checkpoints" / f"step-{number:06d}"
        with_batch.append("pending" in checkpoint.load_state(saved))
        resumed(place)
        assert_same_run(place, whole)
    assert with_batch == [False] * (last - 4) + [True] * 3
    lags = [x["ahead/lag"] for x in metrics(whole) if "ahead/lag" in x]
    assert lags == [0.0, 1.0, 1.0, 1.0]


@pytest.mark.slow
def test_killed_in_the_middle_of_steps_it_is_the_same_run(tmp_path: Path) -> None:
    whole = undisturbed(make(tmp_path / "whole"), **short(save__every=2))
    folder = make(tmp_path / "killed")
    write_recipe(folder, **short(save__every=2))
    kill(folder, after_lines(4), 0.02)
    finish(folder)
    assert_same_run(folder / "run", whole)


@pytest.mark.slow
def test_switched_on_and_off_by_a_resume(tmp_path: Path) -> None:
    """Off: the pending batch is dropped, and its prompts are sampled again, on-policy."""
    folder = make(tmp_path / "on")
    whole = undisturbed(folder, **short(**NO_CRITIC, algorithm="grpo"))
    place = until(whole, folder / "off", 3)
    resumed(place, "rollout.ahead=0")
    lines = [x for x in metrics(place) if x["stage"] == "optimize"]
    assert ["ahead/lag" in x for x in lines] == [True, True, False, False]
    assert all("agreement/ratio_error" in x for x in lines[2:])
    ids = [prompt_ids(x, 4) for x in (whole, place)]
    assert ids[0] == ids[1], "the same prompts"
    off = checkpoint.load_state(place / "checkpoints" / "step-000005")
    assert (
        off["position"] == checkpoint.load_state(whole / "checkpoints" / "step-000005")["position"]
    )
    on = until(place, folder / "on-again", 4)
    resumed(on, "rollout.ahead=1")
    lags = [x.get("ahead/lag") for x in metrics(on) if x["stage"] == "optimize"]
    assert lags == [0.0, 1.0, None, 0.0]


def prompt_ids(run_folder: Path, number: int) -> list[str]:
    import json

    file = run_folder / "rollouts" / f"step-{number:06d}.jsonl"
    return [json.loads(x)["prompt_id"] for x in file.read_text().splitlines()]


@pytest.mark.usefixtures("unchecked")
def test_a_reward_may_return_numpys_booleans(tmp_path: Path) -> None:
    state = begun(GRPO, rollout__samples=2, rollout__ahead=1)
    state.reward = NumpyReward()
    stepped(state)
    checkpoint.save_state(tmp_path, ahead.as_saved(state))
    found = ahead.restored(state, checkpoint.load_state(tmp_path)["pending"])
    assert found is not None
    assert state.pending is not None
    assert found.sampled.rewards == state.pending.sampled.rewards


class NumpyReward(ByLength):
    """A reward computed with numpy, as rewards in Python may be."""

    def __call__(self, responses: Sequence[Response]) -> list[Reward]:
        odd = np.array([x.num_tokens for x in responses]) % 2 == 1
        return [Reward(x.astype(float), "odd", x, x, verdict=x | True) for x in odd]


class Unnamed(LeaveOneOut):
    """Credit of one's own, which Python names by its address in memory."""

    __repr__ = object.__repr__


def test_a_method_is_the_same_in_another_process() -> None:
    """Its name must not contain where in memory it is."""

    def again() -> State:
        algorithm = replace(ALGORITHMS["rloo"](kl=0.0), credit=Unnamed())
        made = changed(**copy.deepcopy({**TEXT, "rollout__samples": 2, "rollout__ahead": 1}))
        made["stages"] = [{"kind": "warm_start", "steps": 1, "batch": 4}, *made["stages"]]
        return begun(plan=make_plan(parse_recipe(made), algorithm))

    one, other = again(), again()
    stepped(one)
    other.step, other.position = one.step, one.position
    assert ahead.restored(other, ahead.as_saved(one)["pending"]) is not None


def test_a_changed_reward_file_grades_new_responses(tmp_path: Path) -> None:
    """The step after the resume uses the rewards of the new file, as without rollout.ahead."""
    write_recipe(tmp_path)
    file, reward = tmp_path / "reward.py", f"{tmp_path}/reward.py:by_length"
    changes = short(**{**NO_CRITIC, "algorithm": "rloo", "reward": reward})
    changes["stages"][-1]["steps"] = 2
    changes["evaluation"] = {"prompts": 2, "every": 0, "greedy": False}
    Trainer.from_recipe(parse_recipe(changed(**changes))).train(tmp_path / "run", progress=False)
    before = metrics(tmp_path / "run")
    constant = "def by_length(completions):\n    return [0.25] * len(completions)"
    for number, text in enumerate([file.read_text(), constant]):
        file.write_text(text)
        place = until(tmp_path / "run", tmp_path / str(number), 2)
        made = parse_recipe(changed(**changes))
        Trainer.from_recipe(made).train(place, resume=True, progress=False)
    same, other = (metrics(tmp_path / x) for x in "01")
    assert same == before
    learned = [x for x in other if x["stage"] == "optimize"][-1]
    assert (learned["reward"], learned["ahead/lag"]) == (0.25, 0.0)


@pytest.mark.slow
@each(
    "change",
    ["settings", "method", "data", "step"],
)
def test_a_pending_batch_that_no_longer_fits_is_dropped(change: str) -> None:
    state = begun(GRPO, rollout__samples=2, rollout__ahead=1)
    stepped(state)
    kept = copy.deepcopy(ahead.as_saved(state)["pending"])
    position = state.position
    found = ahead.restored(state, kept)
    assert isinstance(found, PendingBatch)
    assert torch.equal(found.sampled.rollouts.tokens, state.pending.sampled.rollouts.tokens)  # type: ignore[union-attr]
    if change == "settings":
        kept["settings"]["temperature"] = 0.5
    elif change == "method":
        kept["settings"]["method"] = "another"
    elif change == "data":
        kept["prompts"][0][1] = "another prompt of the same name"
    else:
        kept["step"] = 7
    assert ahead.restored(state, kept) is None
    # its prompts come again, unless it was another step's
    assert state.position == (position if change == "step" else position - 6)
    assert ahead.restored(state, None) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["sapo", pytest.param("grpo, refills, curriculum", marks=pytest.mark.slow)]
)
def test_two_processes_make_the_run_of_one(method: str, tmp_path: Path) -> None:
    changes = short(
        **METHODS[method],
        update__tokens_per_micro=150,
        optimizer__eps=1e-3,  # or weights without a gradient would go where rounding sends them
        save={"every": 9},
    )
    changes["stages"][-1]["steps"] = 3
    made = write_recipe(tmp_path, **changes)
    run_several(tmp_path, 1, "train", made, "--folder", "one")
    run_several(tmp_path, 2, "train", made, "--folder", "two")
    assert_close(tmp_path / "one", tmp_path / "two")


# ── Refused settings ─────────────────────────────────────────────────────────────────────────────

CONTINUES = (
    r"whole, independent responses one update early, but [\w ]+ also continues parts of them"
)


@each(
    ("changes", "message"),
    [
        ({"rollout__engine": "vllm"}, r"rollout\.ahead .* vLLM releases its memory .*engine=hf"),
        ({"memory": {"shard": True}}, r"rollout\.ahead .*memory\.shard.*remove one"),
        ({"algorithm": "vineppo"}, CONTINUES + r" \(continuations\): set rollout\.ahead=0"),
        ({"algorithm": "spo_chain"}, CONTINUES),
        ({"algorithm": "dvo"}, CONTINUES),
        (
            {"algorithm": "spo_tree", "rollout__tree": {"branching": [2, 2], "tokens": 2}},
            CONTINUES + r" \(parent\)",
        ),
        ({"rollout__ahead": 2}, r"rollout\.ahead"),
        ({"rollout__device": "gpu"}, r"expected cpu, cuda or cuda:1 …; got 'gpu'"),
        (
            {"rollout__ahead": 0, "rollout__device": "cpu"},
            r"rollout\.device has no effect without rollout\.ahead",
        ),
    ],
)
def test_refused_settings(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        parse_recipe(changed(**{"stages": SHORT["stages"][::2], "rollout__ahead": 1, **changes}))


def test_a_device_that_is_not_there_is_refused() -> None:
    made = changed(reward="exact", rollout__ahead=1, rollout__device="cuda:77")
    with pytest.raises(RecipeError, match=r"rollout\.device: expected a GPU .* got 'cuda:77'"):
        make_plan(parse_recipe(made))


@dataclass(frozen=True)
class Continued(Greedy):
    continues = True


def test_a_column_of_ones_own_that_continues_is_refused() -> None:
    @dataclass(frozen=True)
    class Needs(LeaveOneOut):
        @property
        def needs(self) -> frozenset[Any]:
            return frozenset({Continued()})

    algorithm = replace(ALGORITHMS["rloo"](kl=0.0), credit=Needs())
    more = {"rollout__ahead": 1, "rollout__samples": 2, "reward": "exact"}
    made = changed(stages=SHORT["stages"][::2], **more)
    with pytest.raises(RecipeError, match=CONTINUES + r" \(greedy\)"):
        make_plan(parse_recipe(made), algorithm)


# ── The thread ───────────────────────────────────────────────────────────────────────────────────


class Watched(HFEngine):
    """An engine of one's own that records who samples, and may fail or wait."""

    threads: ClassVar[list[threading.Thread]]
    fails: ClassVar[Exception | None] = None
    sampling: ClassVar[threading.Event]
    updating: ClassVar[threading.Event]
    together = False

    def sample(
        self, prompts: Sequence[Encoded], sampling: Sampling, generator: torch.Generator
    ) -> Rollouts:
        here = threading.current_thread()
        type(self).threads.append(here)
        if here is not threading.main_thread():
            if self.fails is not None:
                raise self.fails
            type(self).sampling.set()
            type(self).together |= type(self).updating.wait(60)
        return super().sample(prompts, sampling, generator)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[Watched]:
    class Engine(Watched):
        threads: ClassVar[list[threading.Thread]] = []
        sampling, updating = threading.Event(), threading.Event()

    monkeypatch.setattr(
        "segcredit.train.models.make_engine", lambda _, policy, x: Engine.from_policy(policy, x)
    )
    return Engine


def test_sampling_and_update_run_at_the_same_time(
    watched: type[Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits for the other: neither would end alone."""

    def both(*arguments: Any, **named: Any) -> Tensor:
        watched.updating.set()
        assert watched.sampling.wait(60), "sampling had not begun when the update ended"
        return update(*arguments, **named)

    monkeypatch.setattr(step, "update", both)
    state = begun(GRPO, rollout__samples=2, rollout__ahead=1)
    stepped(state)
    assert watched.together
    main, background = watched.threads
    assert main is threading.main_thread()
    assert background.name == "rollout.ahead"
    assert not background.is_alive(), "nothing runs between steps"


def test_an_error_in_the_thread_reaches_the_user(watched: type[Watched]) -> None:
    watched.fails = RuntimeError("the engine broke down")
    state = begun(GRPO, rollout__samples=2, rollout__ahead=1)
    with pytest.raises(RuntimeError, match="the engine broke down"):
        stepped(state)


def test_without_memory_for_both_it_samples_after_the_update(watched: type[Watched]) -> None:
    watched.fails = torch.OutOfMemoryError()
    state, usual = (begun(GRPO, rollout__samples=2, rollout__ahead=1) for _ in range(2))
    usual.lookahead = Lookahead(usual)
    usual.lookahead.engine = HFEngine.from_policy(  # type: ignore[assignment]
        usual.lookahead.policy, usual.recipe.rollout.engine_settings()
    )
    with pytest.warns(UserWarning, match=r"rollout\.ahead: there was too little memory"):
        stepped(state)
    stepped(usual)
    assert state.pending is not None and usual.pending is not None  # noqa: PT018
    ours, theirs = (x.pending.sampled.rollouts for x in (state, usual))
    assert torch.equal(ours.tokens, theirs.tokens)
    assert torch.equal(ours.logp_old, theirs.logp_old)
    assert_equal(weights(state), weights(usual))


def test_after_an_error_the_memory_of_the_work_is_free() -> None:
    kept: list[weakref.ref[Tensor]] = []

    def work() -> None:
        cache = torch.zeros(1)
        kept.append(weakref.ref(cache))
        raise torch.OutOfMemoryError

    background = Background(work)
    gc.disable()  # the memory must be free at once, without a search for cycles
    try:
        with suppress(torch.OutOfMemoryError):
            background.result()
        assert kept[0]() is None
    finally:
        gc.enable()


def test_memory_of_a_failed_thread_is_free_before_it_samples_again(
    watched: type[Watched],
) -> None:
    """Its error refers to the tensors of every frame that it passed."""
    held: list[weakref.ref[Tensor]] = []

    def sample(
        self: Watched, prompts: Sequence[Encoded], sampling: Sampling, generator: torch.Generator
    ) -> Rollouts:
        if threading.current_thread() is not threading.main_thread():
            cache = torch.zeros(1)
            held.append(weakref.ref(cache))
            raise torch.OutOfMemoryError
        assert all(x() is None for x in held)
        return HFEngine.sample(self, prompts, sampling, generator)

    watched.sample = sample  # type: ignore[method-assign]
    state = begun(GRPO, rollout__samples=2, rollout__ahead=1)
    with pytest.warns(UserWarning, match=r"rollout\.ahead: there was too little memory"):
        stepped(state)
    assert held


def test_an_error_in_the_update_stops_the_thread(
    watched: type[Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Tensor:
        assert watched.sampling.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(step, "update", broken)
    monkeypatch.setattr(HFEngine, "sample", endless_in_threads(HFEngine.sample))
    state = begun(GRPO, rollout__samples=2, rollout__ahead=1)
    watched.updating.set()
    with pytest.raises(KeyboardInterrupt):
        stepped(state)
    assert not watched.threads[-1].is_alive()


def endless_in_threads(sample: Any) -> Any:
    def endless(self: HFEngine, *arguments: Any) -> Rollouts:
        while threading.current_thread() is not threading.main_thread():
            pass
        return sample(self, *arguments)

    return endless


def test_a_thread_computes_with_as_many_cpu_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert Background(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(before)


def test_a_stopped_thread_has_no_result() -> None:
    ready = threading.Event()

    def work() -> None:
        ready.set()
        while True:
            pass

    task = Background(work)
    assert ready.wait(60)
    task.stop()
    with pytest.raises(StopSampling):
        task.result()


# ── Learning ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("method", ["sapo", "grpo"])
def test_it_learns(method: str, warm: Any) -> None:
    algorithm, samples = ({"name": "sapo", "kl": 0.001}, 1) if method == "sapo" else ("grpo", 4)
    rollout = {"prompts": 128 // samples, "samples": samples, "max_tokens": 24, "ahead": 1}
    made = small_recipe(SMALL["chains"], algorithm, samples=samples, rollout=rollout)
    _, found = after_warm_start(made, warm("chains"))
    accuracy = [x["accuracy"] for x in found]
    assert sum(accuracy[-3:]) / 3 > sum(accuracy[:3]) / 3 + 0.12, accuracy
    assert all(x["policy/refused"] == 0.0 for x in found)


@pytest.mark.slow
def test_from_python(tmp_path: Path) -> None:
    made = parse_recipe(
        changed(
            stages=SHORT["stages"][::2], rollout__ahead=1, reward="exact", algorithm="reinforce_pp"
        )
    )
    found = Trainer.from_recipe(made).train(tmp_path / "run", progress=False)
    assert found.history("ahead/lag") == [0.0, 1.0, 1.0, 1.0]
