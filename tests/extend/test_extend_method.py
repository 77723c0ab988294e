"""A user's column, credit estimator and method in one file: examples/custom_column.py."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from extend.test_extend_data import section
from forked_cli import run
from tiny_runs import REWARD, metrics

from segcredit.algorithms import make_algorithm
from segcredit.columns import LOGP_REF
from segcredit.models import Policy
from segcredit.runlog.folder import step_name
from segcredit.types import Prompt

REMAX = Path(__file__).parents[2] / "examples" / "custom_column.py"
TITLE = "A column, a credit estimator and a method"
LENGTH = 24
"""rollout.max_tokens of the recipe in the document."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps by the document's recipe and command, every step saved and recorded."""
    folder = tmp_path_factory.mktemp("remax")
    (folder / "custom_column.py").write_text(REMAX.read_text())
    (folder / "reward.py").write_text(REWARD)  # of an untrained model nothing is right
    (folder / "remax.yaml").write_text(section(TITLE)["yaml"])
    program, *command = shlex.split(section(TITLE)["bash"])
    assert program == "segcredit"
    more = ("reward=reward.py:by_length", "algorithm.kl=0", "save.every=1", "save.keep=10")
    recorded = ("save.rollouts_every=1", "save.rollouts=64", "evaluation.watch=2")
    done = run(folder, *command, *more, *recorded, "--folder", folder / "run")
    assert done.code == 0, done.complained
    return folder / "run"


def greedy_reward(policy: Policy, row: dict[str, Any]) -> float:
    """The reward of the greedy response, by plain argmax, one token at a time."""
    prompt = Prompt(row["prompt_id"], tuple(row["messages"]))
    tokens = policy.encode(prompt).tokens.tolist()
    length = 0
    while length < LENGTH:
        with torch.no_grad():
            logits = policy.model(input_ids=torch.tensor([tokens])).logits[0, -1]
        if policy.banned is not None:
            logits[policy.banned] = -torch.inf
        tokens.append(int(logits.argmax()))
        length += 1
        if tokens[-1] in policy.end_tokens:
            break
    return (length % 4) / 3


def test_the_baseline_is_the_greedy_responses_reward(trained: Path) -> None:
    differences = set()
    for step in (3, 4):  # after two of imitation
        policy = Policy.from_pretrained(trained / "checkpoints" / step_name(step - 1) / "policy")
        rows = (trained / "rollouts" / f"{step_name(step)}.jsonl").read_text().splitlines()
        assert len(rows) == 8
        for row in map(json.loads, rows):
            expected = row["reward"] - greedy_reward(policy, row)
            assert row["advantage"] == pytest.approx([expected] * len(row["advantage"]), abs=1e-5)
            differences.add(round(expected, 3))
    assert len(differences) > 1, "some responses are better than the greedy one, some are not"


def test_it_learns_resumes_and_is_watched(trained: Path) -> None:
    found = [x for x in metrics(trained) if x["stage"] == "optimize"]
    assert len(found) == 2
    assert all(x["policy/grad_norm"] > 0 for x in found)
    written = next((trained / "watched").iterdir()).read_text()
    watched = [json.loads(x) for x in written.splitlines()]
    assert all("advantage" in row for row in watched), "held-out prompts have a greedy response too"
    more = run(trained.parent, "train", "--resume", trained, "stages.1.steps=3", "--trust-run")
    assert more.code == 0, more.complained
    assert len([x for x in metrics(trained) if x["stage"] == "optimize"]) == 3


def test_needs_and_plan_name_the_column(trained: Path) -> None:
    folder = trained.parent
    method = make_algorithm(f"{folder / 'custom_column.py'}:remax")
    assert {x.name for x in method.needs} == {"greedy_reward", "logp_ref"}
    assert LOGP_REF in method.needs
    shown = run(folder, "train", "remax.yaml", "--check")
    assert "needs: greedy_reward, logp_ref" in shown.said
