"""Table of recipe settings and the verl keys that they set."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from segcredit.algorithms.policy_gradient import PolicyGradient
from segcredit.config import PretrainCritic, Recipe
from segcredit.config.recipe import algorithm_of
from segcredit.integrations.verl import reward as reward_module
from segcredit.integrations.verl.counterparts import counterpart_settings
from segcredit.integrations.verl.dumps import METRICS, ROLLOUTS
from segcredit.integrations.verl.settings import (
    ACTOR,
    VerlSettings,
    absolute,
    has_segment_critic,
    method_settings,
)

ROLLOUT, REF = "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
MODELS = ("actor_rollout_ref.model", "critic.model")
OPTIMIZERS = (f"{ACTOR}.optim", "critic.optim")
REWARD = "reward.custom_reward_function"
PROMPT_TOKENS = 1024
"""Default limit on prompts: verl requires one, and a recipe may have none."""
LOG_VARIABLE = "VERL_FILE_LOGGER_PATH"
"""Environment variable of verl's driver: the path of its metrics log."""

COPIED: Mapping[str, tuple[str, ...]] = {
    "name": ("trainer.experiment_name",),
    "seed": (
        *("data.seed", f"{ROLLOUT}.seed"),
        *(f"{ACTOR}.data_loader_seed", "critic.data_loader_seed"),
    ),
    "model.path": (*(f"{x}.path" for x in MODELS), "critic.model.tokenizer_path"),
    "model.trust_remote_code": tuple(f"{x}.trust_remote_code" for x in MODELS),
    "memory.recompute_activations": tuple(f"{x}.enable_gradient_checkpointing" for x in MODELS),
    "data.skip_bad_rows": ("data.filter_overlong_prompts",),
    "rollout.prompts": ("data.train_batch_size",),
    "rollout.samples": (f"{ROLLOUT}.n",),
    "rollout.temperature": (f"{ROLLOUT}.temperature",),
    "rollout.top_p": (f"{ROLLOUT}.top_p",),
    "rollout.max_tokens": ("data.max_response_length", f"+{REWARD}.reward_kwargs.max_tokens"),
    "update.epochs": (f"{ACTOR}.ppo_epochs",),
    "update.entropy_coef": (f"{ACTOR}.entropy_coeff",),
    "update.tokens_per_micro": (
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        "critic.ppo_max_token_len_per_gpu",
    ),
    "optimizer.lr": (f"{ACTOR}.optim.lr",),
    "optimizer.critic_lr": ("critic.optim.lr",),
    "optimizer.weight_decay": tuple(f"{x}.weight_decay" for x in OPTIMIZERS),
    "optimizer.max_grad_norm": tuple(f"{x}.clip_grad" for x in OPTIMIZERS),
    "optimizer.warmup_steps": tuple(f"{x}.lr_warmup_steps" for x in OPTIMIZERS),
    "optimizer.schedule": tuple(f"{x}.lr_scheduler_type" for x in OPTIMIZERS),
    "optimizer.min_lr_ratio": tuple(f"{x}.min_lr_ratio" for x in OPTIMIZERS),
    "optimizer.eps": tuple(f"+{x}.override_optimizer_config.eps" for x in OPTIMIZERS),
    "evaluation.prompts": ("data.val_max_samples",),
    "evaluation.samples": (f"{ROLLOUT}.val_kwargs.n",),
    "evaluation.temperature": (f"{ROLLOUT}.val_kwargs.temperature",),
    "evaluation.top_p": (f"{ROLLOUT}.val_kwargs.top_p",),
    "save.every": ("trainer.save_freq",),
    "save.keep": ("trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep"),
}
"""Settings whose value is copied to one or more verl keys."""

CONSTANT: Mapping[str, Any] = {
    "data.truncation": "error",
    f"{REWARD}.path": reward_module.__file__,
    f"{REWARD}.name": "compute_score",
    "reward.reward_manager.source": "importlib",
    "reward.reward_manager.name": "CountingRewardManager",
    "reward.reward_manager.module.path": "pkg://segcredit.integrations.verl.reward_manager",
    f"{ACTOR}.strategy": "fsdp2",
    "critic.strategy": "fsdp2",
    f"{ACTOR}.shuffle": True,
    f"{ACTOR}.use_dynamic_bsz": True,
    f"{REF}.log_prob_use_dynamic_bsz": True,
    "critic.use_dynamic_bsz": True,
    f"{ROLLOUT}.val_kwargs.do_sample": True,
    "trainer.total_epochs": 1_000_000,  # the number of steps ends the run
    "trainer.project_name": "segcredit",
}
"""verl keys that every run sets to the same value."""

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


@dataclass(frozen=True)
class Cluster:
    """Where verl runs."""

    nodes: int = 1
    gpus: int = 8
    """GPUs of each node."""
    rollout: str = "vllm"
    """verl's rollout engine."""
    tensor_parallel: int = 1
    """GPUs that share one copy of the model while sampling."""


def verl_settings(recipe: Recipe, folder: Path, cluster: Cluster) -> VerlSettings:
    """Collect all verl keys for a recipe that verl can run."""
    copied = {key: value_of(recipe, name) for name, keys in COPIED.items() for key in keys}
    return {
        **_method(recipe),
        **CONSTANT,
        **copied,
        **_data(recipe),
        **_models(recipe),
        **_sizes(recipe),
        **_stages(recipe, folder),
        **_cluster(recipe, cluster),
    }


def _method(recipe: Recipe) -> VerlSettings:
    # without the bonus: verl adds update.entropy_coef itself
    method = policy_gradient(algorithm_of(recipe.algorithm, recipe.rollout.max_tokens))
    if has_segment_critic(method):
        return method_settings(recipe.algorithm, method)
    return counterpart_settings(method)


def value_of(recipe: Recipe, key: str) -> Any:
    """Read a setting by its dotted key."""
    return reduce(getattr, key.split("."), recipe)


def policy_gradient(method: object) -> PolicyGradient:
    """Narrow the type of a method that is known to be a policy gradient."""
    assert isinstance(method, PolicyGradient)
    return method


def prompt_tokens(recipe: Recipe) -> int:
    """Return the maximum length of a prompt on verl."""
    return recipe.data.max_prompt_tokens or PROMPT_TOKENS


def _data(recipe: Recipe) -> VerlSettings:
    data = recipe.data
    return {
        "data.train_files": [str(Path(x).absolute()) for x in data.train],
        "data.val_files": [str(Path(x).absolute()) for x in data.test or data.train],
        "data.max_prompt_length": prompt_tokens(recipe),
        f"+{REWARD}.reward_kwargs.reward": _reward(recipe.reward),
    }


def _reward(spec: str | Mapping[str, Any] | list[Any]) -> Any:
    if isinstance(spec, list):
        return [_reward(x) for x in spec]
    if isinstance(spec, Mapping):
        return {**spec, "name": _reward(str(spec["name"]))}
    return absolute(spec)


def _models(recipe: Recipe) -> VerlSettings:
    model, memory = recipe.model, recipe.memory
    packed = model.attention in ("auto", "packed", "flash_attention_2")
    settings: VerlSettings = {f"{x}.use_remove_padding": packed for x in MODELS}
    if not packed:
        for key in MODELS:
            settings[f"+{key}.override_config.attn_implementation"] = model.attention
    offload = bool(memory.offload_optimizer)
    settings[f"{ACTOR}.fsdp_config.optimizer_offload"] = offload
    settings["critic.fsdp.optimizer_offload"] = offload
    if model.dtype == "float32":
        float32 = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
        settings[f"{ROLLOUT}.dtype"] = "float32"
        for engine in (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config", "critic.fsdp"):
            settings[f"+{engine}.mixed_precision"] = float32
    return settings


def _sizes(recipe: Recipe) -> VerlSettings:
    optimizer, rollout = recipe.optimizer, recipe.rollout
    settings: VerlSettings = {
        f"{ACTOR}.ppo_mini_batch_size": recipe.rollout.prompts // recipe.update.minibatches
    }
    settings |= {f"{x}.betas": [optimizer.beta1, optimizer.beta2] for x in OPTIMIZERS}
    if (cap := rollout.mismatch_cap) is not None:  # importance weights of sampler and trainer
        over = "sequence" if rollout.mismatch_over == "response" else "token"
        bounds = f"{rollout.mismatch_floor}_{cap}" if rollout.mismatch_mask else cap
        settings |= {
            "algorithm.rollout_correction.rollout_is": over,
            "algorithm.rollout_correction.rollout_is_threshold": bounds,
            f"{ROLLOUT}.calculate_log_probs": True,
        }
    return settings


def _stages(recipe: Recipe, folder: Path) -> VerlSettings:
    save, validates = recipe.save, bool(recipe.data.test)
    pretraining = sum(x.steps for x in recipe.stages if isinstance(x, PretrainCritic))
    # 0: only before and after training; if verl validates, it does so after the last step too
    every = recipe.evaluation.every or recipe.total_steps
    settings: VerlSettings = {
        "trainer.total_training_steps": recipe.total_steps,
        "trainer.test_freq": every if validates else -1,
        "trainer.val_before_train": validates,
        "trainer.default_local_dir": folder / "checkpoints",
        "trainer.rollout_data_dir": folder / ROLLOUTS if save.rollouts_every else None,
        "trainer.logger": ["console", "file", *save.trackers],
        f"+ray_kwargs.ray_init.runtime_env.env_vars.{LOG_VARIABLE}": folder / METRICS,
    }
    if pretraining:
        settings["+segment.critic_pretraining_steps"] = pretraining
    if policy_gradient(recipe.make_algorithm()).critic is not None:
        settings["+segment.recorded_responses"] = save.rollouts if save.rollouts_every else 0
        settings["+segment.recorded_every"] = max(save.rollouts_every, 1)
    return settings


def _cluster(recipe: Recipe, cluster: Cluster) -> VerlSettings:
    settings: VerlSettings = {
        "trainer.nnodes": cluster.nodes,
        "trainer.n_gpus_per_node": cluster.gpus,
        f"{ROLLOUT}.name": cluster.rollout,
        f"{ROLLOUT}.tensor_model_parallel_size": cluster.tensor_parallel,
    }
    if recipe.rollout.engine == cluster.rollout == "vllm":
        settings[f"{ROLLOUT}.gpu_memory_utilization"] = recipe.rollout.vllm.memory
        settings[f"{ROLLOUT}.enforce_eager"] = recipe.rollout.vllm.eager
    return settings


_UNQUOTED = re.compile(r"(?!(?i:null|true|false|nan|inf)$)[A-Za-z_/][A-Za-z0-9_./-]*")
"""Text that hydra reads as a string without quotes: no number and no word of its grammar."""


def arguments(settings: Mapping[str, Any]) -> list[str]:
    """Write settings as arguments of verl's command."""
    return [f"{key}={_hydra(x)}" for key, x in settings.items()]


def _hydra(x: Any) -> str:
    """Write a value in hydra's grammar."""
    if isinstance(x, Mapping):
        return "{" + ",".join(f"{key}:{_hydra(value)}" for key, value in x.items()) + "}"
    if isinstance(x, list | tuple):
        return "[" + ",".join(_hydra(value) for value in x) + "]"
    if x is None:
        return "null"
    if isinstance(x, bool | int | float):
        return str(x)
    text = str(x).replace("${", "\\${")  # no interpolation
    if _UNQUOTED.fullmatch(text):
        return text
    # a backslash needs escaping only before a quote
    quoted = re.sub(r"(\\*)('|$)", lambda x: x[1] * 2 + ("\\'" if x[2] else ""), text)
    return f"'{quoted}'"
