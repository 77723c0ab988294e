"""docs/plan.md and its appendix: their numbers are those that the commands print."""

import math
import re
import shlex
import shutil
from pathlib import Path

import pytest
from accuracy import APPENDIX, DOCUMENT, MODELS, TABLES, comparisons, with_tables
from test_plan_command import typed

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def shown() -> list[tuple[str, str]]:
    """Commands of the document, each with the output below it."""
    blocks = BLOCK.findall(DOCUMENT.read_text(encoding="utf-8"))
    outputs = [*blocks[1:], ("", "")]
    return [
        (code.strip(), text if kind == "text" else "")
        for (language, code), (kind, text) in zip(blocks, outputs, strict=True)
        if language == "sh" and code.startswith("segcredit plan")
    ]


@pytest.fixture
def recipe_of_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(MODELS, tmp_path, dirs_exist_ok=True)
    kind, code = BLOCK.findall(DOCUMENT.read_text(encoding="utf-8"))[0]
    assert kind == "yaml"
    (tmp_path / "geometry.yaml").write_text(code)
    monkeypatch.chdir(tmp_path)


def test_tables_are_made_by_the_command():
    text = APPENDIX.read_text(encoding="utf-8")
    assert with_tables(text) == text, "type: python tests/plan/accuracy.py --write"
    assert len(TABLES) == 3


def test_the_accuracy_that_the_document_states():
    found = [*comparisons()]
    memory = [abs(x.error) for x in found if x.what.startswith(("memory", "peak"))]
    times = [abs(x.error) for x in found if x.what.startswith("time")]
    near = sum(error <= 0.1 for error in times)
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    assert f"within {math.ceil(100 * max(memory))} % of all measurements" in text
    assert f"{near} of {len(times)} times within 10 %" in text


@pytest.mark.usefixtures("recipe_of_the_document")
def test_commands_print_what_is_shown():
    assert len(shown()) == 2
    for command, output in shown():
        code, said, complained = typed(*shlex.split(command)[2:])
        assert (code, complained) == (0, "")
        if output:
            assert trimmed(said) == trimmed(output)


def trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


@pytest.mark.usefixtures("recipe_of_the_document")
def test_the_advice_of_the_document_fits():
    (_, output), (second, _) = shown()
    advised = next(x for x in output.splitlines() if x.startswith("type "))
    assert set(shlex.split(advised)[4:]) <= set(shlex.split(second))
    assert "fits: " in typed(*shlex.split(second.replace("--json", ""))[2:])[1]
