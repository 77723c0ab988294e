"""The commands of the documents: every one parses; those of README and Get started are run."""

import ast
import re
import shlex
import shutil
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
import typer
import yaml
from each import each
from forked_cli import run
from test_docs import DOCS, DOCUMENTS, ROOT, blocks, write_text_model

from segcredit.cli import app
from segcredit.data import load_prompts

SHELLS = ("sh", "bash", "console")
LINES = re.compile(r"^(?:\$ )?(?P<line>(?:[^\\\n]|\\\n|\\.)+)$", re.MULTILINE)
PROGRAM = re.compile(r"^(?:torchrun .*?--no-python )?(?:\.venv\S*/bin/)?segcredit (?P<rest>.+)")
DEMO = [
    *("stages.0.steps=1", "stages.1.steps=1", "stages.2.steps=1", "stages.3.steps=1"),
    *("rollout.prompts=4", "update.minibatches=2", "evaluation.prompts=2"),
    *("rollout.max_tokens=8", "model.hidden=32", "model.layers=1", "model.heads=2"),
]
"""Overrides that make the demo a run of seconds."""
SMALL = [
    *("stages=[{kind: optimize, steps: 1}]", "rollout.prompts=4", "update.minibatches=2"),
    *("rollout.max_tokens=8", "evaluation.prompts=2", "evaluation.every=0", "model.dtype=float32"),
]
"""The same for a recipe that only optimizes."""
LONG = ("study", "benchmark", "verl", "plan", "prepare")
"""Commands of the README that need a GPU, the network or hours: they are only parsed."""


def commands(path: Path) -> list[list[str]]:
    """Split the segcredit commands of a document's shell blocks into words, without comments."""
    found = []
    for block in blocks(path.read_text()):
        if block.language not in SHELLS:
            continue
        for match in LINES.finditer(block.code):
            line = re.sub(r"\\\n\s*", " ", match["line"]).strip()
            if command := PROGRAM.match(line):
                found.append(shlex.split(command["rest"], comments=True))
    return found


def parsed(words: list[str]) -> None:
    """Parse a command as the terminal would, without running it."""
    group = typer.main.get_command(app)
    ends = [x for x in ("|", ">", "&&") if x in words]
    words = words[: words.index(ends[0])] if ends else words
    name, *arguments = words
    command = group.commands[name]  # type: ignore[attr-defined]
    command.make_context(name, [x for x in arguments if x != "…"])


@each("path", DOCUMENTS)
def test_every_command_parses(path: Path) -> None:
    for words in commands(path):
        try:
            if not {"--help", "--list"} & {*words}:
                parsed(words)
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{path.name}: segcredit {shlex.join(words)}: {error}") from error


@each("path", DOCUMENTS)
def test_extras_and_targets_exist(path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = path.read_text()
    for extra in re.findall(r"segcredit\[(\w+)\]", text):
        assert extra == "x" or extra in project["optional-dependencies"], extra
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for block in blocks(text):
        if block.language in SHELLS:
            for target in re.findall(r"^make ([a-z-]+)", block.code, re.MULTILINE):
                assert target in targets, f"make {target}"


def shortened(words: list[str]) -> list[str]:
    """The command with the overrides that make it short."""
    name, *arguments = words
    if "--resume" in words:
        return words
    if name == "demo":
        return [name, *arguments, *DEMO]
    if name == "train":
        return [name, *arguments, *SMALL]
    if name == "evaluate":
        return [name, *arguments, "--prompts", "2"]
    return words


def test_get_started_from_top_to_bottom(tmp_path: Path) -> None:
    """Every block: rows load, the recipe is written as it stands, commands run in their order."""
    page = DOCS / "get-started.md"
    write_text_model(tmp_path)
    found = blocks(page.read_text())
    assert {x.language for x in found} <= {"sh", "json", "yaml", "python", "text"}
    (row,) = [x.code for x in found if x.language == "json"]
    (tmp_path / "row.jsonl").write_text(row)
    assert load_prompts([str(tmp_path / "row.jsonl")]).prompts[0].answer == "7"
    (recipe,) = [x.code for x in found if x.language == "yaml"]
    (tmp_path / f"{yaml.safe_load(recipe)['name']}.yaml").write_text(recipe)
    for words in commands(page):
        if "--resume" in words:  # one step more than there were
            words = [re.sub(r"steps=\d+", "steps=2", x) for x in words]
        done = run(tmp_path, *shortened(words))
        assert done.code == 0, f"{words}: {done.said} {done.complained}"
    for place in ("runs/first/report.html", "both.html", "runs/ppo", "runs/mine/report.html"):
        assert (tmp_path / place).exists(), place
    saved = [x.name for x in (tmp_path / "runs" / "mine" / "checkpoints").iterdir()]
    assert "step-000002" in saved


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    done = run(folder, "demo", "-o", "run", *DEMO, "save.rollouts_every=1")
    assert done.code == 0, done.complained
    return folder / "run"


def test_commands_of_the_readme_run(demo_run: Path, tmp_path: Path) -> None:
    """Those that need neither a GPU nor the network nor hours, on runs of the demo."""
    recipe = yaml.safe_load((demo_run / "config.yaml").read_text())
    readme = [x for x in commands(ROOT / "README.md") if x[0] not in LONG and "--serve" not in x]
    assert len(readme) > 3
    for words in readme:
        for before, word in pairwise(words):
            if re.match(r"runs/[\w-]+$", word) and before != "-o":
                shutil.copytree(demo_run, tmp_path / word, dirs_exist_ok=True)
            if word.endswith(".yaml"):
                (tmp_path / word).write_text(yaml.safe_dump(recipe))
            if word.endswith(".jsonl") and words[0] == "segment":
                rows = sorted((demo_run / "rollouts").glob("*.jsonl"))[-1]
                shutil.copy(rows, tmp_path / word)
        train = words[0] == "train" and not {"--check", "--resume"} & {*words}
        extra = ["-o", f"trained-{len([*tmp_path.iterdir()])}"] if train else []
        short = words if words[0] == "train" else shortened(words)  # its recipe is short already
        done = run(tmp_path, *short, *extra)
        assert done.code == 0, f"{words}: {done.said} {done.complained}"


# --------------------------------------------------------------------------------------------
# docs/troubleshooting.md
# --------------------------------------------------------------------------------------------


def messages() -> str:
    """Every string of the package, with a mark where a message inserts a value."""
    found = []
    for path in (ROOT / "segcredit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [x.value if isinstance(x, ast.Constant) else "\0" for x in node.values]
                found.append("".join(map(str, parts)))
    return "\n\n".join(found)


def test_symptoms_are_messages_of_the_package() -> None:
    known, page = messages(), (DOCS / "troubleshooting.md").read_text()
    symptoms = re.findall(r"^\| (.*?) \|", page, re.MULTILINE)
    quoted = [x for symptom in symptoms for x in re.findall(r"`([^`]+)`", symptom)]
    assert len(quoted) > 25
    for message in quoted:
        assert message in known, f"no message says {message!r}"
