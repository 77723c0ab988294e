"""Evaluate what is on disk: a run's last checkpoint, a Hugging Face folder, or a hub id."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from segcredit.config import Recipe, parse_recipe
from segcredit.data import load_prompts
from segcredit.data.worlds import make_world
from segcredit.evaluate.measure import Evaluation, evaluate
from segcredit.models import Policy
from segcredit.rewards import make_reward
from segcredit.rollout import HFEngine
from segcredit.runlog import read_run
from segcredit.runlog.lines import to_line
from segcredit.types import Prompt, Sampling

MAX_TOKENS = 2048


def evaluate_checkpoint(
    checkpoint: str,
    data: Sequence[str] | None = None,
    reward: str | None = None,
    prompts: int = 512,
    samples: int = 4,
    temperature: float = 1.0,
    top_p: float = 1.0,
    max_tokens: int | None = None,
    suffix: str | None = None,
    seed: int = 0,
    output: Path | None = None,
) -> Evaluation:
    """A run brings its own test data, reward and length limit; anything given goes before them."""
    source, recipe = _find(checkpoint)
    if recipe is None and (data is None or reward is None):
        raise ValueError(
            f"{checkpoint} is a model, not a run folder, so it has no test data of its own: pass "
            f"--data FILE and --reward NAME."
        )
    asked = _prompts(recipe, data, prompts, suffix)
    grade = make_reward(reward if reward is not None or recipe is None else recipe.reward)  # type: ignore[arg-type]
    limit = max_tokens or (recipe.rollout.max_tokens if recipe is not None else MAX_TOKENS)
    policy = _policy(source, recipe)
    engine = HFEngine(policy.model, policy.end_tokens, policy.banned)
    try:
        found = evaluate(
            asked,
            engine,
            grade,
            policy.encode,
            policy.codec.decode,
            Sampling(limit, temperature, top_p),
            samples,
            seed=seed,
        )
    finally:
        grade.close()
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_bytes(b"".join(to_line(row) for row in found.rows))
    return found


def _find(checkpoint: str) -> tuple[str, Recipe | None]:
    """Where the policy lies, and the recipe that made it if it is a run's."""
    path = Path(checkpoint)
    if not (path / "config.yaml").is_file():
        return checkpoint, None
    run = read_run(path)
    if not run.checkpoints:
        raise ValueError(f"{path} has no whole checkpoint yet. Train on, or pass a model.")
    config: dict[str, Any] = dict(run.config)
    config.pop("given_in_python", None)
    return str(run.checkpoints[-1] / "policy"), parse_recipe(config, str(path / "config.yaml"))


def _prompts(
    recipe: Recipe | None, data: Sequence[str] | None, count: int, suffix: str | None
) -> list[Prompt]:
    if data is not None or recipe is None:
        return load_prompts(list(data or []), limit=count, suffix=suffix).prompts
    settings = recipe.data
    if settings.world is not None:
        return make_world(settings.world, **settings.settings).prompts("test", 0, count)
    if not settings.test:
        raise ValueError("the run has no test data; pass --data FILE")
    suffix = settings.suffix if suffix is None else suffix
    return load_prompts(settings.test, limit=count, suffix=suffix).prompts


def _policy(source: str, recipe: Recipe | None) -> Policy:
    dtype = torch.float32
    if recipe is not None:
        dtype = getattr(torch, recipe.model.dtype)
    elif torch.cuda.is_available():
        dtype = torch.bfloat16
    policy = Policy.from_pretrained(source, dtype)
    if torch.cuda.is_available():
        policy.model.to("cuda")
    return policy
