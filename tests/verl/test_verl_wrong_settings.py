"""Wrong settings stop before anything is started, with a message that says what to set."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from running import HERE, arguments, base, environment, run
from toy import make_model, make_rows

GOOD = {"trainer.v1.trainer_mode": "segment_sync"}
WRONG = {
    "no critic": (
        {"algorithm.adv_estimator": "grpo"},
        "segment credit needs a critic",
        "Set algorithm.adv_estimator=gae critic.enable=True.",
    ),
    "critic switched off": ({"critic.enable": False}, "needs a critic", "critic.enable=True"),
    "bypass mode": (
        {"algorithm.rollout_correction.bypass_mode": True},
        "bypass mode does not compute",
        "Set algorithm.rollout_correction.bypass_mode=False.",
    ),
    "rejection sampling": (
        {"algorithm.rollout_correction.rollout_rs": "token_k1"},
        "rejection sampling",
        "Set algorithm.rollout_correction.rollout_rs=null",
    ),
    "another loss": (
        {"actor_rollout_ref.actor.policy_loss.loss_mode": "gspo"},
        "loss_mode=gspo",
        "Leave it at vanilla.",
    ),
    "unknown partition": (
        {"+segment.partition": "entropi"},
        "segment.partition: unknown partition 'entropi'",
        "Did you mean 'entropy'?",
    ),
    "unknown method": ({"+segment.algorithm": "sap"}, "got 'sap'", "Did you mean 'sapo'?"),
    "unknown key": ({"+segment.lambda": 1}, "segment: expected one of algorithm", "'lambda'"),
    "a percentage": (
        {"+segment.partition.fraction": 30},
        "fraction must be in (0, 1]",
        "For top-30% pass 0.30.",
    ),
    "a partition without its size": (
        {"+segment.partition.name": "fixed"},
        "segment.partition: partition fixed needs the setting size",
        "as in {name: fixed, size: 16}",
    ),
    "a setting of another partition": (
        {"+segment.partition.name": "newline", "+segment.partition.size": 3},
        "partition newline has no setting 'size'",
        "It has no settings.",
    ),
    "a setting that is no number": (
        {"+segment.partition.fraction": "many"},
        "partition entropy: fraction must be a number",
        "got 'many'",
    ),
    "segments for ppo": (
        {"+segment.algorithm": "ppo", "+segment.partition": "newline"},
        "ppo credits tokens",
        "set +segment.algorithm=sapo",
    ),
    "two kinds of warm-up": (
        {"+segment.critic_pretraining_steps": 3, "trainer.critic_warmup": 2},
        "two settings for steps",
        "Set trainer.critic_warmup=0.",
    ),
    "adapters on the critic": ({"critic.model.lora_rank": 8}, "stay frozen", "lora_rank=0"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verl")
    make_model(folder / "model")
    make_rows(folder / "rows.jsonl")
    return folder


def construct(place: Path, changes: dict[str, dict], version: str = "", taken: bool = False):
    settings = base(place, place / "model", place / "rows.jsonl", 1) | GOOD
    cases = {
        name: [x for x in arguments(settings | change) if not x.startswith("hydra.")]
        for name, change in changes.items()
    }
    given = json.dumps({"cases": cases, "version": version, "taken": taken})
    done = subprocess.run(
        [sys.executable, HERE / "construct.py", given],
        env=environment(place),
        capture_output=True,
        text=True,
        timeout=200,
    )
    lines = [x for x in done.stdout.splitlines() if x.startswith("SAID ")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("SAID ")), done.stderr


def test_each_is_refused_with_what_to_set(place: Path) -> None:
    said, _ = construct(place, {"good": {}} | {name: x[0] for name, x in WRONG.items()})
    assert said.pop("good") == "nothing"
    for name, (_, problem, remedy) in WRONG.items():
        assert said[name].startswith("ValueError: "), (name, said[name])
        assert problem in said[name], (name, said[name])
        assert remedy in said[name], (name, said[name])
        assert "\n" not in said[name], name


def test_an_untested_verl_is_refused_with_the_tested_range(place: Path) -> None:
    said, log = construct(place, {"good": {}}, version="0.10.0")
    assert "tested with verl >=0.9.1,<0.9.2; this is verl 0.10.0" in said["good"]
    assert "pip install 'verl==0.9.1'" in said["good"]
    assert "tested with verl >=0.9.1,<0.9.2" in log  # also where nobody asks for our trainers


def test_a_taken_name_is_refused(place: Path) -> None:
    said, log = construct(place, {"other": {}}, taken=True)
    assert "verl's trainer 'segment_sync' is" in log
    assert ".Other, so segcredit's plugin does not load. Uninstall one of the two" in log
    assert said["other"] == "nothing"  # the other plugin's trainer is left alone


def test_the_command_ends_with_the_message(place: Path, tmp_path: Path) -> None:
    """Through verl's own command: before a worker, a rollout or a step."""
    settings = base(tmp_path, place / "model", place / "rows.jsonl", 1) | GOOD
    ran = run(tmp_path, settings | {"+segment.partition": "top_entropy"}, seconds=200)
    assert ran.code != 0
    assert (
        "segment.partition: unknown partition 'top_entropy'. Did you mean 'entropy'?" in ran.output
    )
    assert "Training Progress" not in ran.output
    assert "LLMServerManager" not in ran.output
    assert not ran.metrics
