"""The table of translations in verl's own configuration, as its Hydra composes it."""

import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from translations import CASES, SAPO

from segcredit.algorithms.objective import ResponseMean
from segcredit.config import load_recipe
from segcredit.integrations.verl.settings import METHODS, VerlKeys, method, parse
from segcredit.integrations.verl.translate import arguments, translate

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
        keys = VerlKeys.of(config)
        native: Any = recipe.make_algorithm()
        assert bare(method(parse(section), keys)) == bare(native), change
        assert keys.kl_in_reward == ("kl", "fixed", native.kl.coef)


def test_text_arrives_as_it_is() -> None:
    texts = ["it's", "a\\b", "c\\", "\\'", "d\\'e", "${x}", "1e-3", "0.5", "true", "NaN", "a b,c"]
    texts += ["{x: 1}", "[1]", "", " ", "über", "~/m", "a=b", "x:y", "$HOME", '"', "null"]
    for text in texts:
        (said,) = arguments({"trainer.experiment_name": text})
        assert composed(said).trainer.experiment_name == text, said


class Words:
    """As much of a tokenizer as a reward manager uses."""

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
