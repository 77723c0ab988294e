"""examples/sapo_loop.py learns, is short, and computes what the trainer computes."""

import copy
from types import ModuleType

import pytest
import torch
from test_examples import EXAMPLES, load_example

from segcredit.algorithms import sapo
from segcredit.config import parse_recipe
from segcredit.data.worlds import make_world
from segcredit.models import Critic, Policy
from segcredit.rollout import HFEngine
from segcredit.train.build import make_plan
from segcredit.train.collect import Context
from segcredit.train.metrics import Metrics
from segcredit.train.optim import CriticLearner, PolicyLearner, make_optimizer
from segcredit.train.state import State
from segcredit.train.step import update
from segcredit.types import Encoded, Prompt, Rollouts

EPS = 1e-4
"""AdamW's ε: at 1e-8 a step is nearly sign(g), which magnifies the rounding of small gradients."""


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_example("sapo_loop", monkeypatch)


def trainer_state(loop: ModuleType, model: torch.nn.Module, value_model: torch.nn.Module) -> State:
    """The trainer's state with copies of the loop's models and its settings."""
    given, world = loop.Settings(), make_world("derived_variables")
    recipe = parse_recipe(
        {
            "model": {"tiny": "qwen2"},
            "data": {"world": "derived_variables"},
            "reward": "exact",
            "algorithm": "sapo",
            "stages": [{"kind": "warm_start", "steps": 1}, {"kind": "optimize", "steps": 3}],
            "update": {"minibatches": given.minibatches, "epochs": 1},
            "optimizer": {"lr": given.lr, "critic_lr": given.critic_lr, "eps": EPS},
        },
        "test",
    )
    policy = Policy.tiny("qwen2", world.tokenizer(), hidden=32, layers=1, heads=4)
    policy = Policy(copy.deepcopy(model), policy.codec)
    vars(policy)["banned"] = None  # the loop's vocabulary has no tokens of prompts only
    critic = Critic.from_policy(policy)
    critic.trunk.load_state_dict(value_model.trunk.state_dict())
    critic.head.load_state_dict(value_model.head.state_dict())
    algorithm = sapo(given.fraction, given.lam, given.gamma, (given.clip, given.clip), given.kl)
    plan = make_plan(recipe)
    engine = HFEngine(policy.model, policy.end_tokens, policy.banned)
    state = State(recipe, algorithm, policy, engine, plan.reward, plan.train, plan.test)
    settings = recipe.optimizer
    state.learners["policy"] = PolicyLearner(
        policy, make_optimizer("policy", policy.model, given.lr, settings), 1.0
    )
    state.learners["critic"] = CriticLearner(
        critic, make_optimizer("critic", critic, given.critic_lr, settings)
    )
    return state


def as_rollouts(loop: ModuleType, batch: object, state: State, reference: Policy) -> Rollouts:
    """Annotate the loop's responses with the trainer's own models."""
    prompts = [
        Encoded(Prompt(str(n), ()), row[: loop.P], torch.arange(loop.P)[None])
        for n, row in enumerate(batch.tokens)
    ]
    bare = Rollouts.from_columns(batch.mask, tokens=batch.tokens[:, loop.P :], prompts=prompts)
    with torch.no_grad():
        logp, entropy = state.policy.score(bare, 1.0, with_entropy=True)
        logp_ref, _ = reference.score(bare, 1.0)
        value = state.learners["critic"].critic(bare)
    count = len(batch.tokens)
    return Rollouts(
        tokens=batch.tokens[:, loop.P :],
        mask=batch.mask,
        logp_old=logp,
        reward=batch.reward,
        group=torch.arange(count),
        truncated=torch.zeros(count, dtype=torch.bool),
        entropy=entropy,
        value=value,
        logp_ref=logp_ref,
        prompts=prompts,
    )


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_losses_gradients_and_weights_are_the_trainers(loop: ModuleType) -> None:
    """Three rollout batches of four mini-batches, from the same weights and responses."""
    torch.manual_seed(0)
    settings, drawn = loop.Settings(), torch.Generator().manual_seed(0)
    policy = loop.make_policy(hidden=32, layers=1)
    loop.warm_start(policy, 20, drawn)
    critic, reference = loop.Critic(policy), copy.deepcopy(policy)
    torch.nn.init.normal_(critic.head.weight, std=0.1)
    state = trainer_state(loop, policy, critic)
    ref = Policy(copy.deepcopy(reference), state.policy.codec)
    vars(ref)["banned"] = None
    optimizers = (
        loop.adamw(policy, settings.lr, EPS),
        loop.adamw(critic, settings.critic_lr, EPS),
    )
    start = copy.deepcopy(policy.state_dict())
    for step in range(3):
        prompts = loop.make_prompts(16, drawn)
        tokens, mask = loop.sample(policy, prompts, drawn)
        reward = loop.grade(prompts, tokens[:, loop.P :], mask)
        batch = loop.assign_credit(policy, critic, reference, tokens, mask, reward, settings)
        rollouts = as_rollouts(loop, batch, state, ref)
        theirs = state.algorithm.prepare(rollouts)
        assert torch.equal(batch.credit.segments.index, theirs.credit.segments.index)
        close(batch.credit.advantage, theirs.credit.advantage)

        context = Context(state, Metrics(), ("optimize", step))
        order = theirs.split_rows(
            settings.minibatches, context.generator("minibatches", "optimize", step, 0)
        )
        part = state.algorithm.minibatch(theirs.select(order[0]))
        for model in (policy, critic):
            model.zero_grad()  # the last mini-batch's gradient
        loop.policy_loss(policy, batch, order[0], settings).backward()
        loop.value_loss(critic, batch, order[0]).backward()
        for name, model, own in (
            ("policy", policy, state.policy.model),
            ("critic", critic, state.learners["critic"].critic),
        ):
            state.learners[name].backward(state.algorithm, part)
            for one, other in zip(model.parameters(), own.parameters(), strict=True):
                close(one.grad, other.grad)
            model.zero_grad()
            state.learners[name].optimizer.zero_grad()

        losses = loop.update(policy, critic, optimizers, batch, order, settings)
        update(context, state.algorithm, theirs, ("policy", "critic"), epochs=1)
        logged = context.log.result()
        for name, number in losses.items():
            assert number == pytest.approx(logged[name], abs=1e-6)
        for name, weight in state.policy.model.state_dict().items():
            close(policy.state_dict()[name], weight)
        for name, weight in state.learners["critic"].critic.state_dict().items():
            close(critic.state_dict()[name], weight)
    assert any((start[name] - x).abs().max() > 1e-3 for name, x in policy.state_dict().items())


def test_is_one_short_file() -> None:
    assert len((EXAMPLES / "sapo_loop.py").read_text().splitlines()) < 300


@pytest.mark.slow
def test_learns(loop: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = loop.main([])
    assert before < 0.7 < 0.9 < after
    assert "before SAPO" in capsys.readouterr().out
