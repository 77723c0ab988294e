"""Runs are read as they are: finished, in progress, damaged."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
from each import each

from segcredit.runlog import MetricsWriter, RunFolder, read_run, write_rollouts
from segcredit.runlog.files import write_json_atomically, write_yaml_atomically


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with RunFolder.create(tmp_path / "runs" / "one") as folder:
        write_yaml_atomically(folder.config, {"algorithm": {"name": "sapo"}, "seed": 1})
        write_json_atomically(folder.environment, {"python": "3.11"})
        with MetricsWriter(folder.metrics) as writer:
            writer.write(0, "pretrain", {"loss": 3.0})
            writer.write(1, "train", {"loss": math.nan, "reward": 0.5})
            writer.write(2, "train", {"loss": math.inf, "reward": 1})
        for step in (2, 1):
            write_rollouts(folder.rollouts, step, [{"response": f"of {step}", "reward": math.nan}])
        for name in ("step-000002", "step-000010", ".tmp-step-000011-5", "step-000012", "best"):
            (folder.checkpoints / name).mkdir()
            if name != "step-000012":
                (folder.checkpoints / name / "manifest.json").touch()
    return folder.path


def test_everything_comes_back(path: Path) -> None:
    run = read_run(path)
    assert run.config == {"algorithm": {"name": "sapo"}, "seed": 1}
    assert run.environment == {"python": "3.11"}
    assert [row["step"] for row in run.metrics] == [0, 1, 2]
    steps, losses = run.series("loss")
    assert steps == [0, 1, 2]
    assert losses[0] == 3.0
    assert math.isnan(losses[1])
    assert losses[2] == math.inf
    assert run.series("reward", stage="train") == ([1, 2], [0.5, 1.0])
    assert run.series("loss", stage="pretrain") == ([0], [3.0])
    assert run.keys() == ["loss", "reward"]
    assert run.keys("pretrain") == ["loss"]
    assert run.rollout_steps == [1, 2]
    assert run.rollouts(2)[0]["response"] == "of 2"
    assert math.isnan(run.rollouts(2)[0]["reward"])
    assert [p.name for p in run.checkpoints] == ["step-000002", "step-000010"]


def test_a_run_can_be_read_while_it_is_written(path: Path) -> None:
    with RunFolder.open(path) as folder:
        with folder.metrics.open("ab") as file:
            file.write(b'{"step": 3, "stage": "train", "rew')
        assert [row["step"] for row in read_run(str(path)).metrics] == [0, 1, 2]
        with folder.metrics.open("ab") as file:
            file.write(b'ard": 2.0}')
        assert read_run(path).series("reward")[1][-1] == 2.0


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run") as folder:
        folder.config.write_text("{}\n")
        run = read_run(folder.path)
        assert (run.config, run.metrics, run.environment) == ({}, [], {})
        assert (run.rollout_steps, run.checkpoints) == ([], [])
        with pytest.raises(ValueError, match="has no metrics yet"):
            run.series("loss")


def test_a_path_that_is_no_run(path: Path, tmp_path: Path) -> None:
    for wrong in (path.parent, tmp_path / "nowhere", path / "config.yaml", path / "rollouts"):
        with pytest.raises(ValueError, match="is not a run"):
            read_run(wrong)
    with pytest.raises(ValueError, match=r"Runs nearby: .*runs/one"):
        read_run(path.parent)


def test_wrong_names_are_answered_with_the_right_ones(path: Path) -> None:
    run = read_run(path)
    with pytest.raises(ValueError, match=r"no metric 'rewad'. Did you mean 'reward'\?"):
        run.series("rewad")
    with pytest.raises(ValueError, match=r"stages so far: pretrain, train"):
        run.series("reward", stage="trian")
    with pytest.raises(ValueError, match=r"stage 'pretrain' .* has no metric 'reward'"):
        run.series("reward", stage="pretrain")
    with pytest.raises(
        ValueError, match=r"no rollouts of step 7; its last steps with rollouts: 1, 2"
    ):
        run.rollouts(7)


@pytest.mark.parametrize(
    "damage", [b"\x00" * 20, b"[1, 2]", b"\xff\xfe", b"{", b"[" * 100_000], ids=repr
)
def test_damage_in_the_middle_is_named(path: Path, damage: bytes) -> None:
    metrics = path / "metrics.jsonl"
    first, *rest = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(first + damage + b"\n" + b"".join(rest))
    with pytest.raises(ValueError, match=r"line 2 of .*metrics\.jsonl must be a JSON object"):
        read_run(path).metrics  # noqa: B018


@each("text", ["a: [", "- 1\n", "", "!!python/object/apply:os.system ['true']", "\x00", "[" * 5000])
def test_a_bad_config_is_one_message(path: Path, text: str) -> None:
    (path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"config\.yaml must"):
        read_run(path)


def test_nulls_of_other_writers_are_no_numbers(path: Path) -> None:
    (path / "metrics.jsonl").write_text('{"step": 1, "stage": "t", "x": null}\n\n')
    assert math.isnan(read_run(path).series("x")[1][0])


def test_lines_of_others_are_read_as_far_as_they_are_metrics(path: Path) -> None:
    """A step that is none, numbers without bounds, texts: neither an error nor a point."""
    lines = [
        '{"stage": "t", "x": 0}',
        *(f'{{"step": {x}, "stage": "t", "x": 0}}' for x in ("null", '"1"', "[1]", "true", "-1")),
        *(f'{{"step": {x}, "stage": "t", "x": 0}}' for x in ('"Infinity"', "1e300", "9" * 4000)),
        *(f'{{"step": {n}, "x": {x}}}' for n, x in enumerate(["9" * 400, "-" + "9" * 400, '"a"'])),
        '{"step": 3.0, "x": [1]}',
        '{"step": 4, "x": 2}',
    ]
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    steps, values = read_run(path).series("x")
    assert steps == [0, 1, 2, 3, 4]
    assert values == pytest.approx([math.inf, -math.inf, math.nan, math.nan, 2.0], nan_ok=True)


def test_reading_needs_no_torch(path: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'safetensors'): sys.modules[name] = None\n"
        "from segcredit.runlog import read_run, describe_environment\n"
        "run = read_run(sys.argv[1])\n"
        "assert run.series('reward') and run.rollouts(1) and describe_environment()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
