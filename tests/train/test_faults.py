"""A run that is killed or whose disk fails at any file operation goes on as if nothing happened.

Every case ends in one of two ways: the run goes on bit for bit, or it has stopped with nothing lost
and goes on bit for bit when the disk is well again.
"""

import errno
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import RECIPE, changed
from transformers import GenerationConfig

from segcredit.config import parse_recipe
from segcredit.data.worlds import make_world
from segcredit.models import Policy
from segcredit.train.models import load_saved_policy

ALL = "SEGCREDIT_ALL_FAULTS"
"""Set it to strike at every operation; otherwise long lists are walked in strides."""
PROGRAM = Path(__file__).parent / "faults.py"


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: hundreds of runs are written."""
    place = Path("/dev/shm")
    if not os.access(place, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)


def struck(folder: Path, scenario: str, fault: str, stride: int) -> dict[str, Any]:
    stride = 1 if os.environ.get(ALL) else stride
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, str(PROGRAM), str(folder), scenario, fault, str(stride)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["problems"] == []
    return told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "stride", "least"),
    [("resume", 5, 80), ("begin", 23, 200), ("ahead", 7, 80)],
)
def test_killed_before_every_operation_that_changes_the_disk(
    memory: Path, scenario: str, stride: int, least: int
) -> None:
    """Resume: what came later is taken back, a step is made and saved, an old one is deleted."""
    told = struck(memory, scenario, "kill", stride)
    assert set(told["codes"]) == {"-9"}
    assert told["cases"] >= least // (1 if os.environ.get(ALL) else stride)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "stride", "least"),
    [("EIO", 23, 250), ("EACCES", 11, 100), ("ENOSPC", 7, 80)],
)
def test_a_disk_that_fails_once_at_any_operation(
    memory: Path, fault: str, stride: int, least: int
) -> None:
    told = struck(memory, "resume", fault, stride)
    assert "-9" not in told["codes"]
    assert told["cases"] >= least // (1 if os.environ.get(ALL) else stride)
    assert told["codes"]["2"] > told["cases"] // 3, "it said so"


def test_end_tokens_that_cannot_be_read_are_not_replaced_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading a model, transformers goes on without generation_config.json, and says nothing."""
    world = make_world("derived_variables", **RECIPE["data"]["settings"])
    Policy.tiny("qwen2", world.tokenizer(), hidden=32, layers=1, heads=4).save(tmp_path)
    recipe = parse_recipe(changed(reward="exact"))
    saved = load_saved_policy(recipe, tmp_path).model.generation_config.to_dict()
    read, calls = GenerationConfig._dict_from_json_file, []

    def fail_once(file: Any) -> Any:
        calls.append(file)
        if len(calls) == 1:
            raise PermissionError(errno.EACCES, "Permission denied")
        return read(file)

    monkeypatch.setattr(GenerationConfig, "_dict_from_json_file", fail_once)
    assert load_saved_policy(recipe, tmp_path).model.generation_config.to_dict() == saved
    assert len(calls) > 1
