"""A user's reward and a user's world, exactly as docs/extending.md shows them."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from forked_cli import run

DOCUMENT = Path(__file__).parents[2] / "docs" / "extending.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHORT = [
    "stages=[{kind: warm_start, steps: 1, batch: 2}, {kind: optimize, steps: 2}]",
    *("rollout.prompts=2", "rollout.samples=4"),
    *("rollout.max_tokens=8", "evaluation.prompts=2", "algorithm=grpo"),
]
"""Overrides that make the demo a run of two steps."""


def section(title: str) -> dict[str, str]:
    """The fenced blocks of one section, by language."""
    text = DOCUMENT.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return dict(FENCE.findall(text))


def run_section(title: str, name: str, folder: Path) -> list[Path]:
    """Write the section's file and recipe, type its commands, and return the run directories."""
    blocks = section(title)
    (folder / f"{name}.py").write_text(blocks["python"])
    (folder / f"{name}.yaml").write_text(blocks["yaml"])
    runs = []
    for line in blocks["bash"].splitlines():
        program, *command = shlex.split(line)
        assert program == "segcredit"
        short = SHORT if "demo" in command else []
        runs.append(folder / "runs" / str(len(runs)))
        done = run(folder, *command, *short, "--folder", runs[-1])
        assert done.code == 0, done.complained
    return runs


@pytest.mark.slow
def test_a_reward(tmp_path: Path) -> None:
    runs = run_section("A reward", "custom_reward", tmp_path)
    for folder in runs:
        rollouts = "".join(x.read_text() for x in (folder / "rollouts").glob("*.jsonl"))
        assert "expected" in rollouts
        assert "tokens" in rollouts
    assert (
        yaml.safe_load((runs[1] / "config.yaml").read_text())["reward"] == "custom_reward.py:brief"
    )


@pytest.mark.slow
def test_a_world(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    runs = run_section("A world", "my_world", tmp_path)
    for folder, limit in zip(runs, (20, 50), strict=True):
        config = yaml.safe_load((folder / "config.yaml").read_text())
        assert config["data"]["world"] == "my_world.py:Sums"
        assert config["data"]["settings"] == {"limit": limit}
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    more = run(elsewhere, "train", "--resume", runs[0], "stages.1.steps=3", "--trust-run")
    assert more.code == 0, more.complained
    asked = run(elsewhere, "evaluate", runs[0], "--prompts", 2, "-k", 1, "--trust-run")
    assert asked.code == 0, asked.complained
    refused = run(elsewhere, "evaluate", runs[0])
    assert refused.code == 2
    assert "data.world: " in refused.complained
    assert "my_world.py:Sums" in refused.complained


def test_a_class_that_is_no_world(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Nothing:\n    name = 'nothing'\n")
    (tmp_path / "my_world.yaml").write_text(section("A world")["yaml"])
    done = run(tmp_path, "train", "my_world.yaml", "data.world=mine.py:Nothing", "data.settings={}")
    assert done.code == 2
    said = " ".join(done.complained.split())
    assert "must be a class that implements World" in said
    assert "it has no phases, prompt, demonstration, tokenizer, oracle, prompts" in said
