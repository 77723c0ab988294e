"""A recipe of ours as settings of verl: the same run, said in its words."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segcredit.algorithms import make_algorithm
from segcredit.algorithms.credit import GAE, GroupZScore, LeaveOneOut
from segcredit.algorithms.objective import BoundaryMSE, Clipped, LossKL, ResponseMean
from segcredit.algorithms.policy_gradient import PolicyGradient
from segcredit.config import Optimize, PretrainCritic, Recipe
from segcredit.integrations.verl import reward as reward_module
from segcredit.integrations.verl.dumps import METRICS, ROLLOUTS
from segcredit.integrations.verl.rows import is_verls
from segcredit.integrations.verl.settings import (
    METHODS,
    NO_CLIP,
    NO_VALUES,
    asks_the_critic,
)
from segcredit.partition import PARTITIONS, Partition, Token, settings_of

ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{x}" for x in ("actor", "rollout", "ref"))
FLOAT32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}

LOG_VARIABLE = "VERL_FILE_LOGGER_PATH"
"""By which verl is told where its log of metrics goes; in the environment of its driver."""
PLAIN = re.compile(r"[A-Za-z0-9_./-]+")
"""Text that hydra reads as it stands."""

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


def translate(recipe: Recipe, folder: Path, machines: Machines | None = None) -> Translated:
    """verl's settings for the recipe; ``folder`` is where the run is kept."""
    machines = machines or Machines()
    problems, notes = _problems(recipe, machines), _notes(recipe)
    if problems:
        raise ValueError("\n".join(problems))
    parts = (
        _algorithm(recipe),
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
    return Translated(settings, tuple(notes))


def _problems(recipe: Recipe, machines: Machines) -> list[str]:
    found = []
    if recipe.model.path is None:
        found.append("verl trains checkpoints: set model.path to a folder or hub id")
    if not recipe.data.train:
        found.append("verl reads files of rows: set data.train, and data.test for evaluation")
    if recipe.data.suffix is not None:
        found.append(
            "data.suffix is joined to prompts by our reader, not by verl's: write it into the "
            "rows (segcredit prepare does) and remove data.suffix"
        )
    for name in (*recipe.data.train, *recipe.data.test):
        if (path := Path(name)).is_file() and not is_verls(path):
            found.append(
                f"{name} holds rows that verl cannot read: it wants prompt as a list of messages, "
                f"and reward_model.ground_truth. Type: segcredit prepare --help"
            )
    for stage in recipe.stages:
        if not isinstance(stage, PretrainCritic | Optimize):
            found.append(f"verl has no {stage.kind} stage: do it with segcredit train first")
        elif isinstance(stage, PretrainCritic):
            found += _pretraining_problems(stage, recipe)
    kinds = [stage.kind for stage in recipe.stages]
    if kinds not in (["optimize"], ["pretrain_critic", "optimize"]):
        found.append(
            f"verl runs critic pretraining, then optimisation; got stages {', '.join(kinds)}"
        )
    rows = recipe.rollout.prompts
    if rows % recipe.update.minibatches:
        found.append(
            f"verl's mini-batches are equal: {rows} prompts do not split into "
            f"{recipe.update.minibatches}. Change rollout.prompts or update.minibatches"
        )
    workers = machines.nodes * machines.gpus
    size = rows // recipe.update.minibatches * recipe.rollout.samples
    if size % workers:
        found.append(
            f"a mini-batch of {size} responses does not split over {workers} GPUs. "
            f"Change update.minibatches, --nodes or --gpus"
        )
    name = _name(recipe)
    if name not in (*METHODS, "grpo", "rloo"):
        found.append(
            f"{name} does not run on verl through this plugin; those that do: "
            f"{', '.join((*METHODS, 'grpo', 'rloo'))}"
        )
    elif name in METHODS:
        found += _untold(name, recipe.make_algorithm())
    if recipe.optimizer.schedule == "linear":
        found.append("verl has no linear schedule: set optimizer.schedule to constant or cosine")
    return found


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


def _untold(name: str, made: object) -> list[str]:
    """Settings of the method for which neither verl nor the plugin has a word."""
    usual = make_algorithm(name)
    assert isinstance(made, PolicyGradient)
    assert isinstance(usual, PolicyGradient)
    assert made.critic is not None
    assert usual.critic is not None
    assert isinstance(made.credit, GAE)
    assert isinstance(usual.credit, GAE)
    parts = {
        "value_at": made.credit.value_at == usual.credit.value_at,
        "whiten and algorithm.clamp": made.adjust == usual.adjust,
        "value_everywhere": made.critic.everywhere == usual.critic.everywhere,
    }
    found = [
        f"algorithm.{key} cannot be said to verl: remove it, or use segcredit train"
        for key, same in parts.items()
        if not same
    ]
    return found + ([f"algorithm.partition: {NO_VALUES}"] if asks_the_critic(made) else [])


def _notes(recipe: Recipe) -> list[str]:
    found = []
    if recipe.optimizer.weight_decay:
        found.append("verl decays norms and biases too; segcredit train decays matrices alone")
    if recipe.model.freeze_vision:
        found.append("freeze_vision depends on verl's engine: check that it honours it")
    if recipe.model.critic is not None:
        found.append("model.critic stays behind: verl's critic begins at the policy's weights")
    if recipe.evaluation.greedy and recipe.evaluation.samples:
        found.append("verl validates greedily or by sampling, not both: sampling is chosen")
    if recipe.optimizer.eps != 1e-8:
        found.append("optimizer.eps is torch's default in verl")
    return found


def _name(recipe: Recipe) -> str:
    given = recipe.algorithm
    return given if isinstance(given, str) else str(given["name"])


def _algorithm(recipe: Recipe) -> Settings:
    made = recipe.make_algorithm()
    assert isinstance(made, PolicyGradient)
    surrogate = made.surrogate
    assert isinstance(surrogate, Clipped)
    settings: Settings = {
        f"{ACTOR}.clip_ratio": surrogate.low,
        f"{ACTOR}.clip_ratio_low": surrogate.low,
        f"{ACTOR}.clip_ratio_high": surrogate.high,
        f"{ACTOR}.clip_ratio_c": surrogate.dual or NO_CLIP,
        f"{ACTOR}.loss_agg_mode": _average(made.reduce),
        f"{ACTOR}.entropy_coeff": 0,
        "algorithm.use_kl_in_reward": made.kl is not None,
    }
    if made.kl is not None:
        settings |= {"algorithm.kl_penalty": "kl", "algorithm.kl_ctrl.kl_coef": made.kl.coef}
    if isinstance(made.credit, GAE):
        return settings | _segment(_name(recipe), made, made.credit, made.critic)
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
        settings |= {f"+segment.partition.{key}": x for key, x in _partition(credit.over).items()}
    return settings


def _partition(over: Partition) -> Mapping[str, Any]:
    name = next(name for name, kind in PARTITIONS.items() if type(over) is kind)
    return {"name": name, **{x: getattr(over, x) for x in settings_of(name)}}


def _group(made: PolicyGradient) -> Settings:
    """verl's own: our plugin is not asked."""
    settings: Settings = {"trainer.v1.trainer_mode": "sync", "critic.enable": False}
    if isinstance(made.credit, GroupZScore):
        settings |= {
            "algorithm.adv_estimator": "grpo",
            "algorithm.norm_adv_by_std_in_grpo": made.credit.std is not None,
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


def _average(reduce: object) -> str:
    return "seq-mean-token-mean" if isinstance(reduce, ResponseMean) else "token-mean"


def _data(recipe: Recipe) -> Settings:
    test = recipe.data.test or recipe.data.train
    return {
        "data.train_files": _files(recipe.data.train),
        "data.val_files": _files(test),
        "data.train_batch_size": recipe.rollout.prompts,
        "data.max_prompt_length": recipe.data.max_prompt_tokens or 1024,
        "data.max_response_length": recipe.rollout.max_tokens,
        "data.truncation": "error",
        "data.filter_overlong_prompts": recipe.data.skip_bad_rows,
        "data.seed": recipe.seed,
        "reward.custom_reward_function.path": reward_module.__file__,
        "reward.custom_reward_function.name": "compute_score",
        "+reward.custom_reward_function.reward_kwargs.reward": _reward(recipe.reward),
    }


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
            settings[f"{engine}.optimizer_offload"] = memory.offload_optimizer
        if model.dtype == "float32":
            settings[f"+{engine}.mixed_precision"] = FLOAT32
    settings[f"{ACTOR}.freeze_vision_tower"] = model.freeze_vision
    if model.dtype == "float32":
        settings[f"{ROLLOUT}.dtype"] = "float32"
    return settings


def _sizes(recipe: Recipe) -> Settings:
    rollout, update = recipe.rollout, recipe.update
    tokens = update.tokens_per_micro
    return {
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
        }
    return settings


def _stages(recipe: Recipe, folder: Path) -> Settings:
    evaluation, save = recipe.evaluation, recipe.save
    pretraining = sum(x.steps for x in recipe.stages if isinstance(x, PretrainCritic))
    sampled = evaluation.samples > 0
    settings: Settings = {
        "trainer.total_training_steps": recipe.total_steps,
        "trainer.total_epochs": 1_000_000,  # the number of steps decides
        "trainer.test_freq": evaluation.every or -1,
        "trainer.val_before_train": True,
        f"{ROLLOUT}.val_kwargs.do_sample": sampled,
        f"{ROLLOUT}.val_kwargs.n": evaluation.samples if sampled else 1,
        f"{ROLLOUT}.val_kwargs.temperature": evaluation.temperature if sampled else 0,
        f"{ROLLOUT}.val_kwargs.top_p": evaluation.top_p if sampled else 1.0,
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
    if "value" in recipe.make_algorithm().needs:
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
    text = str(x)
    if PLAIN.fullmatch(text):
        return text
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
