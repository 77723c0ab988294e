"""Evaluate what is on disk: a run's last checkpoint, a Hugging Face folder, or a hub id."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from segcredit.config import GIVEN_IN_PYTHON, Recipe, parse_recipe
from segcredit.data import load_prompts
from segcredit.data.worlds import make_world
from segcredit.evaluate.measure import Evaluation, evaluate
from segcredit.models import Policy
from segcredit.models.packed import set_attention
from segcredit.rewards import make_reward
from segcredit.rollout import HFEngine
from segcredit.runlog import Run, read_run
from segcredit.runlog.lines import to_line
from segcredit.runlog.manifest import MANIFEST, verify
from segcredit.template import check_questions, check_template
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
    template: str | None = None,
    seed: int = 0,
    output: Path | None = None,
) -> Evaluation:
    """A run brings its own test data, reward, template and length limit; what is given goes first.

    ``template`` puts a question to a model that knows no chat: text with ``{question}`` in it.
    """
    found = _find(checkpoint)
    recipe = found.recipe
    _require(checkpoint, "test data", "data FILE", data, recipe is None or found.lacks("test"))
    _require(checkpoint, "reward", "reward NAME", reward, recipe is None or found.lacks("reward"))
    if template is None and recipe is not None:
        template = recipe.data.template
    asked = _prompts(recipe, data, prompts, suffix)
    if template is not None:
        check_template(template)
        check_questions(asked)
    grade = make_reward(recipe.reward if reward is None and recipe is not None else reward or "")
    limit = max_tokens or (recipe.rollout.max_tokens if recipe is not None else MAX_TOKENS)
    policy = _policy(found.source, recipe, template)
    engine = HFEngine(policy.model, policy.end_tokens, policy.banned)
    try:
        measured = evaluate(
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
        output.write_bytes(b"".join(to_line(row) for row in measured.rows))
    return measured


@dataclass(frozen=True)
class Found:
    """Where a policy lies, and, if a run made it, the run's recipe."""

    source: str
    recipe: Recipe | None = None
    objects: Collection[str] = ()
    """What the run had as objects in Python, so that no file has it."""

    def lacks(self, part: str) -> bool:
        return part in self.objects


def _find(checkpoint: str) -> Found:
    """A run's last whole checkpoint, one checkpoint of it, or a model."""
    path = Path(checkpoint).absolute()
    one_of_a_run = (path / MANIFEST).is_file() and (path.parents[1] / "config.yaml").is_file()
    if not one_of_a_run and not (path / "config.yaml").is_file():
        return Found(checkpoint)
    run = read_run(path.parents[1] if one_of_a_run else path)
    if one_of_a_run:
        verify(path)
    config: dict[str, Any] = dict(run.config)
    objects = config.pop(GIVEN_IN_PYTHON, None) or ()
    recipe = parse_recipe(config, str(run.folder.config))
    return Found(str((path if one_of_a_run else _last_whole(run)) / "policy"), recipe, objects)


def _last_whole(run: Run) -> Path:
    path = run.last_whole_checkpoint()
    if path is None:
        raise ValueError(f"{run.path} has no whole checkpoint yet. Train on, or pass a model.")
    return path


def _require(checkpoint: str, what: str, option: str, given: object, needed: bool) -> None:
    if needed and given is None:
        raise ValueError(f"{checkpoint} has no {what} on file: pass --{option}")


def _prompts(
    recipe: Recipe | None, data: Sequence[str] | None, count: int, suffix: str | None
) -> list[Prompt]:
    if data is not None or recipe is None:
        return load_prompts(list(data or []), limit=count, suffix=suffix).prompts
    settings = recipe.data
    if settings.world is not None:
        return make_world(settings.world, **settings.settings).prompts("test", 0, count)
    if not settings.test:
        raise ValueError("the run has no test data: pass --data FILE")
    suffix = settings.suffix if suffix is None else suffix
    return load_prompts(settings.test, limit=count, suffix=suffix).prompts


def _policy(source: str, recipe: Recipe | None, template: str | None) -> Policy:
    dtype = torch.float32
    if recipe is not None:
        dtype = getattr(torch, recipe.model.dtype)
    elif torch.cuda.is_available():
        dtype = torch.bfloat16
    trusted = recipe is not None and recipe.model.trust_remote_code
    try:
        policy = Policy.from_pretrained(source, dtype, trusted, template)
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        first = " ".join(str(error).split())[:300]
        raise ValueError(
            f"expected a run folder, a Hugging Face folder or a hub id; got {source!r}, which does "
            f"not load: {first}"
        ) from error
    if torch.cuda.is_available():
        policy.model.to("cuda")
    set_attention(policy.model, "auto" if recipe is None else recipe.model.attention)
    return policy
