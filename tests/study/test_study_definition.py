"""Studies as they are written down."""

from pathlib import Path

import pytest
from each import each
from small import SMOKE, plan, study

from segcredit.benchmarks.table import paper_tables, title
from segcredit.config import RecipeError
from segcredit.config.recipe import Settings
from segcredit_lab.study import (
    SCALES,
    Arm,
    Options,
    Store,
    Study,
    StudyPlan,
    load_study,
    shipped_studies,
)
from segcredit_lab.study.definition import scale_of

NAMES = [*(f"table{n}" for n in range(1, 7)), *(f"fig{n}" for n in range(3, 8))]
OURS = ["authors", "choices", "epochs", "lambda", "newer", "second_model", "value_at"]


def test_every_table_and_figure_is_there() -> None:
    assert [*shipped_studies()] == NAMES + OURS


@pytest.mark.parametrize("name", NAMES + OURS)
@pytest.mark.parametrize(
    "scale", [*(pytest.param(x, marks=pytest.mark.slow) for x in ("smoke", "small")), "paper"]
)
def test_every_arm_is_a_valid_recipe(name: str, scale: str, tmp_path: Path) -> None:
    found = load_study(name)
    # the paper's own recipes do not pretrain SAPO's critic, so there a cold one is the same
    options = Options(only=tuple(found.arms) if scale == "smoke" else ())
    made = StudyPlan(found, SCALES[scale], options, Store(tmp_path))
    runs = {made.run(arm, 0, 1e-3).digest for arm in made.arms}
    assert len(runs) == len(made.arms), "two arms are the same"


def test_the_paper_figure_four_has_eight_methods() -> None:
    found = load_study("fig4")
    methods = [arm.algorithm for arm in found.arms.values() if not arm.optional]
    names = {str(x["name"] if isinstance(x, dict) else x) for x in methods}
    assert names == {
        *("sapo", "ppo", "grpo_spo", "rloo_spo", "vineppo", "spo_chain", "restem", "dpo_positive")
    }
    assert found.published is not None
    assert all(len(numbers) == 8 for numbers in found.published.columns.values())


@pytest.mark.parametrize(("name", "grpo"), [("table1", "grpo_verl"), ("choices", "grpo_verl")])
def test_grpo_beside_verls_ppo_is_verls(name: str, grpo: str) -> None:
    arms = load_study(name).arms
    assert arms["grpo"].algorithm == arms["grpo_prompts"].algorithm == grpo


def test_table1_has_the_newer_methods_as_optional_arms() -> None:
    optional = [arm.algorithm for arm in load_study("table1").arms.values() if arm.optional]
    assert {str(x["name"] if isinstance(x, dict) else x) for x in optional} >= {
        *("dapo", "dr_grpo", "cispo", "gmpo", "soft_adaptive", "high_entropy"),
        *("reinforce_pp", "sae", "vppo"),
    }


def test_lambda_is_matched_in_tokens() -> None:
    """λ of a segment is that of a token to the power of its tokens, 1 / k."""
    arms = load_study("lambda").arms
    lam = {}
    for name, arm in arms.items():
        spec = {"name": arm.algorithm} if isinstance(arm.algorithm, str) else arm.algorithm
        assert spec is not None
        lam[name] = spec.get("lam", 0.99)
    length = 1 / 0.3
    for horizon in ("short", "long", "one"):
        tokens, segments = lam[f"token_{horizon}"], lam[f"segment_{horizon}"]
        assert segments == pytest.approx(tokens**length, abs=1e-3)


PAPER_ARMS = {
    "SAPO": "sapo",
    "PPO": "ppo",
    "VC-PPO": "vc_ppo",
    "GRPO": "grpo",
    "SAPO (sw-IS)": "segment",
    "SAPO (naive-IS)": "token",
    "Entropy-based": "entropy",
    "Newline-based": "newline",
    "Step-based": "step",
    "Prob-based": "probability",
}
"""Arms of the studies by rows of the paper's tables."""


@pytest.mark.parametrize("number", [2, 3, 4, 5, 6])
def test_published_numbers_are_those_of_the_paper(number: int) -> None:
    table, published = paper_tables()[number], load_study(f"table{number}").published
    assert published is not None
    rows = {name.removeprefix("+"): x for name, x in table.rows.items()}
    rows.pop("Base", None)
    columns = [title(name) for name in table.columns] + ["mean"] * table.average
    assert published.columns == {
        column: {PAPER_ARMS[name]: values[place] for name, values in rows.items()}
        for place, column in enumerate(columns)
    }


@pytest.mark.slow
@pytest.mark.parametrize(("name", "model"), [("table4", "7B"), ("table5", "4B")])
def test_tables_four_and_five_train_the_papers_models(name: str, model: str) -> None:
    options = Options(optional=True)
    made = StudyPlan(load_study(name), SCALES["paper"], options, Store(Path("nowhere")))
    for arm in made.arms:
        assert f"-{model}-" in str(made.recipe(arm).model.path)
    first = load_study("table1")
    small = StudyPlan(load_study(name), SCALES["mini"], options, Store(Path("nowhere")))
    other = StudyPlan(first, SCALES["mini"], Options(), Store(Path("nowhere")))
    assert small.seeds == other.seeds
    assert "the runs of table1" in small.study.title
    assert {x.digest for x in small.runs(guess=True)} <= {x.digest for x in other.runs(guess=True)}


@pytest.mark.parametrize(
    "scale", [pytest.param(x, marks=[pytest.mark.slow] * (x != "paper")) for x in SCALES]
)
def test_tables_share_the_runs_of_one_model(scale: str) -> None:
    """Table 6 needs no run that Table 3 does not have; SAPO on 7B is one run of four tables."""

    def runs(name: str) -> set[str]:
        made = StudyPlan(load_study(name), SCALES[scale], Options(), Store(Path("nowhere")))
        return {x.digest for x in made.runs(guess=True)}

    assert runs("table6") <= runs("table3")
    if scale == "paper":
        assert len(runs("table2") & runs("table3") & runs("table4") & runs("table6")) == 3


@each(
    ("changes", "said"),
    [
        ({"reference": "grpo"}, "reference must be one of the arms sapo, ppo; got 'grpo'"),
        ({"arms": {"sapo": {"algoritm": "sapo"}}}, "unknown key. Did you mean 'algorithm'?"),
        ({"figure": ["curves"]}, "unknown key. Did you mean 'figures'?"),
        ({"figures": ["sweep"]}, "figure sweep needs `at` in at least one arm; got none"),
        (
            {"published": {"source": "x", "columns": {"Geo3K": {"grpo": 1.0}}}},
            "published.columns.Geo3K: unknown arm 'grpo'; the arms are sapo, ppo",
        ),
        (
            {"scales": {"smal": {}}},
            "expected one of smoke, mini, small, paper; got 'smal'. Did you mean 'small'",
        ),
    ],
)
def test_mistakes_are_told(changes: dict[str, object], said: str) -> None:
    with pytest.raises(RecipeError) as error:
        study(**changes)
    assert said in str(error.value)


def test_names_that_nobody_has_are_told(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="Did you mean 'table1'"):
        load_study("tabel1")
    with pytest.raises(RecipeError, match="the scales are smoke, mini, small, paper; got 'big'"):
        scale_of("big")
    with pytest.raises(RecipeError, match=r"no arm 'pppo'; it has sapo, ppo\. Did you mean 'ppo'"):
        plan(tmp_path, Options(only=("pppo",)))
    with pytest.raises(RecipeError, match="seed 1000 is used to tune"):
        plan(tmp_path, Options(seeds=(0, 1000)))
    assert plan(tmp_path, Options(seeds=(0, 1000), tune=False)).seeds == (0, 1000)


def test_an_optional_arm_runs_when_it_is_asked_for(tmp_path: Path) -> None:
    arms = {"sapo": {}, "ppo": {"algorithm": "ppo"}, "rest": {"cold": True, "optional": True}}
    assert plan(tmp_path, arms=arms).arms == ["sapo", "ppo"]
    assert plan(tmp_path, Options(only=("rest",)), arms=arms).arms == ["sapo", "rest"]
    assert plan(tmp_path, Options(optional=True), arms=arms).arms == ["sapo", "ppo", "rest"]


def test_seeds_are_the_users_the_studys_or_the_scales(tmp_path: Path) -> None:
    assert plan(tmp_path).seeds == SMOKE.seeds
    assert plan(tmp_path, seeds={"smoke": [4, 5], "mini": [6]}).seeds == (4, 5)
    assert plan(tmp_path, Options(seeds=(7,)), seeds={"smoke": [4, 5]}).seeds == (7,)


def test_a_study_can_differ_at_a_scale(tmp_path: Path) -> None:
    changes = {"title": "Other", "arms": {"ppo": {"optional": True}, "sapo": {"share": 0.5}}}
    made = study(scales={"smoke": changes})
    assert made.at_scale("mini") is made
    found = made.at_scale("smoke")
    assert (found.title, found.asks) == ("Other", made.asks)
    assert (found.arms["sapo"].share, found.arms["sapo"].label) == (0.5, "SAPO")
    assert plan(tmp_path, scales={"smoke": changes}).arms == ["sapo"]
    assert plan(tmp_path).arms == ["sapo", "ppo"]
    with pytest.raises(RecipeError, match=r"study small, scales\.smoke: the study is not valid"):
        study(scales={"smoke": {"reference": "grpo"}}).at_scale("smoke")


def test_the_arms_of_a_real_model() -> None:
    """Scale small, as docs/studies.md plans it."""
    expected = {
        "fig4": ["sapo", "ppo", "grpo", "rloo", "vineppo", "spo", "restem", "dpo_positive"],
        "table1": ["sapo", "ppo", "vc_ppo", "grpo", "grpo_prompts", "ppo_long", "token_long"],
        "table2": ["segment", "token"],
        "table3": ["entropy", "newline", "probability", "fixed", "response"],
        "fig3": ["sapo", "everywhere", "ppo"],
        "second_model": ["sapo", "ppo", "ppo_long", "grpo"],
    }
    seeds = {"table1": 5, "second_model": 2}
    for name, arms in expected.items():
        made = StudyPlan(load_study(name), SCALES["small"], Options(), Store(Path("nowhere")))
        assert made.arms == arms, name
        assert len(made.seeds) == seeds.get(name, 3), name


def test_arms_of_a_real_model_share_starts_and_sampled_responses(tmp_path: Path) -> None:
    """One warm start and one critic per seed for every study of one model."""
    starts, critics = set(), set()
    for name in ("table1", "fig4", "table2", "table3", "lambda", "fig3"):
        made = StudyPlan(load_study(name), SCALES["small"], Options(), Store(tmp_path))
        for arm in made.arms:
            run = made.run(arm, 0, 2e-5)
            starts.add(run.starts[0].digest)
            critics |= {x.digest for x in run.starts[1:]}
            rollout, steps = run.whole.rollout, run.steps
            continues = arm in ("vineppo", "spo")
            factor = 8 if arm == "grpo_prompts" else 1
            if not continues:
                assert rollout.prompts * rollout.samples * steps == 512 * 200 * factor, arm
    assert (len(starts), len(critics)) == (1, 1)


def test_the_documents_study_is_one(tmp_path: Path) -> None:
    """docs/studies.md: a study of one's own, in ten lines, at a scale that anyone has."""
    text = (Path(__file__).parents[2] / "docs" / "studies.md").read_text()
    example = text.partition("```yaml\n")[2].partition("```")[0]
    path = tmp_path / "mine.yaml"
    path.write_text(example)
    made = StudyPlan(load_study(str(path)), SMOKE, Options(), Store(tmp_path))
    assert made.arms == ["paper", "far", "wide"]
    assert made.recipe("wide").rollout.temperature == 1.2
    assert len(example.splitlines()) <= 11


@pytest.mark.parametrize("kind", [Arm, Study])
def test_every_key_is_documented(kind: type[Settings]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "studies.md").read_text()
    for key in kind.model_fields:
        assert f"`{key}`" in text or key == "name", f"docs/studies.md does not say what {key} is"
    for name in shipped_studies():
        assert f"`{name}`" in text


def test_a_base_is_looked_for_beside_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "deep"
    folder.mkdir()
    (folder / "base.yaml").write_text(Path(SMOKE.bases["text"]).read_text() + "seed: 5\n")
    arms = "arms: {sapo: {}}"
    (folder / "mine.yaml").write_text(
        f"title: x\nasks: y\nbase: base.yaml\nreference: sapo\n{arms}\n"
    )
    monkeypatch.chdir(tmp_path)
    made = StudyPlan(load_study("deep/mine.yaml"), SMOKE, Options(), Store(tmp_path))
    assert made.recipe("sapo").data.world == "derived_variables"
