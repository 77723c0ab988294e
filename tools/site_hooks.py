"""MkDocs hooks: nothing from the network, links to files outside docs/, documented names only.

On GitHub ``[methods.py](../segcredit/algorithms/methods.py)`` leads to the file. The site contains
only docs/, so such a link becomes a link to the repository (``repo_url`` of mkdocs.yml), or its
plain text while there is no ``repo_url``.

mkdocstrings leaves out what has no docstring. Here a public function or class of a page's module
without one stops the build.
"""

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^(`{3,}|~{3,}).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[(?P<text>(?:`[^`\n]*`|[^\[\]`])+)\]\((?P<target>[^)\s]+)\)")


def outside(target: str, page: Path, docs: Path) -> str | None:
    """Return the path in the repository of a linked file outside docs/; None for other links."""
    if re.match(r"[a-z][a-z0-9+.-]*:|#|/", target):
        return None
    name, _, anchor = target.partition("#")
    path = (page.parent / name).resolve()
    if path.is_relative_to(docs) or not path.is_relative_to(ROOT):
        return None  # mkdocs checks links within docs/
    if not path.exists():
        raise FileNotFoundError(
            f"{page.relative_to(ROOT)}: expected a link to an existing file; got {target!r}. "
            f"Correct the link, then run: make docs"
        )
    return path.relative_to(ROOT).as_posix() + (f"#{anchor}" if anchor else "")


def rewrite(text: str, page: Path, docs: Path, repo_url: str) -> str:
    """Rewrite a page's links to files outside docs/; code blocks stay as they are."""

    def link(match: re.Match[str]) -> str:
        path = outside(match["target"], page, docs)
        if path is None:
            return match[0]
        if repo_url:
            return f"[{match['text']}]({repo_url.rstrip('/')}/blob/HEAD/{path})"
        shown = match["text"]
        return shown if "`" in shown or " " in shown else f"`{shown}`"

    pieces, end = [], 0
    for fence in FENCE.finditer(text):
        pieces += [LINK.sub(link, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*pieces, LINK.sub(link, text[end:])])


def undocumented(module: Path) -> list[str]:
    """List the public functions and classes of a file, and its own name, that have no docstring."""
    tree = ast.parse(module.read_text())
    defined = (ast.FunctionDef, ast.ClassDef)
    names = [x for x in tree.body if isinstance(x, defined) and not x.name.startswith("_")]
    found = [x.name for x in names if not ast.get_docstring(x)]
    return found if ast.get_docstring(tree) else [module.stem, *found]


def check_documented(text: str, root: Path = ROOT) -> None:
    """Raise ValueError if a module that a page inserts (``::: package.module``) has such names."""
    for name in re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE):
        parts = name.split(".")
        while parts and not (path := root.joinpath(*parts).with_suffix(".py")).is_file():
            path = root.joinpath(*parts, "__init__.py")
            if path.is_file():
                break
            parts = parts[:-1]
        if not parts:
            raise ValueError(f"expected a module of this repository after :::; got {name!r}")
        if missing := undocumented(path):
            raise ValueError(
                f"expected a docstring on every public name of {path.relative_to(root)}; "
                f"{', '.join(missing)} lack one. Write them, then run: make docs"
            )


def on_config(config: Any, **_: Any) -> Any:
    """Drop the script that Material's offline plugin loads from the network."""
    config["extra"]["polyfills"] = []
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Called by MkDocs for each page."""
    check_documented(markdown)
    docs = Path(config["docs_dir"]).resolve()
    return rewrite(markdown, docs / page.file.src_path, docs, config["repo_url"] or "")
