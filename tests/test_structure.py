"""Properties of the code itself: no loops over data, and what may be imported."""

import subprocess
import sys

import pytest
import torch
from batches import fake_monte_carlo, story
from jaxtyping import TypeCheckError
from torch.utils._python_dispatch import TorchDispatchMode

from segcredit.algorithms import ALGORITHMS
from segcredit.partition import tokens
from segcredit.types import Batch, Outputs

WALKS_STRINGS = {"vineppo", "dvo"}
"""Their default partition is read off the text."""


class CountOperations(TorchDispatchMode):
    """Counts tensor operations: a Python loop over rows, tokens or segments would multiply them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [n for n in ALGORITHMS if n not in WALKS_STRINGS])
def test_number_of_operations_does_not_grow_with_the_batch(name: str) -> None:
    counts = []
    for groups, longest in ((2, 8), (16, 100)) * 2:  # the first round fills caches
        rollouts, _ = story(num_groups=groups, longest=longest, seed=1).lay_out(0, holes=True)
        # at SAE's own threshold the small batch is one segment per response, a shortcut of Segments
        algorithm = ALGORITHMS[name](**({"threshold": 0.9} if name == "sae" else {}))
        counter = CountOperations()
        with counter:
            batch = algorithm.minibatch(algorithm.prepare(rollouts, fake_monte_carlo))
            logp = batch.rollouts.logp_old.clone().requires_grad_()
            algorithm.loss(Outputs(logp, logp), batch).total.backward()
        counts.append(counter.count)
    *_, small, large = counts
    assert small == large, f"{small} operations for a small batch, {large} for a large one"


def test_the_mathematics_imports_torch_alone() -> None:
    blocked = ["transformers", "vllm", "ray", "verl", "pydantic", "typer", "rich", "matplotlib"]
    code = f"import sys\nfor name in {blocked}: sys.modules[name] = None\n"
    for module in ("core.losses", "partition", "algorithms"):  # in one process, and in this order
        code += f"import segcredit.{module}\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_shapes_are_checked_while_testing() -> None:
    made = tokens(torch.ones(2, 5, dtype=torch.bool))
    with pytest.raises(TypeCheckError):
        made.sum(torch.zeros(2, 5, 1))
    with pytest.raises(TypeCheckError):
        Batch(rollouts=None, loss_mask=torch.zeros(3))


def test_stable_names() -> None:
    """Others build on these."""
    from segcredit.algorithms import ppo, sapo
    from segcredit.core.advantages import gae, segment_gae
    from segcredit.core.losses import (
        boundary_value_loss,
        clipped_surrogate,
        response_mean,
        token_mean,
    )
    from segcredit.core.ratios import geometric_mean_ratio
    from segcredit.core.segments import Segments
    from segcredit.partition import top_entropy

    for thing in (
        ppo,
        sapo,
        gae,
        segment_gae,
        boundary_value_loss,
        clipped_surrogate,
        geometric_mean_ratio,
        response_mean,
        token_mean,
        Segments.from_ends,
        top_entropy,
    ):
        assert callable(thing)
    made = Segments.from_ends(torch.tensor([[True, True]]), torch.tensor([[True, True]]))
    for name in (
        "index",
        "start",
        "end",
        "mask",
        "num",
        "sum",
        "mean",
        "at_start",
        "at_end",
        "spread",
    ):
        assert hasattr(made, name)
