"""Check a recipe's settings against each other and against its method.

Everything that is wrong with a recipe regardless of rows, weights and machine is found here, when
the recipe is read, so that training, ``--check``, ``plan``, ``verl`` and studies give one answer.
``segcredit/train/build.py`` checks the rest: rows, model files, GPUs and installed packages.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from segcredit.algorithms.policy_gradient import PolicyGradient
from segcredit.algorithms.requirements import requirements
from segcredit.columns import COLUMNS
from segcredit.data.worlds import make_world
from segcredit.types import Algorithm

if TYPE_CHECKING:
    from segcredit.config.recipe import PretrainCritic, Recipe


def recipe_problems(recipe: "Recipe") -> list[str]:
    """List the problems of a recipe that do not depend on its method."""
    size = recipe.data.size if recipe.data.world is not None else None
    return [
        *_batch_problems(recipe),
        *_stage_problems(recipe),
        *_engine_problems(recipe),
        *_ahead_problems(recipe),
        *_memory_problems(recipe),
        *_best_problems(recipe),
        *_curriculum_problems(recipe),
        *_tiny_problems(recipe),
        *prompt_problems(recipe, size),
    ]


def _batch_problems(recipe: "Recipe") -> Iterator[str]:
    rows = recipe.rollout.prompts * recipe.rollout.samples
    if recipe.rollout.tree is not None:
        rows *= recipe.rollout.tree.branching[0]
    if recipe.update.minibatches > rows:
        yield (
            f"update.minibatches is {recipe.update.minibatches}, but a step has only {rows} "
            f"responses (rollout.prompts × rollout.samples)"
        )


def _stage_problems(recipe: "Recipe") -> Iterator[str]:
    world = recipe.data.world and make_world(recipe.data.world, **recipe.data.settings)
    for number, stage in enumerate(recipe.stages):
        if stage.kind == "warm_start" and stage.hold and stage.schedule == "constant":
            yield (
                f"stages.{number}.hold is {stage.hold:g}, but a constant learning rate does not "
                f"decay: remove it, or set stages.{number}.schedule to linear or cosine"
            )
        if stage.kind == "warm_start" and world and stage.phase not in world.phases:
            yield (
                f"stages.{number}.phase: {world.name} has the phases {', '.join(world.phases)}; "
                f"got {stage.phase!r}"
            )
        if stage.kind == "pretrain_critic":
            yield from _pretraining_problems(f"stages.{number}", stage, recipe)


def _pretraining_problems(place: str, stage: "PretrainCritic", recipe: "Recipe") -> Iterator[str]:
    """Check that a batch of the stage has enough responses for its gradient steps."""
    if stage.prompts is None and stage.minibatches is None:
        return  # as in any other step
    prompts, asked = f"{place}.prompts", stage.prompts
    if asked is None:
        prompts, asked = "rollout.prompts", recipe.rollout.prompts
    steps, count = f"{place}.minibatches", stage.minibatches
    if count is None:
        steps, count = "update.minibatches", recipe.update.minibatches
    samples = recipe.rollout.samples
    if asked * samples < count:
        times = "" if samples == 1 else f" × rollout.samples {samples}"
        yield f"{prompts} {asked}{times} is too few for {steps} {count}"


def _engine_problems(recipe: "Recipe") -> Iterator[str]:
    rollout = recipe.rollout
    if rollout.engine == "vllm" and not recipe.recomputes:
        yield (
            "rollout.old_logp is sampler, but vLLM returns no entropies: remove it, or set "
            "rollout.old_logp=recompute"
        )
    if rollout.graphs is True and rollout.engine == "vllm":
        yield (
            "rollout.graphs is a setting of the hf engine: remove it; vLLM uses CUDA graphs unless "
            "rollout.vllm.eager is true"
        )
    if rollout.graphs is True and recipe.model.attention == "flash_attention_2":
        yield (
            "rollout.graphs needs attention with a mask: set model.attention=auto, or "
            "rollout.graphs=false"
        )
    if rollout.mismatch_cap is not None and not recipe.recomputes:
        yield (
            "rollout.mismatch_cap corrects the sampler's log-probabilities by recomputed ones: set "
            "rollout.old_logp=recompute, or remove it"
        )
    if rollout.mismatch_cap is not None and rollout.top_p < 1:
        yield (
            "rollout.mismatch_cap weights tokens by π_old / π_sampler, and with rollout.top_p < 1 "
            "that ratio contains the probability that top-p cuts off: set rollout.top_p=1, or "
            "remove rollout.mismatch_cap"
        )
    if rollout.refills and (rollout.samples < 2 or rollout.tree is not None):
        yield (
            "rollout.refills compares the rewards of a prompt's independent responses: set "
            "rollout.samples to at least 2 and remove rollout.tree, or set rollout.refills=0"
        )
    if not rollout.refills and rollout.refill_by != "auto":
        yield "rollout.refill_by has no effect without rollout.refills: set it, such as 3"
    if rollout.mismatch_cap is None:
        for key in ("mismatch_over", "mismatch_mask", "mismatch_floor"):
            if getattr(rollout, key) != type(rollout).model_fields[key].default:
                yield f"rollout.{key} has no effect without rollout.mismatch_cap: set it, such as 3"


def _ahead_problems(recipe: "Recipe") -> Iterator[str]:
    rollout = recipe.rollout
    if not rollout.ahead:
        if rollout.device is not None:
            yield (
                "rollout.device has no effect without rollout.ahead: set rollout.ahead=1, or "
                "remove it"
            )
        return
    if rollout.engine == "vllm":
        yield (
            "rollout.ahead samples while the policy trains, but vLLM releases its memory then "
            "(sleep mode): set rollout.engine=hf, or rollout.ahead=0"
        )
    if recipe.memory.shard:
        yield (
            "rollout.ahead samples from a whole copy of the policy, but memory.shard divides its "
            "weights over the processes: remove one of the two"
        )


def _memory_problems(recipe: "Recipe") -> Iterator[str]:
    memory = recipe.memory
    if memory.offload_optimizer == "stream" and recipe.model.dtype == "float32":
        yield (
            "memory.offload_optimizer=stream is for weights in bfloat16, whose fp32 master weights "
            "are offloaded to CPU memory: set model.dtype=bfloat16, or offload_optimizer=true"
        )
    if memory.offload_optimizer == "stream" and memory.shard:
        yield (
            "memory.offload_optimizer=stream cannot be combined with memory.shard, which shards "
            "the optimizer state over the processes: set offload_optimizer to true or false"
        )
    if memory.shard and recipe.optimizer.kind != "adamw":
        yield (
            f"memory.shard shards the moments of adamw; got optimizer.kind "
            f"{recipe.optimizer.kind}: remove one of the two"
        )
    if memory.shard and recipe.model.lora is not None:
        yield (
            "memory.shard shards all weights, but model.lora trains adapters on a full copy of "
            "them: remove one of the two"
        )
    if recipe.model.critic is not None and recipe.model.lora is not None:
        yield (
            "model.critic is a complete critic, but with model.lora the critic is an adapter: "
            "remove one of the two"
        )


def _best_problems(recipe: "Recipe") -> Iterator[str]:
    """Check that the best result is measured if a setting needs it, and needed if it is set."""
    evaluation, has_test = recipe.evaluation, recipe.data.world or recipe.data.test
    asked = [
        name
        for name, is_set in (
            ("save.best", recipe.save.best),
            ("evaluation.patience", evaluation.patience is not None),
        )
        if is_set
    ]
    for name in asked:
        if not has_test:
            yield f"{name} compares held-out results: set data.test, or remove it"
        if not evaluation.every:
            yield (
                f"{name} compares evaluations during optimization, and evaluation.every is 0: set "
                f"it to a number of steps, such as 10, or remove {name}"
            )
    if not asked and evaluation.metric != "auto":
        yield (
            "evaluation.metric has no effect without save.best or evaluation.patience: set one of "
            "them, or remove it"
        )
    if evaluation.min_gain and evaluation.patience is None:
        yield (
            "evaluation.min_gain has no effect without evaluation.patience: set it, such as 5, or "
            "remove min_gain"
        )
    if evaluation.metric in ("greedy", "greedy_reward") and not evaluation.greedy:
        yield (
            f"evaluation.metric is {evaluation.metric}, but evaluation.greedy is false: set it to "
            f"true, or compare sampled responses (sampled, reward)"
        )


def _curriculum_problems(recipe: "Recipe") -> Iterator[str]:
    if not recipe.data.curriculum:
        return
    if recipe.data.world is not None and recipe.data.size is None:
        yield (
            "data.curriculum draws prompts again by their success rate, so they must repeat: set "
            "data.size to the number of distinct prompts, or data.curriculum=false"
        )
    if recipe.rollout.tree is not None:
        yield (
            "data.curriculum counts the successes of independent responses: remove rollout.tree, "
            "or set data.curriculum=false"
        )


def _tiny_problems(recipe: "Recipe") -> Iterator[str]:
    if not recipe.model.tiny:
        return
    if recipe.data.world is None:
        yield "model.tiny takes its vocabulary from a world: set data.world, or model.path"
    if not any(stage.kind == "warm_start" for stage in recipe.stages):
        yield "a tiny model has random weights: begin with a warm_start stage"


def prompt_problems(recipe: "Recipe", size: int | None) -> list[str]:
    """Return settings that require more distinct prompts per step than there are.

    Args:
        size: Number of training prompts; None: unlimited.
    """
    if size is None:
        return []
    asked = {"rollout.prompts": 0}
    for number, stage in enumerate(recipe.stages):
        if stage.kind == "pretrain_critic" and stage.prompts is not None:
            asked[f"stages.{number}.prompts"] = stage.prompts
        elif stage.kind != "warm_start":
            asked["rollout.prompts"] = recipe.rollout.prompts
    more = "add rows" if recipe.data.world is None else f"set data.size={max(asked.values())}"
    return [
        f"{name}: expected at most {size}, the number of training prompts, since the prompts of a "
        f"step are distinct; got {count}. Set {name}={size} or less, or {more}"
        for name, count in asked.items()
        if count > size
    ]


def method_problems(recipe: "Recipe", algorithm: Algorithm, name: str) -> list[str]:
    """Return settings that do not fit a method, and settings that the method needs but are missing.

    Args:
        name: Name of the method, for messages.
    """
    problems, rollout, needed = [], recipe.rollout, requirements(algorithm)
    if needed.compares_responses and rollout.samples < 2:
        problems.append(
            f"{name} compares the responses to one prompt, so rollout.samples must be at least 2; "
            f"got {rollout.samples}"
        )
    if rollout.mismatch_cap is not None and not needed.assigns_credit:
        problems.append(
            f"rollout.mismatch_cap weights advantages, but {name} computes none: remove it"
        )
    if recipe.update.mask_truncated and not needed.assigns_credit:
        problems.append(
            f"update.mask_truncated is for methods that compute advantages, and {name} computes "
            f"none: remove it"
        )
    if recipe.update.entropy_coef and not isinstance(algorithm, PolicyGradient):
        problems.append(
            f"update.entropy_coef is for policy-gradient methods; got {name}. Set "
            f"update.entropy_coef=0"
        )
    for column in needed.columns:
        problems += column.check(recipe, name)
        if rollout.ahead and column.continues:
            problems.append(
                f"rollout.ahead samples whole, independent responses one update early, but {name} "
                f"also continues parts of them ({column.name}): set rollout.ahead=0"
            )
    for kind, column in ((type(x), x) for x in COLUMNS.values()):
        if not needed.needs(kind):
            problems += column.check_unused(recipe, name)
    return problems
