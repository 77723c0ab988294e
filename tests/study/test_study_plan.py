"""From arms to runs: equal terms, shared warm starts, addresses, tuned learning rates."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from each import each
from small import SMOKE, plan, pretend, study

from segcredit.algorithms import ALGORITHMS
from segcredit.config import RecipeError, WarmStart
from segcredit_lab.study import SCALES, Options, Store, StudyPlan
from segcredit_lab.study.definition import LargestArea, LargestSafe
from segcredit_lab.study.execute import (
    RunState,
    RunStates,
    _add_known_runs,
    _wanted_starts,
    recorded,
)
from segcredit_lab.study.recipes import arm_recipe, pretraining_of, warm_start_of
from segcredit_lab.study.store import StudyRun


def kinds(run: StudyRun) -> list[str]:
    return [stage.kind for stage in run.recipe("start").stages]


def test_arms_share_what_the_base_says_of_kl_clip_and_gamma() -> None:
    arms = {
        "sapo": {},
        "rloo": {"algorithm": "rloo", "samples": 2},
        "restem": {"algorithm": "restem"},
        "own": {"algorithm": {"name": "ppo", "kl": 0.5}},
    }
    made = study(arms=arms, recipe={"algorithm": {"gamma": 0.9, "lam": 0.5}})
    found = {name: arm_recipe(made, name, SMOKE).algorithm for name in arms}
    assert found["sapo"] == {
        "name": "sapo",
        "kl": 0.0,
        "clip": [0.2, 0.2],
        "gamma": 0.9,
        "lam": 0.5,
    }
    assert found["rloo"] == {"name": "rloo", "kl": 0.0, "clip": [0.2, 0.2]}
    assert found["restem"] == {"name": "restem"}
    assert found["own"] == {"name": "ppo", "kl": 0.5, "clip": [0.2, 0.2], "gamma": 0.9}


def test_a_critic_with_batches_of_its_own_is_the_same_for_arms_that_draw_others() -> None:
    def critic(*overrides: str) -> dict[str, Any]:
        made = pretraining_of(arm_recipe(study(), "sapo", SMOKE, overrides))
        assert made is not None
        return made.as_dict()

    own = ("stages.1.prompts=6", "stages.1.minibatches=3")
    assert critic(*own) == critic(*own, "rollout.prompts=400", "update.minibatches=300")
    # one of the two is its own, the other the arm's
    few = critic("stages.1.minibatches=1", "rollout.prompts=2", "update.minibatches=2")
    assert (few["rollout"]["prompts"], few["update"]["minibatches"]) == (2, 1)
    many = critic("stages.1.prompts=200", "rollout.prompts=400", "update.minibatches=150")
    assert (many["rollout"]["prompts"], many["update"]["minibatches"]) == (200, 150)


def test_more_samples_are_of_fewer_prompts() -> None:
    arms = {
        "sapo": {},
        "grpo": {"algorithm": "grpo", "samples": 8},
        "more": {"algorithm": "grpo", "samples": 8, "same_prompts": True},
        "fewer": {"algorithm": "vineppo", "share": 0.25},
        "odd": {"algorithm": "grpo", "samples": 5},
    }
    made = study(arms=arms)
    rollouts = [arm_recipe(made, x, SMOKE).rollout for x in ("sapo", "grpo", "more", "fewer")]
    assert [(x.prompts, x.samples) for x in rollouts] == [(16, 1), (2, 8), (16, 8), (4, 1)]
    with pytest.raises(RecipeError, match="16 rollouts per step cannot be divided into 5"):
        arm_recipe(made, "odd", SMOKE)


def test_stages_are_the_methods(tmp_path: Path) -> None:
    arms = {"sapo": {}, "cold": {"cold": True}, "grpo": {"algorithm": "grpo", "samples": 2}}
    made = plan(tmp_path, arms=arms)
    runs = {arm: made.run(arm, 0, 1e-3) for arm in made.arms}
    assert [kinds(run) for run in runs.values()] == [["optimize"]] * 3
    critic, start = runs["sapo"].start, runs["cold"].start
    assert critic is not None
    assert start is not None
    assert kinds(critic) == ["pretrain_critic"]
    assert kinds(start) == ["warm_start"]
    assert [x.digest for x in runs["sapo"].starts] == [start.digest, critic.digest]
    assert runs["grpo"].starts == [start]


def test_a_critic_is_pretrained_once_for_all_methods_and_cuts(tmp_path: Path) -> None:
    arms = {
        "sapo": {},
        "ppo": {"algorithm": "ppo"},
        "newline": {"algorithm": {"name": "sapo", "partition": "newline", "lam": 0.9}},
        "epochs": {"recipe": {"update": {"epochs": 4}}},
        "short": {"algorithm": {"name": "sapo", "gamma": 0.9}},
        "hotter": {"recipe": {"rollout": {"temperature": 1.5}}},
        "lora": {"recipe": {"model": {"lora": {"rank": 2}}}},
    }
    made = plan(tmp_path, arms=arms)
    found = {arm: made.run(arm, 0, 1e-3).start for arm in made.arms}
    digests = {arm: x.digest for arm, x in found.items() if x is not None}
    assert digests["sapo"] == digests["ppo"] == digests["newline"] == digests["epochs"]
    assert digests["hotter"] not in {digests["sapo"], digests["short"]}, "it draws others"
    assert found["sapo"] is not None
    assert found["sapo"].recipe("start").algorithm == {"name": "sapo", "partition": "token"}
    own = [arm for arm in made.arms if "pretrain_critic" in kinds(made.run(arm, 0, 1e-3))]
    assert own == ["short", "lora"], "discounted by its own units; an adapter"
    assert digests["short"] == made.run("sapo", 0, 1e-3).starts[0].digest


def test_one_warm_start_per_seed_serves_all_arms_and_studies(tmp_path: Path) -> None:
    arms = {"sapo": {}, "ppo": {"algorithm": "ppo"}, "grpo": {"algorithm": "grpo", "samples": 8}}
    one = plan(tmp_path, Options(seeds=(0, 1)), arms=arms)
    other = plan(tmp_path, Options(seeds=(1,), overrides=("optimizer.lr=0.5",)), name="other")
    starts = {
        (arm, seed): found.run(arm, seed, rate).starts[0]
        for found, rate in ((one, 1e-3), (other, 1e-4))
        for arm in found.arms
        for seed in found.seeds
    }
    digests = {key: x.digest for key, x in starts.items()}
    assert len(digests) == 6
    assert {x for (_, seed), x in digests.items() if seed == 1} == {digests["ppo", 1]}
    assert digests["ppo", 0] != digests["ppo", 1]


def test_an_arm_with_other_data_has_another_warm_start(tmp_path: Path) -> None:
    arms = {"sapo": {}, "other": {"recipe": {"data": {"settings": {"given": 3}}}}}
    made = plan(tmp_path, arms=arms)
    starts = [made.run(arm, 0, 1e-3).start for arm in made.arms]
    assert len({x.digest for x in starts if x is not None}) == 2


def test_without_imitation_there_is_no_run_for_it() -> None:
    recipe = arm_recipe(study(), "sapo", SMOKE)
    rest = [stage for stage in recipe.stages if not isinstance(stage, WarmStart)]
    assert warm_start_of(recipe.model_copy(update={"stages": rest})) is None


# ── Addresses ────────────────────────────────────────────────────────────────────────────────────


def test_the_address_is_the_recipes(tmp_path: Path) -> None:
    arms = {"sapo": {}, "same": {"algorithm": {"name": "sapo", "fraction": 0.3, "lam": 0.99}}}
    made = plan(tmp_path, arms=arms)
    run = made.run("sapo", 0, 1e-3)
    assert run.digest == made.run("same", 0, 1e-3).digest, "defaults may be written out"
    others = [
        made.run("sapo", 1, 1e-3),
        made.run("sapo", 0, 2e-3),
        plan(tmp_path, Options(overrides=("rollout.max_tokens=19",))).run("sapo", 0, 1e-3),
        plan(tmp_path, Options(overrides=("stages.0.steps=61",))).run("sapo", 0, 1e-3),
    ]
    assert len({run.digest, *(x.digest for x in others)}) == 5
    assert run.name == f"sapo-s0-{run.digest}"


def test_a_run_is_found_under_another_arms_name_and_in_a_moved_store(tmp_path: Path) -> None:
    arms = {"sapo": {}, "same": {"algorithm": {"name": "sapo", "fraction": 0.3}}}
    made = plan(tmp_path, arms=arms)
    folder = pretend(made.store, made.run("sapo", 0, 1e-3), [0.1, 0.2])
    assert made.store.folder(made.run("same", 0, 1e-3)) == folder
    assert made.store.finished(made.run("same", 0, 1e-3))
    moved = (tmp_path / "runs").rename(tmp_path / "moved")
    assert Store(moved).finished(plan(tmp_path, arms=arms).run("sapo", 0, 1e-3))


def test_a_run_begins_from_the_start_in_its_store(tmp_path: Path) -> None:
    made = plan(tmp_path)
    recipe = made.store.recipe(made.run("ppo", 0, 1e-3))
    start = made.run("ppo", 0, 1e-3).start
    assert start is not None
    place = tmp_path / "runs" / start.name / "checkpoints" / "step-000001"
    assert recipe.model.path == str(place / "policy")
    assert recipe.model.critic == str(place / "critic")
    assert recipe.model.tiny is None
    assert recipe.optimizer.lr == 1e-3


@each("name", ALGORITHMS)
def test_a_method_is_called_the_same_in_every_process(name: str) -> None:
    """Its repr is part of the address: no object's place in memory may stand in it."""
    assert " at 0x" not in repr(ALGORITHMS[name]())


def test_a_start_is_run_only_if_a_missing_run_needs_its_models(tmp_path: Path) -> None:
    made = plan(tmp_path, Options(tune=False))
    run = made.run("sapo", 0, 1e-3)
    warm, critic = run.starts
    for start in (warm, critic):
        pretend(made.store, start, [0.1])
    states = RunStates({x.digest: RunState(x, "done") for x in (warm, critic, run)})
    assert _wanted_starts(states, made.store) == set()
    assert made.store.finished(warm), "nobody asks for its model"
    states.runs[run.digest].status = "waiting"
    (made.store.last(critic) / "policy").mkdir(parents=True)
    assert _wanted_starts(states, made.store) == {warm.digest, critic.digest}
    for start in (warm, critic):  # the critic is not there, and what it would begin from neither
        assert states.runs[start.digest].status == "waiting"
        assert not made.store.finished(start)
        (made.store.folder(start) / "finished.json").write_text('{"cleared": true}')
        states.runs[start.digest].status = "done"
    (made.store.last(critic) / "critic").mkdir()
    assert _wanted_starts(states, made.store) == {critic.digest}
    assert states.runs[critic.digest].status == "done", "its models are there"


def test_what_an_earlier_study_needs_comes_first_even_if_it_is_known_later(tmp_path: Path) -> None:
    first, second = plan(tmp_path), plan(tmp_path, name="other", base="vision")
    store, states = first.store, RunStates()
    _add_known_runs(states, [first, second], store)
    assert not any(x.run.kind == "run" for x in states.runs.values())
    for run in (run for runs in first.tuning("sapo").values() for run in runs):
        pretend(store, run, [0.1, 0.2])
    known = {**states.runs}
    _add_known_runs(states, [first, second], store)
    assert known.keys() < states.runs.keys()
    assert all(states.runs[key] is state for key, state in known.items())
    order = [*states.runs]
    runs = [x.digest for x in first.runs() if x.kind == "run"]
    later = [x.digest for x in second.runs()]
    assert runs
    assert max(map(order.index, runs)) < min(map(order.index, later))


# ── Learning rates ───────────────────────────────────────────────────────────────────────────────


def tuned(tmp_path: Path, curves: dict[str, list[list[float]]], **changes: object) -> StudyPlan:
    """A plan whose tuning runs have these curves, by arm and rate."""
    made = plan(tmp_path, **changes)
    for arm, by_rate in curves.items():
        for runs, curve in zip(made.tuning(arm).values(), by_rate, strict=True):
            for run in runs:
                pretend(made.store, run, curve)
    return made


def test_the_rate_with_the_larger_area_is_chosen(tmp_path: Path) -> None:
    made = tuned(
        tmp_path,
        {"sapo": [[0.0, 0.5, 0.6], [0.0, 0.1, 0.9]], "ppo": [[0.0, 0.1], [0.0, 0.2]]},
        tune="each",
    )
    sapo, ppo = made.rate("sapo"), made.rate("ppo")
    assert sapo is not None
    assert ppo is not None
    assert sapo.rate == 1e-3  # mean of .25 and .55 against .05 and .5
    assert sapo.tried == {1e-3: pytest.approx(0.4), 3e-3: pytest.approx(0.275)}
    assert ppo.rate == 3e-3
    assert ppo.at_edge
    names = [run.name for run in made.runs() if run.kind == "run"]
    assert names == [made.run("sapo", 0, 1e-3).name, made.run("ppo", 0, 3e-3).name]


SAFE = replace(SMOKE, rates=(1.0, 2.0, 4.0), tuning_seeds=(1000, 1001), rule=LargestSafe())


@pytest.mark.slow
@each(
    ("by_rate", "chosen", "losing"),
    [
        # two seeds each: every run rises
        ([[[0.1, 0.2], [0.1, 0.3]]] * 3, 4e-3, ()),
        # one run of the largest rate ends below its start, although the mean rises
        ([[[0.1, 0.2]] * 2, [[0.1, 0.3]] * 2, [[0.1, 0.9], [0.1, 0.08]]], 2e-3, (4e-3,)),
        # it ends above its start, but below its best evaluation
        ([[[0.1, 0.2]] * 2, [[0.1, 0.5, 0.4], [0.1, 0.5]], [[0.3, 0.1]] * 2], 1e-3, (2e-3, 4e-3)),
        # noise of less than a point
        ([[[0.1, 0.2]] * 2, [[0.1, 0.2]] * 2, [[0.1, 0.2, 0.191], [0.1, 0.2]]], 4e-3, ()),
        # every rate loses: the smallest
        ([[[0.3, 0.2]] * 2] * 3, 1e-3, (1e-3, 2e-3, 4e-3)),
    ],
)
def test_the_largest_rate_at_which_no_run_loses_accuracy(
    tmp_path: Path, by_rate: list[list[list[float]]], chosen: float, losing: tuple[float, ...]
) -> None:
    store = Store(tmp_path / f"{len([*tmp_path.iterdir()])}")
    made = StudyPlan(study(), SAFE, Options(), store)
    for runs, curves in zip(made.tuning("sapo").values(), by_rate, strict=True):
        for run, curve in zip(runs, curves, strict=True):
            pretend(made.store, run, curve)
    found = made.rate("sapo")
    assert found is not None
    assert found.rate == chosen
    assert found.losing == losing


def test_a_rate_whose_run_failed_is_not_safe(tmp_path: Path) -> None:
    made = StudyPlan(study(), SAFE, Options(), Store(tmp_path))
    for rate, runs in made.tuning("sapo").items():
        for run in runs:
            if (rate, run.seed) != (4e-3, 1001):
                pretend(made.store, run, [0.1, 0.2])
    found = made.rate("sapo", {made.tuning("sapo")[4e-3][1].digest})
    assert found is not None
    assert (found.rate, found.failed) == (2e-3, (4e-3,))


def test_the_rule_of_mini_is_the_largest_area() -> None:
    """Its published results were tuned by it."""
    assert SCALES["mini"].rule == SCALES["smoke"].rule == LargestArea()
    assert isinstance(SCALES["small"].rule, LargestSafe)


def test_steps_are_joined_to_rounds() -> None:
    arms = {"sapo": {}, "restem": {"algorithm": "restem", "samples": 8, "rounds": 3}}
    made = study(arms=arms, recipe={"save": {"rollouts_every": 7}, "evaluation": {"every": 2}})
    joined = arm_recipe(made, "restem", SMOKE)
    assert [x.steps for x in joined.stages] == [60, 1]
    assert (joined.rollout.prompts, joined.rollout.samples) == (2 * 3, 8)
    assert joined.update.minibatches == 2 * 3
    assert joined.evaluation.every == 1
    assert (joined.save.every, joined.save.rollouts_every) == (100, 2)
    assert arm_recipe(made, "restem", SMOKE, ["stages.2.steps=6"]).stages[-1].steps == 2
    with pytest.raises(RecipeError, match="4 optimization steps cannot be joined to rounds of 3"):
        arm_recipe(made, "restem", SMOKE, ["stages.2.steps=4"])


def test_ablations_take_the_references_rate(tmp_path: Path) -> None:
    made = tuned(tmp_path, {"sapo": [[0.0, 0.5], [0.0, 0.9]]}, tune="reference")
    rates = [made.rate(arm) for arm in made.arms]
    assert [x.rate for x in rates if x is not None] == [3e-3, 3e-3]


def test_equal_rates_leave_the_smaller(tmp_path: Path) -> None:
    made = tuned(tmp_path, {"sapo": [[0.0, 0.5], [0.0, 0.5]]})
    found = made.rate("sapo")
    assert found is not None
    assert found.rate == 1e-3


def test_until_tuning_is_done_the_runs_are_not_known(tmp_path: Path) -> None:
    made = plan(tmp_path)
    first, second = (runs[0] for runs in made.tuning("sapo").values())
    assert made.rate("sapo") is None
    assert {run.kind for run in made.runs()} == {"warm", "tune"}
    assert len(made.runs(guess=True)) == 4 + 2 + 2, (
        "starts and critics of two seeds, two rates, two arms"
    )
    pretend(made.store, first, [0.0, 0.5])
    assert made.rate("sapo") is None
    assert [start.seed for start in made.early()] == [0, 0], "its start and critic need not wait"
    found = made.rate("sapo", failed={second.digest})
    assert found is not None
    assert (found.rate, found.failed) == (1e-3, (3e-3,))
    assert made.rate("sapo", failed={first.digest, second.digest}) is None


def test_a_rate_that_failed_is_remembered(tmp_path: Path) -> None:
    made = plan(tmp_path)
    first, second = (runs[0] for runs in made.tuning("sapo").values())
    pretend(made.store, first, [0.0, 0.5])
    assert recorded([made], made.store).failed == {}
    made.store.note_failure(second, "loss is not finite")
    states = recorded([made], made.store)
    assert states.failed == {second.digest: "loss is not finite"}
    runs = [x.run.name for x in states.runs.values() if x.run.kind == "run"]
    assert made.run("sapo", 0, 1e-3).name in runs, "the other rate is left"
    made.store.forget_failure(second)
    assert made.store.failure(second) is None
    assert recorded([made], made.store).failed == {}


def test_tuning_has_seeds_and_steps_of_its_own(tmp_path: Path) -> None:
    made = plan(tmp_path)
    run = made.tuning("sapo")[3e-3][0]
    assert run.seed == 1000
    assert [stage.steps for stage in run.recipe("start").stages] == [1]
    assert run.recipe("start").optimizer.lr == 3e-3


def test_without_tuning_rates_are_the_recipes(tmp_path: Path) -> None:
    made = plan(tmp_path, Options(tune=False))
    assert made.early() == []
    assert not made.tuning("sapo")
    found = made.rate("ppo")
    assert found is not None
    assert (found.rate, found.tried, found.at_edge) == (1e-3, {}, False)


def test_an_arms_method_and_partition_may_come_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(
        "from dataclasses import dataclass\n"
        "from segcredit.algorithms import sapo\n"
        "from segcredit.partition import FixedLength\n"
        "@dataclass(frozen=True)\n"
        "class Pairs(FixedLength):\n"
        "    size: int = 2\n"
        "def mine(lam=0.9, kl=0.0):\n"
        "    return sapo(lam=lam, kl=kl)\n"
    )
    monkeypatch.chdir(tmp_path)
    arms = {
        "sapo": {},
        "pairs": {"algorithm": {"name": "sapo", "partition": "own.py:Pairs"}},
        "mine": {"algorithm": "own.py:mine"},
    }
    found = plan(tmp_path, Options(tune=False), arms=arms)
    runs = {run.arm: run for run in found.runs() if run.kind == "run"}
    assert len({run.digest for run in runs.values()}) == 3
    assert "Pairs(size=2)" in repr(runs["pairs"].recipe("start").make_algorithm())
    assert runs["mine"].recipe("start").make_algorithm().credit.lam == 0.9
    assert runs["mine"].start == runs["sapo"].start, "and share the warm start"
