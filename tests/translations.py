"""Every setting of a recipe, changed once, and what must become of it on verl.

``tests/integrations/test_verl_translation.py`` compares the table with the recipe's classes and
with the translation; ``tests/verl/test_verl_composed.py`` with verl's composed configuration.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, get_args

from pydantic import BaseModel

from segcredit.algorithms import ALGORITHMS
from segcredit.config import Recipe
from segcredit.integrations.verl.settings import METHODS
from segcredit.rewards import REWARDS

SAPO, GRPO = "geo3k/qwen2.5-vl-3b-sapo", "geo3k/qwen2.5-vl-3b-grpo"
ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{x}" for x in ("actor", "rollout", "ref"))
MODEL, CRITIC_MODEL = "actor_rollout_ref.model", "critic.model"
REWARD = "reward.custom_reward_function.reward_kwargs.reward"


@dataclass(frozen=True)
class Case:
    """A change of a recipe, and one of: values that arrive, a refusal, or no counterpart."""

    changes: tuple[str, ...]
    arrives: Mapping[str, Any] = field(default_factory=dict)
    """verl's keys and values, none of which the unchanged recipe has."""
    refused: str | None = None
    """What the refusal says; it names the setting."""
    unused: bool = False
    """Whether the setting has no counterpart on verl."""
    recipe: str = SAPO
    accept: bool = False
    """With --accept-departures."""


def arrives(*changes: str, recipe: str = SAPO, accept: bool = False, **keys: Any) -> Case:
    return Case(changes, keys["to"], recipe=recipe, accept=accept)


def refused(match: str, *changes: str, recipe: str = SAPO) -> Case:
    return Case(changes, refused=match, recipe=recipe)


def unused(*changes: str) -> Case:
    return Case(changes, unused=True)


def _stages(kind: str, setting: str) -> str:
    steps = "" if setting.startswith("steps") else "steps: 2, "
    first = f"{{kind: {kind}, {steps}{setting}}}, "
    return f"stages=[{first}{{kind: optimize, steps: 2}}]"


def _both(name: str, value: Any) -> dict[str, Any]:
    return {f"{MODEL}.{name}": value, f"{CRITIC_MODEL}.{name}": value}


def _optim(name: str, value: Any) -> dict[str, Any]:
    return {f"{ACTOR}.optim.{name}": value, f"critic.optim.{name}": value}


WORLD = ("data.world=ledger", "data.train=[]", "data.test=[]")
TINY = ("model.path=null", "model.tiny=llama", *WORLD, _stages("warm_start", "batch: 2"))
WARM = r"verl has no warm_start stage"
FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}

SETTINGS: dict[str, Case] = {
    "name": arrives("name=other", to={"trainer.experiment_name": "other"}),
    "seed": arrives(
        "seed=7",
        to={
            "data.seed": 7,
            f"{ROLLOUT}.seed": 7,
            f"{ACTOR}.data_loader_seed": 7,
            "critic.data_loader_seed": 7,
        },
    ),
    "threads": unused("threads=3"),
    "model.path": arrives("model.path=a/b", to=_both("path", "a/b")),
    "model.tiny": refused(r"model\.tiny: verl trains checkpoints", *TINY),
    "model.family": unused("model.family=qwen3_vl"),
    "model.hidden": unused("model.hidden=64"),
    "model.layers": unused("model.layers=3"),
    "model.heads": unused("model.heads=2"),
    "model.kv_heads": unused("model.kv_heads=2"),
    "model.vision_layers": unused("model.vision_layers=2"),
    "model.dtype": arrives(
        "model.dtype=float32",
        to={
            f"{ROLLOUT}.dtype": "float32",
            f"{ACTOR}.fsdp_config.mixed_precision": FP32,
            f"{REF}.fsdp_config.mixed_precision": FP32,
            "critic.fsdp.mixed_precision": FP32,
        },
    ),
    "model.attention": arrives(
        "model.attention=eager",
        to=_both("override_config.attn_implementation", "eager")
        | _both("use_remove_padding", False),
    ),
    "model.compile": unused("model.compile=true"),
    "model.freeze_vision": refused(r"model\.freeze_vision: ", "model.freeze_vision=true"),
    "model.critic": refused(r"model\.critic: ", "model.critic=runs/x/critic"),
    "model.lora.rank": refused(r"model\.lora is not carried over", "model.lora={rank: 8}"),
    "model.lora.alpha": refused(r"model\.lora is not carried over", "model.lora={alpha: 8}"),
    "model.lora.targets": refused(r"model\.lora is not", "model.lora={targets: all-linear}"),
    "model.device": unused("model.device=cuda"),
    "model.trust_remote_code": arrives(
        "model.trust_remote_code=true", to=_both("trust_remote_code", True)
    ),
    "data.train": arrives("data.train=[/x/a.parquet]", to={"data.train_files": ["/x/a.parquet"]}),
    "data.test": arrives("data.test=[/x/b.jsonl]", to={"data.val_files": ["/x/b.jsonl"]}),
    "data.system": refused(r"data\.system is applied by our reader", "data.system=Think."),
    "data.suffix": refused(r"data\.suffix is applied by our reader", "data.suffix=Think."),
    "data.template": refused(
        r"data\.template is applied by our reader", "data.template='Q: {question} A:'"
    ),
    "data.max_prompt_tokens": arrives(
        "data.max_prompt_tokens=77", to={"data.max_prompt_length": 77}
    ),
    "data.skip_bad_rows": arrives(
        "data.skip_bad_rows=true", to={"data.filter_overlong_prompts": True}
    ),
    "data.world": refused(r"data\.world: verl reads files", *WORLD),
    "data.settings": refused(r"data\.world: ", *WORLD, "data.settings={}"),
    "data.allow_outside": unused("data.allow_outside=true"),
    "data.size": unused("data.size=7"),
    "data.curriculum": refused(r"data\.curriculum: ", "data.curriculum=true"),
    "reward": arrives("reward=math", to={REWARD: "math"}),
    "algorithm": arrives("algorithm=ppo", to={"segment.algorithm": "ppo"}),
    "stages.warm_start.steps": refused(WARM, _stages("warm_start", "steps: 3")),
    "stages.warm_start.batch": refused(WARM, _stages("warm_start", "batch: 2")),
    "stages.warm_start.lr": refused(WARM, _stages("warm_start", "lr: 1e-3")),
    "stages.warm_start.phase": refused(WARM, _stages("warm_start", "phase: x")),
    "stages.warm_start.schedule": refused(WARM, _stages("warm_start", "schedule: cosine")),
    "stages.warm_start.warmup_steps": refused(WARM, _stages("warm_start", "warmup_steps: 1")),
    "stages.warm_start.min_lr_ratio": refused(WARM, _stages("warm_start", "min_lr_ratio: 1")),
    "stages.warm_start.hold": refused(WARM, _stages("warm_start", "hold: 0.5")),
    "stages.warm_start.beta2": refused(WARM, _stages("warm_start", "beta2: 0.9")),
    "stages.pretrain_critic.steps": arrives(
        _stages("pretrain_critic", "steps: 3"),
        to={"segment.critic_pretraining_steps": 3, "trainer.total_training_steps": 5},
    ),
    "stages.pretrain_critic.lr": refused(
        r"remove the stage's lr", _stages("pretrain_critic", "lr: 1e-3")
    ),
    "stages.pretrain_critic.schedule": refused(
        r"remove the stage's schedule", _stages("pretrain_critic", "schedule: cosine")
    ),
    "stages.pretrain_critic.epochs": refused(
        r"set the stage's epochs to 1", _stages("pretrain_critic", "epochs: 2")
    ),
    "stages.pretrain_critic.prompts": refused(
        r"remove the stage's prompts", _stages("pretrain_critic", "prompts: 64")
    ),
    "stages.pretrain_critic.minibatches": refused(
        r"remove the stage's minibatches", _stages("pretrain_critic", "minibatches: 2")
    ),
    "stages.optimize.steps": arrives(
        "stages=[{kind: optimize, steps: 9}]", to={"trainer.total_training_steps": 9}
    ),
    "rollout.prompts": arrives(
        "rollout.prompts=64",
        to={"data.train_batch_size": 64, f"{ACTOR}.ppo_mini_batch_size": 16},
    ),
    "rollout.samples": arrives("rollout.samples=3", to={f"{ROLLOUT}.n": 3}),
    "rollout.max_tokens": arrives(
        "rollout.max_tokens=99",
        to={
            "data.max_response_length": 99,
            "reward.custom_reward_function.reward_kwargs.max_tokens": 99,
        },
    ),
    "rollout.temperature": arrives("rollout.temperature=0.7", to={f"{ROLLOUT}.temperature": 0.7}),
    "rollout.top_p": arrives("rollout.top_p=0.9", to={f"{ROLLOUT}.top_p": 0.9}),
    "rollout.stop": refused(r"rollout\.stop: verl's rollout settings", "rollout.stop=[x]"),
    "rollout.prefixes": refused(r"rollout\.prefixes limits", "rollout.prefixes=8"),
    "rollout.tree.branching": refused("rollout.tree is for", "rollout.tree={branching: [2, 2]}"),
    "rollout.tree.tokens": refused("rollout.tree is for", "rollout.tree={tokens: 5}"),
    "rollout.rows": unused("rollout.rows=8"),
    "rollout.engine": unused("rollout.engine=vllm"),
    "rollout.graphs": unused("rollout.graphs=false"),
    "rollout.vllm.memory": arrives(
        "rollout.engine=vllm",
        "rollout.vllm.memory=0.3",
        to={f"{ROLLOUT}.gpu_memory_utilization": 0.3},
    ),
    "rollout.vllm.eager": arrives(
        "rollout.engine=vllm", "rollout.vllm.eager=true", to={f"{ROLLOUT}.enforce_eager": True}
    ),
    "rollout.old_logp": refused(
        r"rollout\.old_logp: ", "rollout.old_logp=sampler", "model.dtype=float32"
    ),
    "rollout.mismatch_cap": arrives(
        "rollout.mismatch_cap=3",
        to={
            "algorithm.rollout_correction.rollout_is": "token",
            "algorithm.rollout_correction.rollout_is_threshold": 3.0,
        },
    ),
    "rollout.mismatch_over": arrives(
        *("rollout.mismatch_cap=3", "rollout.mismatch_over=response"),
        to={"algorithm.rollout_correction.rollout_is": "sequence"},
    ),
    "rollout.mismatch_mask": refused(
        r"rollout\.mismatch_mask: ", "rollout.mismatch_cap=3", "rollout.mismatch_mask=true"
    ),
    "rollout.mismatch_floor": arrives(
        "rollout.mismatch_cap=5",
        "rollout.mismatch_mask=true",
        "rollout.mismatch_floor=0.5",
        to={"algorithm.rollout_correction.rollout_is_threshold": "0.5_5.0"},
    ),
    "rollout.refills": refused(r"rollout\.refills: ", "rollout.refills=3", "rollout.samples=4"),
    "rollout.refill_by": refused(
        *(r"rollout\.refills: ", "rollout.refills=3", "rollout.samples=4"),
        "rollout.refill_by=reward",
    ),
    "rollout.ahead": refused(r"rollout\.ahead: ", "rollout.ahead=1"),
    "rollout.device": refused(r"rollout\.ahead: ", "rollout.ahead=1", "rollout.device=cpu"),
    "update.entropy_coef": arrives("update.entropy_coef=0.01", to={f"{ACTOR}.entropy_coeff": 0.01}),
    "update.mask_truncated": refused(r"update\.mask_truncated: ", "update.mask_truncated=true"),
    "update.minibatches": arrives("update.minibatches=2", to={f"{ACTOR}.ppo_mini_batch_size": 256}),
    "update.epochs": arrives("update.epochs=3", to={f"{ACTOR}.ppo_epochs": 3}),
    "update.tokens_per_micro": arrives(
        "update.tokens_per_micro=4096",
        to={
            f"{ACTOR}.ppo_max_token_len_per_gpu": 4096,
            "critic.ppo_max_token_len_per_gpu": 4096,
        },
    ),
    "memory.recompute_activations": arrives(
        "memory.recompute_activations=false", to=_both("enable_gradient_checkpointing", False)
    ),
    "memory.offload_optimizer": arrives(
        "memory.offload_optimizer=false",
        to={
            f"{ACTOR}.fsdp_config.optimizer_offload": False,
            "critic.fsdp.optimizer_offload": False,
        },
    ),
    "memory.shard": unused("memory.shard=true"),
    "optimizer.kind": refused(r"optimizer\.kind: ", "optimizer.kind=adamw_8bit"),
    "optimizer.lr": arrives("optimizer.lr=3e-5", to={f"{ACTOR}.optim.lr": 3e-5}),
    "optimizer.critic_lr": arrives("optimizer.critic_lr=4e-5", to={"critic.optim.lr": 4e-5}),
    "optimizer.beta1": arrives("optimizer.beta1=0.8", to=_optim("betas", [0.8, 0.999])),
    "optimizer.beta2": arrives("optimizer.beta2=0.95", to=_optim("betas", [0.9, 0.95])),
    "optimizer.eps": arrives(
        "optimizer.eps=1e-5", to=_optim("override_optimizer_config.eps", 1e-5)
    ),
    "optimizer.weight_decay": arrives("optimizer.weight_decay=0.1", to=_optim("weight_decay", 0.1)),
    "optimizer.max_grad_norm": arrives("optimizer.max_grad_norm=0.5", to=_optim("clip_grad", 0.5)),
    "optimizer.schedule": arrives(
        "optimizer.schedule=cosine", to=_optim("lr_scheduler_type", "cosine")
    ),
    "optimizer.warmup_steps": arrives("optimizer.warmup_steps=5", to=_optim("lr_warmup_steps", 5)),
    "optimizer.min_lr_ratio": arrives("optimizer.min_lr_ratio=0.2", to=_optim("min_lr_ratio", 0.2)),
    "evaluation.every": arrives("evaluation.every=7", to={"trainer.test_freq": 7}),
    "evaluation.prompts": arrives("evaluation.prompts=50", to={"data.val_max_samples": 50}),
    "evaluation.samples": arrives("evaluation.samples=4", to={f"{ROLLOUT}.val_kwargs.n": 4}),
    "evaluation.greedy": Case(("evaluation.greedy=true",)),  # a note: see NOTES
    "evaluation.temperature": arrives(
        "evaluation.temperature=0.3", to={f"{ROLLOUT}.val_kwargs.temperature": 0.3}
    ),
    "evaluation.top_p": arrives("evaluation.top_p=0.8", to={f"{ROLLOUT}.val_kwargs.top_p": 0.8}),
    "evaluation.watch": unused("evaluation.watch=2"),
    "evaluation.metric": refused(r"save\.best: ", "evaluation.metric=reward", "save.best=true"),
    "evaluation.patience": refused(r"evaluation\.patience: ", "evaluation.patience=3"),
    "evaluation.min_gain": refused(
        r"evaluation\.patience: ", "evaluation.min_gain=0.1", "evaluation.patience=3"
    ),
    "save.best": refused(r"save\.best: ", "save.best=true"),
    "save.every": arrives("save.every=3", to={"trainer.save_freq": 3}),
    "save.keep": arrives(
        "save.keep=5",
        to={"trainer.max_actor_ckpt_to_keep": 5, "trainer.max_critic_ckpt_to_keep": 5},
    ),
    "save.rollouts_every": arrives("save.rollouts_every=4", to={"segment.recorded_every": 4}),
    "save.rollouts": arrives("save.rollouts=5", to={"segment.recorded_responses": 5}),
    "save.trackers": arrives(
        "save.trackers=[wandb]", to={"trainer.logger": ["console", "file", "wandb"]}
    ),
}
"""By the setting's name in a recipe; a stage's by its kind."""

NOTES = {
    ("evaluation.greedy=true",): "evaluation.greedy: ",
    ("optimizer.warmup_steps=5",): "optimizer.warmup_steps: ",
    ("data.max_prompt_tokens=null",): "data.max_prompt_tokens is not set",
    ("data.test=[]",): "data.test is empty",
    ("memory.offload_optimizer=stream",): "memory.offload_optimizer=stream: ",
}
"""Changes that verl follows in another way, and how the note begins."""

MORE: dict[str, Case] = {
    "reward: several": arrives(
        "reward=[geo3k, {name: exact, weight: 0.5}]",
        to={REWARD: ["geo3k", {"name": "exact", "weight": 0.5}]},
    ),
    "evaluation.every=0: before and after": arrives(
        "evaluation.every=0", to={"trainer.test_freq": 200}
    ),
    "data.test=[]: no validation": arrives(
        "data.test=[]", to={"trainer.test_freq": -1, "trainer.val_before_train": False}
    ),
    "save.rollouts_every=0: none": arrives(
        "save.rollouts_every=0",
        to={"trainer.rollout_data_dir": None, "segment.recorded_responses": 0},
    ),
    "data.train: a hub id": refused(
        r"data\.train: verl reads files .*got openai/gsm8k", "data.train=[openai/gsm8k]"
    ),
    "update.tokens_per_micro below the longest": refused(
        r"update\.tokens_per_micro: .*3072 tokens.*got 3000", "update.tokens_per_micro=3000"
    ),
    "optimizer.schedule=linear": refused(r"optimizer\.schedule", "optimizer.schedule=linear"),
    "cosine beside critic pretraining": refused(
        r"optimizer\.schedule=constant", _stages("pretrain_critic", ""), "optimizer.schedule=cosine"
    ),
    "name: a number": arrives("name='123'", to={"trainer.experiment_name": "123"}),
    "name: a word of hydra's": arrives("name='null'", to={"trainer.experiment_name": "null"}),
}
"""Further values of settings that are not translated one to one."""

CLIP = {f"{ACTOR}.clip_ratio_low": 0.1, f"{ACTOR}.clip_ratio_high": 0.3}
KL = {
    "algorithm.use_kl_in_reward": True,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.05,
}
PART = "segment.partition"
SEGMENT: dict[str, tuple[str, dict[str, Any] | None]] = {
    "fraction": ("0.1", {f"{PART}.name": "entropy", f"{PART}.fraction": 0.1}),
    "lam": ("0.5", {"algorithm.lam": 0.5}),
    "lam_critic": ("0.8", {"segment.lam_critic": 0.8}),
    "gamma": ("0.9", {"algorithm.gamma": 0.9}),
    "clip": ("[0.1, 0.3]", CLIP),
    "kl": ("0.05", KL),
    "partition": ("{name: fixed, size: 4}", {f"{PART}.name": "fixed", f"{PART}.size": 4}),
    "dual_clip": ("4.0", {f"{ACTOR}.clip_ratio_c": 4.0}),
    "token_mean": ("true", {f"{ACTOR}.loss_agg_mode": "token-mean"}),
    "value_at": ("end", None),
    "whiten": ("true", None),
    "clamp": ("5", None),
    "value_everywhere": ("true", None),
}
"""Settings of the methods that the plugin computes: a value, and what arrives; None: refused."""

KL_LOSS = {
    f"{ACTOR}.use_kl_loss": True,
    f"{ACTOR}.kl_loss_coef": 0.02,
    f"{ACTOR}.kl_loss_type": "low_var_kl",
}
CLAMPED = r"algorithm\.kl: verl's KL loss is k3 clamped at 10"


def _group(spec: str, to: Mapping[str, Any]) -> Case:
    return arrives(f"algorithm={{{spec}}}", recipe=GRPO, to=to)


def _not_group(match: str, spec: str) -> Case:
    return refused(match, f"algorithm={{{spec}}}", recipe=GRPO)


def _accepted(spec: str, to: Mapping[str, Any]) -> Case:
    return arrives(f"algorithm={{{spec}}}", recipe=GRPO, accept=True, to=to)


LOSS, AVERAGE = f"{ACTOR}.policy_loss.loss_mode", f"{ACTOR}.loss_agg_mode"
CONSTANT = {AVERAGE: "seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor": 256}
KL_REWARD = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.02}
KL_SQUARED = {
    f"{ACTOR}.use_kl_loss": True,
    f"{ACTOR}.kl_loss_coef": 0.02,
    f"{ACTOR}.kl_loss_type": "mse",
}
PP, PP_BASELINE = (
    {"algorithm.adv_estimator": f"reinforce_plus_plus{x}"} for x in ("", "_baseline")
)
GROUP: dict[str, dict[str, Case]] = {
    "grpo": {
        "std": _group("name: grpo, kl: 0, std: none", {"algorithm.norm_adv_by_std_in_grpo": False}),
        "eps": _not_group(r"algorithm\.eps: .*adds 1e-06", "name: grpo, kl: 0, eps: 1e-4"),
        "clip": _group("name: grpo, kl: 0, clip: [0.1, 0.3]", CLIP),
        "kl": _not_group(CLAMPED, "name: grpo, kl: 0.02"),
        "reduce": _group(
            "name: grpo, kl: 0, reduce: token", {f"{ACTOR}.loss_agg_mode": "token-mean"}
        ),
        "dual_clip": _group("name: grpo, kl: 0, dual_clip: 4", {f"{ACTOR}.clip_ratio_c": 4.0}),
        "kl_clamp": _group("name: grpo, kl: 0.02, kl_clamp: 10", KL_LOSS),
        "kl_reduce": _not_group(
            r"algorithm\.kl: verl averages the KL loss as the policy loss",
            "name: grpo, kl: 0.02, kl_clamp: 10, kl_reduce: sum",
        ),
        "limit": _not_group(r"algorithm\.limit: .*at 20", "name: grpo, kl: 0, limit: 10"),
        "whiten": _not_group(r"grpo whitens", "name: grpo, kl: 0, whiten: true"),
    },
    "grpo_verl": {
        "clip": _group("name: grpo_verl, clip: [0.1, 0.3]", CLIP),
        "kl": _group("name: grpo_verl, kl: 0.02", KL_LOSS),
    },
    "grpo_deepseekmath": {
        "clip": _group("name: grpo_deepseekmath, kl: 0, clip: [0.1, 0.3]", CLIP),
        "kl": _not_group(CLAMPED, "name: grpo_deepseekmath, kl: 0.02"),
    },
    "grpo_trl": {
        "clip": _not_group(r"algorithm\.eps: .*adds 1e-06", "name: grpo_trl, clip: [0.1, 0.3]"),
        "kl": _not_group(r"algorithm\.eps: .*adds 1e-06", "name: grpo_trl, kl: 0.02"),
    },
    "dapo": {
        "clip": _group("name: dapo, clip: [0.1, 0.3]", CLIP),
        "dual_clip": _group("name: dapo, dual_clip: 4", {f"{ACTOR}.clip_ratio_c": 4.0}),
        "eps": _not_group(r"algorithm\.eps: .*adds 1e-06", "name: dapo, eps: 1e-4"),
    },
    "dr_grpo": {
        "max_tokens": _group("name: dr_grpo, max_tokens: 256", CONSTANT),
        "clip": _group("name: dr_grpo, max_tokens: 256, clip: [0.1, 0.3]", CONSTANT | CLIP),
        "kl": _not_group(CLAMPED, "name: dr_grpo, kl: 0.02"),
    },
    "cispo": {
        "weight": _group(  # distances from 1
            "name: cispo, weight: [0.9, 1.3]", {**CLIP, LOSS: "cispo", AVERAGE: "token-mean"}
        ),
        "kl": _not_group(CLAMPED, "name: cispo, kl: 0.02"),
        "eps": _not_group(r"algorithm\.eps: .*adds 1e-06", "name: cispo, eps: 1e-4"),
    },
    "gmpo": {
        "clip": _accepted("name: gmpo, clip: [0.1, 0.3]", {**CLIP, LOSS: "geo_mean"}),
        "kl": _not_group(CLAMPED, "name: gmpo, kl: 0.02"),
        "partition": _not_group(
            r"gmpo does not run on verl: verl's geo_mean loss has one ratio per response",
            "name: gmpo, partition: newline",
        ),
    },
    "soft_adaptive": {
        "positive": _group(
            "name: soft_adaptive, positive: 1.5",
            {LOSS: "sapo", f"{ACTOR}.tau_pos": 1.5, f"{ACTOR}.tau_neg": 1.05},
        ),
        "negative": _group("name: soft_adaptive, negative: 1.2", {f"{ACTOR}.tau_neg": 1.2}),
        "kl": _not_group(CLAMPED, "name: soft_adaptive, kl: 0.02"),
        "eps": _not_group(r"algorithm\.eps: .*adds 1e-06", "name: soft_adaptive, eps: 1e-4"),
    },
    "gspo": {
        "clip": _group("name: gspo, clip: [0.1, 0.3]", {**CLIP, LOSS: "gspo"}),
        "kl": _not_group(CLAMPED, "name: gspo, kl: 0.02"),
        "tokenwise": _group("name: gspo, tokenwise: true", {LOSS: "gspo"}),
    },
    "reinforce_pp": {
        "gamma": _group("name: reinforce_pp, gamma: 0.9", {**PP, "algorithm.gamma": 0.9}),
        "clip": _group("name: reinforce_pp, clip: [0.1, 0.3]", PP | CLIP),
        "kl": _group("name: reinforce_pp, kl: 0.02", PP | KL_REWARD),
    },
    "reinforce_pp_baseline": {
        "clip": _group("name: reinforce_pp_baseline, clip: [0.1, 0.3]", PP_BASELINE | CLIP),
        "kl": _group("name: reinforce_pp_baseline, kl: 0.02", PP_BASELINE | KL_SQUARED),
    },
    "rloo": {
        "clip": _accepted("name: rloo, clip: [0.1, 0.3]", CLIP),
        "kl": _accepted("name: rloo, kl: 0.02", KL_REWARD),
    },
    "rloo_reinforce": {
        "kl": _group(
            "name: rloo_reinforce, kl: 0.02",
            {**KL_REWARD, LOSS: "gpg", AVERAGE: "seq-mean-token-sum"},
        ),
    },
}
"""The same for the methods that verl computes itself."""

GROUP_VALUES = {
    "grpo.std=population": _not_group(
        r"algorithm\.std: .*sample .*or by nothing; got population",
        "name: grpo, kl: 0, std: population",
    ),
    "rloo": _not_group(
        r"verl clips the ratio of each token; rloo clips that of the response", "name: rloo"
    ),
    "gmpo": _not_group(r"verl's geo_mean averages each micro-batch", "name: gmpo"),
    "rloo, accepted": arrives(
        "algorithm=rloo",
        recipe=GRPO,
        accept=True,
        to={
            "algorithm.adv_estimator": "rloo",
            "algorithm.use_kl_in_reward": True,
            "algorithm.kl_ctrl.kl_coef": 0.05,
        },
    ),
}


def leaves(kind: type[BaseModel] = Recipe, head: str = "") -> Iterator[str]:
    """Every setting of the recipe's classes by its name."""
    for name, info in kind.model_fields.items():
        models = list(_models(info.annotation))
        for model in models:
            stage = f"{model.model_fields['kind'].default}." if len(models) > 1 else ""
            yield from leaves(model, f"{head}{name}.{stage}")
        if not models and not (name == "kind" and head.startswith("stages.")):
            yield head + name


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def segment_cases() -> dict[str, Case]:
    """One case for each setting of each method of the plugin."""
    found = {}
    for name in METHODS:
        for key in signature(ALGORITHMS[name]).parameters:
            value, to = SEGMENT[key]  # KeyError: say above what becomes of it
            changes = (f"algorithm={name}", f"algorithm.{key}={value}")
            found[f"{name}.{key}"] = (
                refused(rf"algorithm\.{key} has no key on verl", *changes)
                if to is None
                else arrives(*changes, to=to)
            )
    return found


def group_cases() -> dict[str, Case]:
    """One case for each setting of each method that verl computes itself."""
    return {
        f"{name}.{key}": cases[key]  # KeyError: say above what becomes of it
        for name, cases in GROUP.items()
        for key in signature(ALGORITHMS[name]).parameters
    }


LIMITS = {"url": "http://localhost:2", "deadline": 9, "batch_seconds": 9, "workers": 9}
REMOTE: dict[str, dict[str, Any]] = {
    "judge": {
        **LIMITS,
        "model": "m",
        "prompt": "{response}",
        "highest": 9,
        "correct_from": 1,
        "max_tokens": 9,
    },
    "server": {**LIMITS, "batch": 9},
}
"""Settings of the rewards that ask a server, and a value."""


def reward_cases() -> dict[str, Case]:
    """One case for each setting of each reward that has a name."""
    values = {"length_penalty": "authors", "extract": "hash"}
    found = {}
    for name, make in REWARDS.items():
        for key, parameter in signature(make).parameters.items():
            if name in REMOTE:
                spec = {"name": name, "url": "http://localhost:1", key: REMOTE[name][key]}
                found[f"{name}.{key}"] = refused(
                    f"reward: verl grades one response at a time, and {name} sends",
                    f"reward={spec}",
                )
                continue
            usual = parameter.default
            value = values.get(key, usual + 1 if isinstance(usual, int | float) else usual)
            spec = {"name": name, key: value}
            found[f"{name}.{key}"] = arrives(f"reward={spec}", to={REWARD: spec})
    return found


CASES = SETTINGS | MORE | segment_cases() | group_cases() | GROUP_VALUES | reward_cases()
