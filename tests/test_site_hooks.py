"""The hooks of the documentation site: links to other files, and names without a docstring."""

import importlib.util
import re
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
