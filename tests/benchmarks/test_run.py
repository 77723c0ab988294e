"""A tiny model over a small set: answers on disk, resuming, other settings, a judge."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench import DATA, needs_data
from json_server import said, serving

from segcredit.benchmarks import run as running
from segcredit.benchmarks.run import BenchmarkSettings, SetResult, load_questions, run_benchmarks
from segcredit.data.worlds import make_world
from segcredit.models import Policy
from segcredit.runlog.files import Lock

SHORT = {"max_tokens": 8, "chunk": 4}


def answered(model: Path, data: Path, folder: Path, **settings: Any) -> SetResult:
    chosen = BenchmarkSettings(**{**SHORT, **settings})
    sets = load_questions(["logicvista"], data, chosen.limit, chosen.instruction)
    return run_benchmarks(str(model), sets, folder, chosen)["logicvista"]


def lines(folder: Path) -> list[dict]:
    text = (folder / "answers/logicvista.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_every_answer_is_on_disk(model: Path, data: Path, tmp_path: Path) -> None:
    result = answered(model, data, tmp_path / "out", samples=2)
    found = lines(tmp_path / "out")
    assert [(x["id"], x["sample"]) for x in found] == [
        (f"v1_{n}", k) for n in range(9) for k in (0, 1)
    ]
    assert [x.response for x in result.answers] == [x["response"] for x in found]
    assert len({x["response"] for x in found}) > 4, "every question and sample has its own numbers"
    scores = json.loads((tmp_path / "out/scores.json").read_text())["logicvista"]
    assert (scores["questions"], scores["samples"]) == (9, 2)
    assert scores["questions_of_complete_set"] == 447
    assert list(scores["scores"]) == ["accuracy", "skill: inductive", "skill: spatial"]


def test_finished_answers_are_not_sampled_again(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = answered(model, data, tmp_path)
    monkeypatch.setattr(running, "load_policy", None)
    again = answered(model, data, tmp_path)
    assert again.answers == first.answers
    assert again.scores == first.scores


@pytest.mark.slow
@pytest.mark.parametrize("kept", [0, 1, 300, 1000, 1500, -1])
def test_a_torn_file_is_continued_to_the_same_file(
    model: Path, data: Path, tmp_path: Path, kept: int
) -> None:
    answered(model, data, tmp_path)
    file = tmp_path / "answers/logicvista.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[:kept])
    answered(model, data, tmp_path)
    assert file.read_bytes() == whole


@pytest.mark.slow
def test_killed_and_resumed_gives_the_same_file(model: Path, data: Path, tmp_path: Path) -> None:
    answered(model, data, tmp_path / "whole", samples=2)
    code = f"""
import os, signal
from pathlib import Path
from segcredit.benchmarks.run import BenchmarkSettings, load_questions, run_benchmarks

def kill(name, done, total):
    if 0 < done < total:
        os.kill(os.getpid(), signal.SIGKILL)

settings = BenchmarkSettings(samples=2, max_tokens=8, chunk=4)
sets = load_questions(["logicvista"], {str(data)!r})
run_benchmarks({str(model)!r}, sets, Path({str(tmp_path / "killed")!r}), settings, kill)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=os.environ)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(lines(tmp_path / "killed")) == 4
    answered(model, data, tmp_path / "killed", samples=2)
    one, other = ((tmp_path / x / "answers/logicvista.jsonl") for x in ("whole", "killed"))
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"temperature": 0.5}, "temperature was 1.0, now 0.5"),
        ({"samples": 2}, "samples was 1, now 2"),
        ({"seed": 3}, "seed was 0, now 3"),
        ({"limit": 5}, "limit was nothing (null), now 5"),
        ({"instruction": ""}, "instruction was 'You FIRST think"),
    ],
)
def test_other_settings_are_refused(
    model: Path, data: Path, tmp_path: Path, changed: dict, problem: str
) -> None:
    answered(model, data, tmp_path)
    before = lines(tmp_path)
    with pytest.raises(ValueError, match="Start again in another folder: --output") as error:
        answered(model, data, tmp_path, **changed)
    assert problem in str(error.value)
    assert lines(tmp_path) == before


def test_other_questions_are_refused(model: Path, data: Path, tmp_path: Path) -> None:
    answered(model, data, tmp_path)
    image = data / "logicvista/data/images/v1_0.png"
    image.write_bytes((data / "logicvista/data/images/v1_1.png").read_bytes())
    with pytest.raises(ValueError, match="the questions of logicvista have changed"):
        answered(model, data, tmp_path)


def test_other_weights_are_refused(model: Path, data: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "model")
    answered(copy, data, tmp_path / "out")
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"abcd")
    with pytest.raises(ValueError, match="weights was"):
        answered(copy, data, tmp_path / "out")


def test_a_damaged_line_is_named(model: Path, data: Path, tmp_path: Path) -> None:
    answered(model, data, tmp_path)
    file = tmp_path / "answers/logicvista.jsonl"
    file.write_text(file.read_text().replace('"id": "v1_2"', '"id": "v1_3"'))
    with pytest.raises(ValueError, match=r"line 3 of .*logicvista.jsonl.* Delete the file"):
        answered(model, data, tmp_path)


def test_values_of_other_types_are_refused(model: Path, data: Path, tmp_path: Path) -> None:
    answered(model, data, tmp_path)
    file = tmp_path / "answers/logicvista.jsonl"
    whole = file.read_text()
    file.write_text(whole.replace('"correct": false', '"correct": "no"', 1))
    with pytest.raises(ValueError, match=r"line 1 of .*correct is 'no'"):
        answered(model, data, tmp_path)
    file.write_text(whole)
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "sets": []}))
    with pytest.raises(ValueError, match="its 'sets' are not an object"):
        answered(model, data, tmp_path)


def test_two_processes_do_not_write_to_one_folder(model: Path, data: Path, tmp_path: Path) -> None:
    lock = Lock(tmp_path / ".lock")
    try:
        with pytest.raises(ValueError, match="is writing answers to"):
            answered(model, data, tmp_path)
    finally:
        lock.release()


def test_the_first_questions(model: Path, data: Path, tmp_path: Path) -> None:
    result = answered(model, data, tmp_path, limit=2)
    assert [x.id for x in result.questions] == ["v1_0", "v1_1"]


def test_instruction_is_appended(data: Path) -> None:
    (found,) = load_questions(["logicvista"], data, 1, "Box it.")
    assert found.questions[0].messages[-1]["content"] == (
        "<image>Which figure comes next? Number 0.\nBox it."
    )


@pytest.mark.slow
@needs_data
@pytest.mark.parametrize(
    "name",
    [
        *("logicvista", "gsm8k", "math500"),
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("wemath", "dynamath")),
    ],
)
def test_the_first_rows_of_real_sets(model: Path, tmp_path: Path, name: str) -> None:
    """A tiny vision-language model answers; after a torn file, the same answers."""
    settings = BenchmarkSettings(max_tokens=6, chunk=2, limit=3)
    sets = load_questions([name], DATA.parent, 3)
    found = run_benchmarks(str(model), sets, tmp_path, settings)[name]
    assert len(found.answers) == len(sets[0].questions) >= 3
    file = tmp_path / f"answers/{name}.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) * 4 // 5])
    assert run_benchmarks(str(model), sets, tmp_path, settings)[name].answers == found.answers
    assert file.read_bytes() == whole


def test_a_model_without_vision(data: Path, tmp_path: Path) -> None:
    tokenizer = make_world("derived_variables").tokenizer()
    Policy.tiny("qwen2", tokenizer, hidden=32, heads=4).save(tmp_path / "text")
    with pytest.raises(ValueError, match="Choose another model, or other sets") as error:
        answered(tmp_path / "text", data, tmp_path / "out")
    assert "logicvista v1_0: " in str(error.value)


# ── Judge ────────────────────────────────────────────────────────────────────────────────────────


def test_a_judge_finds_answers_that_the_rules_do_not(
    model: Path, data: Path, tmp_path: Path
) -> None:
    with serving(lambda *_: said("\\boxed{A}")) as (url, seen):
        result = answered(model, data, tmp_path, judge=url)
    judged = [x for x in result.answers if x.judged]
    _, *asked = seen.bodies  # the first checks that the judge answers
    assert len(asked) == 9
    assert len(judged) == 8, "A is no answer to v1_5, whose options are numbers"
    assert {x.answer for x in judged} == {"A"}
    assert {x.correct for x in judged if x.expected == "A"} == {True}
    assert asked[0]["model"] == "first"
    assert "Which figure comes next?" in asked[0]["messages"][0]["content"]


@pytest.mark.parametrize("judge_model", [None, "m"])
def test_a_judge_that_cannot_be_reached_stops_before_sampling(
    model: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    judge_model: str | None,
) -> None:
    monkeypatch.setattr("segcredit.rewards.client.PAUSE", 0.01)
    with pytest.raises(ValueError, match=r"expected an OpenAI-compatible judge at http://127\.0"):
        answered(model, data, tmp_path, judge="http://127.0.0.1:9/v1", judge_model=judge_model)
    assert not (tmp_path / "answers").exists()
    with pytest.raises(ValueError, match="--judge needs the URL of a server"):
        answered(model, data, tmp_path, judge="localhost:9")
