"""Measured against predicted, and the other tables of docs/appendix/plan.md.

python tests/plan/accuracy.py          # print them
python tests/plan/accuracy.py --write  # put them into the appendix
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from segcredit.config import parse_recipe
from segcredit.plan import GPUS, Gpu, Prediction, plan, predict
from segcredit.plan.memory import between
from segcredit.plan.timing import update_critic, update_policy

HERE = Path(__file__).resolve().parent
DOCUMENT = HERE.parents[1] / "docs" / "plan.md"
APPENDIX = DOCUMENT.parent / "appendix" / "plan.md"
MODELS = HERE / "models"


@dataclass(frozen=True)
class Compared:
    """One number."""

    run: str
    what: str
    low: float
    high: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative to the middle of what was measured."""
        middle = (self.low + self.high) / 2
        return self.predicted / middle - 1


def predicted(run: dict[str, Any], model: str) -> Prediction:
    """By the recipe that was measured."""
    given = {"data": {"train": ["rows.jsonl"]}, "stages": [{"kind": "optimize", "steps": 1}]}
    settings = {"path": str(MODELS / model), "dtype": "bfloat16"}
    recipe = given | run["recipe"] | {"model": settings | run["recipe"].get("model", {})}
    found = plan(parse_recipe(recipe), "1xH200", **run["lengths"])
    # sampling has changed since: then it copied keys and values for every query head
    return predict(replace(found.job, copied_keys=True))


def value(found: Prediction, what: str) -> float:
    """The number of that name."""
    kind, _, phase = what.partition(" ")
    phase = phase.removeprefix("in ").removeprefix("of ")
    if what == "memory before the first step":
        return between(found.job, stepped=False) / 2**30
    if what == "memory between phases":
        return found.between / 2**30
    if what == "peak of the device":  # what the driver counts, by when vLLM sleeps or wakes
        return max(x.total for x in found.memory.values()) / 2**30
    if kind == "memory":
        return max(x.total for name, x in found.memory.items() if name.startswith(phase)) / 2**30
    if kind == "time":
        return sum(x for name, x in found.seconds.items() if name.startswith(phase))
    assert what == "PFLOP of update"
    critic = update_critic(found.job) if found.job.critic else 0.0
    return (update_policy(found.job) + critic) / 1e15


def compared(run: dict[str, Any], what: str, found: Prediction) -> Compared:
    """One measurement beside its prediction."""
    low, high = run["measured"][what]
    return Compared(run["name"], what, low, high, value(found, what))


def comparisons() -> Iterator[Compared]:
    """Every measurement beside its prediction."""
    file = json.loads((HERE / "measured.json").read_text(encoding="utf-8"))
    for run in file["runs"]:
        found = predicted(run, run.get("model", file["model"]))
        for what in run["measured"]:
            yield compared(run, what, found)


def accuracy() -> str:
    """As Markdown."""
    lines = ["| run | what | measured | predicted | off by |", "|---|---|---|---|---|"]
    for x in comparisons():
        measured = f"{x.low:g}" if x.low == x.high else f"{x.low:g} – {x.high:g}"
        lines.append(
            f"| {x.run} | {x.what} | {measured} | {x.predicted:.4g} | {100 * x.error:+.1f} % |"
        )
    return "\n".join(lines)


def constants() -> str:
    """Table of the constants in memory.py and timing.py with their docstrings."""
    lines = ["| constant | value | what it is |", "|---|---|---|"]
    for place in ("timing", "memory"):
        module = import_module(f"segcredit.plan.{place}")
        text = Path(str(module.__file__)).read_text(encoding="utf-8")
        rows = re.findall(r'^((?:[A-Z_]+ = [^\n]*\n)+)"""(.*?)"""', text, re.MULTILINE | re.DOTALL)
        for names, meaning in rows:
            for name in re.findall(r"^([A-Z_]+) =", names, re.MULTILINE):
                amount = getattr(module, name)
                shown = f"{amount / 2**30:g} GiB" if amount > 2**20 else f"{amount:g}"
                lines.append(f"| `{name}` | {shown} | {' '.join(meaning.split())} |")
    return "\n".join(lines)


def gpus() -> str:
    """The table of GPUs."""
    names = ["GPU", "GiB", "bfloat16 TFLOP/s", "float32 TFLOP/s", "memory GB/s"]
    names += ["CPU memory GB/s"]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for gpu in GPUS.values():
        lines.append(f"| {' | '.join(_cell(getattr(gpu, f.name)) for f in fields(Gpu))} |")
    return "\n".join(lines)


def _cell(x: Any) -> str:
    return x if isinstance(x, str) else f"{x:,g}"


TABLES = {"accuracy": accuracy, "constants": constants, "gpus": gpus}


def with_tables(text: str) -> str:
    """The appendix with its tables made anew."""
    for name, make in TABLES.items():
        begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = before + begin + make() + end + rest.split(end)[1]
    return text


if __name__ == "__main__":
    if "--write" in sys.argv:
        APPENDIX.write_text(with_tables(APPENDIX.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print("\n\n".join(make() for make in TABLES.values()))
