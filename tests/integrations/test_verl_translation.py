"""Every setting of every recipe that ``segcredit verl`` accepts: it arrives, is refused, or is
listed as without a counterpart. ``tests/translations.py`` holds the table."""

import contextlib
import inspect
import json
import re
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from each import each
from translations import ACTOR, CASES, GROUP, GRPO, NOTES, SAPO, SEGMENT, SETTINGS, Case, leaves

from segcredit.algorithms import ALGORITHMS, dapo, gspo, reinforce_pp, soft_adaptive
from segcredit.algorithms.credit import GroupZScore, ReturnToGo
from segcredit.algorithms.objective import (
    Clipped,
    GeometricMean,
    PositiveNLL,
    TokenMean,
    Unclipped,
    Whiten,
)
from segcredit.config import (
    apply_overrides,
    load_recipe,
    parse_recipe,
    recipe_settings,
    shipped_recipes,
)
from segcredit.integrations.verl.counterparts import departures, missing
from segcredit.integrations.verl.mapping import NO_COUNTERPART, Cluster
from segcredit.integrations.verl.reward import NUM_TOKENS, TRUNCATED, compute_score
from segcredit.integrations.verl.settings import METHODS
from segcredit.integrations.verl.translate import Translation, translate
from segcredit.partition import Newline
from segcredit.partition import Response as WholeResponse
from segcredit.rewards import make_reward
from segcredit.types import Prompt, Response

DOCUMENT = Path(__file__).parents[2] / "docs" / "appendix" / "verl.md"
FOLDER = Path("/runs/x")
VERLS = {"algorithm.kl_ctrl.type": "fixed"}
"""verl's own defaults that a case relies on; tests/verl sees the whole configuration."""


def translated(case: Case) -> Translation:
    return translate(load_recipe(case.recipe, case.changes), FOLDER, None, case.accept)


def unchanged(case: Case) -> Translation:
    """Translate the recipe without the change, with the method that the case sets, if any."""
    method = [x for x in case.changes if re.fullmatch(r"algorithm=\w+", x)]
    if not method or len(case.changes) == 1:
        method = ["algorithm=sapo"] if case.recipe == SAPO else ["algorithm={name: grpo, kl: 0}"]
    return translate(load_recipe(case.recipe, method), FOLDER)


def plain(settings: dict[str, object]) -> dict[str, object]:
    return {key.removeprefix("+"): x for key, x in settings.items()}


def test_the_table_has_every_setting_of_the_recipe() -> None:
    """Each setting of the recipe classes needs a row here that says what happens on verl."""
    assert sorted(leaves()) == sorted(SETTINGS)
    assert NO_COUNTERPART.keys() == {key for key, x in SETTINGS.items() if x.unused}


@each("name", CASES)
def test_a_setting_arrives_or_is_refused_or_is_told(name: str) -> None:
    case = CASES[name]
    if case.refused is not None:
        with pytest.raises(ValueError, match=case.refused):
            translated(case)
        return
    found, before = translated(case), unchanged(case)
    if case.unused:
        assert f"{name} has no effect on verl: {NO_COUNTERPART[name]}" in found.notes
        return
    settings, others = plain(found.settings), plain(before.settings)
    arrived = {key: settings.get(key, VERLS.get(key)) for key in case.arrives}
    assert arrived == case.arrives
    told = set(found.notes) - set(before.notes)
    assert told or any(others.get(key, VERLS.get(key)) != x for key, x in arrived.items())


TRIED = [f"geo3k/qwen2.5-vl-3b-{method}" for method in ("grpo", "ppo", "sapo", "vc-ppo")]
TRIED += [f"geo3k/qwen2.5-vl-7b-sapo-{cut}" for cut in ("newline", "probability")]
TRIED += ["gsm8k/qwen2.5-0.5b-sapo"]
"""Recipes of the package that run on verl as they are; one of those that differ by model alone."""
OTHERWISE = {
    "vc-ppo": ("optimizer.schedule", "optimizer.warmup_steps"),  # refused beside pretraining
    "grpo": (  # no critic, no tree; verl's trainer writes all responses, which is told
        "model.critic",
        "stages.pretrain_critic",
        "save.rollouts",
        "rollout.tree",
    ),
    "0.5b-sapo": ("update.minibatches",),  # 256 prompts per step, where the others have 512
}
"""How settings begin that a method's recipe cannot have as the others do."""


def test_these_recipes_of_the_package_run_on_verl() -> None:
    """Whatever else is accepted is one of them with another model."""
    found = []
    for name in shipped_recipes():
        with contextlib.suppress(ValueError):
            translate(load_recipe(name), FOLDER)
            found.append(name)
    assert set(TRIED) < set(found)
    own = ("name=x", "model.path=x", "rollout.rows=1")
    tried = [load_recipe(name, own) for name in TRIED]
    assert all(load_recipe(name, own) in tried for name in found)


@pytest.mark.parametrize(
    "recipe",
    [
        x if x.endswith(("3b-grpo", "3b-sapo")) else pytest.param(x, marks=pytest.mark.slow)
        for x in TRIED
    ],
)
def test_every_setting_of_every_accepted_recipe(recipe: str) -> None:
    """The same change has the same outcome whatever else a recipe says."""
    said = recipe_settings(recipe)
    otherwise = tuple(
        x for ending, keys in OTHERWISE.items() if recipe.endswith(ending) for x in keys
    )
    for key, case in SETTINGS.items():
        if key.startswith(otherwise):
            continue
        settings = apply_overrides(deepcopy(said), case.changes)
        if case.refused is not None:
            with pytest.raises(ValueError, match=case.refused):
                translate(parse_recipe(settings), FOLDER)
            continue
        found = translate(parse_recipe(settings), FOLDER)
        if case.unused:
            assert f"{key} has no effect on verl: {NO_COUNTERPART[key]}" in found.notes
        settings = plain(found.settings)
        assert {x: settings[x] for x in case.arrives} == case.arrives, key


@each("changes", NOTES)
def test_what_verl_does_in_another_way_is_told(changes: tuple[str, ...]) -> None:
    before, after = ({*translate(load_recipe(SAPO, x), FOLDER).notes} for x in ((), changes))
    assert any(note.startswith(NOTES[changes]) for note in after - before)


REQUIRED = {
    "spo_tree": ["rollout.samples=1", "rollout.tree={}"],
    "single_stream_spo": ["rollout.samples=1"],
}
"""Settings without which a method is no recipe."""


FIXTURE = json.loads((DOCUMENT.parents[2] / "tests/fixtures/peers_2026.json").read_text())
SETTLED = {  # verl's functions that the fixture ran, and their settings
    "dapo": ("grpo", "vanilla", "token-mean", (0.2, 0.28), 10.0),
    "dr_grpo": ("grpo", "vanilla", "seq-mean-token-sum-norm", (0.2, 0.2), 1e6),
    "cispo": ("grpo", "cispo", "token-mean", (0.2, 0.2), None),
    "geo_mean": ("grpo", "geo_mean", "seq-mean-token-mean", (0.4, 0.4), None),
    "sapo": ("grpo", "sapo", "seq-mean-token-mean", (None, None), None),
    "reinforce_plus_plus": ("reinforce_plus_plus", "vanilla", "token-mean", (0.2, 0.2), 1e6),
    "reinforce_plus_plus_baseline": (
        *("reinforce_plus_plus_baseline", "vanilla", "token-mean"),
        *((0.2, 0.2), 1e6),
    ),
}


@each("peer", SETTLED)
def test_the_settings_are_those_with_which_verls_functions_gave_our_numbers(peer: str) -> None:
    """tests/algorithms/test_recent_methods.py compares these numbers with our methods."""
    method = FIXTURE["peers"][f"verl {peer}"]["algorithm"]
    recipe = load_recipe(GRPO, [f"algorithm={json.dumps(method)}"])
    settings = translate(recipe, FOLDER, accept_departures=True).settings
    actor = {key: settings.get(f"{ACTOR}.{key}") for key in ("loss_agg_mode", "clip_ratio_c")}
    clip = tuple(settings.get(f"{ACTOR}.clip_ratio_{x}") for x in ("low", "high"))
    assert (
        settings["algorithm.adv_estimator"],
        settings[f"{ACTOR}.policy_loss.loss_mode"],
        actor["loss_agg_mode"],
        clip,
        actor["clip_ratio_c"],
    ) == SETTLED[peer]
    if peer == "dr_grpo":
        assert settings["algorithm.norm_adv_by_std_in_grpo"] is False
        assert settings[f"{ACTOR}.loss_scale_factor"] == 16
    if peer == "sapo":
        assert [settings[f"{ACTOR}.tau_{x}"] for x in ("pos", "neg")] == [1.0, 1.05]
    kl = settings["algorithm.use_kl_in_reward"], settings.get("algorithm.kl_ctrl.kl_coef")
    assert kl == ((True, 0.01) if peer == "reinforce_plus_plus" else (False, None))


def test_the_constant_of_dr_grpo_is_the_runs_length_limit() -> None:
    recipe = load_recipe(GRPO, ["algorithm=dr_grpo", "rollout.max_tokens=700"])
    assert translate(recipe, FOLDER).settings[f"{ACTOR}.loss_scale_factor"] == 700


def test_every_method_gets_all_of_verls_keys_or_what_verl_lacks() -> None:
    """No key without a value, and no reason that lists other methods instead."""
    document = DOCUMENT.read_text()
    for name in ALGORITHMS:
        recipe = load_recipe(GRPO, [f"algorithm={name}", *REQUIRED.get(name, [])])
        if name in METHODS or name in GROUP or name in ("grpo_spo", "rloo_spo"):
            settings = translate(recipe, FOLDER, accept_departures=True).settings
            needed = ("algorithm.adv_estimator", f"{ACTOR}.loss_agg_mode")
            assert all(settings[key] for key in needed), name
            assert {key for key, x in settings.items() if x is None} <= {"trainer.rollout_data_dir"}
            if name not in METHODS:
                row = re.search(rf"^\| `{name}` \| .*", document, re.MULTILINE)
                shown = [settings[key] for key in (*needed, f"{ACTOR}.policy_loss.loss_mode")]
                assert row is not None, name
                assert all(f"`{x}`" in row[0] for x in shown), row[0]
            continue
        for accept in (False, True):
            with pytest.raises(ValueError, match=rf"{name} does not run on verl: verl") as error:
                translate(recipe, FOLDER, accept_departures=accept)
        reason = str(error.value).split(" on verl: ")[1].removesuffix(". Use segcredit train")
        assert f"| `{name}` | {reason} |" in document, name


def test_parts_that_verl_lacks_are_named() -> None:
    """Own compositions, and parts that verl has only together with others."""
    base = dapo()
    wrong = {
        "an average of the user's": (replace(base, reduce=HalfMean()), "by a constant; got"),
        "a ratio per line": (replace(gspo(), ratio=GeometricMean(Newline())), "one ratio per resp"),
        "a bonus": (replace(base, terms=(PositiveNLL(0.1),)), "no NLL term"),
        "no clip": (replace(base, surrogate=Unclipped()), "no policy loss with"),
        "another credit": (replace(base, credit=HalfCredit()), "no advantage estimator"),
    }
    for what, (method, said) in wrong.items():
        assert any(said in x for x in missing(method)), what
    differing = {
        "whitens": replace(base, adjust=(Whiten(),)),
        "x as set here does not": replace(reinforce_pp(), adjust=()),
        "averages over responses": replace(soft_adaptive(), reduce=TokenMean()),
        "gspo has none; got 3": replace(gspo(), surrogate=Clipped(0.1, 0.1, dual=3.0)),
        "one advantage per response": replace(gspo(), credit=ReturnToGo(), adjust=(Whiten(),)),
        "does not clamp": replace(gspo(), ratio=GeometricMean(WholeResponse(), limit=20.0)),
    }
    for said, method in differing.items():
        assert missing(method) == []
        (departure,) = departures("x", method)
        assert said in departure
    assert missing(gspo()) == list(departures("gspo", gspo())) == []


class HalfMean:
    """An average of a user's own file."""

    def __call__(self, mask: torch.Tensor, micro_batch: Any, dtype: torch.dtype) -> torch.Tensor:
        return mask.to(dtype) / 2


class HalfCredit(GroupZScore):
    """Credit of a user's own file."""


def test_a_setting_that_nobody_translated_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that gets a new setting: the plugin would make the method without it."""
    make = ALGORITHMS["ppo"]

    def ppo(limit: float | None = None, **settings: object) -> object:
        from dataclasses import replace

        made = make(**settings)
        return replace(made, ratio=replace(made.ratio, limit=limit))

    ppo.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [*inspect.signature(make).parameters.values(), inspect.signature(ppo).parameters["limit"]]
    )
    monkeypatch.setitem(ALGORITHMS._entries, "ppo", ppo)
    translate(load_recipe(SAPO, ["algorithm={name: ppo, lam: 0.9}"]), FOLDER)
    with pytest.raises(ValueError, match=r"algorithm\.limit has no key on verl"):
        translate(load_recipe(SAPO, ["algorithm={name: ppo, limit: 20}"]), FOLDER)


def test_departures_are_refused_with_how_to_accept_them() -> None:
    for changes in (["algorithm=rloo"], ["algorithm={name: grpo, std: population}"]):
        recipe = load_recipe(GRPO, changes)
        with pytest.raises(ValueError, match="add --accept-departures"):
            translate(recipe, FOLDER)
        accepted = [
            x for x in translate(recipe, FOLDER, accept_departures=True).notes if "acc" in x
        ]
        assert accepted
        assert all(x.startswith("accepted: algorithm") for x in accepted)


def test_vllms_share_has_no_effect_in_another_engine_and_that_is_told() -> None:
    recipe = load_recipe(SAPO, ["rollout.engine=vllm", "rollout.vllm.memory=0.3"])
    notes = translate(recipe, FOLDER, Cluster(rollout="sglang")).notes
    assert "rollout.vllm has no effect with --rollout sglang" in notes


def test_verls_own_trainer_writes_every_response_and_that_is_told() -> None:
    recipe = load_recipe(GRPO, ["algorithm={name: grpo, kl: 0}"])
    assert any(x.startswith("save.rollouts_every") for x in translate(recipe, FOLDER).notes)


@pytest.mark.parametrize("num_tokens", [100, 950, 999, 1000])
def test_the_length_penalty_is_the_native_one(num_tokens: int) -> None:
    """Well below the limit, near it, and at it."""
    spec = {"name": "geo3k", "length_penalty": "authors"}
    text = r"<think>2 + 2</think>\boxed{4}"
    prompt = Prompt("p", (), answer="4")
    reward = make_reward(spec)
    (native,) = reward([Response(prompt, text, num_tokens, num_tokens == 1000, 1000)])
    reward.close()
    extra = {NUM_TOKENS: num_tokens, TRUNCATED: num_tokens == 1000}
    found = compute_score("geo3k", text, "4", extra, reward=spec, max_tokens=1000)
    assert found["score"] == native.value
    assert found["score"] == pytest.approx({100: 1, 950: 0.95, 999: 0.601, 1000: 0.6}[num_tokens])
    assert found["acc"] == 1.0


def test_a_reward_without_the_responses_length_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"reward\.reward_manager\.name=CountingRewardManager"):
        compute_score("x", r"\boxed{4}", "4", {}, reward="exact")


def test_several_rewards_are_summed_and_reported() -> None:
    extra = {NUM_TOKENS: 3, TRUNCATED: False}
    spec = ["geo3k_strict", {"name": "exact", "weight": 2.0}]
    found = compute_score("geo3k", r"\boxed{4}", "4", extra, reward=spec)
    assert found["score"] == pytest.approx(2.9)
    assert (found["reward/geo3k_strict"], found["reward/exact"]) == (pytest.approx(0.9), 1.0)
    assert found["acc"] == 1.0


def test_no_accuracy_is_made_up_for_a_function_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "half.py"
    file.write_text(
        "def half(completions, num_tokens, **_):\n    return [0.5 + n for n in num_tokens]\n"
    )
    extra = {NUM_TOKENS: 3, TRUNCATED: False}
    found = compute_score("x", "y", "4", extra, reward=f"{file}:half")
    assert found["score"] == 3.5
    assert "acc" not in found


def test_the_document_lists_every_setting_where_it_belongs() -> None:
    text = DOCUMENT.read_text()
    names = ("Arrives.", "Differs,", "Has no counterpart", "Is refused", "Methods without")
    begin = [text.index(f"**{name}") for name in names]
    tables = dict(zip(names, (text[x:y] for x, y in pairwise([*begin, len(text)])), strict=True))
    for key, case in SETTINGS.items():
        named = {key, key.rpartition(".")[0]}  # model.lora stands for all of its settings
        if case.unused:
            row = f"| `{key}` | {NO_COUNTERPART[key]} |"
            assert row in tables["Has no counterpart"], key
        elif case.refused is not None:
            named |= {"warm_start"} if key.startswith("stages.warm_start") else set()
            assert any(re.search(rf"`{x}\b", tables["Is refused"]) for x in named), key
        elif case.arrives:
            assert f"`{key}`" in tables["Arrives."], key
        else:
            assert f"`{key}`" in tables["Differs,"], key
    for key in (*SEGMENT, *GROUP["grpo"]):
        assert re.search(rf"`{key}\b", text[begin[0] :]), key
