"""Evaluate what is on disk: a run's last checkpoint, a Hugging Face folder, or a hub id."""

import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from segcredit.config import GIVEN_IN_PYTHON, Recipe, RolloutSettings, parse_recipe
from segcredit.data import BadRow, BadRows, load_prompts
from segcredit.data.prepare import KNOWN
from segcredit.data.worlds import make_world
from segcredit.evaluate.measure import Evaluation, evaluate
from segcredit.models import Codec, Policy
from segcredit.models.attention import set_attention
from segcredit.models.loading import load_codec, load_config, locate, not_found
from segcredit.models.template import BrokenTemplate, LimitedChat, check_questions, check_template
from segcredit.printable import printable
from segcredit.registry import resolve_files
from segcredit.rewards import CustomReward, compares_answers, make_reward
from segcredit.rollout import engine_problem, make_engine
from segcredit.runlog import Run, read_run
from segcredit.runlog.files import to_line
from segcredit.runlog.folder import is_run
from segcredit.runlog.storage import MANIFEST, verify
from segcredit.runlog.untrusted import FLAG, require_trust
from segcredit.types import Prompt, Sampling

PROMPTS = 512
"""Of a world, which has no end."""
ALSO = {"math500": "math", "geometry3k": "geo3k"}
"""Other names of data sets."""


def load_questions(
    recipe: Recipe | None,
    data: Sequence[str] | None,
    count: int | None,
    suffix: str | None,
    one_answer: bool = False,
    allow_outside: bool = False,
) -> list[Prompt]:
    """Load the first ``count`` prompts (None: all) of ``data``, or of the run's test data.

    ``one_answer``: treat a row with a list of answers as a bad row.
    """
    if data is not None:
        files = data_files(data)
        return load_prompts(
            files,
            limit=count,
            suffix=suffix,
            one_answer=one_answer,
            allow_outside=allow_outside,
        ).prompts
    if recipe is None:
        raise ValueError("expected a run or data; got neither.")
    settings = recipe.data
    if settings.world is not None:
        world = make_world(settings.world, **settings.settings)
        return world.prompts("test", 0, PROMPTS if count is None else count)
    if not settings.test:
        raise ValueError("the run has no test data: pass --data FILE")
    suffix = settings.suffix if suffix is None else suffix
    return load_prompts(
        list(settings.test),
        limit=count,
        suffix=suffix,
        one_answer=one_answer,
        allow_outside=allow_outside or settings.allow_outside,
    ).prompts


def data_files(names: Sequence[str]) -> list[str]:
    """Files; a data set's name is the held-out file that ``segcredit prepare`` writes."""
    return [_file(name) for name in names]


def _file(name: str) -> str:
    known = ALSO.get(name, name)
    if known not in KNOWN or Path(name).exists():
        return name
    file = Path("data") / known / "test.parquet"
    if not file.is_file():
        raise ValueError(
            f"--data {name} is {file}, which is not here. Type: segcredit prepare {known}; or pass "
            f"a file of yours."
        )
    return str(file)


def usual_reward(prompts: Sequence[Prompt]) -> str | None:
    """The reward of the data set that all rows say they are of."""
    sources = {str(prompt.columns.get("data_source")) for prompt in prompts}
    return next((x.reward for x in KNOWN.values() if sources <= set(x.data_sources)), None)


MAX_TOKENS = 2048


def evaluate_checkpoint(
    checkpoint: str,
    data: Sequence[str] | None = None,
    reward: str | None = None,
    prompts: int | None = PROMPTS,
    samples: int = 4,
    temperature: float | None = None,
    top_p: float | None = None,
    max_tokens: int | None = None,
    suffix: str | None = None,
    template: str | None = None,
    greedy: bool = True,
    engine: str | None = None,
    seed: int = 0,
    output: Path | None = None,
    trust_run: bool = False,
    allow_outside: bool = False,
) -> Evaluation:
    """A run brings its own test data, reward, sampling and template; what is given goes first.

    Args:
        checkpoint: A run folder, one of its checkpoints, a Hugging Face folder, or a hub id.
        data: Files of prompts, or geo3k, gsm8k, math as prepared; rows that name such a data set
            need no ``reward``.
        prompts: The first so many; None: all.
        template: Puts a question to a model that knows no chat: text with ``{question}`` in it.
        greedy: Whether the greedy response is asked for, too.
        engine: Rollout engine: hf, vllm, or file.py:Name; None: as in the run.
        output: Where every response is written, a line each.
        trust_run: Run the code that the run's config.yaml names; if False, refuse such a run.
        allow_outside: Allow rows to name images outside the folder of their file.
    """
    given = {"reward": reward, "data.allow_outside": data is not None or allow_outside or None}
    found = _find(checkpoint, trust_run, [name for name, x in given.items() if x is not None])
    recipe = found.recipe
    _require(checkpoint, "test data", "data FILE", data, recipe is None or found.lacks("test"))
    if template is None and recipe is not None:
        template = recipe.data.template
    named = _named_reward(found, reward)
    grade = None if named is None else make_reward(named)
    one_answer = grade is None or compares_answers(grade)
    asked = load_questions(recipe, data, prompts, suffix, one_answer, allow_outside)
    if template is not None:
        check_template(template)
        check_questions(asked)
    if grade is None:
        grade = make_reward(_usual_reward(checkpoint, asked))
    if isinstance(grade, CustomReward):
        grade.check_signature(asked)
    sampling = _sampling(recipe, max_tokens, temperature, top_p)
    settings = _rollout(recipe, engine, sampling)
    policy = _policy(found.source, recipe, template, asked)
    longest = None if recipe is None else recipe.data.max_prompt_tokens
    drawn_by = make_engine(settings.engine, policy, settings.engine_settings(longest))
    try:
        measured = evaluate(
            asked,
            drawn_by,
            grade,
            policy.encode,
            policy.codec.decode,
            sampling,
            samples,
            greedy,
            seed,
        )
    finally:
        grade.close()
        drawn_by.close()
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


def _find(checkpoint: str, trust_run: bool, typed: Sequence[str]) -> Found:
    """Find a run's last whole checkpoint, one checkpoint of it, or a model.

    Unless ``trust_run``, a run that requests code is refused, except by settings in ``typed``.
    """
    path = Path(checkpoint).absolute()
    if problem := not_found(checkpoint, "a run folder, a Hugging Face folder"):
        raise ValueError(problem)
    one_of_a_run = (path / MANIFEST).is_file() and is_run(path.parents[1])
    if not one_of_a_run and not is_run(path):
        return Found(locate(checkpoint))
    run = read_run(path.parents[1] if one_of_a_run else path)
    if one_of_a_run:
        verify(path)
    if not trust_run:  # before parse_recipe, which imports the code that the settings name
        command = f"segcredit evaluate {shlex.quote(checkpoint)} {FLAG}"
        require_trust(run.config, Path(checkpoint), command, typed)
    objects = run.config.get(GIVEN_IN_PYTHON)
    if not isinstance(objects, dict | list):
        objects = ()
    recipe = parse_recipe(resolve_files(run.config, run.path), str(run.folder.config))
    return Found(str((path if one_of_a_run else _last_whole(run)) / "policy"), recipe, objects)


def _last_whole(run: Run) -> Path:
    path = run.last_whole_checkpoint()
    if path is None:
        raise ValueError(f"{run.path} has no whole checkpoint yet. Train on, or pass a model.")
    return path


def _named_reward(found: Found, given: str | None) -> str | dict[str, Any] | None:
    """The reward given by the user, or the run's own; None: the default of the data set."""
    if given is not None:
        return given
    if found.recipe is not None and not found.lacks("reward"):
        return found.recipe.reward
    return None


def _usual_reward(checkpoint: str, prompts: Sequence[Prompt]) -> str:
    usual = usual_reward(prompts)
    _require(checkpoint, "reward", "reward NAME", usual, True)
    assert usual is not None
    return usual


def _sampling(
    recipe: Recipe | None, max_tokens: int | None, temperature: float | None, top_p: float | None
) -> Sampling:
    """As given, else as in the run's own evaluations, else as the model is."""
    usual = Sampling(MAX_TOKENS)
    if recipe is not None:
        settings = recipe.evaluation
        usual = Sampling(recipe.rollout.max_tokens, settings.temperature, settings.top_p)
    return Sampling(
        max_tokens or usual.max_tokens,
        usual.temperature if temperature is None else temperature,
        usual.top_p if top_p is None else top_p,
    )


def _rollout(recipe: Recipe | None, engine: str | None, sampling: Sampling) -> RolloutSettings:
    """The run's own, with what was given; only the engine's settings are read."""
    usual = RolloutSettings() if recipe is None else recipe.rollout
    chosen = engine or usual.engine
    if problem := engine_problem(chosen):
        raise ValueError(problem)
    return usual.model_copy(update={"engine": chosen, "max_tokens": sampling.max_tokens})


def _require(checkpoint: str, what: str, option: str, given: object, needed: bool) -> None:
    if needed and given is None:
        raise ValueError(f"{checkpoint} has no {what} on file: pass --{option}")


def _policy(
    source: str, recipe: Recipe | None, template: str | None, asked: Sequence[Prompt]
) -> Policy:
    """Check that the model can process every prompt, then load the policy."""
    dtype = torch.float32
    if recipe is not None:
        dtype = getattr(torch, recipe.model.dtype)
    elif torch.cuda.is_available():
        dtype = torch.bfloat16
    trusted = recipe is not None and recipe.model.trust_remote_code
    family = None if recipe is None else recipe.model.family
    place, config = load_config(source, trusted, family)
    codec = load_codec(place, config, trusted, template, family)
    codec.require_template()  # before the weights are read
    _check_readable(codec, asked)
    policy = Policy.from_pretrained(source, dtype, trusted, template, family)
    if torch.cuda.is_available():
        policy.model.to("cuda")
    set_attention(policy.model, "auto" if recipe is None else recipe.model.attention)
    return policy


def _check_readable(codec: Codec, asked: Sequence[Prompt]) -> None:
    """Refuse prompts that the model cannot process, all in one message."""
    bad = []
    with LimitedChat(codec.chat) as chat:
        for prompt in asked:
            try:
                codec.count_tokens(prompt, chat)
            except BrokenTemplate:
                raise
            except ValueError as error:
                bad.append(BadRow(printable(prompt.id), printable(str(error), 400)))
    if bad:
        raise BadRows(bad, "Repair these rows, or leave them out of the file.")
