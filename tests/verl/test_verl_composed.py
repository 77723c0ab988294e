"""The table of translations in verl's own configuration, as its Hydra composes it."""

import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from translations import CASES, GRPO, SAPO

from segcredit.algorithms.objective import ResponseMean
from segcredit.config import load_recipe
from segcredit.integrations.verl.counterparts import LOSSES
from segcredit.integrations.verl.mapping import arguments
from segcredit.integrations.verl.settings import (
    KL,
    KL_DETAILS,
    METHODS,
    make_method,
    parse_settings,
    read_keys,
)
from segcredit.integrations.verl.translate import translate

ARRIVING = {name: x for name, x in CASES.items() if x.refused is None and not x.unused}
FOLDER = Path("/runs/x")


@cache
def composed(*overrides: str) -> Any:
    from hydra import compose, initialize_config_module

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with initialize_config_module("verl.trainer.config", version_base=None):
            return compose("ppo_trainer", list(overrides))


def of_recipe(name: str, changes: tuple[str, ...], accept: bool = False) -> Any:
    recipe = load_recipe(name, changes)
    return composed(*arguments(translate(recipe, FOLDER, None, accept).settings))


@pytest.mark.parametrize("name", ARRIVING)
def test_the_value_arrives_in_verls_configuration(name: str) -> None:
    from omegaconf import OmegaConf

    case = ARRIVING[name]
    config = of_recipe(case.recipe, case.changes, case.accept)
    plain = {key: OmegaConf.select(config, key) for key in case.arrives}
    assert {
        key: OmegaConf.to_container(x, resolve=True) if OmegaConf.is_config(x) else x
        for key, x in plain.items()
    } == case.arrives


def test_what_verl_derives_from_it_follows() -> None:
    """Keys that verl fills from others: the critic's mini-batches, reference and sampler."""
    changes = ("update.epochs=3", "update.minibatches=2", "update.tokens_per_micro=4096")
    config = of_recipe(SAPO, changes)
    actor, critic = config.actor_rollout_ref.actor, config.critic
    assert (critic.ppo_epochs, critic.ppo_mini_batch_size, critic.shuffle) == (3, 256, True)
    assert critic.forward_max_token_len_per_gpu == 4096
    assert config.actor_rollout_ref.ref.log_prob_max_token_len_per_gpu == 4096
    assert config.actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu == 4096
    assert config.actor_rollout_ref.rollout.response_length == 2048
    assert config.data.shuffle
    assert actor.policy_loss.loss_mode == "vanilla"


@pytest.mark.parametrize("name", METHODS)
def test_the_plugin_makes_the_recipes_method_of_it(name: str) -> None:
    """The whole method, averages and KL apart, which verl applies."""

    def bare(made: Any) -> Any:
        critic = replace(made.critic, reduce=ResponseMean())
        return replace(made, reduce=ResponseMean(), critic=critic, kl=None)

    changes = [CASES[key].changes for key in ARRIVING if key.startswith(f"{name}.")]
    for change in [(f"algorithm={name}",), *changes]:
        recipe, config = load_recipe(SAPO, change), of_recipe(SAPO, change)
        from omegaconf import OmegaConf

        section = OmegaConf.to_container(config.segment, resolve=True)
        keys = read_keys(config)
        native: Any = recipe.make_algorithm()
        assert bare(make_method(parse_settings(section), keys)) == bare(native), change
        assert [keys[key] for key in (KL, *KL_DETAILS)] == [True, "kl", "fixed", native.kl.coef]


def test_text_arrives_as_it_is() -> None:
    texts = ["it's", "a\\b", "c\\", "\\'", "d\\'e", "${x}", "1e-3", "0.5", "true", "NaN", "a b,c"]
    texts += ["{x: 1}", "[1]", "", " ", "über", "~/m", "a=b", "x:y", "$HOME", '"', "null"]
    for text in texts:
        (said,) = arguments({"trainer.experiment_name": text})
        assert composed(said).trainer.experiment_name == text, said


class Words:
    """The part of a tokenizer that a reward manager uses."""

    eos_token_id = 2

    def decode(self, tokens: Any, skip_special_tokens: bool) -> str:
        return r"<think>2 + 2</think>\boxed{4}"


@pytest.mark.parametrize("length", [100, 950, 999, 1000])
@pytest.mark.parametrize("ended", [True, False])
def test_verls_reward_workers_count_tokens(length: int, ended: bool) -> None:
    """Well below the limit, near it, and at it: the reward of the native trainer."""
    import asyncio

    import numpy as np
    import torch
    from tensordict import TensorDict

    from segcredit.rewards import make_reward
    from segcredit.types import Prompt, Response

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from verl import DataProto
        from verl.trainer.ppo.reward import load_reward_manager

        changes = ("reward={name: geo3k, length_penalty: authors}", "rollout.max_tokens=1000")
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        manager = load_reward_manager(of_recipe(SAPO, changes), Words())
    response = torch.ones(length, dtype=torch.int64)
    response[-1] = Words.eos_token_id if ended else 7
    prompt = torch.ones(5, dtype=torch.int64)
    whole = torch.cat([prompt, response])
    tensors = {"prompts": prompt, "responses": response, "attention_mask": torch.ones_like(whole)}
    row = {
        "data_source": "geo3k",
        "reward_model": {"ground_truth": "4"},
        "extra_info": {"index": 1},
    }
    data = DataProto(
        batch=TensorDict({name: x[None] for name, x in tensors.items()}, batch_size=1),
        non_tensor_batch={name: np.array([x]) for name, x in row.items()},
    )
    found = loop.run_until_complete(manager.run_single(data))
    asyncio.set_event_loop(None)
    loop.close()
    with make_reward({"name": "geo3k", "length_penalty": "authors"}) as reward:
        cut = length == 1000 and not ended
        text = Words().decode(response, skip_special_tokens=True)
        (native,) = reward([Response(Prompt("x", (), answer="4"), text, length, cut, 1000)])
    assert found["reward_score"] == native.value
    assert found["reward_extra_info"]["acc"] == 1.0


GROUP_METHODS = [
    "{name: grpo_verl, kl: 0.02}",
    "{name: grpo, kl: 0.02, kl_clamp: 10, std: none, clip: [0.1, 0.3]}",
    "{name: grpo, kl: 0, dual_clip: 2, reduce: token}",
    "{name: grpo_deepseekmath, kl: 0}",
    "{name: dapo}",
    "{name: dr_grpo, max_tokens: 11}",
    "{name: cispo, weight: [0.4, 1.7]}",
    "{name: gmpo}",
    "{name: soft_adaptive, negative: 1.3}",
    "{name: gspo, clip: [0.05, 0.2]}",
    "{name: gspo, clip: [0.05, 0.2], tokenwise: true}",
    "{name: reinforce_pp, gamma: 0.9, kl: 0.05}",
    "{name: reinforce_pp_baseline, kl: 0.02}",
    "{name: rloo_reinforce}",
]


def verls_loss(config: Any, batch: dict[str, Any]) -> Any:
    """Compute the policy's loss with the functions that verl's trainer finds by these keys."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from verl.trainer.ppo.core_algos import (
            agg_loss,
            get_adv_estimator_fn,
            get_policy_loss_fn,
            kl_penalty,
        )
        from verl.utils.config import omega_conf_to_dataclass

        actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    mask, logp, old, reference = (batch[x] for x in ("mask", "logp", "old", "reference"))
    rows, scores = torch.arange(len(mask)), torch.zeros(mask.shape, dtype=torch.float64)
    scores[rows, mask.sum(dim=1) - 1] = batch["reward"]
    algorithm = config.algorithm
    if algorithm.use_kl_in_reward:
        penalty = kl_penalty(old, reference, algorithm.kl_penalty) * mask
        scores = scores - algorithm.kl_ctrl.kl_coef * penalty
    given = {"index": batch["group"].numpy(), "config": algorithm}
    if algorithm.adv_estimator == "grpo":  # as verl's compute_advantage passes it
        given["norm_adv_by_std_in_grpo"] = algorithm.norm_adv_by_std_in_grpo
    estimate = get_adv_estimator_fn(algorithm.adv_estimator)
    advantage, _ = estimate(token_level_rewards=scores, response_mask=mask.double(), **given)
    actor.global_batch_info["loss_scale_factor"] = actor.loss_scale_factor  # as ppo_loss does
    average = {"loss_mask": mask.double(), "loss_agg_mode": actor.loss_agg_mode}
    loss, _ = get_policy_loss_fn(actor.policy_loss.loss_mode)(
        old_log_prob=old,
        log_prob=logp,
        advantages=advantage,
        response_mask=mask.double(),
        loss_agg_mode=actor.loss_agg_mode,
        config=actor,
    )
    if actor.use_kl_loss:
        estimates = kl_penalty(logp, reference, actor.kl_loss_type)
        scale = actor.loss_scale_factor
        penalty = agg_loss(loss_mat=estimates, loss_scale_factor=scale, **average)
        loss = loss + actor.kl_loss_coef * penalty
    return loss


@pytest.mark.parametrize("spec", GROUP_METHODS)
def test_verls_own_functions_compute_the_recipes_group_method(spec: str) -> None:
    """Loss and gradient of a ragged batch, far enough from π_old and π_ref for every clamp."""
    import torch

    from segcredit.types import Outputs, Rollouts

    config = of_recipe(GRPO, (f"algorithm={spec}",), accept="gmpo" in spec)
    random = torch.Generator().manual_seed(1)
    rows, width = 24, 9
    length = torch.randint(1, width + 1, (rows, 1), generator=random)
    mask = torch.arange(width) < length
    old, new, reference = (
        -1 + scale * torch.randn(rows, width, generator=random, dtype=torch.float64)
        for scale in (0.1, 1.0, 3.0)
    )
    reward = torch.rand(rows, generator=random, dtype=torch.float64)
    group = torch.arange(rows) // 4

    def gradient(loss: Any, at: Any) -> Any:
        return torch.autograd.grad(loss, at)[0]

    logp = new.clone().requires_grad_()
    columns = {"mask": mask, "logp": logp, "old": old, "reference": reference}
    theirs = verls_loss(config, {**columns, "reward": reward, "group": group})
    algorithm = load_recipe(GRPO, (f"algorithm={spec}",)).make_algorithm()
    rollouts = Rollouts(
        tokens=mask.long(),
        mask=mask,
        logp_old=old,
        reward=reward,
        group=group,
        truncated=torch.zeros(rows, dtype=torch.bool),
        logp_ref=reference,
    )
    batch = algorithm.minibatch(algorithm.prepare(rollouts))
    ours_at = new.clone().requires_grad_()
    ours = algorithm.loss(Outputs(ours_at), batch).policy
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)
    found, expected = gradient(ours, ours_at), gradient(theirs, logp)
    torch.testing.assert_close(found, torch.where(mask, expected, 0.0), rtol=1e-6, atol=1e-8)


def test_the_names_of_estimators_and_losses_are_verls() -> None:
    """What the refusals say that verl lacks is absent from its registries, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

    assert {*LOSSES.values(), "clip_cov", "kl_cov"} <= POLICY_LOSS_REGISTRY.keys()
    estimators = ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
    assert set(estimators) <= {str(getattr(x, "value", x)) for x in ADV_ESTIMATOR_REGISTRY}
    known = " ".join((*POLICY_LOSS_REGISTRY, *map(str, ADV_ESTIMATOR_REGISTRY))).lower()
    for absent in ("dpo", "vine", "tree", "tracked", "single_stream", "top_entropy", "vppo"):
        assert absent not in known.replace("gdpo", ""), absent
