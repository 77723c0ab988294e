"""``segcredit study`` from the outside: real runs, shared, failing, killed, gone on with."""

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from each import each
from forked_cli import Call, run, start
from forked_worker import NAME
from tiny_runs import REWARD
from typer.testing import CliRunner, Result

from segcredit.cli import app

BASE: dict[str, Any] = {
    "threads": 1,
    "model": {"tiny": "qwen2", "hidden": 16, "layers": 1, "heads": 2},
    "data": {
        "world": "derived_variables",
        "settings": {"given": 2, "derived": 1, "needed": [1, 1], "modulus": 2},
    },
    "reward": "reward.py:by_length",
    "algorithm": {"name": "sapo", "kl": 0.0},
    "stages": [
        {"kind": "warm_start", "steps": 6, "batch": 4},
        {"kind": "pretrain_critic", "steps": 1},
        {"kind": "optimize", "steps": 4},
    ],
    "rollout": {"prompts": 4, "max_tokens": 30},
    "update": {"minibatches": 2},
    "optimizer": {"lr": 1e-3, "critic_lr": 1e-3},
    "evaluation": {"every": 1, "prompts": 16, "greedy": False, "watch": 0},
    "save": {"every": 2, "keep": 1, "rollouts_every": 0},
}
STUDY: dict[str, Any] = {
    "title": "Mine",
    "asks": "Does it go on?",
    "base": "base.yaml",
    "reference": "sapo",
    "tune": "none",
    "figures": ["curves"],
    "arms": {"sapo": {}, "ppo": {"algorithm": "ppo"}},
}
CSV = ("study.csv", "runs.csv", "curves.csv")


def write(folder: Path, **changes: Any) -> Path:
    """A study of one's own beside its base."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "base.yaml").write_text(yaml.safe_dump(BASE))
    (folder / "reward.py").write_text(REWARD)  # of an untrained model nothing else is right
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(STUDY | changes, sort_keys=False))
    return path


def segcredit(*arguments: object) -> Result:
    """In this process; for what trains nothing."""
    runner = CliRunner(env={"FORCE_COLOR": None, "TTY_COMPATIBLE": None, "COLUMNS": "100"})
    return runner.invoke(app, ["study", *(str(x) for x in arguments)])


def results(folder: Path) -> dict[str, bytes]:
    return {name: (folder / "studies" / "mine-smoke" / name).read_bytes() for name in CSV}


def runs_of(folder: Path) -> list[str]:
    return sorted(x.name.rpartition("-")[0] for x in (folder / "studies" / "runs").glob("*-*"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study that nobody disturbed, and whose worker was really started."""
    folder = tmp_path_factory.mktemp("whole")
    write(folder)
    call = run(folder, "study", "mine.yaml", forks=False)
    assert call.wait() == 0, call.said + call.complained
    assert "Mine" in call.said
    return folder


@pytest.mark.slow
def test_it_runs_what_is_needed_and_writes_it_down(whole: Path) -> None:
    assert runs_of(whole) == ["ppo-s0", "sapo-s0", "warm-critic-s0", "warm-start-s0"]
    for place in (whole / "studies" / "runs").glob("*-s0-*"):
        assert json.loads((place / "finished.json").read_bytes()) == {"cleared": True}
    lines = results(whole)["curves.csv"].decode().splitlines()
    assert len(lines) == 1 + 2 * 5, "before, and after each of four steps"
    assert len({line.split(",")[3] for line in lines if ",0,0," in line}) == 1, "one warm start"
    assert len({line.split(",")[3] for line in lines}) > 3, "something happens"
    assert list((whole / "studies" / "logs").iterdir()) == []


@pytest.mark.slow
def test_a_second_time_it_runs_nothing(whole: Path) -> None:
    before = {x: x.stat().st_mtime_ns for x in (whole / "studies" / "runs").rglob("*.jsonl")}
    kept = results(whole)
    call = run(whole, "study", "mine.yaml")
    assert call.wait() == 0
    assert "running" not in call.said
    assert before == {
        x: x.stat().st_mtime_ns for x in (whole / "studies" / "runs").rglob("*.jsonl")
    }
    assert results(whole) == kept


@pytest.mark.slow
def test_another_study_shares_its_runs_and_one_that_fails_stops_no_other(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms = {
        "broken": {"recipe": {"reward": "nowhere.py:reward"}},
        "plain": {"algorithm": {"name": "sapo", "fraction": 0.3}},
        "rloo": {"algorithm": "rloo", "samples": 2},
    }
    other = STUDY | {"arms": arms, "reference": "plain"}
    (whole / "other.yaml").write_text(yaml.safe_dump(other, sort_keys=False))
    call = run(whole, "study", "other.yaml")
    assert call.wait() == 1
    assert "nowhere.py" in call.complained
    assert "broken-s0" in call.complained
    assert runs_of(whole) == ["ppo-s0", "rloo-s0", "sapo-s0", "warm-critic-s0", "warm-start-s0"]
    assert "its start failed" in call.complained, "its reward is the warm start's as well"
    page = (whole / "studies" / "other-smoke" / "study.md").read_text()
    assert "**Incomplete: 1 of 3 runs" in page
    rows = (whole / "studies" / "other-smoke" / "runs.csv").read_text()
    assert ",sapo-s0-" in rows, "the other study's run, under its name"
    assert ",rloo-s0-" in rows
    assert "nowhere.py" in page
    monkeypatch.chdir(whole)
    told = segcredit("other.yaml", "--no-run")
    assert told.exit_code == 0, told.output
    again = (whole / "studies" / "other-smoke" / "study.md").read_text()
    assert "nowhere.py" in again, "what failed is remembered"
    assert "**Incomplete: 1 of 3 runs" in again


@pytest.mark.slow
def test_light_copies_of_runs_suffice(whole: Path, tmp_path: Path) -> None:
    """Records of finished runs without models and warm starts, as one brings them home."""
    write(tmp_path)
    for place in (whole / "studies" / "runs").glob("*-s0-*"):
        if not place.name.startswith("warm-start"):
            copied = tmp_path / "studies" / "runs" / place.name
            copied.mkdir(parents=True)
            for name in ("config.yaml", "metrics.jsonl", "finished.json"):
                shutil.copy(place / name, copied)
    call = run(tmp_path, "study", "mine.yaml")
    assert call.wait() == 0, call.complained
    assert "running" not in call.said
    assert results(tmp_path) == results(whole)


@pytest.mark.slow
def test_list_and_dry_run_train_nothing(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(whole)
    listed = segcredit("mine.yaml", "--list", "--seeds", "0,1")
    assert listed.exit_code == 0
    assert "sapo, ppo" in listed.stdout
    assert "8" in listed.stdout
    assert "4" in listed.stdout
    shown = segcredit("mine.yaml", "--dry-run", "--only", "ppo", "--set", "rollout.max_tokens=9")
    assert shown.exit_code == 0
    assert shown.stdout.count("(to run)") == 4
    assert shown.stdout.count("# segcredit train ") == 4
    recipes = [x for x in yaml.safe_load_all(shown.stdout) if x is not None]
    assert [x["rollout"]["max_tokens"] for x in recipes] == [9, 9, 9, 9]
    waiting = segcredit("table1", "--dry-run", "-o", "nowhere")
    assert "runs of sapo, ppo, vc_ppo, grpo follow" in waiting.stdout
    assert not (whole / "nowhere").exists()


@pytest.mark.slow
def test_tables_of_what_is_there_are_written_without_a_run(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(whole)
    before, kept = runs_of(whole), results(whole)
    found = segcredit("mine.yaml", "--no-run", "--seeds", "0,1")
    assert found.exit_code == 0, found.output
    assert "running" not in found.stdout
    assert runs_of(whole) == before
    page = (whole / "studies" / "mine-smoke" / "study.md").read_text()
    assert "**Incomplete: 2 of 4 runs" in page
    assert segcredit("mine.yaml", "--no-run").exit_code == 0
    assert results(whole) == kept


@pytest.mark.slow
@pytest.mark.usefixtures("as_users_run_it")
def test_every_study_is_listed() -> None:
    found = segcredit("--list", "-o", "nowhere")
    assert found.exit_code == 0
    assert "runs in total, 0 done; shared runs count once" in found.stdout
    for name in ("table1", "fig5", "lambda", "authors"):
        assert name in found.stdout
    assert "(optional)" in segcredit("table1", "--list", "-o", "nowhere").stdout
    small = segcredit("table2", "table3", "--list", "--scale", "small", "-o", "nowhere").stdout
    assert "step (optional)" in " ".join(small.split()), "arms as they are at this scale"


@each(
    ("arguments", "said"),
    [
        (("tabel2",), "Did you mean 'table2'?"),
        (("table1", "--scale", "huge"), "the scales are smoke, mini, small, paper"),
        (("table1", "--seeds", "0,x"), "--seeds: expected different whole numbers"),
        (("table1", "--only", "pppo"), "Did you mean 'ppo'?"),
        (("table1", "--only", "ppo", "--all"), "cannot be combined"),
        (("table1", "--set", "optimizer.lrr=1"), "optimizer.lrr: unknown key"),
    ],
)
def test_mistakes_are_one_message(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    found = segcredit(*arguments, "-o", tmp_path)
    assert found.exit_code == 2
    assert said in found.stderr
    assert "Traceback" not in found.stderr
    assert list(tmp_path.iterdir()) == []


# ── Killed ───────────────────────────────────────────────────────────────────────────────────────


def workers() -> set[int]:
    """Processes that train for a study and have not ended."""
    found = set()
    for place in Path("/proc").glob("[0-9]*"):
        try:
            name, state = re.findall(r"\((.*)\) (.)", (place / "stat").read_text())[0]
        except OSError:
            continue
        if name == NAME and state != "Z":
            found.add(int(place.name))
    return found


def killed_at(folder: Path, arm: str, lines: int) -> Call:
    """A study, killed with no chance to say anything when that run has so many lines."""

    def far_enough() -> bool:
        files = (folder / "studies" / "runs").glob(f"{arm}-s0-*/metrics.jsonl")
        return any(file.read_bytes().count(b"\n") >= lines for file in files)

    call = start(folder, "study", "mine.yaml")
    assert call.wait_until(far_enough), call.said + call.complained
    assert workers()
    os.kill(call.pid, signal.SIGKILL)
    assert call.wait() == -signal.SIGKILL
    return call


@pytest.mark.slow
def test_killed_again_and_again_it_ends_with_the_same_table(whole: Path, tmp_path: Path) -> None:
    write(tmp_path)
    before = workers()
    for arm, lines in (("warm-start", 3), ("warm-critic", 1), ("ppo", 6)):
        killed_at(tmp_path, arm, lines)
        until = time.monotonic() + 20
        while workers() - before:  # they notice that nobody is there, and go
            assert time.monotonic() < until, "a worker outlived its study"
            time.sleep(0.02)
        assert not (tmp_path / "studies" / "mine-smoke").exists()
    call = run(tmp_path, "study", "mine.yaml")
    assert call.wait() == 0, call.said + call.complained
    assert results(tmp_path) == results(whole)


@pytest.mark.slow
def test_interrupted_it_saves_and_the_same_command_goes_on(whole: Path, tmp_path: Path) -> None:
    write(tmp_path)
    call = start(tmp_path, "study", "mine.yaml")
    assert call.wait_until(lambda: "sapo-s0" in call.said)
    os.kill(call.pid, signal.SIGINT)
    assert call.wait() == 130, call.complained
    assert "Run the same command again to continue" in call.said
    call = run(tmp_path, "study", "mine.yaml", "-j", 2)
    assert call.wait() == 0
    assert results(tmp_path) == results(whole)


@pytest.mark.slow
def test_two_at_once_in_one_folder_share_the_work(whole: Path, tmp_path: Path) -> None:
    write(tmp_path)
    calls = [start(tmp_path, "study", "mine.yaml") for _ in range(2)]
    for call in calls:
        assert call.wait() == 0, call.said + call.complained
    assert results(tmp_path) == results(whole)
    for place in (tmp_path / "studies" / "runs").glob("*-s0-*"):
        stages = [
            json.loads(x)["stage"] for x in (place / "metrics.jsonl").read_text().splitlines()
        ]
        assert stages.count("evaluation") == (1 if place.name.startswith("warm") else 5)
