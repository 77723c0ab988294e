"""Translate a recipe into verl's settings for the same run.

No setting is dropped silently. Each one is passed to verl's configuration, or is refused, or does
not affect training and is listed in ``NO_COUNTERPART``.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from segcredit.algorithms.credit import GAE, GroupZScore, LeaveOneOut
from segcredit.algorithms.objective import (
    BoundaryMSE,
    Clipped,
    LossKL,
    MicroBatchTokenMean,
    ResponseMean,
    TokenMean,
)
from segcredit.algorithms.policy_gradient import PolicyGradient
from segcredit.algorithms.ratio import TokenRatio
from segcredit.columns import VALUE
from segcredit.config import Optimize, PretrainCritic, Recipe
from segcredit.config.recipe import algorithm_of
from segcredit.integrations.verl import reward as reward_module
from segcredit.integrations.verl.dumps import METRICS, ROLLOUTS
from segcredit.integrations.verl.rows import FORMATS, is_verls
from segcredit.integrations.verl.settings import (
    METHODS,
    NO_CLIP,
    NO_VALUES,
    VerlKeys,
    asks_the_critic,
    method,
    parse,
)
from segcredit.partition import Token, spec_of

ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{x}" for x in ("actor", "rollout", "ref"))
FLOAT32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}

LOG_VARIABLE = "VERL_FILE_LOGGER_PATH"
"""By which verl is told where its log of metrics goes; in the environment of its driver."""
PLAIN = re.compile(r"(?!(?i:null|true|false|nan|inf)$)[A-Za-z_/][A-Za-z0-9_./-]*")
"""Text that hydra reads as a string without quotes: no number and no word of its grammar."""
PROMPT_TOKENS = 1024
"""Default limit on prompts: verl requires one, and a recipe may have none."""
GROUP_EPS = 1e-6
"""Constant that verl's GRPO adds to the standard deviation; it cannot be configured."""
LOG_RATIO_LIMIT = 20.0
"""Bound (±) at which verl clamps each token's log-ratio; it cannot be configured."""
KL_LIMIT = 10.0
"""Upper bound at which verl clamps k3; it cannot be configured."""

_TINY = "it is a size of model.tiny, and verl trains checkpoints"
NO_COUNTERPART: Mapping[str, str] = {
    "threads": "set OMP_NUM_THREADS where Ray starts",
    "model.family": "verl loads and runs models by its own code",
    "model.hidden": _TINY,
    "model.layers": _TINY,
    "model.heads": _TINY,
    "model.kv_heads": _TINY,
    "model.vision_layers": _TINY,
    "model.compile": "it only changes speed, and verl has its own compile settings",
    "model.device": "--nodes and --gpus place the workers",
    "data.allow_outside": "verl opens every image path that a row names",
    "data.size": "it counts the prompts of a world, and verl reads files",
    "rollout.rows": "it only changes speed and memory, and verl's engine does its own batching",
    "rollout.engine": "--rollout chooses verl's engine",
    "rollout.graphs": "it only changes the speed of rollout.engine=hf",
    "memory.shard": "verl always shards weights, gradients and optimizer (FSDP2)",
    "evaluation.watch": "verl does not record held-out responses per token",
}
"""Settings without a verl counterpart that change no result; a note says so if one is set."""

Settings = dict[str, Any]


@dataclass(frozen=True)
class Machines:
    """Where verl runs."""

    nodes: int = 1
    gpus: int = 8
    """Of each node."""
    rollout: str = "vllm"
    """verl's rollout engine."""
    tensor_parallel: int = 1
    """GPUs that share one copy of the model while sampling."""


@dataclass(frozen=True)
class Translated:
    """What verl is told, and what it cannot be told."""

    settings: Settings
    notes: tuple[str, ...] = ()


def translate(
    recipe: Recipe,
    folder: Path,
    machines: Machines | None = None,
    accept_departures: bool = False,
) -> Translated:
    """Translate the recipe into verl's settings.

    Args:
        recipe: The run.
        folder: Where the run is kept.
        machines: Where verl runs.
        accept_departures: Run verl's own form of a group method even if it differs from the
            recipe's, and list the differences as notes. If False, refuse the recipe.
    """
    machines = machines or Machines()
    problems = _problems(recipe, machines)
    departures = _group_departures(recipe)
    if not accept_departures:
        hint = "To run verl's own form of the method anyway, add --accept-departures"
        problems += [*departures, hint] if departures else []
    if problems:
        raise ValueError("\n".join(problems))
    parts = (
        _algorithm(_name(recipe), recipe.make_algorithm()),
        _data(recipe),
        _models(recipe),
        _sizes(recipe),
        _optimizers(recipe),
        _stages(recipe, folder),
        _machines(machines),
        _sampler(recipe, machines),
    )
    settings: Settings = {}
    for part in parts:
        settings |= part
    notes = [*_notes(recipe, machines), *(f"accepted: {x}" for x in departures)]
    return Translated(settings, tuple(notes))


def _problems(recipe: Recipe, machines: Machines) -> list[str]:
    """List the settings that verl cannot reproduce, with the reason for each."""
    return [
        *_model_problems(recipe),
        *_data_problems(recipe),
        *_stage_problems(recipe),
        *_size_problems(recipe, machines),
        *_optimizer_problems(recipe),
        *_method_problems(recipe),
    ]


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
    for key in ("suffix", "template"):
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
            elif path.is_file() and not is_verls(path):
                yield (
                    f"{name} holds rows that verl cannot read: it needs prompt as a list of "
                    f"messages, and reward_model.ground_truth. Type: segcredit prepare --help"
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


def _size_problems(recipe: Recipe, machines: Machines) -> Iterator[str]:
    rollout, update = recipe.rollout, recipe.update
    rows = rollout.prompts
    if rows % update.minibatches:
        yield (
            f"verl's mini-batches are equal: {rows} prompts do not split into "
            f"{update.minibatches}. Change rollout.prompts or update.minibatches"
        )
    workers = machines.nodes * machines.gpus
    size = rows // update.minibatches * rollout.samples
    if size % workers:
        yield (
            f"a mini-batch of {size} responses does not split over {workers} GPUs. "
            f"Change update.minibatches, --nodes or --gpus"
        )
    longest = _prompt_tokens(recipe) + rollout.max_tokens
    if update.tokens_per_micro < longest:
        yield (
            f"update.tokens_per_micro: verl stops if a prompt with its response is longer, and "
            f"they may take {longest} tokens (data.max_prompt_tokens + rollout.max_tokens); got "
            f"{update.tokens_per_micro}. Set it to {longest} or more"
        )
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


def _method_problems(recipe: Recipe) -> Iterator[str]:
    """Refuse methods that are neither the plugin's nor one of verl's group methods."""
    name, made = _name(recipe), recipe.make_algorithm()
    if name in METHODS:
        yield from _segment_problems(recipe)
    elif not _is_group_method(made):
        yield (
            f"algorithm: {name} does not run on verl. Those that do: {', '.join(METHODS)}, and "
            f"the forms of GRPO and RLOO that verl has itself (grpo, grpo_verl, rloo)"
        )


def _pretraining_problems(stage: PretrainCritic, recipe: Recipe) -> list[str]:
    """verl's steps before the first update of the actor are steps like any other."""
    found = []
    if stage.epochs != 1:
        found.append("verl pretrains a critic one epoch per batch: set the stage's epochs to 1")
    if stage.prompts not in (None, recipe.rollout.prompts):
        found.append(
            "verl pretrains a critic on rollout.prompts a batch: remove the stage's prompts"
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


def _segment_problems(recipe: Recipe) -> Iterator[str]:
    """Refuse settings of the method for which neither verl nor the plugin has a key.

    The plugin must build the recipe's method from verl's settings, so a new setting without a
    translation is refused. To find it, each setting is tried alone.
    """
    name, made = _name(recipe), _policy_gradient(recipe.make_algorithm())
    if asks_the_critic(made):
        yield f"algorithm.partition: {NO_VALUES}"
        return
    if _arrives(name, made):
        return
    given = {} if isinstance(recipe.algorithm, str) else recipe.algorithm
    keys = [x for x in given if x != "name"]
    alone = [x for x in keys if not _arrives(name, algorithm_of({"name": name, x: given[x]}))]
    for key in alone or keys:
        yield f"algorithm.{key} has no key on verl: remove it, or use segcredit train"


def _arrives(name: str, wanted: object) -> bool:
    """Whether the plugin builds the same method from verl's settings, except averages and KL."""
    made = _policy_gradient(wanted)
    if _average(made.reduce) is None:
        return False
    settings = _algorithm(name, made)
    head = "+segment."
    section: dict[str, Any] = {"partition": {}}
    for key, value in settings.items():
        if key.startswith(f"{head}partition."):
            section["partition"][key.removeprefix(f"{head}partition.")] = value
        elif key.startswith(head):
            section[key.removeprefix(head)] = value
    section["partition"] = section["partition"] or None
    found = method(parse(section), VerlKeys.from_settings(settings))
    return _without_averages(found) == _without_averages(made)


def _without_averages(made: PolicyGradient) -> PolicyGradient:
    assert made.critic is not None
    critic = replace(made.critic, reduce=ResponseMean())
    return replace(made, reduce=ResponseMean(), critic=critic, kl=None)


def _is_group_method(made: object) -> bool:
    """Whether verl's GRPO or RLOO implements the method, possibly with departures."""
    if not isinstance(made, PolicyGradient) or type(made.surrogate) is not Clipped:
        return False
    if isinstance(made.credit, GroupZScore):
        return isinstance(made.ratio, TokenRatio)
    return isinstance(made.credit, LeaveOneOut)


def _group_departures(recipe: Recipe) -> list[str]:
    """Differences between verl's GRPO or RLOO and the recipe's, to be refused or accepted."""
    made = recipe.make_algorithm()
    if _name(recipe) in METHODS or not _is_group_method(made):
        return []
    return list(_departures_of(_name(recipe), _policy_gradient(made)))


def _departures_of(name: str, made: PolicyGradient) -> Iterator[str]:
    credit = made.credit
    if isinstance(credit, GroupZScore):
        if credit.std == "population":
            yield (
                "algorithm.std: verl's GRPO divides by the sample standard deviation or by "
                "nothing; got population. Set it to sample or none"
            )
        if credit.std != "none" and credit.eps != GROUP_EPS:
            yield (
                f"algorithm.eps: verl's GRPO adds {GROUP_EPS:g} to the standard deviation; got "
                f"{credit.eps:g}. Set it to {GROUP_EPS:g}"
            )
    if isinstance(made.ratio, TokenRatio):
        if made.ratio.limit not in (None, LOG_RATIO_LIMIT):
            yield (
                f"algorithm.limit: verl clamps each token's log-ratio at {LOG_RATIO_LIMIT:g}; got "
                f"{made.ratio.limit:g}. Set it to {LOG_RATIO_LIMIT:g}"
            )
    else:
        yield (
            f"algorithm: verl clips the ratio of each token; {name} clips that of the response. "
            f"Use segcredit train, or verl's own form"
        )
    if made.adjust or made.adjust_minibatch or made.only is not None:
        yield (
            f"algorithm: {name} whitens, limits or masks advantages, and verl's group methods do "
            f"not. Use grpo_verl, or segcredit train"
        )
    if _average(made.reduce) is None:
        yield f"algorithm.reduce: verl averages over tokens or responses; got {made.reduce!r}"
    for term in made.terms:
        if not isinstance(term, LossKL):
            yield f"algorithm: verl has no loss term {term.name}. Use segcredit train"
            continue
        if not _is_verls_k3(term):
            yield (
                f"algorithm.kl: verl's KL loss is k3 clamped at {KL_LIMIT:g}, and {name} as set "
                f"here uses another estimator. Use grpo_verl, set algorithm.kl_clamp={KL_LIMIT:g} "
                f"if the method has it, or set algorithm.kl=0"
            )
        if _average(term.reduce) != _average(made.reduce):
            yield (
                f"algorithm.kl: verl averages the KL loss as the policy loss; got {term.reduce!r} "
                f"beside {made.reduce!r}. Use grpo_verl, or set algorithm.kl=0"
            )


def _is_verls_k3(term: LossKL) -> bool:
    """Whether the estimate equals verl's: min(exp(x) − x − 1, 10) with x = log π_ref − log π."""
    x = torch.tensor([[-30.0, -15.0, -3.0, -0.1, 0.0, 0.2, 2.0, 2.5, 3.0, 5.0]])
    verls = (x.clamp(-20, 20).exp() - x.clamp(-20, 20) - 1).clamp(max=KL_LIMIT)
    return torch.allclose(term.estimator(torch.zeros_like(x), x), verls)


def _notes(recipe: Recipe, machines: Machines) -> list[str]:
    """Notes on harmless differences of the run on verl, one sentence each."""
    found = [
        f"{key} has no effect on verl: {reason}"
        for key, reason in NO_COUNTERPART.items()
        if _value(recipe, key) != _default(key)
    ]
    optimizer, evaluation, save = recipe.optimizer, recipe.evaluation, recipe.save
    if optimizer.weight_decay:
        found.append("verl decays norms and biases too; segcredit train decays matrices alone")
    if optimizer.warmup_steps:
        found.append(
            "optimizer.warmup_steps: verl's learning rate is 0 in the first step and s / "
            "warmup_steps in step s; segcredit train's is (s + 1) / (warmup_steps + 1)"
        )
    if recipe.data.max_prompt_tokens is None:
        found.append(
            f"data.max_prompt_tokens is not set, and verl needs a limit: using {PROMPT_TOKENS}"
        )
    if not recipe.data.test:
        found.append("data.test is empty: verl does not validate")
    elif evaluation.greedy:
        found.append(
            "evaluation.greedy: verl validates greedily or by sampling, not both, and samples here"
        )
    if recipe.memory.offload_optimizer == "stream":
        found.append(
            "memory.offload_optimizer=stream: verl reloads the whole optimizer state, as with true"
        )
    if recipe.rollout.engine == "vllm" != machines.rollout:
        found.append(f"rollout.vllm has no effect with --rollout {machines.rollout}")
    if not isinstance(_policy_gradient(recipe.make_algorithm()).credit, GAE) and (
        save.rollouts_every
    ):
        found.append(
            "save.rollouts_every, save.rollouts: verl's own trainer writes every response of "
            "every step; 0 writes none"
        )
    return found


def _value(recipe: Recipe, key: str) -> Any:
    return reduce(getattr, key.split("."), recipe)


def _default(key: str) -> Any:
    """Return a setting's default value."""
    kind: Any = Recipe
    *path, last = key.split(".")
    for part in path:
        kind = kind.model_fields[part].annotation
    return kind.model_fields[last].default


def _policy_gradient(made: object) -> PolicyGradient:
    assert isinstance(made, PolicyGradient)
    return made


def _name(recipe: Recipe) -> str:
    given = recipe.algorithm
    return given if isinstance(given, str) else str(given["name"])


def _algorithm(name: str, algorithm: object) -> Settings:
    made = _policy_gradient(algorithm)
    surrogate = made.surrogate
    assert isinstance(surrogate, Clipped)
    settings: Settings = {
        f"{ACTOR}.clip_ratio": surrogate.low,
        f"{ACTOR}.clip_ratio_low": surrogate.low,
        f"{ACTOR}.clip_ratio_high": surrogate.high,
        f"{ACTOR}.clip_ratio_c": surrogate.dual or NO_CLIP,
        f"{ACTOR}.loss_agg_mode": _average(made.reduce),
        f"{ACTOR}.entropy_coeff": 0,
        f"{ACTOR}.use_kl_loss": False,
        "algorithm.use_kl_in_reward": made.kl is not None,
    }
    if made.kl is not None:
        settings |= {"algorithm.kl_penalty": "kl", "algorithm.kl_ctrl.kl_coef": made.kl.coef}
    if isinstance(made.credit, GAE):
        return settings | _segment(name, made, made.credit, made.critic)
    return settings | _group(made)


def _segment(name: str, made: PolicyGradient, credit: GAE, critic: BoundaryMSE | None) -> Settings:
    assert critic is not None
    settings: Settings = {
        "trainer.v1.trainer_mode": "segment_sync",
        "+segment.algorithm": name,
        "algorithm.adv_estimator": "gae",
        "algorithm.gamma": credit.gamma,
        "algorithm.lam": credit.lam,
        "critic.enable": True,
        "critic.cliprange_value": critic.clip or NO_CLIP,
        "critic.loss_agg_mode": _average(critic.reduce),
    }
    if credit.lam_critic is not None:
        settings["+segment.lam_critic"] = credit.lam_critic
    if not isinstance(credit.over, Token):
        settings |= {f"+segment.partition.{key}": x for key, x in spec_of(credit.over).items()}
    return settings


def _group(made: PolicyGradient) -> Settings:
    """verl's own: our plugin is not asked."""
    settings: Settings = {"trainer.v1.trainer_mode": "sync", "critic.enable": False}
    if isinstance(made.credit, GroupZScore):
        settings |= {
            "algorithm.adv_estimator": "grpo",
            "algorithm.norm_adv_by_std_in_grpo": made.credit.std != "none",
        }
    else:
        assert isinstance(made.credit, LeaveOneOut)
        settings["algorithm.adv_estimator"] = "rloo"
    for term in made.terms:
        assert isinstance(term, LossKL)
        settings |= {
            f"{ACTOR}.use_kl_loss": True,
            f"{ACTOR}.kl_loss_coef": term.coef,
            f"{ACTOR}.kl_loss_type": "low_var_kl",
        }
    return settings


def _average(average: object) -> str | None:
    """verl's name of the average; None: verl does not have it."""
    if isinstance(average, ResponseMean):
        return "seq-mean-token-mean"
    # verl removed means per micro-batch after the authors forked it
    return "token-mean" if isinstance(average, TokenMean | MicroBatchTokenMean) else None


def _data(recipe: Recipe) -> Settings:
    test = recipe.data.test or recipe.data.train
    return {
        "data.train_files": _files(recipe.data.train),
        "data.val_files": _files(test),
        "data.train_batch_size": recipe.rollout.prompts,
        "data.max_prompt_length": _prompt_tokens(recipe),
        "data.max_response_length": recipe.rollout.max_tokens,
        "data.truncation": "error",
        "data.filter_overlong_prompts": recipe.data.skip_bad_rows,
        "data.seed": recipe.seed,
        "reward.custom_reward_function.path": reward_module.__file__,
        "reward.custom_reward_function.name": "compute_score",
        "+reward.custom_reward_function.reward_kwargs.reward": _reward(recipe.reward),
        "+reward.custom_reward_function.reward_kwargs.max_tokens": recipe.rollout.max_tokens,
        "reward.reward_manager.source": "importlib",
        "reward.reward_manager.name": "CountingRewardManager",
        "reward.reward_manager.module.path": "pkg://segcredit.integrations.verl.reward_manager",
    }


def _prompt_tokens(recipe: Recipe) -> int:
    return recipe.data.max_prompt_tokens or PROMPT_TOKENS


def _reward(spec: str | Mapping[str, Any]) -> Any:
    """A function of one's own by its whole path: Ray's workers stand elsewhere."""
    if isinstance(spec, Mapping):
        return {**spec, "name": _reward(str(spec["name"]))}
    file, colon, function = spec.rpartition(":")
    return f"{Path(file).absolute()}:{function}" if colon else spec


def _models(recipe: Recipe) -> Settings:
    model, memory = recipe.model, recipe.memory
    packed = model.attention in ("auto", "packed", "flash_attention_2")
    settings: Settings = {}
    for key in ("actor_rollout_ref.model", "critic.model"):
        settings |= {
            f"{key}.path": model.path,
            f"{key}.enable_gradient_checkpointing": memory.recompute_activations,
            f"{key}.use_remove_padding": packed,
            f"{key}.trust_remote_code": model.trust_remote_code,
        }
        if not packed:
            settings[f"+{key}.override_config.attn_implementation"] = model.attention
    settings["critic.model.tokenizer_path"] = model.path
    engines = (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config", "critic.fsdp")
    settings |= {f"{ACTOR}.strategy": "fsdp2", "critic.strategy": "fsdp2"}
    for engine in engines:
        if engine != f"{REF}.fsdp_config":
            settings[f"{engine}.optimizer_offload"] = bool(memory.offload_optimizer)
        if model.dtype == "float32":
            settings[f"+{engine}.mixed_precision"] = FLOAT32
    if model.dtype == "float32":
        settings[f"{ROLLOUT}.dtype"] = "float32"
    return settings


def _sizes(recipe: Recipe) -> Settings:
    rollout, update = recipe.rollout, recipe.update
    tokens = update.tokens_per_micro
    return {
        **_mismatch(rollout.mismatch_cap),
        f"{ROLLOUT}.n": rollout.samples,
        f"{ROLLOUT}.temperature": rollout.temperature,
        f"{ROLLOUT}.seed": recipe.seed,
        f"{ACTOR}.ppo_mini_batch_size": rollout.prompts // update.minibatches,
        f"{ACTOR}.ppo_epochs": update.epochs,
        f"{ACTOR}.shuffle": True,
        f"{ACTOR}.data_loader_seed": recipe.seed,
        f"{ACTOR}.use_dynamic_bsz": True,
        f"{ACTOR}.ppo_max_token_len_per_gpu": tokens,
        f"{REF}.log_prob_use_dynamic_bsz": True,
        "critic.use_dynamic_bsz": True,
        "critic.ppo_max_token_len_per_gpu": tokens,
        "critic.data_loader_seed": recipe.seed,
    }


def _mismatch(cap: float | None) -> Settings:
    """Settings for truncated importance weights per token in verl's policy loss."""
    if cap is None:
        return {}
    return {
        "algorithm.rollout_correction.rollout_is": "token",
        "algorithm.rollout_correction.rollout_is_threshold": cap,
        f"{ROLLOUT}.calculate_log_probs": True,
    }


def _optimizers(recipe: Recipe) -> Settings:
    given = recipe.optimizer
    settings: Settings = {}
    for key, rate in ((f"{ACTOR}.optim", given.lr), ("critic.optim", given.critic_lr)):
        settings |= {
            f"{key}.lr": rate,
            f"{key}.betas": [given.beta1, given.beta2],
            f"{key}.weight_decay": given.weight_decay,
            f"{key}.clip_grad": given.max_grad_norm,
            f"{key}.lr_warmup_steps": given.warmup_steps,
            f"{key}.lr_scheduler_type": given.schedule,
            f"{key}.min_lr_ratio": given.min_lr_ratio,
            f"+{key}.override_optimizer_config.eps": given.eps,
        }
    return settings


def _stages(recipe: Recipe, folder: Path) -> Settings:
    evaluation, save = recipe.evaluation, recipe.save
    pretraining = sum(x.steps for x in recipe.stages if isinstance(x, PretrainCritic))
    held_out = bool(recipe.data.test)
    # 0: only before and after; if verl validates, it also does so after the last step
    every = evaluation.every or recipe.total_steps
    settings: Settings = {
        "trainer.total_training_steps": recipe.total_steps,
        "trainer.total_epochs": 1_000_000,  # the number of steps decides
        "trainer.test_freq": every if held_out else -1,
        "trainer.val_before_train": held_out,
        f"{ROLLOUT}.val_kwargs.do_sample": True,
        f"{ROLLOUT}.val_kwargs.n": evaluation.samples,
        f"{ROLLOUT}.val_kwargs.temperature": evaluation.temperature,
        f"{ROLLOUT}.val_kwargs.top_p": evaluation.top_p,
        "data.val_max_samples": evaluation.prompts,
        "trainer.save_freq": save.every,
        "trainer.max_actor_ckpt_to_keep": save.keep,
        "trainer.max_critic_ckpt_to_keep": save.keep,
        "trainer.default_local_dir": folder / "checkpoints",
        "trainer.rollout_data_dir": folder / ROLLOUTS if save.rollouts_every else None,
        "trainer.logger": ["console", "file", *save.trackers],
        f"+ray_kwargs.ray_init.runtime_env.env_vars.{LOG_VARIABLE}": folder / METRICS,
        "trainer.project_name": "segcredit",
        "trainer.experiment_name": recipe.name,
    }
    if pretraining:
        settings["+segment.critic_pretraining_steps"] = pretraining
    if VALUE in recipe.make_algorithm().needs:
        settings["+segment.recorded_responses"] = save.rollouts if save.rollouts_every else 0
        settings["+segment.recorded_every"] = max(save.rollouts_every, 1)
    return settings


def _machines(machines: Machines) -> Settings:
    return {
        "trainer.nnodes": machines.nodes,
        "trainer.n_gpus_per_node": machines.gpus,
        f"{ROLLOUT}.name": machines.rollout,
        f"{ROLLOUT}.tensor_model_parallel_size": machines.tensor_parallel,
    }


def _sampler(recipe: Recipe, machines: Machines) -> Settings:
    """vLLM's share of a GPU and its graphs, where the recipe speaks of vLLM, too."""
    if not recipe.rollout.engine == machines.rollout == "vllm":
        return {}
    return {
        f"{ROLLOUT}.gpu_memory_utilization": recipe.rollout.vllm.memory,
        f"{ROLLOUT}.enforce_eager": recipe.rollout.vllm.eager,
    }


def _files(paths: list[str]) -> list[str]:
    """Whole paths: Ray's workers stand elsewhere."""
    return [str(Path(x).absolute()) for x in paths]


def arguments(settings: Mapping[str, Any]) -> list[str]:
    """As verl's command takes them."""
    return [f"{key}={_hydra(x)}" for key, x in settings.items()]


def _hydra(x: Any) -> str:
    """A value in hydra's grammar."""
    if isinstance(x, Mapping):
        return "{" + ",".join(f"{key}:{_hydra(value)}" for key, value in x.items()) + "}"
    if isinstance(x, list | tuple):
        return "[" + ",".join(_hydra(value) for value in x) + "]"
    if x is None:
        return "null"
    if isinstance(x, bool | int | float):
        return str(x)
    text = str(x).replace("${", "\\${")  # no interpolation
    if PLAIN.fullmatch(text):
        return text
    # a backslash needs escaping only before a quote
    quoted = re.sub(r"(\\*)('|$)", lambda x: x[1] * 2 + ("\\'" if x[2] else ""), text)
    return f"'{quoted}'"
