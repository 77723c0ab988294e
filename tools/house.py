"""Print the size and the shape of the code base: ``make house``.

It lists the packages directly below ``segcredit`` and ``segcredit_lab``; the modules at the top of
each count as one package. The files of a training step are measured: a shortened demo runs on the
CPU, and a profiler records the functions of segcredit that its second SAPO step calls.
"""

import ast
import contextlib
import io
import os
import re
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path.cwd()
PACKAGES = ("segcredit", "segcredit_lab")
STEP = "train_step"
"""Name of the function in segcredit.train that runs one step of reinforcement learning."""
SHORT_DEMO = (
    *(f"stages.{number}.steps={steps}" for number, steps in enumerate((1, 1, 1, 3))),
    *("rollout.prompts=4", "rollout.max_tokens=8", "update.minibatches=2"),
    *("evaluation.prompts=4", "save.rollouts_every=0"),
)
EXTENSIONS = {
    **dict.fromkeys(("partition", "column", "engine", "reward", "benchmark", "world")),
    "credit estimator": "credit",
    "model family": "family",
    "algorithm": "method",
}
"""Kinds of extension, with the word in the title of their section in docs/extending.md."""
SMALL = 25
"""Modules with fewer lines are listed."""


@dataclass(frozen=True)
class Module:
    """One Python file of ours."""

    path: Path
    name: str
    lines: int
    imports: frozenset[str]

    @property
    def package(self) -> str:
        """The package below the top one: ``segcredit.train``; a top-level module is its own."""
        return ".".join(self.name.split(".")[:2])


def read_modules(package: str) -> list[Module]:
    """Read every module of a package; none if the package does not exist."""
    modules = []
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text()
        modules.append(Module(path, name, text.count("\n"), imported_names(text)))
    return modules


def imported_names(text: str) -> frozenset[str]:
    """Collect the dotted names of ours that a file imports, at its top or inside a function."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(name for name in names if name.split(".")[0] in PACKAGES)


def show_packages(package: str, modules: list[Module]) -> None:
    """Print one line per package, then the total."""
    folders = {x.name for x in modules if x.path.name == "__init__.py"} - {package}
    packages = defaultdict(list)
    for module in modules:
        packages[module.package if module.package in folders else package].append(module)
    print(f"{package:34}{'files':>7}{'lines':>8}   largest file")
    for name, members in sorted(packages.items()):
        largest = max(members, key=lambda module: module.lines)
        lines = sum(module.lines for module in members)
        where = f"{largest.lines:5} {largest.path.relative_to(ROOT / package)}"
        print(f"  {name:32}{len(members):7}{lines:8}  {where}")
    print(f"  {'total':32}{len(modules):7}{sum(module.lines for module in modules):8}\n")


def show_small(modules: list[Module]) -> None:
    """Print the modules that are too small to be a topic."""
    small = [x for x in modules if x.lines < SMALL and x.path.name != "__init__.py"]
    print(f"modules under {SMALL} lines, without __init__: {len(small)}")
    for module in small:
        print(f"  {module.lines:3} {module.path.relative_to(ROOT)}")
    print()


def show_imports(modules: list[Module]) -> None:
    """Print which package imports which, and with how many modules."""
    known = {module.package for module in modules}
    between: dict[str, Counter[str]] = defaultdict(Counter)
    for module in modules:
        packages = {".".join(name.split(".")[:2]) for name in module.imports}
        between[module.package].update((packages & known) - {module.package})
    print("imports between packages (number of importing modules)")
    for package, targets in sorted(between.items()):
        if targets:
            order = sorted(targets, key=lambda name: (-targets[name], name))
            shown = [f"{short(name)} {targets[name]}" for name in order]
            print(f"  {short(package):20} → {', '.join(shown)}")
    print(f"  {sum(map(len, between.values()))} pairs of packages\n")


def short(package: str) -> str:
    """Drop the library's own name."""
    return package.removeprefix("segcredit.")


def visited_in_step() -> Counter[str]:
    """Run the shortened demo; count our functions per file that its second SAPO step calls."""
    from segcredit.cli import main

    called: set[CodeType] = set()
    steps, inside = 0, False
    ours = tuple(str(ROOT / package) + os.sep for package in PACKAGES)

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal steps, inside
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(ours):
            return
        if code.co_name == STEP:
            steps += event == "call"
            inside = event == "call" and steps == 2  # caches are filled by the first step
        if inside and event == "call":
            called.add(code)

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as said:
        sys.argv = ["segcredit", "demo", *SHORT_DEMO, "--folder", f"{folder}/run"]
        threading.setprofile(profile)
        sys.setprofile(profile)
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"the shortened demo failed: {said.getvalue()}") from None
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    if steps < 2:
        raise RuntimeError(
            f"expected two calls of {STEP}, got {steps}; edit STEP in tools/house.py"
        )
    named = {code for code in called if not code.co_name.startswith("<")}  # no comprehensions
    return Counter(str(Path(code.co_filename).relative_to(ROOT)) for code in named)


def show_step() -> None:
    """Print the files and functions of ours in one training step."""
    files = visited_in_step()
    print(f"one SAPO step: {len(files)} files, {files.total()} functions")
    for name, count in sorted(files.items()):
        print(f"  {count:4} {name}")
    print()


def show_extensions() -> None:
    """Print the user's files for each kind of extension: those its documented recipe names."""
    text = (ROOT / "docs" / "extending.md").read_text()
    sections = [part.partition("\n") for part in text.split("\n## ")[1:]]
    tests = {path: path.read_text() for path in sorted((ROOT / "tests/extend").glob("test_*.py"))}
    print("files per extension, by docs/extending.md; the library's own files stay as they are")
    for kind, word in EXTENSIONS.items():
        named: set[str] = set()
        for title, _, body in sections:
            if re.search(rf"\b{word or kind}\b", title):
                named |= set(re.findall(r"(\w+\.py):[A-Za-z]", body))
        by = [x.name for x, code in tests.items() if any(Path(y).stem in code for y in named)]
        shown = f"{len(named)}: {', '.join(sorted(named))}" if named else "no recipe names one"
        print(f"  {kind:17} {shown}{'; tested by ' if by else ''}{', '.join(by)}")


if __name__ == "__main__":
    library, laboratory = (read_modules(package) for package in PACKAGES)
    show_packages(PACKAGES[0], library)
    if laboratory:
        show_packages(PACKAGES[1], laboratory)
    modules = library + laboratory
    print(f"{len(modules)} modules, {sum(module.lines for module in modules)} lines\n")
    show_small(modules)
    show_imports(modules)
    show_step()
    show_extensions()
