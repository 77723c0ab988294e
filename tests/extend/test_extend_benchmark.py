"""A user's benchmark, exactly as docs/extending.md shows it."""

import json
import shlex
from pathlib import Path

import pytest
from forked_cli import run
from test_extend_data import section

from segcredit.data.worlds import make_world
from segcredit.models import Policy

ROWS = """\
index\tpair\tcontinent\tquestion\tA\tB\tanswer
1\tfr\tEurope\tWhich city is the capital of France?\tParis\tLyon\tA
2\tfr\tEurope\tWhich city is the capital of France?\tLyon\tParis\tB
3\tpe\tAmerica\tWhich city is the capital of Peru?\tCusco\tLima\tB
4\tpe\tAmerica\tWhich city is the capital of Peru?\tLima\tCusco\tA
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "capitals.py").write_text(section("A benchmark")["python"])
    (tmp_path / "capitals.tsv").write_text(ROWS)
    tokenizer = make_world("derived_variables").tokenizer()
    Policy.tiny("qwen2", tokenizer, hidden=32, heads=4).save(tmp_path / "MODEL")
    return tmp_path


def test_a_benchmark(folder: Path) -> None:
    program, *command = shlex.split(section("A benchmark")["bash"].strip())
    assert program == "segcredit"
    done = run(folder, *command, "--max-tokens", "4", "--limit", "3", "-o", "out")
    assert done.code == 0, done.complained
    scores = json.loads((folder / "out/MODEL/scores.json").read_text())["capitals"]
    assert scores["questions"] == 4, "the pair of the third question is complete"
    assert list(scores["scores"]) == [
        *("both right", "accuracy", "continent: America", "continent: Europe")
    ]
    assert scores["scores"]["both right"]["count"] == 2


def test_its_metrics(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from segcredit.benchmarks import find_data, make_benchmark, score
    from segcredit.types import Response

    monkeypatch.chdir(folder)
    made = make_benchmark("capitals.py:Capitals")
    asked = made.read(find_data(made.layouts, [folder]))
    said = ["Paris", "B", "\\boxed{B}", "The answer is B."]
    responses = [Response(x, text, 3, False, 9) for x, text in zip(asked, said, strict=True)]
    right = [x.correct for x in made.grade(responses, lambda pairs: [])]
    assert right == [True, True, True, False]
    found = score(made, asked, [right])
    assert found["both right"].value == 50
    assert found["accuracy"].value == 75
    assert found["continent: America"].value == 50
