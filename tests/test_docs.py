"""The documents cannot rot: their code runs, their output is real, their links lead somewhere."""

import contextlib
import io
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

from segcredit.algorithms import ALGORITHMS, PolicyGradient
from segcredit.types import Rollouts

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]

FENCE = re.compile(r"^```([\w-]*)[^\n]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)[^)]*\)|\b(?:src|srcset|href)=\"([^\"\s]+)")
HEADING = re.compile(r"^#+ +(.*?)[ \t]*$", re.MULTILINE)

each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)


class Block(NamedTuple):
    language: str
    code: str
    line: int


def blocks(text: str) -> list[Block]:
    """Fenced blocks, in order, with the line on which their content begins."""
    return [Block(m[1], m[2], text.count("\n", 0, m.start(2))) for m in FENCE.finditer(text)]


def prose(text: str) -> str:
    """The document without its code."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


def run(path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Execute a document's Python blocks in one namespace; compare what they print.

    A ``text`` block right after a ``python`` block is that block's output.
    """
    module = ModuleType(f"document_{path.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look their module up
    found = blocks(path.read_text())
    for i, block in enumerate(found):
        if block.language != "python":
            continue
        code = compile("\n" * block.line + block.code, str(path), "exec")  # true line numbers
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, module.__dict__)
        for output in found[i + 1 : i + 2]:
            if output.language == "text":
                assert printed.getvalue() == output.code, f"{path.name}:{output.line + 1}"
    return module.__dict__


@each_document
def test_code_runs_and_prints_what_it_says(path: Path, monkeypatch: pytest.MonkeyPatch):
    run(path, monkeypatch)


def anchors(path: Path) -> set[str]:
    """GitHub's anchors of a document's headings."""
    titles = HEADING.findall(FENCE.sub("", path.read_text()))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@each_document
def test_relative_links_lead_somewhere(path: Path):
    for match in LINK.finditer(prose(path.read_text())):
        target = match[1] or match[2]
        if re.match(r"[a-z]+:", target):  # https:, mailto:
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), f"{path.name} links to {target}, which does not exist"
        assert file.is_relative_to(ROOT), f"{path.name} links to {target}, outside the repository"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{path.name} links to {target}: no such heading"


@each_document
def test_equations_are_such_as_github_renders(path: Path):
    text = FENCE.sub("", path.read_text())
    displays = re.findall(r"^\n\$\$\n(.+?)\n\$\$\n$", text, re.MULTILINE | re.DOTALL)
    assert text.count("$$") == 2 * len(displays), "each $$ on its own line, blank lines around"
    for equation in displays:  # Markdown eats a backslash before punctuation, < starts a tag
        assert not re.search(r"\\[^a-zA-Z\s]|<|\\operatorname", equation), equation


# --------------------------------------------------------------------------------------------
# docs/algorithms.md
# --------------------------------------------------------------------------------------------


def table_rows() -> dict[str, str]:
    """Constructor → row, for every row of the table of methods."""
    text = (ROOT / "docs" / "algorithms.md").read_text()
    rows = re.findall(r"^(\|.*\| \[`(\w+)\(\)`\]\([^)]*\) \|)$", text, re.MULTILINE)
    names = [name for _, name in rows]
    assert len(names) == len(set(names))
    return {name: row for row, name in rows}


def test_the_table_has_a_row_for_every_method():
    assert list(table_rows()) == list(ALGORITHMS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_row_names_the_parts_of_its_method(name: str):
    algorithm, row = ALGORITHMS[name](), table_rows()[name]
    if not isinstance(algorithm, PolicyGradient):
        return
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    _, credit_units, credit, ratio, reduction, kl, value_source, _, _ = cells
    parts: list[tuple[object, str]] = [
        (algorithm.credit.over, credit_units),
        (algorithm.credit, credit),
        (algorithm.ratio, ratio),
        (algorithm.reduce, reduction),
    ]
    parts += [(part, credit) for part in (*algorithm.adjust, *algorithm.adjust_minibatch)]
    parts += [(part, kl if "KL" in type(part).__name__ else credit) for part in algorithm.terms]
    parts += [(algorithm.kl, kl)] if algorithm.kl else []
    parts += [(algorithm.only, ratio)] if algorithm.only else []
    for part, cell in parts:
        assert f"`{type(part).__name__}`" in cell, f"{name}: {part} is not in {cell!r}"
    assert ("KL" in kl) == ("logp_ref" in algorithm.needs)
    assert ("critic" in value_source) == (algorithm.critic is not None)


def test_every_method_has_a_section():
    text = (ROOT / "docs" / "algorithms.md").read_text()
    named = {name for title in HEADING.findall(text) for name in re.findall(r"`(\w+)`", title)}
    assert named == set(ALGORITHMS)


# --------------------------------------------------------------------------------------------
# docs/extending.md
# --------------------------------------------------------------------------------------------


@pytest.fixture
def extending(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    return run(ROOT / "docs" / "extending.md", monkeypatch)


def hand_case() -> Rollouts:
    """Seven tokens with a hole at 3, and three tokens; 9.9 must not be read."""
    mask = torch.tensor([[1, 1, 1, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0]], dtype=torch.bool)
    entropy = torch.tensor(
        [[0.2, 1.5, 1.0, 9.9, 1.1, 0.4, 0.1], [0.3, 0.2, 2.0, 9.9, 9.9, 9.9, 9.9]]
    )
    return Rollouts(
        tokens=torch.zeros(2, 7, dtype=torch.long),
        mask=mask,
        logp_old=torch.full((2, 7), -0.3),
        reward=torch.tensor([1.0, 0.0]),
        group=torch.tensor([0, 1]),
        truncated=torch.tensor([False, True]),
        entropy=entropy,
        value=torch.linspace(0.1, 0.9, 14).view(2, 7),
        logp_ref=torch.full((2, 7), -0.4),
    )


def test_the_partition_cuts_where_it_should(extending: dict[str, object]):
    segments = extending["EntropyAbove"](nats=1.0)(hand_case())
    ends = [row[:num].tolist() for row, num in zip(segments.end, segments.num, strict=True)]
    assert ends == [[1, 4, 6], [2]]  # 1.0 itself is no cut; the last token always is
    assert segments.index[0].tolist() == [0, 0, 1, -1, 1, 2, 2]


def test_sapo_takes_the_partition(extending: dict[str, object]):
    algorithm = extending["algorithm"]
    assert algorithm.needs == {"entropy", "value", "logp_ref"}
    assert algorithm.credit.over == algorithm.ratio.over == extending["EntropyAbove"](1.0)
    rollouts = hand_case()
    credit = algorithm.prepare(rollouts).credit
    assert credit.advantage.isfinite().all()
    assert (credit.advantage[rollouts.mask] != 0).all()
    assert (credit.advantage[~rollouts.mask] == 0).all()
