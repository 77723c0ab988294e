"""The hooks of the documentation site: links to other files, and names without a docstring."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import segcredit

ROOT = Path(__file__).parents[1]


BASE = """\"\"\"Documented.\"\"\"


class Base:
    \"\"\"Documented.\"\"\"

    def f(self):
        \"\"\"Documented.\"\"\"
"""
METHODS = """\"\"\"Documented.\"\"\"

import torch

from package.base import Base as Other


class Child(Other):
    \"\"\"Documented.\"\"\"

    def f(self): ...

    def own(self): ...

    def _own(self): ...


class Part(Protocol):
    \"\"\"Documented.\"\"\"

    def g(self): ...


class Foreign(torch.autograd.Function):
    \"\"\"Documented.\"\"\"

    def forward(ctx): ...
"""


@pytest.fixture(scope="module")
def hooks() -> Any:
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "tools" / "site_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_module_of_the_api_page_is_documented(hooks: Any) -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    hooks.check_documented(text)
    for name in set(segcredit.__all__) - {"__version__"}:
        assert re.search(rf"^::: segcredit[\w.]*\.{name}$", text, re.MULTILINE), name


def test_a_name_without_a_docstring_stops_the_build(hooks: Any, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    module = tmp_path / "package" / "module.py"
    text = """\"\"\"Documented.\"\"\"\n\ndef f(): ...\n\nclass C: ...\n\ndef _own(): ...\n"""
    module.write_text(text)
    with pytest.raises(ValueError, match=r"every public name of package/module.py; f, C lack one"):
        hooks.check_documented("::: package.module.C\n", tmp_path)
    module.write_text('"""Documented."""\n')
    hooks.check_documented("::: package.module\n", tmp_path)
    module.write_text('"""See :func:`f`."""\n')
    with pytest.raises(ValueError, match=r"got ':func:`f`', which the page would show"):
        hooks.check_documented("::: package.module\n", tmp_path)
    (tmp_path / "package" / "base.py").write_text(BASE)
    module.write_text(METHODS)
    with pytest.raises(ValueError, match=r"module.py; Child.own, Part.g lack one"):
        hooks.check_documented("::: package.module\n", tmp_path)
    with pytest.raises(ValueError, match=r"module.py; Child.own lack one"):
        hooks.check_documented("::: package.module.Child\n", tmp_path)
    with pytest.raises(ValueError, match="expected a module of this repository"):
        hooks.check_documented("::: other.module\n", tmp_path)


def test_a_link_out_of_the_documents_must_lead_to_a_file(hooks: Any) -> None:
    docs = ROOT / "docs"
    page = docs / "index.md"
    assert hooks.rewrite("[the tests](../tests/golden.json)", page, docs, "") == "the tests"
    linked = hooks.rewrite("[x](../README.md#install)", page, docs, "https://host/repo")
    assert linked == "[x](https://host/repo/blob/HEAD/README.md#install)"
    with pytest.raises(FileNotFoundError, match="expected a link to an existing file"):
        hooks.rewrite("[x](../none.md)", page, docs, "")


@pytest.mark.slow
def test_every_equation_is_drawn(hooks: Any) -> None:
    docs = ROOT / "docs"
    count = 0
    for page in docs.rglob("*.md"):
        found = hooks.EQUATION.findall(hooks.FENCE.sub("", page.read_text()))
        for tex in found:
            assert re.search(
                r'^<div class="equation".* d="M[\d .MLQCZ-]+"/>', hooks.draw_equation(tex)
            )
        count += len(found)
    assert count > 20
    text = "a\n\n$$\nx \\lt 1\n$$\n\n```\n$$\ny\n$$\n```\n"
    shown = hooks.rewrite(text, docs / "index.md", docs, "")
    assert 'aria-label="x \\lt 1"' in shown
    assert shown.endswith("```\n$$\ny\n$$\n```\n"), "code stays as it is"


def test_a_picture_follows_the_colors_of_the_site(hooks: Any) -> None:
    docs = ROOT / "docs"
    shown = hooks.rewrite((docs / "index.md").read_text(), docs / "index.md", docs, "")
    assert "<picture>" not in shown
    assert '<img src="img/idea-light.svg#only-light" width="800" alt="One response' in shown
    assert '<img src="img/idea-dark.svg#only-dark" width="800" alt="One response' in shown


@pytest.mark.slow
def test_search_works_on_pages_opened_from_disk(tmp_path: Path) -> None:
    """And the built site asks for nothing from the network."""
    pytest.importorskip("material")
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs chromium or google-chrome on the PATH")
    shutil.copytree(ROOT / "docs" / "js", tmp_path / "docs" / "js")
    (tmp_path / "docs" / "index.md").write_text("# First\n\nA flamingo.\n")
    (tmp_path / "docs" / "second.md").write_text("# Second\n\nA pelican.\n")
    (tmp_path / "mkdocs.yml").write_text(
        f"site_name: birds\ntheme: {{name: material, font: false}}\nplugins: [search, offline]\n"
        f"hooks: [{ROOT / 'tools' / 'site_hooks.py'}]\n"
    )
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict"], cwd=tmp_path, check=True)
    asked: list[str] = []
    with playwright.sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.goto((tmp_path / "site" / "index.html").as_uri())
        page.click("input.md-search__input")
        page.keyboard.type("pelican")
        page.locator(".md-search-result__link", has_text="Second").first.wait_for()
        browser.close()
    assert asked
    assert all(x.startswith("file:") for x in asked)
