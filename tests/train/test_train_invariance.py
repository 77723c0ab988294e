"""What must not change an update: micro-batches, the order of rows, the number of processes."""

import copy
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from train.small import SMALL, recipe

from segcredit.columns import LOGP_REF
from segcredit.models import Policy
from segcredit.train.build import build, make_plan
from segcredit.train.collect import Context, collect
from segcredit.train.distributed import Parallel
from segcredit.train.metrics import Metrics
from segcredit.train.stages import next_prompts, stage_of
from segcredit.train.step import update

TOLERANCE = 1e-5
METHODS = {
    "sapo": ({"name": "sapo", "kl": 0.01}, 1),
    "ppo": ("ppo", 1),
    "vapo": ({"name": "vapo", "alpha": 0.5}, 4),
    "grpo": ("grpo", 4),
    "gspo": ("gspo", 4),
    "rloo": ("rloo", 4),
}


def small_state(method: str, world: str):
    algorithm, samples = METHODS[method]
    made = recipe(
        SMALL[world],
        algorithm,
        rollout={"prompts": 24 // samples, "samples": samples, "max_tokens": 16},
        update={"minibatches": 1},
    )
    state = build(make_plan(made))
    stage_of(state, made.stages[-1]).enter()
    if "critic" in state.learners:  # a new head is zero, and its trunk would get no gradient
        torch.nn.init.normal_(
            state.learners["critic"].critic.head.weight, std=0.1, generator=torch.manual_seed(0)
        )
    with torch.no_grad():  # a reference that differs, so that the KL term has a gradient
        if LOGP_REF in state.providers:
            for x in state.providers[LOGP_REF].reference.model.parameters():
                x.mul_(0.97)
    return state


def collected(state):
    found = collect(Context(state, Metrics(), ("test",)), next_prompts(state), state.columns)
    rewards = torch.arange(len(found.rollouts)) % 3 / 2.0  # not all equal, as random weights' are
    return found.rollouts.replace(reward=rewards)


def gradients(state, rollouts, budget: int) -> dict[str, torch.Tensor]:
    """Of one update with one mini-batch, before the norm is clipped."""
    changed = {"minibatches": 1, "tokens_per_micro": budget}
    state.recipe = state.recipe.model_copy(
        update={"update": state.recipe.update.model_copy(update=changed)}
    )
    kept = {}
    optimizers = state.optimizers()
    for optimizer in optimizers:

        def keep(factor, optimizer=optimizer):
            for i, x in enumerate(optimizer.parameters):
                kept[f"{optimizer.name} {i}"] = copy.deepcopy(x.grad)
            optimizer.zero_grad()
            return {}

        optimizer.step = keep
    batch = state.algorithm.prepare(rollouts)
    trained = [x.name for x in state.optimizers()]
    update(Context(state, Metrics(), ("test",)), state.algorithm, batch, trained, epochs=1)
    return kept


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Relative, over all parameters of each model together."""
    assert a.keys() == b.keys()
    worst = 0.0
    for model in ("policy", "critic"):
        names = [name for name in a if name.startswith(model)]
        if names:
            x, y = (torch.cat([part[name].flatten() for name in names]) for part in (a, b))
            assert float(x.norm()) > 0.0
            worst = max(worst, float((x - y).norm() / x.norm()))
    return worst


@pytest.mark.parametrize("world", [pytest.param("grid", marks=pytest.mark.slow), "chains"])
@pytest.mark.parametrize("method", METHODS)
def test_micro_batches_do_not_change_the_gradient(method, world):
    state = small_state(method, world)
    rollouts = collected(state)
    whole = gradients(state, rollouts, 10**9)
    for budget in (1, 150):  # one row at a time; a few rows
        assert distance(whole, gradients(state, rollouts, budget)) < TOLERANCE


@pytest.mark.parametrize("world", ["grid", "chains"])
def test_the_order_of_rows_does_not_change_the_gradient(world):
    state = small_state("sapo", world)
    rollouts = collected(state)
    whole = gradients(state, rollouts, 10**9)
    order = torch.randperm(len(rollouts), generator=torch.Generator().manual_seed(1))
    assert distance(whole, gradients(state, rollouts.select(order), 300)) < TOLERANCE


def updated(policy: Path, parallel: Parallel) -> dict[str, dict]:
    """Two updates of whole weights, and of adapters: this process's models and metrics."""
    small, found = SMALL["grid"], {}
    for trained, lora in {"weights": None, "lora": {"rank": 4, "alpha": 8}}.items():
        made = recipe(
            small,
            {"name": "sapo", "kl": 0.01},
            model={"tiny": small.tiny, **small.sizes, "lora": lora},
            rollout={"prompts": 24, "samples": 1, "max_tokens": 16},
            optimizer={"lr": 1e-3, "critic_lr": 1e-3, "eps": 1e-3},
        )
        state = build(make_plan(made), Policy.from_pretrained(str(policy)), parallel=parallel)
        stage_of(state, made.stages[-1]).enter()
        metrics = []
        for _ in range(2):
            metrics.append(stage_of(state, made.stages[-1]).step()[0])
            state.step += 1
            state.stage_step += 1
        weights = {f"policy.{k}": v for k, v in state.policy.model.state_dict().items()}
        weights |= {
            f"critic.{k}": v for k, v in state.learners["critic"].critic.state_dict().items()
        }
        found[trained] = {"weights": weights, "metrics": metrics}
    return found


WORKER = """
import sys
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from segcredit.train.distributed import Parallel
from train.test_train_invariance import updated

parallel = Parallel.start()
torch.save(updated(Path(sys.argv[3]), parallel), f"{sys.argv[1]}-{parallel.rank}.pt")
parallel.close()
"""


def in_processes(size: int, out: Path, policy: Path) -> list[dict]:
    """What each process found, with whole weights and with adapters."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    tests = str(Path(__file__).parents[1])
    running = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(out), tests, str(policy)],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
        )
        for rank in range(size)
    ]
    for process in running:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors.decode()[-2000:]
    return [torch.load(f"{out}-{rank}.pt", weights_only=True) for rank in range(size)]


@pytest.fixture(scope="module")
def one_and_two(tmp_path_factory, warm) -> tuple[list[dict], list[dict]]:
    both = in_processes(2, tmp_path_factory.mktemp("processes") / "two", warm("grid"))
    return [updated(warm("grid"), Parallel())], both


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["weights", "lora"])
def test_two_processes_make_the_same_update_as_one(one_and_two, trained):
    (alone,), both = ([rank[trained] for rank in ranks] for ranks in one_and_two)
    for rank in both:
        for name, x in alone["weights"].items():
            y = rank["weights"][name]
            assert float((x - y).norm()) <= TOLERANCE * float(x.norm()), name
    for name in ("reward", "entropy", "response_length", "segments", "policy_loss", "value_loss"):
        for a, b in zip(alone["metrics"], both[0]["metrics"], strict=True):
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-6), name
    assert all(torch.equal(x, both[1]["weights"][name]) for name, x in both[0]["weights"].items())
