"""Evaluate the checkpoint of a run, a Hugging Face folder, or a model on the Hub."""

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
from segcredit.models.layers import set_attention
from segcredit.models.loading import (
    CONFIG,
    context_window,
    load_codec,
    load_config,
    locate,
    not_found,
    require_window,
)
from segcredit.models.template import BrokenTemplate, LimitedChat, check_questions, check_template
from segcredit.printable import printable, shown
from segcredit.registry import resolve_files
from segcredit.rewards import compares_answers, functions_in, make_reward, require_servers
from segcredit.rollout import engine_problem, make_engine
from segcredit.runlog import Run, read_run
from segcredit.runlog.files import to_line
from segcredit.runlog.folder import is_run, runs_in, step_of
from segcredit.runlog.storage import MANIFEST, verify
from segcredit.runlog.untrusted import FLAG, require_trust
from segcredit.types import Prompt, Sampling

PROMPTS = 512
"""Default number of prompts of a world, whose prompts are unlimited."""
MAX_TOKENS = 2048
"""Default length limit for models without a run."""
ALIASES = {"math500": "math", "geometry3k": "geo3k"}
"""Other names of datasets."""


def _load_prompts(
    recipe: Recipe | None,
    data: Sequence[str] | None,
    count: int | None,
    suffix: str | None,
    system: str | None,
    one_answer: bool,
    allow_outside: bool,
) -> list[Prompt]:
    """Load the first ``count`` prompts (None: all) of ``data``, or of the run's test data."""
    if data is None:
        assert recipe is not None
        settings = recipe.data
        if settings.world is not None:
            world = make_world(settings.world, **settings.settings)
            return world.prompts("test", 0, PROMPTS if count is None else count)
        if not settings.test:
            raise ValueError("the run has no test data: pass --data FILE")
        suffix = settings.suffix if suffix is None else suffix
        system = settings.system if system is None else system
        allow_outside = allow_outside or settings.allow_outside
    files = list(settings.test) if data is None else [_prepared_file(name) for name in data]
    return load_prompts(
        files,
        limit=count,
        suffix=suffix,
        system=system,
        one_answer=one_answer,
        allow_outside=allow_outside,
    ).prompts


def _prepared_file(name: str) -> str:
    """Return the test file that ``segcredit prepare`` wrote for a dataset; else the name itself."""
    known = ALIASES.get(name, name)
    if known not in KNOWN or Path(name).exists():
        return name
    file = Path("data") / known / "test.parquet"
    if not file.is_file():
        raise ValueError(
            f"--data {name} means {file}, which does not exist. Type: segcredit prepare {known}; "
            f"or pass a file."
        )
    return str(file)


def evaluate_checkpoint(
    checkpoint: str,
    data: Sequence[str] | None = None,
    reward: str | None = None,
    prompts: int | None = PROMPTS,
    samples: int = 4,
    temperature: float | None = None,
    top_p: float | None = None,
    max_tokens: int | None = None,
    stop: Sequence[str] | None = None,
    suffix: str | None = None,
    system: str | None = None,
    template: str | None = None,
    greedy: bool = True,
    engine: str | None = None,
    family: str | None = None,
    seed: int = 0,
    output: Path | None = None,
    trust_run: bool = False,
    allow_outside: bool = False,
    best: bool = False,
) -> Evaluation:
    """Evaluate a policy on held-out prompts.

    For a run, the defaults are its own test data, reward, sampling and template.

    Args:
        checkpoint: A run directory, one of its checkpoints, a Hugging Face folder, or a Hub id.
        data: Prompt files, or the prepared datasets geo3k, gsm8k, math and words, which need
            no ``reward``.
        reward: Name of a reward, or file.py:function.
        prompts: Maximum number of prompts; None: all.
        samples: Number of sampled responses per prompt.
        stop: Stop strings; None: those of the run.
        suffix: Text appended to each question, after a space.
        system: System prompt; None: that of the run, with the run's own test data.
        template: Prompt for a base model without a chat template, with ``{question}`` in it.
        greedy: Whether to sample the greedy response, too.
        engine: Rollout engine: hf, vllm, or file.py:Name; None: as in the run.
        family: Model family: a built-in name, or file.py:Name; None: as in the run, or by the
            model's type.
        output: JSON lines file for all responses.
        trust_run: Run the code that the run's config.yaml names; if False, refuse such a run.
        allow_outside: Allow rows to name images outside the folder of their file.
        best: Evaluate the run's best checkpoint (``save.best``) instead of its last.
    """
    given = {
        "reward": reward,
        "rollout.engine": engine,
        "model.family": family,
        "data.allow_outside": data is not None or allow_outside or None,
    }
    typed = [name for name, x in given.items() if x is not None]
    found = find_policy(checkpoint, trust_run, typed, best=best)
    recipe = found.recipe
    if data is None and (recipe is None or "test" in found.objects):
        raise ValueError(f"{checkpoint} has no test data on file: pass --data FILE")
    if template is None and recipe is not None:
        template = recipe.data.template
    named = _named_reward(found, reward)
    grade = None if named is None else make_reward(named)
    one_answer = grade is None or compares_answers(grade)
    asked = _load_prompts(recipe, data, prompts, suffix, system, one_answer, allow_outside)
    if template is not None:
        check_template(template)
        check_questions(asked)
    if grade is None:
        grade = make_reward(_default_reward(checkpoint, asked))
    for function in functions_in(grade):
        function.check_signature(asked)
    require_servers(grade)
    sampling = sampling_settings(recipe, max_tokens, temperature, top_p, stop)
    settings = rollout_settings(recipe, engine, sampling)
    policy, longest = load_policy(found.source, recipe, template, family, asked, sampling)
    rollout_engine = make_engine(settings.engine, policy, settings.engine_settings(longest))
    try:
        measured = evaluate(
            asked,
            rollout_engine,
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
        rollout_engine.close()
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_bytes(b"".join(to_line(row) for row in measured.rows))
    return measured


@dataclass(frozen=True)
class PolicySource:
    """Location of a policy and, if it belongs to a run, the run's recipe."""

    source: str
    recipe: Recipe | None = None
    objects: Collection[str] = ()
    """Parts that the run got as Python objects, so that no file contains them."""


def find_policy(
    checkpoint: str,
    trust_run: bool,
    typed: Sequence[str],
    command: str = "evaluate",
    best: bool = False,
) -> PolicySource:
    """Find the last complete checkpoint of a run (or the best), one checkpoint of it, or a model.

    A run whose settings name code is refused, unless ``trust_run`` is set or the user has typed
    these settings (``typed``). The message says to repeat ``command``.
    """
    path = Path(checkpoint).absolute()
    if problem := not_found(checkpoint, "a run directory, a Hugging Face folder"):
        raise ValueError(problem)
    # other folders with a manifest, such as the initial model, are models
    is_checkpoint = (
        (path / MANIFEST).is_file() and step_of(path.name) is not None and is_run(path.parents[1])
    )
    if best and (is_checkpoint or not is_run(path)):
        what = "a checkpoint" if is_checkpoint else "a model"
        raise ValueError(
            f"--best: expected a run directory, whose best checkpoint it chooses; got {what}, "
            f"{checkpoint}. Leave --best out"
        )
    if not is_checkpoint and not is_run(path):
        _require_model(checkpoint, path, command)
        return PolicySource(locate(checkpoint))
    run = read_run(path.parents[1] if is_checkpoint else path)
    if is_checkpoint:
        verify(path)
    if not trust_run:  # before parse_recipe, which imports the code that the settings name
        again = f"segcredit {command} {shlex.quote(checkpoint)} {FLAG}"
        require_trust(run.config, Path(checkpoint), again, typed)
    objects = run.config.get(GIVEN_IN_PYTHON)
    if not isinstance(objects, dict | list):
        objects = ()
    recipe = parse_recipe(resolve_files(run.config, run.path), str(run.folder.config))
    if not is_checkpoint:
        path = run.best_checkpoint() if best else _last_checkpoint(run)
    return PolicySource(str(path / "policy"), recipe, objects)


def _require_model(checkpoint: str, path: Path, command: str) -> None:
    """Raise ValueError for a folder that holds no model; name the runs in it."""
    parts = (CONFIG, "adapter_config.json", "*.safetensors", "*.bin", "tokenizer*")
    if not path.is_dir() or any(True for part in parts for _ in path.glob(part)):
        return  # at least a part of a model: loading it says what is missing
    places = (path, path / "runs")
    runs = [x for place in places for x in runs_in(place) if is_run(x)]
    models = [x.parent for place in places for x in sorted(place.glob(f"*/{CONFIG}"))]
    found = [shlex.quote(str(Path(checkpoint) / x.relative_to(path))) for x in (*runs, *models)]
    hint = f" It contains: {', '.join(found[:5])}." if found else ""
    raise ValueError(
        f"expected a run directory, a checkpoint or a model; got {checkpoint}, a folder with "
        f"neither config.yaml nor {CONFIG}.{hint} Type, for example: segcredit {command} "
        f"{found[0] if found else 'runs/NAME-DATE-TIME'}"
    )


def _last_checkpoint(run: Run) -> Path:
    path = run.last_complete_checkpoint()
    if path is None:
        raise ValueError(f"{run.path} has no complete checkpoint yet. Resume it, or pass a model.")
    return path


def _named_reward(
    found: PolicySource, given: str | None
) -> str | dict[str, Any] | list[Any] | None:
    """Return the user's reward, else the run's; None stands for the dataset's default."""
    if given is not None:
        return given
    if found.recipe is not None and "reward" not in found.objects:
        return found.recipe.reward
    return None


def _default_reward(checkpoint: str, prompts: Sequence[Prompt]) -> str:
    """Return the reward of the known dataset that all rows name as their source."""
    sources = {str(prompt.columns.get("data_source")) for prompt in prompts}
    for known in KNOWN.values():
        if known.reward is not None and sources <= set(known.data_sources):
            return known.reward
    raise ValueError(f"{checkpoint} has no reward setting: pass --reward NAME")


def sampling_settings(
    recipe: Recipe | None,
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    stop: Sequence[str] | None = None,
) -> Sampling:
    """Return the given settings; the defaults are those of the run's own evaluations."""
    if isinstance(stop, str):
        raise ValueError(
            f"stop must be a list of strings; got the single string {shown(stop)}, of which each "
            f"character would end a response. Pass stop=[…]."
        )
    usual = Sampling(MAX_TOKENS) if recipe is None else recipe.evaluation_sampling
    return Sampling(
        max_tokens or usual.max_tokens,
        usual.temperature if temperature is None else temperature,
        usual.top_p if top_p is None else top_p,
        stop=usual.stop if stop is None else tuple(stop),
    )


def rollout_settings(
    recipe: Recipe | None, engine: str | None, sampling: Sampling
) -> RolloutSettings:
    """Return the run's rollout settings with the given engine and length limit."""
    usual = RolloutSettings() if recipe is None else recipe.rollout
    chosen = engine or usual.engine
    if problem := engine_problem(chosen):
        raise ValueError(problem)
    return usual.model_copy(update={"engine": chosen, "max_tokens": sampling.max_tokens})


def load_policy(
    source: str,
    recipe: Recipe | None,
    template: str | None,
    family: str | None,
    asked: Sequence[Prompt],
    sampling: Sampling,
) -> tuple[Policy, int]:
    """Check that the model can process every prompt, then load the policy.

    Returns:
        The policy, and the number of tokens of the longest prompt.
    """
    dtype = torch.float32
    if recipe is not None:
        dtype = getattr(torch, recipe.model.dtype)
    elif torch.cuda.is_available():
        dtype = torch.bfloat16
    trusted = recipe is not None and recipe.model.trust_remote_code
    if family is None and recipe is not None:
        family = recipe.model.family
    place, config = load_config(source, trusted, family)
    codec = load_codec(place, config, trusted, template, family)
    codec.require_template()  # before the weights are read
    codec.check_stop(sampling.stop, "stop")
    longest = _check_readable(codec, asked, context_window(config), sampling.max_tokens)
    policy = Policy.from_pretrained(source, dtype, trusted, template, family)
    if torch.cuda.is_available():
        policy.model.to("cuda")
    set_attention(policy.model, "auto" if recipe is None else recipe.model.attention)
    return policy, longest


def _check_readable(
    codec: Codec, asked: Sequence[Prompt], window: int | None, max_tokens: int
) -> int:
    """Refuse prompts that the model cannot process; return the longest one's number of tokens."""
    bad = []
    longest = 0
    with LimitedChat(codec.chat) as chat:
        for prompt in asked:
            try:
                tokens = codec.count_tokens(prompt, chat)
                require_window(tokens, max_tokens, window, "--max-tokens ")
                longest = max(longest, tokens)
            except BrokenTemplate:
                raise
            except ValueError as error:
                bad.append(BadRow(printable(prompt.id), printable(str(error), 400), error))
    if bad:
        raise BadRows(bad, "Repair these rows, or remove them from the file.")
    return longest
