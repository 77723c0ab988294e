"""Run directories with made-up rollouts and metrics, as a training run writes them."""

from pathlib import Path
from typing import Any

import numpy as np
import yaml

from segcredit.runlog import write_rollouts
from segcredit.runlog.files import to_line

CONFIG: dict[str, Any] = {
    "name": "made-up",
    "seed": 0,
    "algorithm": {"name": "sapo", "lam": 0.9, "clip": [0.2, 0.3]},
}


def row(rng: np.random.Generator, number: int, columns: tuple[str, ...] = ()) -> dict[str, Any]:
    """A response of 4 to 12 tokens, in segments of 1 to 3; ``columns`` are left out."""
    length = int(rng.integers(4, 13))
    segment = np.repeat(np.arange(length), rng.integers(1, 4, size=length))[:length]
    log_ratio = rng.normal(0, 0.1, size=length)
    made = {
        "prompt_id": f"p{number}",
        "prompt": f"question {number}",
        "response": "an answer",
        "tokens": rng.integers(0, 20, size=length).tolist(),
        "entropy": rng.gamma(0.5, size=length).round(6).tolist(),
        "value": rng.uniform(size=length).round(6).tolist(),
        "segment": segment.tolist(),
        "ratio": np.exp(log_ratio[segment]).round(6).tolist(),
        "logp_old": (-rng.gamma(0.5, size=length)).tolist(),
        "reward": float(rng.integers(0, 2)),
    }
    return {name: x for name, x in made.items() if name not in columns}


def metric_lines(steps: int, level: float = 1.0, first: int = 11) -> list[dict[str, Any]]:
    """A warm start of ten steps, then optimization."""
    before = [{"step": n, "stage": "warm_start", "nll": 1.0} for n in range(1, first)]
    after = [
        {
            "step": first + n,
            "stage": "optimize",
            "value_loss": level / (1 + n),
            "entropy": level + n,
            "response_length": 10 * level,
        }
        for n in range(steps)
    ]
    return [*before, *after]


def write_run(
    folder: Path,
    folder_name: str = "run",
    rollouts: dict[int, list[dict[str, Any]]] | None = None,
    metrics: list[dict[str, Any]] | None = None,
    **config: Any,
) -> Path:
    run = folder / folder_name
    (run / "rollouts").mkdir(parents=True)
    (run / "config.yaml").write_text(yaml.safe_dump(CONFIG | config))
    if metrics is not None:
        (run / "metrics.jsonl").write_bytes(b"".join(to_line(line) for line in metrics))
    for step, rows in (rollouts or {}).items():
        write_rollouts(run / "rollouts", step, rows)
    return run


def some_rollouts(
    steps: int = 6, responses: int = 8, seed: int = 0, without: tuple[str, ...] = ()
) -> dict[int, list[dict[str, Any]]]:
    rng = np.random.default_rng(seed)
    return {11 + n: [row(rng, i, without) for i in range(responses)] for n in range(steps)}
