"""LoRA: one frozen model, and policy, critic and reference as adapters that do not meet."""

import copy
import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from tiny_policies import drawn, encoded, engine, fresh_policy, seeded
from torch import Tensor

from segcredit.config import OptimizerSettings
from segcredit.models import Critic, Policy, QwenVL
from segcredit.models.layers import full_weights, recompute_activations, set_attention
from segcredit.models.lora import CRITIC, POLICY, REFERENCE, Lora, choose_layers, linear_layers
from segcredit.train.optim import Optimizer
from segcredit.types import Sampling

NAMES = ("qwen2", "qwen2_5_vl")
each = pytest.mark.parametrize("name", NAMES)


def with_lora(name: str, **settings: object) -> Policy:
    return fresh_policy(name).with_lora(4, 8.0, **settings)


def lora_of(policy: Policy) -> Lora:
    assert policy.lora is not None
    return policy.lora


def stir(parameters: Iterable[Tensor], seed: int = 1) -> None:
    """As if they had been trained for long."""
    generator = seeded(seed)
    with torch.no_grad():
        for x in parameters:
            x.add_(0.2 * torch.randn(x.shape, generator=generator))


def logp(policy: Policy, name: str) -> Tensor:
    with torch.no_grad():
        return policy.score(drawn(name), 1.0)[0]


def value(critic: Critic, name: str) -> Tensor:
    with torch.no_grad():
        return critic(drawn(name))


@each
def test_at_the_start_the_policy_is_the_base_and_the_critic_says_nothing(name: str) -> None:
    base, policy = fresh_policy(name), with_lora(name)
    critic = Critic.from_policy(policy)
    assert torch.equal(logp(policy, name), logp(base, name))
    assert not bool(value(critic, name).any())


@each
def test_training_one_leaves_the_others_bit_for_bit(name: str) -> None:
    base, policy = fresh_policy(name), with_lora(name)
    reference, critic = policy.reference(), Critic.from_policy(policy)
    torch.nn.init.normal_(critic.head.weight, generator=seeded())
    before = {key: x.detach().clone() for key, x in base.model.named_parameters()}
    settings = OptimizerSettings()
    pair = {
        one: Optimizer(one, policy.model, 1e-2, settings, trained=part.trained())
        for one, part in ((POLICY, policy), (CRITIC, critic))
    }
    for turn in (POLICY, CRITIC, POLICY):
        said = {
            POLICY: logp(policy, name),
            CRITIC: value(critic, name),
            REFERENCE: logp(reference, name),
        }
        loss = policy.score(drawn(name), 1.0)[0] if turn == POLICY else critic(drawn(name))
        loss.sum().backward()
        pair[turn].step()
        now = {
            POLICY: logp(policy, name),
            CRITIC: value(critic, name),
            REFERENCE: logp(reference, name),
        }
        assert [key for key in said if not torch.equal(said[key], now[key])] == [turn]
    assert torch.equal(logp(reference, name), logp(base, name))
    for key, x in policy.model.named_parameters():
        if ".lora_" not in key:
            assert torch.equal(x, before[key.replace(".base_layer", "")])
            assert x.grad is None


def test_the_reference_of_a_policy_that_has_learned_is_a_third_adapter() -> None:
    policy = with_lora("qwen2")
    lora = lora_of(policy)
    assert policy.reference().adapter is None
    assert lora.names == [POLICY]
    stir(lora.parameters(POLICY))
    then = logp(policy, "qwen2")
    reference = policy.reference()
    assert (reference.adapter, lora.names) == (REFERENCE, [POLICY, REFERENCE])
    stir(lora.parameters(POLICY), seed=2)
    assert torch.equal(logp(reference, "qwen2"), then)
    assert not torch.equal(logp(policy, "qwen2"), then)
    assert not any(x.requires_grad for x in lora.parameters(REFERENCE))
    critic = Critic.from_policy(policy)
    with critic.active():
        pass
    assert not any(x.requires_grad for x in lora.parameters(REFERENCE))


@each
def test_optimizers_hold_their_own_matrices_and_nothing_else(name: str) -> None:
    policy = with_lora(name)
    critic = Critic.from_policy(policy)
    ours, theirs = policy.trained().values(), critic.trained().values()
    assert not {id(x) for x in ours} & {id(x) for x in theirs}
    expected = sum(4 * sum(layer.weight.shape) for layer in chosen_layers(name))
    assert sum(x.numel() for x in ours) == expected
    assert sum(x.numel() for x in theirs) == expected + critic.head.weight.numel() + 1
    together = {id(x) for x in policy.model.parameters() if x.requires_grad}
    assert together == {id(x) for x in [*ours, *theirs] if x is not critic.head.weight} - {
        id(critic.head.bias)
    }
    assert critic.trunk is policy.model.base_model, "no second trunk"


def chosen_layers(name: str) -> list[torch.nn.Linear]:
    layers = linear_layers(fresh_policy(name).model)
    return [layers[key] for key in choose_layers(layers, "language", QwenVL())]


@each
def test_gradients_are_those_of_the_sum_computed_by_hand(name: str) -> None:
    """∂L/∂B = s ∂L/∂W Aᵀ and ∂L/∂A = s Bᵀ ∂L/∂W, at W + s B A."""
    policy = with_lora(name)
    lora = lora_of(policy)
    stir(lora.parameters(POLICY))
    policy.score(drawn(name), 1.0)[0].sum().backward()
    plain = fresh_policy(name)
    plain.model.load_state_dict(dict(full_weights(policy.model)))
    plain.score(drawn(name), 1.0)[0].sum().backward()
    for path, layer in lora._layers.items():
        whole = plain.model.get_submodule(path).weight.grad
        a, b = layer.lora_A[POLICY].weight, layer.lora_B[POLICY].weight
        for got, expected in ((b.grad, 2.0 * whole @ a.T), (a.grad, 2.0 * b.T @ whole)):
            torch.testing.assert_close(
                got, expected.detach(), rtol=1e-3, atol=1e-4 * float(expected.detach().abs().max())
            )


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft's own
@each
def test_merged_weights_are_pefts_own(name: str, tmp_path: Path) -> None:
    policy = with_lora(name)
    lora = lora_of(policy)
    stir(lora.parameters(POLICY))
    Critic.from_policy(policy)
    stir(lora.parameters(CRITIC), seed=3)
    before = copy.deepcopy(policy.model.state_dict())
    found = dict(full_weights(policy.model))
    assert all(torch.equal(x, before[key]) for key, x in policy.model.state_dict().items())
    plain = fresh_policy(name)
    assert list(found) == [key for key, _ in plain.model.named_parameters()]
    lora.save(POLICY, tmp_path)
    theirs = PeftModel.from_pretrained(plain.model, tmp_path).merge_and_unload()
    for key, x in theirs.named_parameters():
        torch.testing.assert_close(found[key], x, rtol=1e-6, atol=1e-6)


@each
def test_a_plain_model_from_the_saved_folder_says_the_same(name: str, tmp_path: Path) -> None:
    policy = with_lora(name, targets="all-linear")
    stir(lora_of(policy).parameters(POLICY))
    policy.save(tmp_path)
    loaded = Policy.from_pretrained(tmp_path)
    torch.testing.assert_close(logp(loaded, name), logp(policy, name), rtol=0, atol=1e-5)
    assert not torch.allclose(logp(fresh_policy(name), name), logp(policy, name), atol=1e-2)


@each
def test_the_sampler_draws_from_the_policys_adapter(name: str) -> None:
    policy = with_lora(name)
    critic = Critic.from_policy(policy)
    stir(policy.trained().values())
    stir(critic.trained().values(), seed=4)
    value(critic, name)
    rollouts = engine(policy).sample(encoded(name), Sampling(12), seeded())
    with torch.no_grad():
        again, _ = policy.score(rollouts, 1.0)
    torch.testing.assert_close(again, rollouts.logp_old, rtol=0, atol=2e-4)


@each
@pytest.mark.parametrize("attention", ["auto", "packed"])
def test_recomputed_activations_give_the_same_gradients(name: str, attention: str) -> None:
    """Both forward passes come before both backward passes: what is computed again must know."""
    found = []
    for again in (False, True):
        policy = with_lora(name)
        set_attention(policy.model, attention)
        stir(policy.trained().values())
        critic = Critic.from_policy(policy)
        stir(critic.trained().values(), seed=5)
        if again:
            recompute_activations(policy.model, policy.lora)
        logp, _ = policy.score(drawn(name), 1.0)
        value = critic(drawn(name))
        value.sum().backward()
        logp.sum().backward()
        assert lora_of(policy).selected == POLICY
        found.append([x.grad for x in (*policy.trained().values(), *critic.trained().values())])
    for plain, recomputed in zip(*found, strict=True):
        assert plain is not None
        assert bool(plain.any())
        torch.testing.assert_close(plain, recomputed, rtol=1e-4, atol=1e-5)


def test_after_an_error_the_policy_is_at_work_again() -> None:
    policy = with_lora("qwen2")
    critic = Critic.from_policy(policy)

    def fail(*_: object) -> None:
        assert lora_of(policy).selected == CRITIC
        raise torch.OutOfMemoryError("CUDA out of memory.")

    critic.trunk.register_forward_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        critic(drawn("qwen2"))
    assert lora_of(policy).selected == POLICY
    assert all(x.requires_grad for x in [*policy.trained().values(), *critic.trained().values()])


def test_in_bfloat16_the_weights_stay_and_the_originals_are_of_adapters_alone() -> None:
    base = fresh_policy("qwen2_5_vl")
    base.model.bfloat16()
    whole = {key: x.detach().clone() for key, x in base.model.named_parameters()}
    policy = base.with_lora(4, 8.0)
    optimizer = Optimizer(POLICY, policy.model, 1e-3, OptimizerSettings(), trained=policy.trained())
    assert all(x.dtype == torch.bfloat16 for x in policy.model.parameters())
    assert all(x.dtype == torch.float32 for x in optimizer.parameters)
    assert optimizer.names == list(policy.trained())
    assert list(map(id, optimizer.weights)) == list(map(id, policy.trained().values()))
    for _ in range(3):
        policy.score(drawn("qwen2_5_vl"), 1.0)[0].sum().backward()
        optimizer.step()
    for key, x in policy.model.named_parameters():
        if ".lora_" not in key:
            assert torch.equal(x, whole[key.replace(".base_layer", "")])
    stir(policy.trained().values())
    merged = fresh_policy("qwen2_5_vl")
    merged.model.bfloat16().load_state_dict(dict(full_weights(policy.model)))
    exact = fresh_policy("qwen2_5_vl")
    exact.model.load_state_dict({key: x.float() for key, x in whole.items()})
    exact = exact.with_lora(4, 8.0)
    with torch.no_grad():
        for x, y in zip(exact.trained().values(), policy.trained().values(), strict=True):
            x.copy_(y)
    beside, summed, right = (logp(x, "qwen2_5_vl") for x in (policy, merged, exact))
    assert beside.dtype == torch.float32
    assert 0.0 < (beside - right).abs().mean() < 1.5 * (summed - right).abs().mean()


@each
def test_adapters_come_back_as_they_were_saved(name: str, tmp_path: Path) -> None:
    policy = with_lora(name)
    stir(policy.trained().values())
    lora_of(policy).save(POLICY, tmp_path)
    other = with_lora(name, seed=9)
    assert not torch.equal(logp(other, name), logp(policy, name))
    lora_of(other).load(POLICY, tmp_path)
    assert torch.equal(logp(other, name), logp(policy, name))
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["peft_type"]) == (4, 8.0, "LORA")
    with pytest.raises(ValueError, match=r"rank 4 for 14 layers; model.lora sets rank 2 and"):
        lora_of(fresh_policy(name).with_lora(2, 8.0)).load(POLICY, tmp_path)


def test_the_fingerprint_is_of_the_frozen_weights_alone() -> None:
    policy = with_lora("qwen2")
    lora = lora_of(policy)
    before = lora.fingerprint()
    stir(policy.trained().values())
    assert lora.fingerprint() == before == lora_of(with_lora("qwen2")).fingerprint()
    with torch.no_grad():
        policy.model.model.norm.weight[0] += 1.0
    assert lora.fingerprint() != before


def test_adapters_begin_by_the_seed_alone() -> None:
    torch.manual_seed(1)
    one = with_lora("qwen2", seed=3).trained()
    torch.manual_seed(2)
    state = torch.get_rng_state()
    same, other = with_lora("qwen2", seed=3).trained(), with_lora("qwen2", seed=4).trained()
    assert list(one) == list(same) == list(other)
    assert all(torch.equal(x, same[name]) for name, x in one.items())
    assert not all(torch.equal(x, other[name]) for name, x in one.items())
    assert torch.equal(torch.get_rng_state(), state)


def test_targets() -> None:
    model = fresh_policy("qwen2_5_vl").model
    names = list(linear_layers(model))
    language = choose_layers(names, "language", QwenVL())
    assert language
    assert not any("visual" in name for name in language)
    everything = choose_layers(names, "all-linear", QwenVL())
    assert any("visual" in name for name in everything)
    assert not any("lm_head" in name for name in everything)
    assert choose_layers(names, "all-linear", QwenVL(), vision=False) == language
    both = choose_layers(names, ["gate_proj"], QwenVL())
    assert {"visual" in name for name in both} == {True, False}
    assert {"visual" in x for x in choose_layers(names, ["gate_proj"], QwenVL(), vision=False)} == {
        False
    }
    one = choose_layers(names, ["language_model.layers.0.mlp.up_proj", "v_proj"], QwenVL())
    assert len(one) == 3
    assert choose_layers(names, "q_proj", QwenVL()) == choose_layers(names, ["q_proj"], QwenVL())


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["q_prj"], "no linear layer is called 'q_prj'. This model has q_proj, k_proj, v_proj"),
        (["q_proj", "lm_head"], "no linear layer is called 'lm_head'"),
        (["embed_tokens"], "no linear layer is called 'embed_tokens'"),
        (["roj"], "no linear layer is called 'roj'"),
        ([], "; none. This model has"),
        ("languages", "no linear layer is called 'languages'"),
    ],
)
def test_targets_that_are_none(targets: str | list[str], said: str) -> None:
    names = list(linear_layers(fresh_policy("qwen2").model))
    with pytest.raises(
        ValueError, match=r"^model.lora.targets: expected language, all-linear"
    ) as e:
        choose_layers(names, targets, QwenVL())
    assert said in str(e.value)
