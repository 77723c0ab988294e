"""Build the state of a run from a recipe; all checks run before a model is loaded."""

import copy
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedConfig

from segcredit.algorithms.requirements import requirements
from segcredit.config import Recipe, RecipeError, WarmStart
from segcredit.config.checks import method_problems, prompt_problems
from segcredit.data import BadRow, BadRows, load_prompts, prompts_from_rows
from segcredit.data.formats import NOTHING_LEFT, SKIP
from segcredit.data.readers import pin_addresses
from segcredit.data.worlds import World, make_world
from segcredit.models import Codec, ModelError, Policy, find_family, tiny_config
from segcredit.models.critic import check_saved
from segcredit.models.layers import set_attention
from segcredit.models.loading import (
    check_weight_files,
    context_window,
    empty_model,
    end_tokens,
    load_codec,
    load_config,
    require_window,
)
from segcredit.models.lora import choose_layers, linear_layers, require_peft
from segcredit.models.template import LimitedChat, check_questions, is_question
from segcredit.printable import shown
from segcredit.registry import file_digests
from segcredit.rewards import (
    CustomReward,
    RewardError,
    compares_answers,
    functions_in,
    make_reward,
    require_servers,
)
from segcredit.rewards.client import TRIAL
from segcredit.rollout import engine_problem
from segcredit.train.columns import prepare_columns, provider_of
from segcredit.train.distributed import Parallel, shard_policy
from segcredit.train.models import device_of, load_policy, make_ready, rollout_engine
from segcredit.train.optim import missing_requirement
from segcredit.train.source import PromptList, WorldPrompts
from segcredit.train.state import State, derive
from segcredit.types import Algorithm, Prompt, PromptSource, RewardFn

Rows = Iterable[Any]
Made = TypeVar("Made")
SOME = 16
"""Number of prompts to check of a world, whose prompts are alike and unlimited."""
PATIENCE = 2.0
"""Seconds after which a trial of the reward is announced."""


@dataclass
class RunPlan:
    """A recipe's checked parts, before a model is loaded."""

    recipe: Recipe
    algorithm: Algorithm
    reward: RewardFn
    world: World | None
    train: PromptSource
    test: PromptSource | None
    bad: list[BadRow]
    """Rows that were skipped."""
    codec: Codec
    code: list[str] = field(default_factory=list)
    """Hashes of the files that define the reward, the method or the engine."""

    @property
    def first_prompt(self) -> Prompt:
        """The first row of the training data, or the first prompt of a world."""
        if isinstance(self.train, PromptList):
            return self.train.prompts[0]
        return self.train.take(0, 1)[0]


def make_plan(
    recipe: Recipe,
    algorithm: Algorithm | None = None,
    reward: Callable[..., Any] | RewardFn | None = None,
    train: Rows | None = None,
    test: Rows | None = None,
    progress: Callable[[int], None] | None = None,
    in_memory: bool = False,
) -> RunPlan:
    """Run all checks of a recipe; objects given in Python replace those that it names.

    Args:
        progress: Called from time to time with the number of rows checked so far.
        in_memory: Whether the weights are in memory, so that the model's folder needs none.
    """
    recipe = _pinned(recipe)
    code = file_digests(recipe.model_dump(include={"algorithm", "reward", "rollout"}))
    problems: list[ValueError] = []

    def attempt(make: Callable[[], Made]) -> Made | None:
        try:
            return make()
        except ValueError as error:
            problems.append(error)
            return None

    world = _world(recipe)
    algorithm = recipe.make_algorithm() if algorithm is None else recipe.with_bonus(algorithm)
    bad: list[BadRow] = []
    made_reward = attempt(lambda: _reward(recipe, reward))
    codec, window = None, None
    if (found := attempt(lambda: _config(recipe, world))) is not None:
        place, config = found
        codec = attempt(lambda: _codec(recipe, world, place, config, not in_memory))
        window = attempt(lambda: _window(recipe, config))
        attempt(lambda: _check_lora(recipe, config))
        attempt(lambda: _check_critic(recipe, config))
    with ExitStack() as limited:
        check = None
        if codec is not None:
            check = RowCheck(
                recipe, codec, limited.enter_context(LimitedChat(codec.chat)), window, progress
            )
            attempt(partial(codec.check_stop, recipe.rollout.stop, "rollout.stop"))
            if found is not None and found[0] is not None:
                path, config = found[0], found[1]
                attempt(lambda: _check_end(recipe, path, config, check))
        sources = attempt(
            lambda: (
                _generated(recipe, world, check)
                if world is not None and train is None
                else _listed(recipe, check, train, test, bad, compares_answers(made_reward))
            )
        )
    if problems or made_reward is None or codec is None or sources is None:
        if len(problems) == 1:
            raise problems[0]
        raise RecipeError("\n".join(str(problem) for problem in problems))
    for function in functions_in(made_reward):
        _check_signature(function, sources)
    plan = RunPlan(recipe, algorithm, made_reward, world, *sources, bad, codec, code)
    _check(plan)
    _try_rewards(plan)
    return plan


def _pinned(recipe: Recipe) -> Recipe:
    """Add the commit of datasets on the Hub, so that config.yaml reproduces the run."""
    try:
        names = {key: pin_addresses(getattr(recipe.data, key)) for key in ("train", "test")}
    except ValueError as error:
        raise RecipeError(f"data: {error}") from None
    if all(getattr(recipe.data, key) == x for key, x in names.items()):
        return recipe
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=names)})


def build(plan: RunPlan, policy: Policy | None = None, parallel: Parallel | None = None) -> State:
    """Load the model and build the state; ``policy`` replaces the recipe's model on resume."""
    recipe = plan.recipe
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    parallel = Parallel() if parallel is None else parallel
    policy = _policy(plan) if policy is None else policy
    device = device_of(recipe.model.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # whose streams and memory the metrics measure
    policy.model.to(device)
    set_attention(policy.model, recipe.model.attention)
    if recipe.model.lora is not None:
        policy = _with_lora(policy, recipe)
    make_ready(policy.model, recipe, policy.lora)
    columns = requirements(plan.algorithm).columns
    engine = rollout_engine(recipe, requirements(plan.algorithm), policy)
    whole = None
    if recipe.memory.shard and parallel.size > 1:  # the loaded model is kept to sample from
        whole, policy = policy.model, Policy(copy.deepcopy(policy.model), policy.codec)
        make_ready(policy.model, recipe)  # a copy is not compiled
        shard_policy(policy, parallel)
    state = State(
        recipe=recipe,
        algorithm=plan.algorithm,
        policy=policy,
        engine=engine,
        reward=plan.reward,
        train=plan.train,
        test=plan.test,
        world=plan.world,
        parallel=parallel,
        whole=whole,
        code=plan.code,
    )
    prepare_columns(state, [x for x in columns if provider_of(x).prepares_at_build])
    return state


def _with_lora(policy: Policy, recipe: Recipe) -> Policy:
    """Add the policy's adapter, with the same initial weights on every rank."""
    settings = recipe.model.lora
    assert settings is not None
    return policy.with_lora(
        settings.rank,
        settings.alpha,
        targets=settings.targets,
        vision=not recipe.model.freeze_vision,
        seed=derive(recipe.seed, "adapters") % 2**31,
    )


def _policy(plan: RunPlan) -> Policy:
    settings = plan.recipe.model
    if settings.path is not None:
        return load_policy(plan.recipe, settings.path)
    assert settings.tiny is not None
    assert plan.world is not None
    seed = derive(plan.recipe.seed, "weights") % 2**31
    tokenizer = plan.world.tokenizer()
    policy = Policy.tiny(settings.tiny, tokenizer, seed, settings.family, **settings.sizes)
    for x in policy.model.parameters():  # not its buffers: rotary frequencies stay exact
        x.data = x.data.to(getattr(torch, settings.dtype))
    return replace(policy, codec=plan.codec)


def _world(recipe: Recipe) -> World | None:
    if recipe.data.world is None:
        return None
    try:
        return make_world(recipe.data.world, **recipe.data.settings)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"data: {error}") from None


def _config(recipe: Recipe, world: World | None) -> tuple[str | None, PreTrainedConfig]:
    """Return the model's path (None: made in code) and its configuration."""
    settings = recipe.model
    if settings.path is not None:
        try:
            return load_config(settings.path, settings.trust_remote_code, settings.family)
        except ModelError as error:
            raise RecipeError(f"model.path: {error}") from None
    assert settings.tiny is not None
    assert world is not None
    try:
        config = tiny_config(
            settings.tiny, world.tokenizer(), **settings.sizes, family=settings.family
        )
        return None, config
    except ValueError as error:
        raise RecipeError(f"model: {error}") from None


def _check_lora(recipe: Recipe, config: PreTrainedConfig) -> None:
    """Check that the model has the layers that LoRA names, without allocating weights."""
    settings = recipe.model.lora
    if settings is None:
        return
    try:
        require_peft()
        family = find_family(config, recipe.model.family)
        model = empty_model(config, family, recipe.model.trust_remote_code)
        vision = not recipe.model.freeze_vision
        choose_layers(linear_layers(model), settings.targets, family, vision)
    except ValueError as error:
        raise RecipeError(str(error)) from None


def _check_critic(recipe: Recipe, config: PreTrainedConfig) -> None:
    """Check that the initial critic exists and has the policy's vocabulary."""
    if recipe.model.critic is None:
        return
    try:
        check_saved(Path(recipe.model.critic).expanduser(), config)
    except ModelError as error:
        raise RecipeError(f"model.critic: {error}") from None


def _codec(
    recipe: Recipe,
    world: World | None,
    place: str | None,
    config: PreTrainedConfig,
    check_weights: bool,
) -> Codec:
    """Load tokenizer, processor and chat template, without weights."""
    template = recipe.data.template
    if place is None:
        assert world is not None
        family = find_family(config, recipe.model.family)
        return replace(Codec.for_tiny(world.tokenizer(), config, family), template=template)
    try:
        if check_weights and Path(place).is_dir():
            check_weight_files(Path(place))
        trusted, own = recipe.model.trust_remote_code, recipe.model.family
        codec = load_codec(place, config, trusted, template, own)
    except ModelError as error:
        raise RecipeError(f"model.path: {error}") from None
    try:
        codec.require_template()
    except ValueError as error:
        raise RecipeError(f"model.path: {recipe.model.path}: {error}") from None
    return codec


def _reward(recipe: Recipe, reward: Callable[..., Any] | RewardFn | None) -> RewardFn:
    try:
        if reward is None:
            return make_reward(recipe.reward)
        return reward if isinstance(reward, RewardFn) else make_reward(reward)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"reward: {error}") from None


def _window(recipe: Recipe, config: PreTrainedConfig) -> int | None:
    """Return the context window; refuse it if the longest response would fill it."""
    window, longest = context_window(config), recipe.rollout.max_tokens
    if window is not None and longest >= window:
        raise RecipeError(
            f"rollout.max_tokens: expected less than the model's context window of {window} "
            f"tokens, since the prompt also takes tokens; got {longest}. "
            f"Set for example rollout.max_tokens={window // 2}"
        )
    return window


def _check_end(recipe: Recipe, place: str, config: PreTrainedConfig, check: "RowCheck") -> None:
    """Refuse a model whose responses would not end with a token at which sampling stops.

    Demonstrations end with the tokenizer's end token. Without a warm start, responses end as the
    chat template ends a turn, or, with ``data.template``, also with the tokenizer's end token.
    """
    codec = check.codec
    tokenizer, ends = codec.tokenizer, end_tokens(place, config)
    taught = tokenizer.eos_token_id
    if taught is None and not ends:
        raise RecipeError(
            f"model.path: the model names no end token, so no response could end. Set eos_token_id "
            f"in {place}/generation_config.json, or eos_token in {place}/tokenizer_config.json"
        )
    numbers = [n for n, stage in enumerate(recipe.stages) if isinstance(stage, WarmStart)]
    if numbers and taught is None:
        raise RecipeError(
            f"stages.{numbers[0]}: a demonstration ends with the tokenizer's end token, and this "
            f"tokenizer has none. Set eos_token in {place}/tokenizer_config.json"
        )
    uses_chat = not numbers and codec.template is None
    last = codec.turn_end(check.chat) if uses_chat else taught
    if last is None or not ends or last in ends:
        return
    stops = ", ".join(f"{x} ({tokenizer.convert_ids_to_tokens(x)!r})" for x in ends)
    where = f"stages.{numbers[0]}: expected demonstrations" if numbers else "model.path: expected"
    what = "to end" if numbers else "responses to end"
    source = "the chat template ends a turn with" if uses_chat else "the tokenizer's end token is"
    other = "" if uses_chat else f", or eos_token in {place}/tokenizer_config.json"
    raise RecipeError(
        f"{where} {what} with a token at which sampling stops, which by the model's generation "
        f"config is {stops}; {source} {last} ({tokenizer.convert_ids_to_tokens(last)!r}), so "
        f'responses would run to rollout.max_tokens. Set "eos_token_id": {[last, *ends]} in '
        f"{place}/generation_config.json{other}"
    )


@dataclass
class RowCheck:
    """Check that the model can process a prompt, without weights and without decoding images."""

    recipe: Recipe
    codec: Codec
    chat: LimitedChat
    window: int | None
    """The model's context window in tokens; None: unknown."""
    progress: Callable[[int], None] | None = None
    done: int = 0

    def train(self, prompt: Prompt) -> int:
        """Count the tokens of a training prompt; raise ValueError if it cannot be used."""
        tokens = self.test(prompt)
        imitated = any(isinstance(stage, WarmStart) for stage in self.recipe.stages)
        if imitated and "response" in prompt.columns:
            self._check_demonstration(prompt.columns["response"], tokens)
        return tokens

    def test(self, prompt: Prompt) -> int:
        """Count the tokens of a held-out prompt; raise ValueError if it cannot be used."""
        self.done += 1
        if self.progress is not None and self.done % 64 == 0:
            self.progress(self.done)
        settings = self.recipe.data
        if settings.template is not None and not settings.skip_bad_rows and not is_question(prompt):
            return 0  # check_questions reports all of these together
        tokens = self.codec.count_tokens(prompt, self.chat)
        longest = self.recipe.rollout.max_tokens
        require_window(tokens, longest, self.window, "rollout.max_tokens=")
        return tokens

    def _check_demonstration(self, response: object, tokens: int) -> None:
        if not isinstance(response, str | int | float) or not str(response).strip():
            raise ValueError(f"a 'response' to imitate that is not text: {shown(response)}")
        total = tokens + len(self.codec.encode_response(str(response)))
        if self.window is not None and total > self.window:
            raise ValueError(
                f"{total} tokens with its 'response', more than the model's context window of "
                f"{self.window}. Shorten the response"
            )


def _check_signature(reward: CustomReward, sources: Iterable[PromptSource | None]) -> None:
    """Check that the rows have a column for each parameter of the reward function."""
    for source in sources:
        if source is not None:
            prompts = source.prompts if isinstance(source, PromptList) else source.take(0, 1)
            try:
                reward.check_signature(prompts)
            except RewardError as error:
                raise RecipeError(f"reward: {error}") from None


def _try_rewards(plan: RunPlan) -> None:
    """Connect to each server, and call each reward function of the user once.

    Functions get responses to the first training row.
    """
    try:
        with _announced(f"connecting to the reward's server (for at most {TRIAL:g} s) …"):
            require_servers(plan.reward)
        for function in functions_in(plan.reward):
            with _announced(
                f"trying the reward function {function.name} on two responses to the first "
                f"training row (for at most {function.deadline:g} s) …"
            ):
                function.try_once(plan.first_prompt, plan.recipe.rollout.max_tokens)
    except RewardError as error:
        raise RecipeError(f"reward: {error}") from None


@contextmanager
def _announced(text: str) -> Iterator[None]:
    """Print to stderr what is being done if it takes long."""

    def tell() -> None:
        with suppress(OSError, ValueError):  # nobody reads it
            print(text, file=sys.stderr, flush=True)

    timer = threading.Timer(PATIENCE, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _generated(
    recipe: Recipe, world: World, check: RowCheck | None
) -> tuple[PromptSource, PromptSource]:
    held_out = world.prompts("test", 0, recipe.evaluation.prompts)
    test = PromptList(held_out, shuffle=False)
    if check is not None:
        try:
            for prompt in [*world.prompts("train", 0, SOME), *held_out[:SOME]]:
                check.test(prompt)
        except ValueError as error:
            raise RecipeError(f"data: {error}") from None
    if recipe.data.size is None:
        return WorldPrompts(world, "train"), test
    prompts = world.prompts("train", 0, recipe.data.size)
    return PromptList(prompts, derive(recipe.seed, "data")), test


def _listed(
    recipe: Recipe,
    check: RowCheck | None,
    train: Rows | None,
    test: Rows | None,
    bad: list[BadRow],
    one_answer: bool,
) -> tuple[PromptSource, PromptSource | None]:
    found_bad: list[BadRows] = []
    settings = recipe.data

    def load(
        rows: Rows | None, files: Sequence[str], count: Callable[[Prompt], int] | None
    ) -> list[Prompt]:
        shared: dict[str, Any] = {
            "skip_bad_rows": settings.skip_bad_rows,
            "suffix": settings.suffix,
            "system": settings.system,
            "max_prompt_tokens": None if count is None else settings.max_prompt_tokens,
            "count_tokens": count,
            "measure": None if check is None else check.codec.measure_images,
            "one_answer": one_answer,
        }
        try:
            if rows is not None:
                loaded = prompts_from_rows(rows, **shared)
            else:
                outside = settings.allow_outside
                loaded = load_prompts(list(files), allow_outside=outside, **shared)
        except BadRows as error:
            found_bad.append(error)
            return []
        bad.extend(loaded.bad)
        return loaded.prompts

    training = load(train, settings.train, None if check is None else check.train)
    held_out = None
    if test is not None or settings.test:
        held_out = load(test, settings.test, None if check is None else check.test)
    if len(found_bad) == 1:
        raise found_bad[0]
    if found_bad:
        advice = SKIP if all(x.advice == SKIP for x in found_bad) else NOTHING_LEFT
        raise BadRows([row for error in found_bad for row in error.bad], advice)
    if settings.template is not None:
        check_questions([*training, *(held_out or [])])
    source = PromptList(training, derive(recipe.seed, "data"))
    return source, None if held_out is None else PromptList(held_out, shuffle=False)


def _device_problems(key: str, name: str | None) -> list[str]:
    """Return why this machine cannot compute on the device that a setting names."""
    if name is None or name == "auto":
        return []
    device = torch.device(name)
    if device.index is not None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return [
            f"{key}: several processes cannot share {name!r}; set it to {device.type}, and "
            f"each takes its own"
        ]
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        return [f"{key}: expected a GPU of this machine, where torch sees {found}; got {name!r}"]
    return []


def _check(plan: RunPlan) -> None:
    """Check the recipe against this machine and the rows, and against a method given in Python."""
    recipe = plan.recipe
    problems = _device_problems("model.device", recipe.model.device)
    problems += _device_problems("rollout.device", recipe.rollout.device)
    try:
        problem = engine_problem(recipe.rollout.engine)
    except ValueError as error:
        problem = f"rollout.engine: {error}"
    if problem is not None:
        problems.append(problem)
    if (lacking := missing_requirement(recipe.optimizer.kind)) is not None:
        problems.append(f"optimizer.kind: {lacking}")
    for name in recipe.save.trackers:
        if find_spec(name) is None:
            problems.append(f"save.trackers: {name} is not installed. Type: pip install {name}")
    problems += method_problems(recipe, plan.algorithm, "this method")
    problems += prompt_problems(recipe, plan.train.size)
    some = plan.train.prompts if isinstance(plan.train, PromptList) else plan.train.take(0, SOME)
    for column in requirements(plan.algorithm).columns:
        problems += column.check_prompts(some, "this method")
    problems += _demonstration_problems(plan)
    if problems:
        raise RecipeError("\n".join(["the recipe cannot run", *(f"  {x}" for x in problems)]))


def _demonstration_problems(plan: RunPlan) -> list[str]:
    """Check that each row has a response to imitate, if the recipe has a warm start."""
    numbers = [n for n, x in enumerate(plan.recipe.stages) if isinstance(x, WarmStart)]
    if plan.world is not None or not isinstance(plan.train, PromptList) or not numbers:
        return []
    without = [x.id for x in plan.train.prompts if "response" not in x.columns]
    if not without:
        return []
    some = f"{len(without)} of {plan.train.size} rows, such as {without[:1]}, have"
    which = "the rows have" if len(without) == plan.train.size else some
    return [
        f"stages.{number}: a warm start imitates the rows' 'response'; {which} none"
        for number in numbers
    ]
