"""MkDocs hooks: links out of docs/, equations, documented names only, nothing from the network.

On GitHub ``[methods.py](../segcredit/algorithms/methods.py)`` leads to the file. The site contains
only docs/, so such a link becomes a link to the repository (``repo_url`` of mkdocs.yml), or its
plain text while there is no ``repo_url``.

GitHub typesets ``$$`` equations; for the site matplotlib draws them as SVG in the text's color.

mkdocstrings leaves out what has no docstring. Here a public function, class or method of a page's
module without one stops the build; a method is documented if its class or a base class says it.
"""

import ast
import html
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^(`{3,}|~{3,}).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[(?P<text>(?:`[^`\n]*`|[^\[\]`])+)\]\((?P<target>[^)\s]+)\)")

ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`([^`\n]+)`")
"""A reference of Sphinx, which is no Markdown."""


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
    """Rewrite equations, pictures and links to files outside docs/, but not in code blocks."""

    def link(match: re.Match[str]) -> str:
        path = outside(match["target"], page, docs)
        if path is None:
            return match[0]
        if repo_url:
            return f"[{match['text']}]({repo_url.rstrip('/')}/blob/HEAD/{path})"
        shown = match["text"]
        return shown if "`" in shown or " " in shown else f"`{shown}`"

    def prose(part: str) -> str:
        part = PICTURE.sub(PICTURES, part)
        return EQUATION.sub(lambda found: draw_equation(found[1]), LINK.sub(link, part))

    pieces, end = [], 0
    for fence in FENCE.finditer(text):
        pieces += [prose(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*pieces, prose(text[end:])])


PICTURE = re.compile(
    r'<picture>\s*<source [^>]*srcset="(?P<dark>[^"]+)">\s*<img src="(?P<light>[^"]+)"'
    r"(?P<rest>[^>]*)>\s*</picture>"
)
PICTURES = (
    r'<p class="picture"><img src="\g<light>#only-light"\g<rest>>'
    r'<img src="\g<dark>#only-dark"\g<rest>></p>'
)
"""Material shows one of the two by the colors that the reader chose, not by the system's."""

EQUATION = re.compile(r"^\$\$\n(.+?)\n\$\$$", re.MULTILINE | re.DOTALL)
MATHTEXT = {"frac": r"\dfrac", "sum": r"\,\sum", "ge": r"\geq", "le": r"\leq", "lt": "<"}
MATHTEXT |= {"lvert": "|", "rvert": "|"}
"""Commands that matplotlib lacks, or draws too small or tight, and what it draws instead."""


def draw_equation(tex: str) -> str:
    """Return an equation as HTML: an SVG whose height is relative to the text's."""
    from matplotlib import rc_context
    from matplotlib.path import Path as Outline
    from matplotlib.textpath import TextPath

    known = re.sub(r"\\([a-z]+)", lambda x: MATHTEXT.get(x[1], x[0]), " ".join(tex.split()))
    with rc_context({"mathtext.fontset": "stix"}):
        outline = TextPath((0, 0), f"${known}$", size=100)
    letters = {Outline.MOVETO: "M", Outline.LINETO: "L", Outline.CURVE3: "Q", Outline.CURVE4: "C"}
    drawn = "".join(
        "Z" if code == Outline.CLOSEPOLY else letters[code] + " ".join(f"{x:.0f}" for x in points)
        for points, code in outline.iter_segments(curves=True, simplify=False)
    )
    box = outline.get_extents()
    width, height = box.width + 10, box.height + 10
    return (
        f'<div class="equation" role="img" aria-label="{html.escape(tex)}"><svg '
        f'viewBox="{box.x0 - 5:.0f} {-box.y1 - 5:.0f} {width:.0f} {height:.0f}" '
        f'style="width: {width / 90:.2f}em"><path transform="scale(1 -1)" d="{drawn}"/></svg></div>'
    )


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
NO_PARENTS = ("ABC", "Enum", "Generic", "NamedTuple", "Protocol", "object")
"""Base classes that document no methods for their subclasses."""


def public(body: list[ast.stmt]) -> list[Definition]:
    """Return the functions and classes of a body whose names do not start with an underscore."""
    found = [x for x in body if isinstance(x, Definition)]
    return [x for x in found if not x.name.startswith("_")]


def undocumented(module: Path, root: Path = ROOT, shown: str = "") -> list[str]:
    """List what a file lacks a docstring for: its public names, and methods of public classes.

    A method needs none if a base class documents it.

    Args:
        module: The file.
        root: Folder of the packages, in which base classes are looked up.
        shown: The only class whose methods are listed; by default, those of every class.
    """
    tree = ast.parse(module.read_text())
    missing = [] if ast.get_docstring(tree) else [module.stem]
    for x in public(tree.body):
        missing += [] if ast.get_docstring(x) else [x.name]
        if isinstance(x, ast.ClassDef) and shown in ("", x.name):
            missing += [
                f"{x.name}.{method.name}"
                for method in public(x.body)
                if not documented(method.name, x, tree, root)
            ]
    return missing


def documented(method: str, owner: ast.ClassDef, tree: ast.Module, root: Path) -> bool:
    """Whether a method has a docstring, in its class or in a base class."""
    own = [x for x in owner.body if isinstance(x, Definition) and x.name == method]
    if any(ast.get_docstring(x) for x in own):
        return True
    for base in owner.bases:
        name = ast.unparse(base).partition("[")[0]
        place = definition(name, tree, root)
        if place is None and name.rpartition(".")[2] not in NO_PARENTS:
            return True  # a class of another package, which has documentation of its own
        if place is not None and documented(method, *place, root):
            return True
    return False


def definition(name: str, tree: ast.Module, root: Path) -> tuple[ast.ClassDef, ast.Module] | None:
    """Return the class that a module calls by this name, and its module; None if not ours."""
    for x in tree.body:
        if isinstance(x, ast.ClassDef) and x.name == name:
            return x, tree
        if isinstance(x, ast.ImportFrom) and x.module:
            imported = {y.asname or y.name: y.name for y in x.names}
            head, _, rest = name.partition(".")
            if head in imported:
                inside = f"{x.module}.{imported[head]}" if rest else x.module
                path = module_file(inside, root)
                if path is not None:
                    return definition(rest or imported[head], ast.parse(path.read_text()), root)
    return None


def module_file(name: str, root: Path) -> Path | None:
    """Return the file of a module or package in a folder."""
    path = root.joinpath(*name.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file
    return None


def check_documented(text: str, root: Path = ROOT) -> None:
    """Raise ValueError if a module that a page inserts (``::: package.module``) has such names."""
    for name in re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE):
        parts = name.split(".")
        while parts and (path := module_file(".".join(parts), root)) is None:
            parts = parts[:-1]
        if not parts:
            raise ValueError(f"expected a module of this repository after :::; got {name!r}")
        if missing := undocumented(path, root, name.removeprefix(".".join(parts)).lstrip(".")):
            raise ValueError(
                f"expected a docstring on every public name of {path.relative_to(root)}; "
                f"{', '.join(missing)} lack one. Write them, then run: make docs"
            )
        if role := ROLE.search(path.read_text()):
            raise ValueError(
                f"expected Markdown in the docstrings of {path.relative_to(root)}; got "
                f"{role[0]!r}, which the page would show. Write ``{role[1]}``, then run: make docs"
            )


def on_config(config: Any, **_: Any) -> Any:
    """Replace the script that Material's offline plugin loads from the network by our own."""
    config["extra"]["polyfills"] = ["js/search-from-disk.js"]
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Called by MkDocs for each page."""
    check_documented(markdown)
    docs = Path(config["docs_dir"]).resolve()
    return rewrite(markdown, docs / page.file.src_path, docs, config["repo_url"] or "")
