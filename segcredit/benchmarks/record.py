"""Record answers in the run directory of a checkpoint, from which its report page is made."""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from segcredit.benchmarks.page import PageLimits, embed_images, set_data
from segcredit.benchmarks.run import SetResult
from segcredit.runlog import RunFolder
from segcredit.runlog.files import write_json_atomically
from segcredit.runlog.folder import is_run, step_of
from segcredit.runlog.records import save_image


def record_in_run(
    source: str,
    results: Mapping[str, SetResult],
    settings: Mapping[str, Any],
    driver: str | None = None,
    limits: PageLimits | None = None,
) -> Path | None:
    """Write the answers to ``RUN/benchmarks``; return the run, or None if there is none.

    Args:
        source: Folder of the policy, as in ``RUN/checkpoints/step-000040/policy``.
        results: Results by set. A set that was recorded before is replaced, others are kept.
        settings: Settings of the sampling, to be shown beside the scores.
        driver: Name of the program that asked the questions, if it was not segcredit.
    """
    policy = Path(source)
    if len(policy.parents) < 3 or step_of(policy.parent.name) is None:
        return None
    run = RunFolder(policy.parents[2])
    if policy.parents[1] != run.checkpoints or not is_run(run.path):
        return None
    limits = limits or PageLimits()
    name = policy.parent.name if driver is None else f"{policy.parent.name}-{driver}"
    alone = {name: results}
    shown = [set_data(x, alone, limits, limits.megabytes * 1e6 / len(results)) for x in results]
    images = embed_images(list(results), shown, alone, limits)
    run.benchmarks.mkdir(exist_ok=True)
    (run.benchmarks / name).mkdir(exist_ok=True)
    (run.benchmarks / "images").mkdir(exist_ok=True)
    paths = {key: _save(uri, run.benchmarks / "images") for key, uri in images.items()}
    for key, content in zip(results, shown, strict=True):
        questions = [
            {
                **row,
                "images": [paths[x] for x in row["images"] if x in paths],
                "answers": row["answers"][name],
            }
            for row in content["questions"]
        ]
        write_json_atomically(
            run.benchmarks / name / f"{key}.json",
            {
                **content,
                "scores": content["scores"][name],
                "questions": questions,
                "settings": ", ".join(f"{key} {x}" for key, x in settings.items() if x is not None),
            },
        )
    return run.path


def _save(uri: str, folder: Path) -> str:
    """Save an embedded image; return its path in the run directory."""
    data = base64.b64decode(uri.partition(",")[2])
    return f"{folder.parent.name}/{save_image(folder, data)}"
