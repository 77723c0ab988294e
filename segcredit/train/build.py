"""From a recipe to a state: everything that can be wrong is found before a model loads."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from segcredit.algorithms.credit import TreeDifference, ValueDifference
from segcredit.config import PretrainCritic, Recipe, RecipeError, WarmStart
from segcredit.data import BadRow, BadRows, load_prompts, prompts_from_rows
from segcredit.data.worlds import World, make_world
from segcredit.models import Codec, Policy
from segcredit.models.compiled import compile_parts
from segcredit.models.lora import VARIANTS, require_peft
from segcredit.models.packed import set_attention
from segcredit.models.policy import bare_model, is_vision
from segcredit.models.recompute import recompute_activations
from segcredit.models.targets import choose_layers, linear_layers
from segcredit.models.tiny import tiny_config
from segcredit.rewards import make_reward
from segcredit.rollout import HFEngine
from segcredit.train.parallel import Parallel
from segcredit.train.seeds import derive
from segcredit.train.source import Generated, Listed, PromptSource
from segcredit.train.stages import freeze_vision
from segcredit.train.state import State
from segcredit.types import Algorithm, Prompt, RewardFn

Rows = Iterable[Any]
Made = TypeVar("Made")


@dataclass
class Plan:
    """A recipe's parts, checked, with no model loaded yet."""

    recipe: Recipe
    algorithm: Algorithm
    reward: RewardFn
    world: World | None
    train: PromptSource
    test: PromptSource | None
    bad: list[BadRow]
    """Rows that were left out."""
    codec: Codec


def make_plan(
    recipe: Recipe,
    algorithm: Algorithm | None = None,
    reward: Callable[..., Any] | RewardFn | None = None,
    train: Rows | None = None,
    test: Rows | None = None,
) -> Plan:
    """Check everything; objects given in Python take the place of what the recipe names."""
    problems: list[ValueError] = []

    def tried(make: Callable[[], Made]) -> Made | None:
        try:
            return make()
        except ValueError as error:
            problems.append(error)
            return None

    world = _world(recipe)
    algorithm = recipe.make_algorithm() if algorithm is None else algorithm
    bad: list[BadRow] = []
    made_reward = tried(lambda: _reward(recipe, reward))
    codec = tried(lambda: _codec(recipe, world))
    if codec is not None:
        tried(lambda: _check_lora(recipe, world))
    sources = tried(
        lambda: (
            _generated(recipe, world)
            if world is not None and train is None
            else _listed(recipe, codec, train, test, bad)
        )
    )
    if problems or made_reward is None or codec is None or sources is None:
        if len(problems) == 1:
            raise problems[0]
        raise RecipeError("\n".join(str(problem) for problem in problems))
    plan = Plan(recipe, algorithm, made_reward, world, *sources, bad, codec)
    _check(plan)
    return plan


def build(plan: Plan, policy: Policy | None = None, parallel: Parallel | None = None) -> State:
    """Load the model and put everything together; ``policy`` is one that was saved on the way."""
    recipe = plan.recipe
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    parallel = Parallel() if parallel is None else parallel
    policy = _policy(plan) if policy is None else policy
    device = _device(recipe.model.device, parallel)
    policy.model.to(device)
    set_attention(policy.model, recipe.model.attention)
    if recipe.model.freeze_vision:
        freeze_vision(policy.model)
    if recipe.model.lora is not None:
        policy = _with_lora(policy, recipe)
        if recipe.model.compile:
            torch._dynamo.config.recompile_limit = VARIANTS
    if recipe.model.compile:
        compile_parts(policy.model)
    if recipe.memory.recompute_activations:
        recompute_activations(policy.model, policy.lora)
    engine = HFEngine(policy.model, policy.end_tokens, policy.banned, recipe.rollout.rows)
    return State(
        recipe=recipe,
        algorithm=plan.algorithm,
        policy=policy,
        engine=engine,
        reward=plan.reward,
        train=plan.train,
        test=plan.test,
        world=plan.world,
        parallel=parallel,
    )


def _with_lora(policy: Policy, recipe: Recipe) -> Policy:
    """The policy's adapter, the same on every process; critic and reference get theirs later."""
    settings = recipe.model.lora
    assert settings is not None
    return policy.with_lora(
        settings.rank,
        settings.alpha,
        targets=settings.targets,
        vision=not recipe.model.freeze_vision,
        seed=derive(recipe.seed, "adapters") % 2**31,
    )


def load_policy(recipe: Recipe, source: str | Path) -> Policy:
    """A policy from a folder or hub id, as the recipe wants it loaded."""
    settings = recipe.model
    dtype = getattr(torch, settings.dtype)
    try:
        policy = Policy.from_pretrained(source, dtype, trust_remote_code=settings.trust_remote_code)
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        first = " ".join(str(error).split())[:300]
        raise RecipeError(f"model: {str(source)!r} does not load: {first}") from error
    own_memory(policy.model)
    return policy


def own_memory(model: nn.Module) -> None:
    """Copy loaded weights out of their file, to where new ones would lie.

    A file that is mapped into memory may be deleted or replaced. And it begins anywhere, while
    matrix products may round differently for another alignment: a resumed run must not.
    """
    for x in [*model.parameters(), *model.buffers()]:
        x.data = x.data.clone()


def _policy(plan: Plan) -> Policy:
    settings = plan.recipe.model
    if settings.path is not None:
        return load_policy(plan.recipe, settings.path)
    assert settings.tiny is not None
    assert plan.world is not None
    sizes = {"hidden": settings.hidden, "layers": settings.layers, "heads": settings.heads}
    seed = derive(plan.recipe.seed, "weights") % 2**31
    policy = Policy.tiny(settings.tiny, plan.world.tokenizer(), seed, **sizes)
    return policy


def _device(name: str, parallel: Parallel) -> torch.device:
    if name != "auto":
        return torch.device(name)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", parallel.rank % torch.cuda.device_count())


def _world(recipe: Recipe) -> World | None:
    if recipe.data.world is None:
        return None
    try:
        return make_world(recipe.data.world, **recipe.data.settings)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"data: {error}") from None


def _config(recipe: Recipe, world: World | None) -> PreTrainedConfig:
    """The model's, without its weights."""
    settings = recipe.model
    if settings.path is None:
        assert settings.tiny is not None
        assert world is not None
        return tiny_config(
            settings.tiny, world.tokenizer(), settings.hidden, settings.layers, settings.heads
        )
    return AutoConfig.from_pretrained(settings.path, trust_remote_code=settings.trust_remote_code)


def _check_lora(recipe: Recipe, world: World | None) -> None:
    """Whether the model has the layers that are named; it is built without memory for weights."""
    settings = recipe.model.lora
    if settings is None:
        return
    try:
        require_peft()
        config = _config(recipe, world)
        model = bare_model(config, recipe.model.trust_remote_code)
        choose_layers(linear_layers(model), settings.targets, not recipe.model.freeze_vision)
    except ValueError as error:
        raise RecipeError(str(error)) from None


def _codec(recipe: Recipe, world: World | None) -> Codec:
    """How the model will read prompts, known from small files alone."""
    settings = recipe.model
    if settings.path is None:
        assert world is not None
        try:
            config = _config(recipe, world)
        except ValueError as error:
            raise RecipeError(f"model: {error}") from None
        return Codec.for_tiny(world.tokenizer(), config)
    try:
        config = _config(recipe, world)
        return Codec.from_pretrained(settings.path, is_vision(config), settings.trust_remote_code)
    except (OSError, ValueError) as error:
        first = " ".join(str(error).split())[:300]
        raise RecipeError(
            f"model.path: expected a Hugging Face folder or hub id; got {settings.path!r}, which "
            f"does not load: {first}"
        ) from None


def _reward(recipe: Recipe, reward: Callable[..., Any] | RewardFn | None) -> RewardFn:
    try:
        if reward is None:
            return make_reward(recipe.reward)
        return reward if isinstance(reward, RewardFn) else make_reward(reward)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"reward: {error}") from None


def _generated(recipe: Recipe, world: World) -> tuple[PromptSource, PromptSource]:
    test = Listed(world.prompts("test", 0, recipe.evaluation.prompts), shuffle=False)
    if recipe.data.size is None:
        return Generated(world, "train"), test
    prompts = world.prompts("train", 0, recipe.data.size)
    return Listed(prompts, derive(recipe.seed, "data")), test


def _listed(
    recipe: Recipe, codec: Codec | None, train: Rows | None, test: Rows | None, bad: list[BadRow]
) -> tuple[PromptSource, PromptSource | None]:
    found_bad: list[BadRows] = []

    def load(rows: Rows | None, files: Sequence[str]) -> list[Prompt]:
        try:
            return load_all(rows, files)
        except BadRows as error:
            found_bad.append(error)
            return []

    def load_all(rows: Rows | None, files: Sequence[str]) -> list[Prompt]:
        settings = recipe.data
        counted = settings.max_prompt_tokens is not None and codec is not None
        shared: dict[str, Any] = {
            "skip_bad_rows": settings.skip_bad_rows,
            "suffix": settings.suffix,
            "max_prompt_tokens": settings.max_prompt_tokens if counted else None,
            "count_tokens": codec.count_tokens if counted and codec is not None else None,
        }
        if rows is not None:
            rows = list(rows)
            if rows and all(isinstance(x, Prompt) for x in rows):
                return rows
            loaded = prompts_from_rows(rows, **shared)
        else:
            loaded = load_prompts(list(files), **shared)
        bad.extend(loaded.bad)
        return loaded.prompts

    training = load(train, recipe.data.train)
    held_out = load(test, recipe.data.test) if test is not None or recipe.data.test else None
    if len(found_bad) == 1:
        raise found_bad[0]
    if found_bad:
        raise BadRows([row for error in found_bad for row in error.bad])
    source = Listed(training, derive(recipe.seed, "data"))
    return source, None if held_out is None else Listed(held_out, shuffle=False)


def _device_problems(name: str) -> list[str]:
    """Why nothing can be computed there."""
    if name == "auto":
        return []
    try:
        device = torch.device(name)
    except RuntimeError:
        return [f"model.device: expected auto, cpu, cuda or cuda:0 …; got {name!r}"]
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        return [
            f"model.device: {name!r} was asked for, but torch sees {torch.cuda.device_count()} GPUs"
        ]
    return []


def _check(plan: Plan) -> None:
    """What only the data and the method together can tell."""
    recipe, first = plan.recipe, plan.train.take(0, 1)[0]
    problems = []
    try:
        plan.codec.encode(first)
    except ValueError as error:
        problems.append(f"data: {error}")
    problems += _device_problems(recipe.model.device)
    for name in recipe.save.trackers:
        if find_spec(name) is None:
            problems.append(f"save.trackers: {name} is not installed. Type: pip install {name}")
    for number, stage in enumerate(recipe.stages):
        if isinstance(stage, PretrainCritic) and "value" not in plan.algorithm.needs:
            problems.append(f"stages.{number}: the method has no critic to pretrain")
        if not isinstance(stage, WarmStart):
            continue
        if plan.world is not None and stage.phase not in plan.world.phases:
            phases = ", ".join(plan.world.phases)
            problems.append(
                f"stages.{number}.phase: {plan.world.name} has the phases {phases}; "
                f"got {stage.phase!r}"
            )
        if plan.world is None and "response" not in first.columns:
            problems.append(
                f"stages.{number}: a warm start imitates the rows' 'response'; the rows have none"
            )
    if isinstance(getattr(plan.algorithm, "credit", None), ValueDifference | TreeDifference):
        problems.append(
            "this method needs continuations of begun responses, which the trainer does not draw; "
            "it runs in a loop of one's own: prepare(rollouts, monte_carlo=…)"
        )
    if "baseline" in plan.algorithm.needs:
        if not isinstance(plan.train, Listed):
            problems.append("this method tracks prompts, so they must come again: set data.size")
        elif recipe.rollout.prompts > plan.train.size:
            problems.append(
                f"rollout.prompts is {recipe.rollout.prompts}, but there are only "
                f"{plan.train.size} prompts, and this method takes each at most once a step"
            )
        if recipe.rollout.samples != 1:
            problems.append("this method takes one response per prompt: set rollout.samples to 1")
    if problems:
        raise RecipeError(
            "\n".join(["the recipe does not fit its data", *(f"  {x}" for x in problems)])
        )
