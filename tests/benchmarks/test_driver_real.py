"""The real ms-vlmeval against a stub of the server: its scores and ours, on the same responses."""

import os
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from bench import DATA
from stub_server import stub_server
from test_driver import executable
from toolkit_tables import logicvista_tsv, rows_of_tsv, wemath_tsv

from segcredit.benchmarks.run import SetResult
from segcredit.benchmarks.server import connect
from segcredit.benchmarks.vlmevalkit import (
    PACKAGE,
    DriverSettings,
    ToolkitResult,
    evaluate_with_toolkit,
)

HERE = Path(__file__).parent
ENVIRONMENT = os.environ.get("SEGCREDIT_VLMEVALKIT", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DATA.is_dir(), reason="needs the data beside the checkout"),
    pytest.mark.skipif(
        not ENVIRONMENT,
        reason=f"needs VLMEvalKit: python -m venv FOLDER; FOLDER/bin/pip install -c "
        f"segcredit/benchmarks/vlmevalkit.txt {PACKAGE}; then SEGCREDIT_VLMEVALKIT=FOLDER",
    ),
]
ROW = re.compile(r"\(row (\d+)\)")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows, each question marked with its index so that the stub knows what is asked."""
    folder = tmp_path_factory.mktemp("LMUData")
    for write in (logicvista_tsv, wemath_tsv):
        write(folder, mark=lambda index: f" (row {index})")
    return folder


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("environment") / "bin" / "python"
    real = Path(ENVIRONMENT).absolute() / "bin" / "python"
    script = f'#!/bin/sh\nshift 2\nexec {real} {HERE / "real_toolkit.py"} "$@"\n'
    return executable(place, script)


Style = Callable[[str], str]


def boxed(letters: str) -> str:
    return f"<think>It could be A, or B.</think>So it is \\boxed{{{letters}}}."


def stated(letters: str) -> str:
    return f"<think>It could be A, or B.</think>Answer: {letters}"


def answer_of(kind: str, row: dict[str, str]) -> str:
    if kind == "gold":
        return row["answer"]
    return "C" if kind == "constant" else random.Random(row["index"]).choice("ABCD")


def run(
    name: str, kind: str, style: Style, judged: bool, python: Path, data: Path, output: Path
) -> tuple[SetResult, ToolkitResult]:
    """Let the model answer and, if asked for, judge."""
    table = {"logicvista": "LogicVista.tsv", "wemath": "WeMath.tsv"}[name]
    answers = {row["index"]: answer_of(kind, row) for row in rows_of_tsv(data / table)}

    def reply(text: str) -> str:
        if "information extractor" in text:  # the judge of LogicVista
            found = re.findall(r"boxed\{([A-Z0-9, ]+)\}", text)
            return found[-1].replace(", ", "") if found else "Z"
        row = ROW.search(text)
        return style(answers[row[1]]) if row else "Hello."

    with stub_server(reply) as (url, seen):
        settings = DriverSettings(
            system_prompt="Think first.", concurrency=16, judge=url if judged else None
        )
        results, own = evaluate_with_toolkit(python, connect(url), [name], output, settings, data)
    asked = [x for x in seen.bodies if x.get("top_p") == 0.95]
    assert len(asked) == len(answers)
    assert {x["temperature"] for x in asked} == {0.6}
    assert {x["messages"][0]["content"] for x in asked} == {"Think first."}
    return results[name], own[name]


def main_score(result: SetResult) -> float:
    return next(iter(result.scores.values())).value


@pytest.mark.parametrize("kind", ["constant", "gold", "random"])
def test_logicvista_with_a_judge(kind: str, python: Path, data: Path, tmp_path: Path) -> None:
    ours, own = run("logicvista", kind, boxed, True, python, data, tmp_path)
    assert len(ours.questions) == 447
    assert own.score is not None
    numbered = 100 / 447 if kind == "gold" else 0  # v1_20 has digits as options: never right there
    assert main_score(ours) == pytest.approx(own.score + numbered, abs=1e-6)
    assert (main_score(ours) == 100) == (kind == "gold")


@pytest.mark.parametrize(
    ("kind", "style", "judged"), [("random", stated, False), ("gold", boxed, True)]
)
def test_wemath(
    kind: str, style: Style, judged: bool, python: Path, data: Path, tmp_path: Path
) -> None:
    ours, own = run("wemath", kind, style, judged, python, data, tmp_path)
    assert len(ours.questions) == 1740
    assert own.score is not None
    assert main_score(ours) == pytest.approx(own.score, abs=0.005)  # it writes two decimals
    assert (main_score(ours) == 100) == (kind == "gold")


def test_where_the_rules_differ(python: Path, data: Path, tmp_path: Path) -> None:
    """Without a judge VLMEvalKit does not see a boxed letter, and fails if nothing is right."""
    ours, own = run("wemath", "gold", boxed, False, python, data, tmp_path)
    assert main_score(ours) == 100
    assert own.score is None
    assert "division by zero" in own.reason
