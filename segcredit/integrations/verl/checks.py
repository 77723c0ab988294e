"""Settings of verl under which segment credit cannot be: refused before anything is started."""

from typing import Any


def check(config: Any, use_critic: bool) -> None:
    """Raise ValueError on the first setting that does not go together, with what to type."""
    for problem in _problems(config, use_critic):
        raise ValueError(problem)


def _problems(config: Any, use_critic: bool) -> Any:
    actor, critic, algorithm = config.actor_rollout_ref.actor, config.critic, config.algorithm
    if not use_critic or str(algorithm.adv_estimator) != "gae":
        yield (
            f"segment credit needs a critic; got algorithm.adv_estimator="
            f"{algorithm.adv_estimator} and critic.enable={critic.enable}. "
            f"Set algorithm.adv_estimator=gae critic.enable=True."
        )
    correction = algorithm.get("rollout_correction") or {}
    if correction.get("bypass_mode", False):
        yield (
            "segments are cut by the entropies of π_old, and bypass mode computes none. "
            "Set algorithm.rollout_correction.bypass_mode=False."
        )
    if correction.get("rollout_rs") is not None:
        yield (
            f"rejection sampling takes tokens out of responses after they were cut; got "
            f"algorithm.rollout_correction.rollout_rs={correction.get('rollout_rs')}. "
            f"Set algorithm.rollout_correction.rollout_rs=null; importance weights (rollout_is) "
            f"may stay."
        )
    loss_mode = actor.policy_loss.get("loss_mode", "vanilla")
    if loss_mode != "vanilla":
        yield (
            f"segment.algorithm chooses the policy loss; got "
            f"actor_rollout_ref.actor.policy_loss.loss_mode={loss_mode}. Leave it at vanilla."
        )
    if critic.model.get("use_fused_kernels", False):
        yield (
            "fused kernels compute log-probabilities, which a value model has none of. "
            "Set critic.model.use_fused_kernels=False."
        )
    if critic.model.get("lora_rank", 0):
        yield (
            "with adapters the value head stays frozen where it begins, at 0. "
            "Set critic.model.lora_rank=0."
        )
    distillation = config.get("distillation") or {}
    if distillation.get("enabled", False):
        yield "segment credit and distillation do not go together. Set distillation.enabled=False."
    section = config.get("segment") or {}
    if section.get("critic_pretraining_steps", 0) and config.trainer.critic_warmup:
        yield (
            f"two counts of steps without a policy update: trainer.critic_warmup="
            f"{config.trainer.critic_warmup} and segment.critic_pretraining_steps="
            f"{section['critic_pretraining_steps']}. Set trainer.critic_warmup=0."
        )
