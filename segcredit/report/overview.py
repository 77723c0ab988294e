"""First view of the report page: run facts, results before and after, warnings and curves."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from segcredit import __version__
from segcredit.algorithms import make_algorithm
from segcredit.printable import change_texts
from segcredit.registry import resolve_files
from segcredit.report.data import (
    Rows,
    files,
    limited_depth,
    plain_number,
    shortened,
    shown_partitions,
)
from segcredit.report.explain import GLOSSARY, HEALTHY, NO_RANGE
from segcredit.runlog import Run
from segcredit.runlog.reader import step_in

MAX_POINTS = 1500
"""Maximum number of points of a curve; of a longer one, every n-th step is shown."""
MAX_WARNINGS = 20
"""Maximum number of warnings shown per run."""
RESULTS = (
    ("sampled", "sampled accuracy"),
    ("greedy", "greedy accuracy"),
    ("reward", "sampled reward"),
    ("greedy_reward", "greedy reward"),
    ("no_verdict", "no verdict"),
    ("response_length", "tokens per response"),
    ("truncated", "truncated"),
)
SHARES = ("sampled", "greedy", "no_verdict", "truncated")
"""Measurements that are shown in percent."""
REWARDS = ("reward", "greedy_reward")
STAGES = ("warm_start", "pretrain_critic", "optimize", "evaluation")
SAME_GROUP = ("seed", "name", "threads", "version")
"""Settings in which runs of one group may differ."""


def gather_overview(runs: Sequence[Run], rows: Sequence[Rows]) -> dict[str, Any]:
    """Collect everything on the page except the responses."""
    shown = []
    for run in runs:
        with limited_depth(run.path):
            shown.append(overview(run))
    return {
        "version": __version__,
        "runs": shown,
        "glossary": GLOSSARY,
        "healthy": {"metrics": HEALTHY, "otherwise": NO_RANGE},
        "files": [part.listed() for part in rows],
        "partitions": [partition.label() for partition in shown_partitions()],
        "recorded": [
            {kind: len(files(run, kind)) for kind in ("rollouts", "watched")} for run in runs
        ],
    }


def overview(run: Run) -> dict[str, Any]:
    """Collect facts, method, results, warnings and curves of one run."""
    group = {key: x for key, x in run.config.items() if key not in SAME_GROUP}
    return {
        "name": run.path.name,
        "group": yaml.safe_dump(group),
        "facts": facts(run),
        "method": method(run),
        "results": results(run),
        "warnings": warnings(run),
        "curves": curves(run),
        "config": yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True),
    }


def facts(run: Run) -> list[list[str]]:
    """Describe the run as (label, value) pairs; unknown values are left out."""
    config, environment = run.config, run.environment
    model, data = _part(config, "model"), _part(config, "data")
    packages, hardware = _part(environment, "packages"), _part(environment, "hardware")
    git = _part(environment, "git")
    versions = ("segcredit", "torch", "transformers", "vllm", "verl")
    found = {
        "method": _name(config.get("algorithm")),
        "model": model.get("path") or (model.get("tiny") and f"tiny {model['tiny']}"),
        "data": data.get("world") or _joined(data.get("train")),
        "reward": _name(config.get("reward")),
        "seed": config.get("seed"),
        "started": environment.get("started"),
        "versions": ", ".join(f"{x} {packages[x]}" for x in versions if x in packages),
        "python": environment.get("python"),
        "hardware": _hardware(hardware),
        "source": git.get("commit")
        and f"{str(git['commit'])[:12]}{' + changes' * bool(git.get('dirty'))}",
        "command": _joined(environment.get("command"), " "),
    }
    return [[label, shortened(x)] for label, x in found.items() if x not in (None, "")]


def _hardware(found: Mapping[str, Any]) -> str:
    shown = [_joined(found["gpus"])] if found.get("gpus") else []
    if found.get("cpus"):
        shown.append(f"{found['cpus']} CPU cores")
    if found.get("memory_gib"):
        shown.append(f"{found['memory_gib']} GiB memory")
    return ", ".join(shown)


def _part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def _name(part: Any) -> Any:
    if isinstance(part, list):  # several rewards
        return ", ".join(str(_name(x)) for x in part)
    return part.get("name") if isinstance(part, Mapping) else part


def _joined(x: Any, between: str = ", ") -> str:
    return between.join(map(str, x)) if isinstance(x, list) else str(x or "")


def method(run: Run) -> list[list[str]]:
    """List the parts of the run's method with their settings.

    If the method cannot be built, only the settings in the config are listed. A method that names
    code in the run directory is built only if the run is trusted.
    """
    given = run.config.get("algorithm")
    if given is None:
        return []
    settings = dict(given) if isinstance(given, Mapping) else {"name": given}
    try:
        run.require_trust("algorithm")
        settings = resolve_files(settings, run.path, "algorithm")
        name = settings.pop("name", None)
        algorithm = make_algorithm(str(name), **settings)
    except (ValueError, TypeError):  # or it is of another version
        return [["algorithm", shortened(repr(given))]]
    parts = [
        (x.name, getattr(algorithm, x.name))
        for x in dataclasses.fields(algorithm)  # type: ignore[arg-type]  # every method is one
    ]
    return [[name, repr(part)] for name, part in parts if part not in (None, ())]


def results(run: Run) -> list[dict[str, Any]]:
    """Return the first and the last evaluation, to compare before and after."""
    rows = [x for x in run.metrics if x.get("stage") == "evaluation"]
    if not rows:
        return []
    first, last = rows[0], rows[-1] if len(rows) > 1 else {}
    return [
        {
            "label": label,
            "before": _measured(first, key),
            "after": _measured(last, key),
            "share": key in SHARES,
            "texts": _texts(first.get(key), last.get(key), key in SHARES)
            if key in (*SHARES, *REWARDS)
            else None,
        }
        for key, label in RESULTS
        if key in first and (key != "no_verdict" or first[key] or last.get(key))
    ]


def _measured(row: Mapping[str, Any], key: str) -> list[Any]:
    """Return a value and, if known, the ends of its confidence interval."""
    return [plain_number(row.get(name)) for name in (key, f"{key}_low", f"{key}_high")]


def _texts(before: Any, after: Any, share: bool) -> tuple[str, str, str]:
    """Format before, after and change as the terminal does; a browser rounds differently."""
    old, new = (
        x if isinstance(x, float) or (type(x) is int and abs(x) < 2**53) else math.nan
        for x in (before, after)
    )
    return change_texts(old, new, share)


def warnings(run: Run) -> list[list[Any]]:
    """Step and message of each warning, at most ``MAX_WARNINGS``."""
    rows = [
        [step, shortened(x["message"])]
        for x in run.warnings
        if (step := step_in(x)) is not None and isinstance(x.get("message"), str)
    ]
    return rows[:MAX_WARNINGS]


def curves(run: Run) -> dict[str, dict[str, list[list[Any]]]]:
    """Collect the curves: stage → metric → [steps, values]."""
    found: dict[str, dict[str, list[list[Any]]]] = {}
    for stage in STAGES:
        lines = [x for x in run.metrics if x.get("stage") == stage and step_in(x) is not None]
        lines = lines[:: -max(1, -(-len(lines) // MAX_POINTS))][::-1]  # always with the last step
        keys = dict.fromkeys(key for x in lines for key in x if key not in ("step", "stage"))
        for key in keys:
            steps = [step_in(x) for x in lines if key in x]
            values = [plain_number(x[key]) for x in lines if key in x]
            found.setdefault(stage, {})[key] = [steps, values]
    return found
