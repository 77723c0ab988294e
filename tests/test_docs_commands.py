"""The commands of the documents: every one parses; those of README and Get started are run."""

import ast
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from itertools import takewhile
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import typer
import yaml
from each import each
from forked_cli import run, run_several, start
from test_docs import (
    DOCS,
    DOCUMENTS,
    FENCE,
    ROOT,
    blocks,
    write_text_model,
    write_vision_model,
)

from segcredit.cli import app
from segcredit.config import shipped_recipes
from segcredit.data import load_prompts
from segcredit_lab.study import shipped_studies

FIRST_READ = (ROOT / "README.md", DOCS / "get-started.md", DOCS / "index.md")
"""Pages whose commands in text and tables are complete."""

SHELLS = ("sh", "bash", "console")
LINES = re.compile(r"^(?:\$ )?(?P<line>(?:[^\\\n]|\\\n|\\.)+)$", re.MULTILINE)
PROGRAM = re.compile(r"^(?:torchrun .*?--no-python )?(?:\.venv\S*/bin/)?segcredit (?P<rest>.+)")
DEMO = [
    *("stages.0.steps=1", "stages.1.steps=1", "stages.2.steps=1", "stages.3.steps=1"),
    *("rollout.prompts=4", "update.minibatches=2", "evaluation.prompts=2"),
    *("rollout.max_tokens=8", "model.hidden=32", "model.layers=1", "model.heads=2"),
]
"""Overrides that make the demo a run of seconds; the first four are of its stages."""
SMALL = [
    *("stages=[{kind: optimize, steps: 1}]", "rollout.prompts=4", "update.minibatches=2"),
    *("rollout.max_tokens=8", "evaluation.prompts=2", "evaluation.every=0", "model.dtype=float32"),
]
"""The same for a recipe that only optimizes."""
INLINE = re.compile(r"`((?:segcredit|torchrun|make)(?: [^`\n]+)?)`")
PLACEHOLDER = re.compile(r"[A-Z]+|.*…|.*\.yaml|[\w.]+=.*")


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


def command_of(name: str) -> Any:
    """Return the command with this name."""
    return typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]


def parsed(words: list[str]) -> None:
    """Parse a command as the terminal would, without running it."""
    ends = [x for x in ("|", ">", "&&") if x in words]
    words = words[: words.index(ends[0])] if ends else words
    name, *arguments = words
    command_of(name).make_context(name, [x for x in arguments if x != "…"])


def unknown_names(words: list[str]) -> list[str]:
    """List what a command names that does not exist: command, options, recipe, studies."""
    name, *arguments = words
    try:
        options = {y for x in command_of(name).params for y in (*x.opts, *x.secondary_opts)}
    except KeyError:
        return [] if PLACEHOLDER.fullmatch(name) else [name]
    named = [x.partition("=")[0] for x in arguments if re.match(r"--\w", x)]
    unknown = [x for x in named if x not in {*options, "--help"}]
    known = {"train": shipped_recipes, "verl": shipped_recipes, "plan": shipped_recipes}
    known["study"] = lambda: {**shipped_studies(), "all": Path()}
    first = [*takewhile(lambda x: not x.startswith("-"), arguments)]
    first = first if name == "study" else first[:1]
    if name in known:
        unknown += [x for x in first if not PLACEHOLDER.fullmatch(x) and x not in known[name]()]
    return unknown


def inline(path: Path) -> list[str]:
    """List the commands of a document's text and tables: code spans, not blocks."""
    return INLINE.findall(FENCE.sub("", path.read_text()))


@each("path", DOCUMENTS)
def test_every_command_parses(path: Path) -> None:
    for words in commands(path):
        try:
            if not {"--help", "--list"} & {*words}:
                parsed(words)
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{path.name}: segcredit {shlex.join(words)}: {error}") from error
        assert not unknown_names(words), f"{path.name}: segcredit {shlex.join(words)}"


@each("path", DOCUMENTS)
def test_commands_in_text_and_tables_exist(path: Path) -> None:
    """Their options, recipes, studies and make targets, too; those of a first reader parse."""
    for span in inline(path):
        if span.startswith("make"):
            assert {*span.split()[1:]} <= {*targets()}, f"{path.name}: {span}"
        if command := PROGRAM.match(span):
            words = shlex.split(command["rest"])
            assert not unknown_names(words), f"{path.name}: {span}: {unknown_names(words)}"
            if path in FIRST_READ and len(words) > 1 and not {"--help", "--list"} & {*words}:
                parsed(words)


def test_a_command_that_does_not_exist_is_found() -> None:
    for line, wrong in [
        ("trian demo", "trian"),
        ("train demo --chek", "--chek"),
        ("train geo3k/qwen-sapo", "geo3k/qwen-sapo"),
        ("study table1 table9", "table9"),
    ]:
        assert unknown_names(line.split()) == [wrong]
    assert not unknown_names(shlex.split("study table1 all mine.yaml --scale mini"))


@each("path", DOCUMENTS)
def test_extras_and_targets_exist(path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = path.read_text()
    for extra in re.findall(r"segcredit\[(\w+)\]", text):
        assert extra == "x" or extra in project["optional-dependencies"], extra
    for block in blocks(text):
        if block.language in SHELLS:
            for target in re.findall(r"^make ([a-z-]+)", block.code, re.MULTILINE):
                assert target in targets(), f"make {target}"


def targets() -> list[str]:
    """List the targets of the Makefile."""
    return re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


def shortened(words: list[str]) -> list[str]:
    """The command with the overrides that make it short."""
    name, *arguments = words
    if {"--resume", "--check"} & {*words}:
        return words
    if name == "demo":
        given = [x.count("kind:") for x in words if x.startswith("stages=")]
        return [name, *arguments, *DEMO[: given[0] if given else 4], *DEMO[4:]]
    if name == "train":
        return [name, *arguments, *SMALL]
    if name == "evaluate":
        return [name, *arguments, "--prompts", "2"]
    return words


@pytest.mark.slow
def test_get_started_from_top_to_bottom(tmp_path: Path) -> None:
    """Every block: rows load, the recipe is written as it stands, commands run in their order."""
    page = DOCS / "get-started.md"
    names_its_files(page)
    write_text_model(tmp_path)
    found = blocks(page.read_text())
    assert {x.language for x in found} <= {"sh", "json", "yaml", "python"}
    (row,) = [x.code for x in found if x.language == "json"]
    (tmp_path / "row.jsonl").write_text(row)
    assert load_prompts([str(tmp_path / "row.jsonl")]).prompts[0].answer == "7"
    (recipe,) = [x.code for x in found if x.language == "yaml"]
    (tmp_path / f"{yaml.safe_load(recipe)['name']}.yaml").write_text(recipe)
    (example,) = re.findall(r"^python (examples/\S+) (.+)$", page.read_text(), re.MULTILINE)
    made = [sys.executable, str(ROOT / example[0]), *example[1].split()]
    subprocess.run(made, cwd=tmp_path, check=True)
    for words in commands(page):
        if "--resume" in words:  # one step more than there were
            words = [re.sub(r"steps=\d+", "steps=2", x) for x in words]
        done = run(tmp_path, *shortened(words))
        assert done.code == 0, f"{words}: {done.said} {done.complained}"
    for place in ("runs/first/report.html", "both.html", "runs/grpo", "runs/mine/report.html"):
        assert (tmp_path / place).exists(), place
    saved = [x.name for x in (tmp_path / "runs" / "mine" / "checkpoints").iterdir()]
    assert "step-000002" in saved


def answers_until_interrupted(folder: Path, words: list[str]) -> None:
    """Start ``report --serve``, load its page, and stop it as Ctrl-C does."""
    call = start(folder, *words)
    assert call.wait_until(lambda: "in a browser" in call.said), call.complained
    (address,) = re.findall(r"http\S+", call.said)
    with urlopen(address) as page:
        assert b"segcredit" in page.read()
    call.signal(signal.SIGINT)
    assert call.wait() == 0, call.complained


def names_its_files(path: Path) -> None:
    """Check that the text says under which names to save the page's rows, recipe and function."""
    text = FENCE.sub("", path.read_text())
    code = "".join(x.code for x in blocks(path.read_text()) if x.language in ("sh", "yaml"))
    named = {*re.findall(r"(?<![\w/.-])([\w-]+\.(?:yaml|jsonl))\b", code)}
    assert named
    for name in named - {"held-out.jsonl"}:
        assert f"`{name}`" in text, f"{path.name} does not say what {name} is"


@pytest.mark.slow
def test_readme_from_top_to_bottom(tmp_path: Path) -> None:
    """README's rows load, its recipe and reward function are saved, and its commands run."""
    page = ROOT / "README.md"
    names_its_files(page)
    write_vision_model(tmp_path)
    found = blocks(page.read_text())
    assert {x.language for x in found} <= {"sh", "json", "yaml", "python"}
    (row,) = [x.code for x in found if x.language == "json"]
    (tmp_path / "row.jsonl").write_text(row)
    image = tmp_path / json.loads(row)["images"][0]
    image.parent.mkdir()
    shutil.copy(tmp_path / "train-0.png", image)
    assert load_prompts([str(tmp_path / "row.jsonl")]).prompts[0].answer == "12"
    (recipe,) = [x.code for x in found if x.language == "yaml"]
    (tmp_path / "my.yaml").write_text(recipe)
    code = "\n".join(x.code for x in found if x.language == "python")
    (function,) = [x for x in ast.parse(code).body if isinstance(x, ast.FunctionDef)]
    (tmp_path / "my_reward.py").write_text(ast.unparse(function))
    demo = "runs/demo-20261115-101500"
    assert run(tmp_path, "demo", "-o", demo, *DEMO, "save.rollouts_every=1").code == 0
    found_commands = commands(page)
    assert len(found_commands) >= 8
    for words in found_commands:
        if "--serve" in words:
            answers_until_interrupted(tmp_path, words)
            continue
        trains = words[0] == "train" and not {"--check", "--resume"} & {*words}
        place = ["-o", "runs/my-20261115-101500"] if trains else []
        done = run(tmp_path, *shortened(words), *place)
        assert done.code == 0, f"{words}: {done.said} {done.complained}"
    (together,) = [x for x in inline(page) if x.startswith("torchrun")]
    command = PROGRAM.match(together)
    assert command is not None
    run_several(tmp_path, 2, *shortened(shlex.split(command["rest"])), "-o", "runs/together")
    assert (tmp_path / "runs" / "together" / "report.html").exists()
    (own,) = set(re.findall(r"my_reward\.py:\w+", recipe))
    done = run(tmp_path, "train", "my.yaml", "--check", f"reward={own}")
    assert done.code == 0, done.complained


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


@pytest.mark.slow
def test_symptoms_are_messages_of_the_package() -> None:
    known, page = messages(), (DOCS / "troubleshooting.md").read_text()
    symptoms = re.findall(r"^\| (.*?) \|", page, re.MULTILINE)
    quoted = [x for symptom in symptoms for x in re.findall(r"`([^`]+)`", symptom)]
    assert len(quoted) > 25
    for message in quoted:
        assert message in known, f"no message says {message!r}"
