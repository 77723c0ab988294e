"""Intervals, paired differences, tables and figures, from runs that were never run."""

import csv
import io
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small import SMOKE, plan, pretend, study

from segcredit.runlog import write_rollouts
from segcredit_lab.study import Options, Store, StudyPlan
from segcredit_lab.study.definition import LargestSafe
from segcredit_lab.study.store import read_measurement
from segcredit_lab.study.summary import Summary, estimate, paired, summarize
from segcredit_lab.study.tables import (
    arms_csv,
    cost_table,
    curves_csv,
    latex,
    markdown,
    results_table,
    runs_csv,
    sets_table,
    times_csv,
    tuning_table,
    write_study,
)

SEEDS = (0, 1, 2)
ARMS = {
    "sapo": {"label": "SAPO"},
    "ppo": {"label": "PPO", "algorithm": "ppo"},
    "grpo": {"label": "GRPO & co", "algorithm": "grpo", "samples": 8, "same_prompts": True},
}
PUBLISHED = {"source": "a paper, Table 9", "columns": {"Geo3K": {"sapo": 46.26, "ppo": 21.8}}}


def made(tmp_path: Path, **changes: object) -> StudyPlan:
    """Three arms, three seeds; the last arm lacks one."""
    options = Options(seeds=SEEDS, tune=False)
    found = plan(tmp_path, options, arms=ARMS, published=PUBLISHED, **changes)
    for seed in SEEDS:
        start = 0.1 * seed
        pretend(found.store, found.run("sapo", seed, 1e-3), [start, start + 0.2, start + 0.4])
        gain = 0.1 + 0.01 * seed
        pretend(found.store, found.run("ppo", seed, 1e-3), [start, start + 0.2, start + 0.4 - gain])
        if seed:
            pretend(found.store, found.run("grpo", seed, 1e-3), [start, start, start])
    return found


@pytest.fixture
def summary(tmp_path: Path) -> Summary:
    return summarize(made(tmp_path))


def test_what_the_critics_own_run_took_stands_beside_the_arms_that_use_it(tmp_path: Path) -> None:
    found = made(tmp_path)
    unknown = summarize(found).reference.runs[0]
    assert math.isnan(unknown.pretraining_tokens), "its record is not there"
    read_measurement.cache_clear()
    start = found.run("ppo", 0, 1e-3).start
    assert start is not None
    pretend(found.store, start, [0.1])
    arms = {arm.name: arm for arm in summarize(found).arms}
    for name in ("sapo", "ppo"):
        assert arms[name].runs[0].pretraining_tokens == 16 * 10
        assert math.isnan(arms[name].runs[1].pretraining_tokens), "another seed's"


def test_an_interval_by_hand() -> None:
    found = estimate([1.0, 2.0, 3.0])
    half = 4.3027 / math.sqrt(3)
    assert (found.mean, found.num) == (2.0, 3)
    assert (found.low, found.high) == (pytest.approx(2 - half), pytest.approx(2 + half))
    one = estimate([1.0, math.nan])
    assert (one.mean, one.num) == (1.0, 1)
    assert math.isnan(one.low)
    assert estimate([]).num == 0


def test_differences_are_paired_by_seed() -> None:
    """Seeds differ far more than arms do: unpaired, nothing could be said."""
    found = paired({0: 0.1, 1: 0.5, 2: 0.9}, {2: 0.8, 1: 0.4, 0: 0.0, 7: 0.3})
    assert found.mean == pytest.approx(0.1)
    assert found.high - found.low == pytest.approx(0.0, abs=1e-9)
    assert found.num == 3


def test_the_summary_by_hand(summary: Summary) -> None:
    sapo, ppo, grpo = summary.arms
    assert sapo.of(lambda run: run.final).mean == pytest.approx(0.5)
    final = ppo.against(sapo, lambda run: run.final)
    assert final.mean == pytest.approx(-0.11)
    assert final.high - final.low == pytest.approx(2 * 4.3027 * 0.01 / math.sqrt(3), rel=1e-3)
    assert ppo.against(sapo, lambda run: run.area).mean == pytest.approx(-0.11 / 4)
    assert grpo.missing == (0,)
    assert not summary.complete
    assert grpo.against(sapo, lambda run: run.final).num == 2


def test_budgets_are_compared(summary: Summary) -> None:
    assert [summary.budget(arm) for arm in summary.arms] == [1.0, 1.0, 8.0]
    assert [arm.name for arm in summary.unequal()] == ["grpo"]


def test_the_table_of_results(summary: Summary) -> None:
    table = results_table(summary)
    assert table.columns[-1] == "paper: Geo3K"
    sapo, ppo, grpo = table.rows
    assert sapo[:3] == ("SAPO", "0.001", "3")
    assert sapo[5] == sapo[7] == "", "not compared with itself"
    assert sapo[-1] == "46.3"
    assert ppo[7] == "−11.0 (−13.5 … −8.5)"
    assert grpo[-1] == "–"
    text = markdown(table).splitlines()
    assert len(text) == 5
    assert len({line.count("|") for line in text}) == 1
    tex = latex(table)
    assert "GRPO \\& co" in tex
    assert "$-$11.0" in tex
    assert "−" not in tex
    assert tex.count("\\\\\n") == 4


@pytest.mark.slow
def test_results_on_each_test_set(tmp_path: Path) -> None:
    found = plan(tmp_path, Options(seeds=SEEDS, tune=False))
    for seed in SEEDS:
        low = 0.01 * seed
        for arm, gain in (("sapo", 0.2), ("ppo", 0.1)):
            curves = {"gsm8k": [0.0, low + gain], "svamp": [0.1, 0.1 + gain]}
            pretend(found.store, found.run(arm, seed, 1e-3), [0.05, 0.2], curves, reward=gain)
    summary = summarize(found)
    assert summary.sets == ("gsm8k", "svamp")
    table = sets_table(summary)
    assert [row[:3] for row in table.rows] == [
        ("SAPO", "gsm8k", "0.0"),
        ("ppo", "gsm8k", "0.0"),
        ("SAPO", "svamp", "10.0"),
        ("ppo", "svamp", "10.0"),
        ("SAPO", "reward in training", "–"),
        ("ppo", "reward in training", "–"),
    ]
    assert table.rows[1][5].startswith("11.0 (")
    assert table.rows[1][6] == "−10.0 (−10.0 … −10.0)", "paired by seed"
    assert table.rows[5][3:] == (
        *("10.0 (10.0 … 10.0)", "−10.0 (−10.0 … −10.0)"),
        *("10.0 (10.0 … 10.0)", "−10.0 (−10.0 … −10.0)"),
    )
    write_study(summary, tmp_path / "out")
    page = (tmp_path / "out" / "study.md").read_text()
    assert "## Test sets" in page
    assert "test_sets.png" in page
    rows = list(csv.DictReader((tmp_path / "out" / "sets.csv").read_text().splitlines()))
    assert len(rows) == 2 * 3 * 2 * 2
    assert rows[1] == {"arm": "sapo", "seed": "0", "set": "gsm8k", "step": "1", "accuracy": "0.2"}


@pytest.mark.slow
def test_one_test_set_needs_no_table(summary: Summary, tmp_path: Path) -> None:
    assert summary.sets == ()
    write_study(summary, tmp_path / "out")
    assert "Test sets" not in (tmp_path / "out" / "study.md").read_text()
    assert not (tmp_path / "out" / "sets.csv").exists()


def test_the_rule_of_the_rates_stands_there(tmp_path: Path) -> None:
    scale = replace(SMOKE, rule=LargestSafe())
    found = StudyPlan(study(), scale, Options(), Store(tmp_path / "runs"))
    low, high = found.tuning("sapo").values()
    pretend(found.store, low[0], [0.1, 0.2])
    pretend(found.store, high[0], [0.1, 0.9, 0.5])
    summary = summarize(found)
    assert [row[2:] for row in tuning_table(summary).rows] == [
        ("15.0", "chosen"),
        ("60.0", "loses accuracy"),
    ]
    pretend(found.store, found.run("sapo", 0, 1e-3), [0.1, 0.4, 0.2])
    pretend(found.store, found.run("ppo", 0, 1e-3), [0.1, 0.2, 0.3])
    write_study(summarize(found), tmp_path / "out")
    text = (tmp_path / "out" / "study.md").read_text()
    assert "ends more than 1 point below its own best evaluation" in text
    assert "Runs of the table that lose accuracy by this measure: SAPO (seed 0)." in text


def test_rounds_are_counted_in_steps(tmp_path: Path) -> None:
    arms = {"sapo": {}, "restem": {"algorithm": "restem", "samples": 8, "rounds": 3}}
    found = plan(tmp_path, Options(tune=False), arms=arms)
    pretend(found.store, found.run("restem", 0, 1e-3), [0.1, 0.2])
    assert summarize(found).arms[1].runs[0].steps == (0, 3)


@pytest.mark.parametrize("whose", ["each", "reference"])
def test_rates_stand_there_for_the_arms_that_were_tuned(tmp_path: Path, whose: str) -> None:
    found = plan(tmp_path, tune=whose)
    for arm in found.arms if whose == "each" else ("sapo",):
        for place, runs in enumerate(found.tuning(arm).values()):
            for run in runs:
                pretend(found.store, run, [0.0, 0.2 - 0.1 * place])
    rows = tuning_table(summarize(found)).rows
    told = [("SAPO", "0.001", "10.0", "chosen"), ("SAPO", "0.003", "5.0", "")]
    own = [("ppo", "0.001", "10.0", "chosen"), ("ppo", "0.003", "5.0", "")]
    assert list(rows) == (told + own if whose == "each" else told)


def test_times_are_apart_from_what_can_be_repeated(summary: Summary) -> None:
    for text in (arms_csv(summary), runs_csv(summary), curves_csv(summary)):
        assert "seconds" not in text
        assert "time" not in text
    assert times_csv(summary).startswith("arm,seed,seconds\n")
    rows = list(csv.DictReader(io.StringIO(arms_csv(summary))))
    assert float(rows[1]["final_difference"]) == pytest.approx(-0.11)
    assert rows[0]["seeds"] == "0 1 2"
    assert rows[2]["paper: Geo3K"] == ""
    assert len(curves_csv(summary).splitlines()) == 1 + 3 * 8


def test_a_label_may_hold_anything(summary: Summary) -> None:
    assert "minutes" in cost_table(summary).columns
    assert "a\\|b" in markdown(type(cost_table(summary))(("x",), (("a|b",),)))


def test_the_page_says_what_is_missing_and_what_failed(tmp_path: Path) -> None:
    found = made(tmp_path, note="A note.")
    lost = found.run("grpo", 0, 1e-3)
    folder = tmp_path / "out"
    write_study(summarize(found, {lost.digest: "no memory\nleft"}), folder)
    page = (folder / "study.md").read_text()
    assert "**Incomplete: 1 of 9 runs are missing.**" in page
    assert f"- {lost.name}: no memory left" in page
    assert "**Budgets of optimization are not equal** within 5 %: GRPO & co (8.00 ×)" in page
    assert "The paper's numbers: a paper, Table 9." in page
    assert "Learning rates are those of the recipes." in page
    for name in ("study.tex", "study.csv", "runs.csv", "curves.csv", "times.csv"):
        assert (folder / name).is_file()
    for name in ("curves", "differences"):
        assert f"]({name}.png)" in page
        assert (folder / f"{name}.png").stat().st_size > 5000
        assert "<svg" in (folder / f"{name}.svg").read_text()


@pytest.mark.slow
def test_a_study_of_a_reward_that_does_not_say_what_is_correct(tmp_path: Path) -> None:
    found = made(tmp_path, figures=["curves", "differences"])
    for file in (tmp_path / "runs").glob("*/metrics.jsonl"):
        file.write_text(file.read_text().replace('"sampled"', '"reward"'))
    folder = tmp_path / "out"
    assert write_study(summarize(found), folder) == []
    page = (folder / "study.md").read_text()
    assert "The measure is held-out reward of sampled responses" in page
    assert "Numbers are multiplied by 100" in page
    assert "held-out accuracy" not in page
    assert (folder / "curves.csv").read_text().startswith("arm,seed,step,reward\n")
    for name in ("curves", "differences"):
        assert "accuracy" not in (folder / f"{name}.svg").read_text()


def test_a_figure_that_cannot_be_drawn_is_told(tmp_path: Path) -> None:
    found = made(tmp_path, figures=["curves", "value_loss", "lift"])
    lacking = write_study(summarize(found), tmp_path / "out")
    assert lacking[0] == "no figure value_loss: no run recorded value_loss."
    assert lacking[1].startswith("no figure lift: ")


@pytest.mark.slow
def test_lift_is_by_the_critic_where_it_learns_at_every_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("segcredit_lab.analysis.drawing.png", lambda analysis: b"")
    arms = {
        "everywhere": {"label": "at all", "algorithm": {"name": "sapo", "value_everywhere": True}},
        "ppo": {"label": "PPO", "algorithm": "ppo"},
    }
    found = plan(
        tmp_path, Options(seeds=SEEDS, tune=False), arms=arms, figures=["lift"],
        reference="everywhere",
    )  # fmt: skip
    for seed in SEEDS:
        for arm in arms:
            run = found.run(arm, seed, 1e-3)
            pretend(found.store, run, [0.1, 0.2])
            if arm == "everywhere":
                recorded(found.store.folder(run) / "rollouts", seed)
    assert write_study(summarize(found), tmp_path / "out") == []
    page = (tmp_path / "out" / "study.md").read_text()
    assert "| at all, early | 3 | critic | " in page
    assert "Without " in page
    assert "ppo-s0" in page


def recorded(folder: Path, seed: int) -> None:
    """Responses of several tokens in one segment, with a value at each."""
    rng = np.random.default_rng(seed)
    folder.mkdir()
    for step in (1, 2, 3):
        rows = [
            {
                "prompt_id": f"p{n}", "tokens": [1] * 12, "segment": [0] * 12,
                "entropy": rng.gamma(0.5, size=12).tolist(),
                "value": rng.uniform(size=12).tolist(), "reward": float(n % 2),
            }
            for n in range(6)
        ]  # fmt: skip
        write_rollouts(folder, step, rows)


def test_a_study_of_nothing_has_a_page_too(tmp_path: Path) -> None:
    found = plan(tmp_path, Options(tune=False))
    write_study(summarize(found), tmp_path / "out")
    assert "**Incomplete: 2 of 2 runs" in (tmp_path / "out" / "study.md").read_text()


def test_a_sweep_is_drawn_in_order(tmp_path: Path) -> None:
    arms = {
        "wide": {"algorithm": {"name": "sapo", "fraction": 0.9}, "at": 90},
        "narrow": {"algorithm": {"name": "sapo", "fraction": 0.1}, "at": 10},
    }
    options = Options(seeds=(0, 1), tune=False)
    found = plan(tmp_path, options, arms=arms, reference="wide", figures=["sweep"], axis="k (%)")
    for arm in arms:
        for seed in (0, 1):
            pretend(found.store, found.run(arm, seed, 1e-3), [0.1, 0.2 + 0.1 * seed])
    write_study(summarize(found), tmp_path / "out")
    record = (tmp_path / "out" / "sweep.json").read_text()
    assert '"at": [\n   10.0,\n   90.0\n  ]' in record
