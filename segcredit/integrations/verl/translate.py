"""Translate a recipe into verl's settings for the same run.

No setting is dropped silently. Each one is passed to verl's configuration (mapping.py), or is
refused here, or does not affect training and is listed in ``NO_COUNTERPART``.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from segcredit.algorithms.credit import GAE
from segcredit.algorithms.objective import ResponseMean
from segcredit.algorithms.policy_gradient import PolicyGradient
from segcredit.config import Optimize, PretrainCritic, Recipe
from segcredit.config.recipe import algorithm_of
from segcredit.data.readers import rows_at_once
from segcredit.integrations.verl.counterparts import departures, missing
from segcredit.integrations.verl.mapping import (
    NO_COUNTERPART,
    PROMPT_TOKENS,
    Cluster,
    policy_gradient,
    prompt_tokens,
    value_of,
    verl_settings,
)
from segcredit.integrations.verl.settings import (
    METHODS,
    NO_VALUES,
    VerlSettings,
    average_name,
    cut_by_values,
    has_segment_critic,
    make_method,
    method_name,
    method_settings,
    parse_settings,
)
from segcredit.registry import names_code

FORMATS = (".parquet", ".json", ".jsonl")
"""File formats that verl reads."""
REMOTE = ("judge", "server")
"""Rewards that send requests to a server."""


@dataclass(frozen=True)
class Translation:
    """verl's settings, and notes on what verl does differently."""

    settings: VerlSettings
    notes: tuple[str, ...] = ()


def translate(
    recipe: Recipe,
    folder: Path,
    cluster: Cluster | None = None,
    accept_departures: bool = False,
) -> Translation:
    """Translate a recipe into verl's settings.

    Args:
        recipe: The run.
        folder: The run directory.
        cluster: Where verl runs.
        accept_departures: Run verl's own form of a method without a critic even if it differs
            from the recipe's, and list the differences as notes. If False, refuse the recipe.
    """
    cluster = cluster or Cluster()
    problems = [
        *_model_problems(recipe),
        *_data_problems(recipe),
        *_stage_problems(recipe),
        *_size_problems(recipe, cluster),
        *_optimizer_problems(recipe),
        *_reward_problems(recipe),
        *_method_problems(recipe),
    ]
    differences = _group_departures(recipe)
    if not accept_departures:
        hint = "To run verl's own form of the method anyway, add --accept-departures"
        problems += [*differences, hint] if differences else []
    if problems:
        raise ValueError("\n".join(problems))
    notes = [*_notes(recipe, cluster), *(f"accepted: {x}" for x in differences)]
    return Translation(verl_settings(recipe, folder, cluster), tuple(notes))


def _model_problems(recipe: Recipe) -> Iterator[str]:
    model = recipe.model
    if model.path is None:
        yield (
            f"model.tiny: verl trains checkpoints; got {model.tiny}. Set model.path to a folder "
            f"or hub id"
        )
    if model.freeze_vision:
        yield (
            "model.freeze_vision: verl 0.9.1 has a key for it (freeze_vision_tower) but does not "
            "read it, so the vision tower would be trained. Set it to false, or use "
            "segcredit train"
        )
    if model.critic is not None:
        yield (
            "model.critic: on verl the critic starts from the policy's weights. Remove it, or use "
            "segcredit train"
        )
    if model.lora is not None:
        yield (
            "model.lora is not carried over to verl: all weights would be trained at the learning "
            "rates of the adapters. Set model.lora=null and learning rates for full training, or "
            "use segcredit train"
        )


def _data_problems(recipe: Recipe) -> Iterator[str]:
    data = recipe.data
    if data.world is not None:
        yield ("data.world: verl reads files of rows. Set data.train, and data.test for evaluation")
    for key in ("suffix", "system", "template"):
        if getattr(data, key) is not None:
            yield (
                f"data.{key} is applied by our reader; verl applies the model's chat template "
                f"to the rows unchanged. Write it into the rows (segcredit prepare does) or "
                f"into the model's chat template (--verl "
                f"actor_rollout_ref.model.custom_chat_template=…), then set data.{key}=null"
            )
    for key, names in (("train", data.train), ("test", data.test)):
        for name in names:
            path = Path(name)
            if path.suffix not in FORMATS:
                yield (
                    f"data.{key}: verl reads files ({', '.join(FORMATS)}); got {name}. Download "
                    f"it first (segcredit prepare --help)"
                )
            elif path.is_file() and not is_verl_file(path):
                yield (
                    f"{name} holds rows that verl cannot read: it needs prompt as a list of "
                    f"messages, and reward_model.ground_truth. Type: segcredit prepare --help"
                )


def _reward_problems(recipe: Recipe) -> Iterator[str]:
    specs = recipe.reward if isinstance(recipe.reward, list) else [recipe.reward]
    for spec in specs:
        name = spec if isinstance(spec, str) else spec["name"]
        if name in REMOTE:
            yield (
                f"reward: verl grades one response at a time, and {name} sends batches to a "
                f"server and stops the run if none of a batch is answered. Use verl's own reward "
                f"model (--verl reward.reward_model…) with another reward, or segcredit train"
            )


def _stage_problems(recipe: Recipe) -> Iterator[str]:
    for stage in recipe.stages:
        if not isinstance(stage, PretrainCritic | Optimize):
            yield f"verl has no {stage.kind} stage: run it with segcredit train first"
        elif isinstance(stage, PretrainCritic):
            yield from _pretraining_problems(stage, recipe)
    kinds = [stage.kind for stage in recipe.stages]
    if kinds not in (["optimize"], ["pretrain_critic", "optimize"]):
        yield f"verl runs critic pretraining, then optimization; got stages {', '.join(kinds)}"


def _size_problems(recipe: Recipe, cluster: Cluster) -> Iterator[str]:
    rollout, update = recipe.rollout, recipe.update
    rows = rollout.prompts
    if rows % update.minibatches:
        yield (
            f"verl's mini-batches are equal: {rows} prompts do not split into "
            f"{update.minibatches}. Change rollout.prompts or update.minibatches"
        )
    workers = cluster.nodes * cluster.gpus
    size = rows // update.minibatches * rollout.samples
    if size % workers:
        yield (
            f"a mini-batch of {size} responses does not split over {workers} GPUs. "
            f"Change update.minibatches, --nodes or --gpus"
        )
    longest = prompt_tokens(recipe) + rollout.max_tokens
    if update.tokens_per_micro < longest:
        yield (
            f"update.tokens_per_micro: verl stops if a prompt with its response is longer, and "
            f"they may take {longest} tokens (data.max_prompt_tokens + rollout.max_tokens); got "
            f"{update.tokens_per_micro}. Set it to {longest} or more"
        )
    if rollout.mismatch_over == "segment":
        yield (
            "rollout.mismatch_over: verl weights tokens or responses; got segment. Set it to token "
            "or response"
        )
    if rollout.mismatch_cap is not None and rollout.mismatch_mask != bool(rollout.mismatch_floor):
        yield (
            "rollout.mismatch_mask: verl masks weights outside a lower and an upper bound, or "
            "truncates them at an upper one. Set both mismatch_mask=true and mismatch_floor, or "
            "neither"
        )
    if rollout.stop:
        yield (
            f"rollout.stop: verl's rollout settings have no stop strings; got {rollout.stop}. Set "
            f"it to [], or use segcredit train"
        )
    if rollout.refills:
        yield (
            "rollout.refills: verl's trainer has no dynamic sampling (its DAPO recipe does). Set "
            "it to 0, or use segcredit train"
        )
    if rollout.ahead:
        yield (
            "rollout.ahead: verl has asynchronous trainers of its own. Set it to 0, and choose one "
            "by trainer.v1.trainer_mode (docs/appendix/verl.md)"
        )
    if recipe.data.curriculum:
        yield (
            "data.curriculum: verl draws prompts in passes over the data. Set it to false, or use "
            "segcredit train"
        )
    if recipe.save.best:
        yield (
            "save.best: verl keeps the last checkpoints only. Set it to false, and choose by "
            "verl's validation scores; or use segcredit train"
        )
    if recipe.evaluation.patience is not None:
        yield ("evaluation.patience: verl has no early stopping. Remove it, or use segcredit train")
    if update.mask_truncated:
        yield "update.mask_truncated: verl keeps truncated responses in the loss. Set it to false"
    if rollout.old_logp == "sampler":
        yield (
            "rollout.old_logp: on verl the trained model computes log π_old and entropies; got "
            "sampler. Set it to recompute"
        )


def _optimizer_problems(recipe: Recipe) -> Iterator[str]:
    given = recipe.optimizer
    if given.kind != "adamw":
        yield (
            f"optimizer.kind: verl shards the optimizer state, and 8-bit state cannot be "
            f"sharded; got {given.kind}. Set it to adamw"
        )
    if given.schedule == "linear":
        yield "verl has no linear schedule: set optimizer.schedule to constant or cosine"
    if any(isinstance(x, PretrainCritic) for x in recipe.stages) and (
        given.schedule != "constant" or given.warmup_steps
    ):
        yield (
            "verl has one schedule for critic pretraining and optimization together: set "
            "optimizer.schedule=constant and optimizer.warmup_steps=0"
        )


def _pretraining_problems(stage: PretrainCritic, recipe: Recipe) -> list[str]:
    """List problems of critic pretraining on verl, whose pretraining steps are ordinary steps."""
    found = []
    if stage.epochs != 1:
        found.append("verl pretrains a critic for one epoch per batch: set the stage's epochs to 1")
    if stage.prompts not in (None, recipe.rollout.prompts):
        found.append(
            "verl pretrains a critic on rollout.prompts prompts per batch: "
            "remove the stage's prompts"
        )
    if stage.minibatches not in (None, recipe.update.minibatches):
        found.append(
            "verl pretrains a critic with update.minibatches: remove the stage's minibatches"
        )
    if stage.schedule != "constant":
        found.append("verl pretrains a critic by optimizer.schedule: remove the stage's schedule")
    if stage.lr not in (None, recipe.optimizer.critic_lr):
        found.append("verl pretrains a critic with optimizer.critic_lr: remove the stage's lr")
    return found


def _is_segment_method(recipe: Recipe) -> bool:
    """Whether the plugin runs the method: a built-in one, or a user's own with GAE and a critic."""
    name = method_name(recipe.algorithm)
    return name in METHODS or (names_code(name) and has_segment_critic(recipe.make_algorithm()))


def _method_problems(recipe: Recipe) -> Iterator[str]:
    """Refuse methods for which neither the plugin nor verl has what they need."""
    name = method_name(recipe.algorithm)
    if _is_segment_method(recipe):
        yield from _segment_problems(recipe)
    elif reasons := missing(algorithm_of(recipe.algorithm, recipe.rollout.max_tokens)):
        own = " The plugin runs methods with GAE, a critic and a clipped surrogate."
        yield (
            f"algorithm: {name} does not run on verl: {'; '.join(reasons)}."
            f"{own if names_code(name) else ''} Use segcredit train"
        )


def _segment_problems(recipe: Recipe) -> Iterator[str]:
    """Refuse settings of the method for which neither verl nor the plugin has a key.

    The plugin must build the recipe's method from verl's settings, so a setting without a
    translation is refused. Each setting is tried alone to find those without one.
    """
    spec = recipe.algorithm
    method = policy_gradient(algorithm_of(spec))  # verl adds update.entropy_coef itself
    if cut_by_values(method):
        yield f"algorithm.partition: {NO_VALUES}"
        return
    if _is_translated(spec, method):
        return
    given = {} if isinstance(spec, str) else spec
    alone = {x: {"name": given["name"], x: given[x]} for x in given if x != "name"}
    wrong = [x for x, one in alone.items() if not _is_translated(one, algorithm_of(one))]
    for key in wrong or alone:
        yield f"algorithm.{key} has no key on verl: remove it, or use segcredit train"
    if not alone:
        yield f"algorithm: {spec} cannot be built from verl's settings. Use segcredit train"


def _is_translated(spec: str | Mapping[str, Any], wanted: object) -> bool:
    """Whether the plugin builds the same method from verl's settings, except averages and KL."""
    method = policy_gradient(wanted)
    assert method.critic is not None
    if average_name(method.reduce) is None or average_name(method.critic.reduce) is None:
        return False
    settings = method_settings(spec, method)
    head, inner = "+segment.", "+segment.partition."
    section = {
        key.removeprefix(head): x
        for key, x in settings.items()
        if key.startswith(head) and not key.startswith(inner)
    }
    partition = {key.removeprefix(inner): x for key, x in settings.items() if inner in key}
    rebuilt = make_method(parse_settings(section | {"partition": partition or None}), settings)
    return _without_averages(rebuilt) == _without_averages(method)


def _without_averages(method: PolicyGradient) -> PolicyGradient:
    assert method.critic is not None
    critic = replace(method.critic, reduce=ResponseMean())
    return replace(method, reduce=ResponseMean(), critic=critic, kl=None)


def _group_departures(recipe: Recipe) -> list[str]:
    """List how verl's own form differs from the recipe's; the user refuses or accepts this."""
    # without the bonus: verl adds update.entropy_coef itself
    method = algorithm_of(recipe.algorithm, recipe.rollout.max_tokens)
    if _is_segment_method(recipe) or missing(method):
        return []
    return list(departures(method_name(recipe.algorithm), policy_gradient(method)))


def _notes(recipe: Recipe, cluster: Cluster) -> list[str]:
    """Return the notes on harmless differences of the run on verl, one sentence each."""
    notes = [
        f"{key} has no effect on verl: {reason}"
        for key, reason in NO_COUNTERPART.items()
        if value_of(recipe, key) != _default(key)
    ]
    optimizer, evaluation, save = recipe.optimizer, recipe.evaluation, recipe.save
    if optimizer.weight_decay:
        notes.append("verl decays norms and biases too; segcredit train decays matrices only")
    if optimizer.warmup_steps:
        notes.append(
            "optimizer.warmup_steps: verl's learning rate is 0 in the first step and s / "
            "warmup_steps in step s; segcredit train's is (s + 1) / (warmup_steps + 1)"
        )
    if recipe.data.max_prompt_tokens is None:
        notes.append(
            f"data.max_prompt_tokens is not set, and verl needs a limit: using {PROMPT_TOKENS}"
        )
    if not recipe.data.test:
        notes.append("data.test is empty: verl does not validate")
    elif evaluation.greedy:
        notes.append(
            "evaluation.greedy: verl validates greedily or by sampling, not both, and samples here"
        )
    if recipe.memory.offload_optimizer == "stream":
        notes.append(
            "memory.offload_optimizer=stream: verl reloads the whole optimizer state, as with true"
        )
    if recipe.rollout.engine == "vllm" != cluster.rollout:
        notes.append(f"rollout.vllm has no effect with --rollout {cluster.rollout}")
    if not isinstance(policy_gradient(recipe.make_algorithm()).credit, GAE) and (
        save.rollouts_every
    ):
        notes.append(
            "save.rollouts_every, save.rollouts: verl's own trainer writes every response of "
            "every step; 0 writes none"
        )
    return notes


def _default(key: str) -> Any:
    """Return a setting's default value."""
    kind: Any = Recipe
    *path, last = key.split(".")
    for part in path:
        kind = kind.model_fields[part].annotation
    return kind.model_fields[last].default


def is_verl_file(path: Path) -> bool:
    """Whether the first row has messages in ``prompt`` and a ground truth, as verl needs."""
    row = _first_row(path)
    if not isinstance(row, Mapping):
        return False
    graded, prompt = row.get("reward_model"), row.get("prompt")
    truth = isinstance(graded, Mapping) and "ground_truth" in graded
    return truth and isinstance(prompt, list) and all(isinstance(x, Mapping) for x in prompt)


def _first_row(path: Path) -> Any:
    if path.suffix == ".parquet":
        parquet = import_module("pyarrow.parquet").ParquetFile(path)
        rows_at_once(parquet.metadata, path)  # refuses a file that would unpack to gigabytes
        small = [x for x in ("prompt", "reward_model") if x in parquet.schema_arrow.names]
        batch = next(parquet.iter_batches(1, columns=small), None)
        return None if batch is None else batch.to_pylist()[0]
    if path.suffix not in FORMATS:
        return None
    with path.open() as lines:
        try:
            return json.loads(lines.readline())
        except ValueError:
            return None
