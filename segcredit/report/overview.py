"""First view of the report page: run facts, results before and after, warnings and curves."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any

import yaml

from segcredit import __version__
from segcredit.algorithms import make_algorithm
from segcredit.printable import METRIC_FORMS, STAGE_NAMES, change_texts, number_text
from segcredit.registry import resolve_files
from segcredit.report.data import (
    MAX_NAME,
    MAX_STEP,
    Rows,
    files,
    limited_depth,
    plain_number,
    shortened,
    shown_partitions,
)
from segcredit.report.explain import GLOSSARY, HEALTHY, IN_THE_PICTURE, NO_RANGE
from segcredit.runlog import Run
from segcredit.runlog.folder import GIVEN_IN_PYTHON
from segcredit.runlog.reader import as_number, step_in, within_noise

MAX_POINTS = 1500
"""Maximum number of points of a curve; of a longer one, every n-th step is shown."""
MAX_WARNINGS = 20
"""Maximum number of warnings shown per run."""
MAX_STAGES = 100
"""Maximum number of stages shown per run."""
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
        "picture": IN_THE_PICTURE,
        "healthy": {"metrics": HEALTHY, "otherwise": NO_RANGE},
        "files": [part.listed() for part in rows],
        "partitions": [partition.label() for partition in shown_partitions()],
        "recorded": [
            {kind: len(files(run, kind)) for kind in ("rollouts", "watched")} for run in runs
        ],
    }


def overview(run: Run) -> dict[str, Any]:
    """Collect facts, stages, method, results, warnings and curves of one run."""
    group = {key: x for key, x in run.config.items() if key not in SAME_GROUP}
    return {
        "name": run.path.name,
        "group": yaml.safe_dump(group),
        "facts": facts(run),
        "stages": stages(run),
        "method": method(run),
        "results": results(run),
        "prompts": run.held_out_prompts,
        "warnings": warnings(run),
        "curves": curves(run),
        "texts": curve_texts(run),
        "config": yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True),
    }


def facts(run: Run) -> list[list[str]]:
    """Describe the run as (label, value) pairs; unknown values are left out."""
    config, environment = run.config, run.environment
    in_python = _part(config, GIVEN_IN_PYTHON)
    model, data = _part(config, "model"), _part(config, "data")
    packages, hardware = _part(environment, "packages"), _part(environment, "hardware")
    git = _part(environment, "git")
    versions = ("segcredit", "torch", "transformers", "vllm", "verl")
    found = {
        "method": in_python.get("algorithm") or _name(config.get("algorithm")),
        "model": model.get("path") or (model.get("tiny") and f"tiny {model['tiny']}"),
        "data": data.get("world") or _joined(data.get("train")),
        "reward": in_python.get("reward") or _name(config.get("reward")),
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


def stages(run: Run) -> list[list[Any]]:
    """List the stages as the progress bar does: number, name, first and last step of the run.

    Without stages in the config, those of the metrics are listed.
    """
    given = run.config.get("stages")
    found = [
        (str(x.get("kind")), x["steps"])
        for x in (given if isinstance(given, list) else [])
        if isinstance(x, Mapping) and type(x.get("steps")) is int and 0 < x["steps"] < MAX_STEP
    ]
    if not found:
        lines = [
            (str(x["stage"]), step)
            for x in run.metrics
            if x.get("stage") in tuple(STAGE_NAMES) and (step := step_in(x)) is not None
        ]
        blocks = [list(block) for _, block in groupby(lines, key=itemgetter(0))]
        last = 0
        for block in blocks:
            steps = block[-1][1] - last
            found += [(block[0][0], steps)] if steps > 0 else []
            last += max(steps, 0)
    ends = list(accumulate(steps for _, steps in found))
    return [
        [number, STAGE_NAMES.get(kind, shortened(kind, MAX_NAME)), end - steps + 1, end]
        for number, ((kind, steps), end) in enumerate(zip(found, ends, strict=True), start=1)
    ][:MAX_STAGES]


def method(run: Run) -> list[list[str]]:
    """List the parts of the run's method with their settings.

    If the method cannot be built, only the settings in the config are listed. A method that names
    code in the run directory is built only if the run is trusted.
    """
    if in_python := _part(run.config, GIVEN_IN_PYTHON).get("algorithm"):
        return [["algorithm", shortened(in_python)]]
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
    rows = run.evaluations
    if not rows:
        return []
    first, last = rows[0], rows[-1] if len(rows) > 1 else {}
    return [
        {
            "label": label,
            "before": _measured(first, key),
            "after": _measured(last, key),
            "share": key in SHARES,
            "texts": _texts(key, first.get(key), last.get(key)),
            "noise": within_noise(first, last, key),
        }
        for key, label in RESULTS
        if key in first and (key != "no_verdict" or first[key] or last.get(key))
    ]


def _measured(row: Mapping[str, Any], key: str) -> list[Any]:
    """Return a value and, if known, the ends of its confidence interval."""
    return [plain_number(row.get(name)) for name in (key, f"{key}_low", f"{key}_high")]


def _texts(key: str, before: Any, after: Any) -> tuple[str, str, str]:
    """Format before, after and change as the terminal does; a browser rounds differently."""
    old, new = (
        x if isinstance(x, float) or (type(x) is int and abs(x) < 2**53) else math.nan
        for x in (before, after)
    )
    if key in (*SHARES, *REWARDS):
        return change_texts(old, new, key in SHARES)
    form = METRIC_FORMS[key]
    return number_text(old, form), number_text(new, form), number_text(new - old, f"+{form}")


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
        for key, points in _points(run, stage).items():
            values = [plain_number(x) for _, x in points]
            found.setdefault(stage, {})[key] = [[step for step, _ in points], values]
    return found


def curve_texts(run: Run) -> dict[str, dict[str, list[str]]]:
    """Format the curves that the progress bar shows, as it does; a browser rounds differently."""
    found: dict[str, dict[str, list[str]]] = {}
    for stage in STAGES:
        for key, points in _points(run, stage).items():
            if form := METRIC_FORMS.get(key):
                texts = [number_text(as_number(x), form).replace("%", " %") for _, x in points]
                found.setdefault(stage, {})[key] = texts
    return found


def _points(run: Run, stage: str) -> dict[str, list[tuple[int, Any]]]:
    """Collect step and value of every metric of a stage; of many steps, every n-th."""
    lines = [
        (step, x)
        for x in run.metrics
        if x.get("stage") == stage and (step := step_in(x)) is not None
    ]
    lines = lines[:: -max(1, -(-len(lines) // MAX_POINTS))][::-1]  # always with the last step
    keys = dict.fromkeys(key for _, x in lines for key in x if key not in ("step", "stage"))
    return {key: [(step, x[key]) for step, x in lines if key in x] for key in keys}
