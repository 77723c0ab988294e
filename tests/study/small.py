"""A study of seconds, and runs that were never run."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from segcredit_lab.study import SCALES, Options, Store, Study, StudyPlan
from segcredit_lab.study.definition import parse_study
from segcredit_lab.study.store import FINISHED, StudyRun

SMOKE = SCALES["smoke"]


def study(**changes: Any) -> Study:
    """Two arms on text."""
    found: dict[str, Any] = {
        "name": "small",
        "title": "A small one",
        "asks": "Does it work?",
        "base": "text",
        "reference": "sapo",
        "arms": {"sapo": {"label": "SAPO", "algorithm": "sapo"}, "ppo": {"algorithm": "ppo"}},
    }
    return parse_study(found | changes)


def plan(folder: Path, options: Options | None = None, **changes: Any) -> StudyPlan:
    return StudyPlan(study(**changes), SMOKE, options or Options(), Store(folder / "runs"))


def pretend(
    store: Store,
    run: StudyRun,
    accuracy: Sequence[float],
    by_set: dict[str, Sequence[float]] | None = None,
    **metrics: float,
) -> Path:
    """A finished run with that held-out curve, one step between two evaluations."""
    folder = store.path / run.name
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(run.recipe("start").as_dict()))
    lines: list[dict[str, Any]] = []
    for step, share in enumerate(accuracy):
        if step:
            lines.append(
                {"step": step + 1, "stage": "optimize", "response_length": 10.0, **metrics}
            )
        else:
            lines.append({"step": 1, "stage": "pretrain_critic", "response_length": 10.0})
        sets = {f"sampled/{name}": curve[step] for name, curve in (by_set or {}).items()}
        lines.append({"step": step + 1, "stage": "evaluation", "sampled": share, **sets})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    (folder / FINISHED).write_text(json.dumps({"cleared": True}))
    return folder
