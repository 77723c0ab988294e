"""Build the release from a clean copy of the last commit, install it, and try it outside the tree.

``make release-check`` runs this with the python of .venv, which has ``build`` and ``twine``. The
first step that fails ends it with exit code 1 and that step's output. Addresses that are still
placeholders are a notice; with ``--publish`` they are a failure.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("segcredit", "segcredit_lab")
DEMO = [
    *("stages.0.steps=40", "stages.1.steps=120", "stages.2.steps=2", "stages.3.steps=4"),
    *("rollout.prompts=64", "evaluation.prompts=64", "evaluation.every=0"),
]
"""A cheap demo that passes through every stage."""
FILES = """
from importlib.metadata import version
import segcredit
from segcredit.config import load_recipe, shipped_recipes
from segcredit_lab.study import load_study, shipped_studies

assert version("segcredit") == segcredit.__version__ == {version!r}, segcredit.__version__
assert "site-packages" in segcredit.__file__, segcredit.__file__
recipes, studies = shipped_recipes(), shipped_studies()
for name in recipes:
    load_recipe(name)
for name in studies:
    load_study(name)
print(f"{{len(recipes)}} recipes, {{len(studies)}} studies")
"""
SNIPPET = """
from segcredit import Trainer
from segcredit.algorithms import sapo


def right(prompts, completions, answer, **columns):
    return [float(a in c) for c, a in zip(completions, answer, strict=True)]


trainer = Trainer(
    model={model!r},
    data=[{{"problem": "How many?", "answer": "3"}}, {{"problem": "How few?", "answer": "1"}}],
    algorithm=sapo(fraction=0.30),
    reward=right,
    steps=1,
    rollout={{"prompts": 2, "max_tokens": 8}},
    update={{"minibatches": 1}},
)
assert (trainer.train("runs/snippet").model / "config.json").is_file()
"""


PLACEHOLDER = "https://example.org/"
"""Start of every address in pyproject.toml that the owner of the repository must set."""


class CheckError(Exception):
    """A step of the check failed."""


def check(work: Path) -> None:
    """Run all steps in an empty folder and print the table."""
    source, outside, environment = work / "source", work / "outside", work / "environment"
    outside.mkdir()
    python, command = environment / "bin" / "python", environment / "bin" / "segcredit"
    dist = source / "dist"

    def clone() -> str:
        archive = work / "source.tar"
        _run(["git", "archive", "--output", archive, "HEAD"], ROOT)
        with tarfile.open(archive) as file:
            file.extractall(source, filter="data")
        commit = _run(["git", "rev-parse", "--short", "HEAD"], ROOT).strip()
        changed = _run(["git", "status", "--porcelain"], ROOT).strip()
        return f"commit {commit}" + ("; uncommitted changes are left out" if changed else "")

    def build() -> str:
        _run([sys.executable, "-m", "build"], source)  # the wheel is built from the sdist
        return ", ".join(f"{x.name} {x.stat().st_size / 2**20:.1f} MiB" for x in dist.iterdir())

    def twine() -> str:
        _run([sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir()], source)
        return "--strict"

    def contents() -> str:
        listed = _run(["git", "ls-tree", "-r", "--name-only", "HEAD", *PACKAGES], ROOT)
        with zipfile.ZipFile(_wheel(dist)) as wheel:
            found = {x for x in wheel.namelist() if ".dist-info/" not in x}
        expected = set(listed.splitlines())
        if found != expected:
            raise CheckError(
                f"expected the files of the commit in the wheel; missing: "
                f"{sorted(expected - found)}, extra: {sorted(found - expected)}"
            )
        return f"{len(found)} files, all of {' and '.join(PACKAGES)}"

    def install() -> str:
        _run([sys.executable, "-m", "venv", environment], work)
        constraints = ["-c", source / "constraints.txt"]  # one exact torch: a CPU build if known
        _run([python, "-m", "pip", "install", "--quiet", *constraints, _wheel(dist)], outside)
        _run([python, "-m", "pip", "check"], outside)
        return _run([python, "-c", "import torch; print('torch', torch.__version__)"], outside)

    def starts() -> str:
        if "demo" not in _run([command, "--help"], outside):
            raise CheckError("expected the command demo in segcredit --help")
        return _run([command, "--version"], outside)

    def shipped() -> str:
        version = _wheel(dist).name.split("-")[1]
        return _run([python, "-c", FILES.format(version=version)], outside)

    def demo() -> str:
        _run([command, "demo", *DEMO, "-o", "runs/demo"], outside)
        made = outside / "runs" / "demo"
        for name in ("report.html", "plots/curves.png", "checkpoints/step-000166/policy"):
            if not (made / name).exists():
                raise CheckError(f"expected {name} in the demo's run; there is none")
        return f"segcredit demo {' '.join(DEMO[:4])} …"

    def evaluate() -> str:
        _run([command, "evaluate", "runs/demo", "--prompts", "16"], outside)
        return "segcredit evaluate runs/demo"

    def snippet() -> str:
        model = "runs/demo/checkpoints/step-000166/policy"
        (outside / "train.py").write_text(SNIPPET.format(model=model), encoding="utf-8")
        _run([python, "train.py"], outside)
        return "Trainer(…).train() on the demo's policy"

    def example() -> str:
        printed = _run([python, source / "examples" / "sapo_loop.py"], outside)
        return f"sapo_loop.py: {printed.strip().splitlines()[-1]}"

    steps: dict[str, Callable[[], str]] = {
        "clean copy": clone,
        "sdist and wheel": build,
        "twine check": twine,
        "files in the wheel": contents,
        "clean environment": install,
        "help and version": starts,
        "recipes and studies": shipped,
        "demo": demo,
        "evaluate": evaluate,
        "Python": snippet,
        "example": example,
    }
    print(f"{'step':<20} {'seconds':>7}  result", flush=True)
    for name, step in steps.items():
        started = time.monotonic()
        result = step().strip()
        print(f"{name:<20} {time.monotonic() - started:>7.1f}  {result}", flush=True)


def placeholders(project: str) -> list[str]:
    """List the lines of pyproject.toml that have a placeholder instead of a public address."""
    lines = enumerate(project.splitlines(), start=1)
    return [f"pyproject.toml:{number}: {x}" for number, x in lines if PLACEHOLDER in x]


def check_addresses(project: str, publish: bool) -> str | None:
    """Return a notice that names the placeholders; raise CheckError if this is to be published."""
    found = placeholders(project)
    if not found:
        return None
    notice = "\n  ".join(
        [
            "not ready to publish: expected the public address of the repository; got "
            "placeholders. Set it in these lines:",
            *found,
        ]
    )
    if publish:
        raise CheckError(notice)
    return notice


def _wheel(dist: Path) -> Path:
    (wheel,) = dist.glob("*.whl")
    return wheel


def _run(command: list[str | Path], folder: Path) -> str:
    """Run a command without the tree on its path; return what it printed."""
    left_out = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {k: x for k, x in os.environ.items() if k not in left_out}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        output = f"{done.stdout}\n{done.stderr}".strip().splitlines()[-30:]
        words = " ".join(map(str, command))[:300]
        raise CheckError("\n".join([f"{words} ended with exit code {done.returncode}", *output]))
    return done.stdout


def main() -> None:
    """Check the last commit in a temporary folder."""
    parser = argparse.ArgumentParser(description="Build the release and try it.")
    parser.add_argument("--publish", action="store_true", help="fail on placeholder addresses")
    publish = parser.parse_args().publish
    work = Path(tempfile.mkdtemp(prefix="segcredit-release-"))
    try:
        notice = check_addresses((ROOT / "pyproject.toml").read_text(encoding="utf-8"), publish)
        check(work)
    except CheckError as error:
        sys.exit(f"release check failed: {error}")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print("the release works")
    if notice:
        print(f"\nNOTICE: {notice}")


if __name__ == "__main__":
    main()
