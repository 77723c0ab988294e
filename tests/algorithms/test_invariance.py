"""What must not matter, for every method: layout, garbage, holes, row order, micro-batches."""

from functools import partial

import pytest
import torch
from batches import Story, fake_monte_carlo, story

from segcredit.algorithms import ALGORITHMS
from segcredit.types import Algorithm, Batch, Outputs, Rollouts

METHODS = {**ALGORITHMS} | {"sapo everywhere": partial(ALGORITHMS["sapo"], value_everywhere=True)}
every_method = pytest.mark.parametrize("name", METHODS)
TIGHT = {"rtol": 0, "atol": 1e-11}


def prepared(algorithm: Algorithm, rollouts: Rollouts) -> Batch:
    return algorithm.prepare(rollouts, fake_monte_carlo)


def outputs_for(batch: Batch, told: Story, dtype: torch.dtype = torch.float64) -> Outputs:
    """What the models say about the batch's rows: logp and value as a function of the row alone.

    Methods may drop, repeat or reorder rows (RestEM, DPO), so the update's numbers are derived
    from columns that travel with the row.
    """
    rollouts = batch.rollouts
    wobble = 0.3 * torch.sin(37.0 * rollouts.logp_old)
    logp = torch.where(rollouts.mask, rollouts.logp_old + wobble, torch.nan)
    value = torch.where(rollouts.mask, rollouts.value + 2.0 * wobble, torch.nan)
    return Outputs(logp.to(dtype).requires_grad_(), value.to(dtype).requires_grad_())


def run(
    name: str, rollouts: Rollouts, told: Story
) -> tuple[float, list[list[float]], list[list[float]]]:
    """Loss, and gradients on the mask as lists, so that layouts can be compared."""
    algorithm = METHODS[name]()
    batch = algorithm.minibatch(prepared(algorithm, rollouts))
    outputs = outputs_for(batch, told)
    loss = algorithm.loss(outputs, batch)
    loss.total.backward()
    mask = batch.rollouts.mask
    for x in (outputs.logp, outputs.value):
        if x.grad is not None:
            assert torch.isfinite(x.grad).all()
            assert (x.grad[~mask] == 0).all()
    value_grad = outputs.value.grad if outputs.value.grad is not None else torch.zeros(mask.shape)
    rows = range(len(mask))
    return (
        loss.total.item(),
        [outputs.logp.grad[i][mask[i]].tolist() for i in rows],
        [value_grad[i][mask[i]].tolist() for i in rows],
    )


def assert_same(
    got: tuple[float, list[list[float]], list[list[float]]],
    want: tuple[float, list[list[float]], list[list[float]]],
) -> None:
    assert got[0] == pytest.approx(want[0], abs=1e-11)
    for x, y in zip(got[1] + got[2], want[1] + want[2], strict=True):
        assert x == pytest.approx(y, abs=1e-11)


@every_method
@pytest.mark.parametrize("holes", [False, True])
def test_padding_and_holes_do_not_matter(name: str, holes: bool) -> None:
    told = story(seed=5)
    want = run(name, told.lay_out(0, holes=False, extra=0)[0], told)
    for seed in (1, 2):
        assert_same(run(name, told.lay_out(seed, holes=holes, extra=40)[0], told), want)


@every_method
def test_row_order_does_not_matter(name: str) -> None:
    told = story(seed=6)
    rollouts, _ = told.lay_out(3, holes=True)
    order = torch.randperm(len(rollouts), generator=torch.Generator().manual_seed(1))
    moved = rollouts.select(order)
    want = run(name, rollouts, told)
    got = run(name, moved, told)
    assert got[0] == pytest.approx(want[0], abs=1e-11)
    if name in ("restem", "dpo", "dpo_positive"):  # these choose and pair rows themselves
        flat = lambda rows: sorted(round(x, 9) for row in rows for x in row)  # noqa: E731
        assert flat(got[1]) == pytest.approx(flat(want[1]), abs=2e-9)
        return
    for new, old in enumerate(order.tolist()):
        assert got[1][new] == pytest.approx(want[1][old], abs=1e-11)
        assert got[2][new] == pytest.approx(want[2][old], abs=1e-11)


@every_method
@pytest.mark.parametrize("cuts", [2, 3])
def test_micro_batches_do_not_matter(name: str, cuts: int) -> None:
    told = story(seed=7)
    algorithm = METHODS[name]()
    whole = prepared(algorithm, told.lay_out(4, holes=True)[0])
    items = torch.arange(len(whole.rollouts)).view(-1, whole.rows_per_item)
    micro = torch.zeros(len(whole.rollouts), dtype=torch.long)
    for number, part in enumerate(items.chunk(cuts)):
        micro[part.flatten()] = number
    batch = algorithm.minibatch(whole, None if name != "sapo_authors" else micro * 0)
    full = outputs_for(batch, told)
    loss = algorithm.loss(full, batch)
    loss.total.backward()

    total = 0.0
    metrics: dict[str, float] = {}
    for number in range(int(micro.max()) + 1):
        rows = (micro == number).nonzero().flatten()
        part = batch.select(rows)
        outputs = outputs_for(part, told)
        piece = algorithm.loss(outputs, part)
        piece.total.backward()
        total += piece.total.item()
        for key, x in piece.metrics.items():
            metrics[key] = metrics.get(key, 0.0) + x.item()
        assert torch.allclose(outputs.logp.grad, full.logp.grad[rows], **TIGHT)
        if outputs.value.grad is not None:
            assert torch.allclose(outputs.value.grad, full.value.grad[rows], **TIGHT)
    assert total == pytest.approx(loss.total.item(), abs=1e-11)
    for key, x in loss.metrics.items():
        assert metrics[key] == pytest.approx(x.item(), abs=1e-11), key


def test_the_authors_reduction_does_depend_on_micro_batches() -> None:
    told = story(seed=8)
    algorithm = ALGORITHMS["sapo_authors"]()
    whole = prepared(algorithm, told.lay_out(4, holes=False)[0])
    micro = torch.arange(len(whole.rollouts)) // 5
    cut, uncut = algorithm.minibatch(whole, micro), algorithm.minibatch(whole)
    mean = [x.loss_mask[micro == n].sum() for n in range(3) for x in (whole,)]
    assert len({int(m) for m in mean}) > 1  # unequal numbers of tokens
    outputs = outputs_for(whole, told)
    a = algorithm.loss(outputs, cut).policy.item()
    b = algorithm.loss(outputs, uncut).policy.item()
    assert abs(a - b) > 1e-6


@every_method
def test_float32_is_close_to_float64(name: str) -> None:
    told = story(num_groups=4, per_group=4, longest=400, seed=9)
    found = []
    for dtype in (torch.float32, torch.float64):
        # one rounding of the input for both, so that only the arithmetic differs
        rollouts, _ = told.lay_out(0, holes=True, dtype=torch.float32)
        if dtype == torch.float64:
            rollouts = rollouts.replace(
                **{
                    column: getattr(rollouts, column).double()
                    for column in (
                        *("logp_old", "reward", "entropy", "value", "logp_ref", "baseline"),
                        "image_kl",
                    )
                }
            )
        algorithm = METHODS[name]()
        batch = algorithm.minibatch(prepared(algorithm, rollouts))
        logp = (batch.rollouts.logp_old - 0.125).to(dtype).requires_grad_()
        value = (batch.rollouts.value + 0.25).to(dtype).requires_grad_()
        loss = algorithm.loss(Outputs(logp, value), batch)
        loss.total.backward()
        advantage = batch.credit.advantage if batch.credit else torch.zeros(1)
        found.append((loss.total.double(), logp.grad.double(), advantage.double()))
    for x, y in zip(*found, strict=True):
        assert torch.allclose(x, y, rtol=1e-5, atol=1e-5)


@every_method
def test_needs_are_exactly_what_is_read(name: str) -> None:
    """With the needed columns alone it runs; without any one of them it says which is missing."""
    told = story(seed=10)
    rollouts, _ = told.lay_out(0, holes=True)
    algorithm = METHODS[name]()
    optional = ("entropy", "value", "logp_ref", "image_kl", "pieces", "baseline", "parent")
    needed = {column.name for column in algorithm.needs} & set(optional)
    lean = rollouts.replace(**{c: None for c in optional if c not in needed})

    def go(given: Rollouts) -> None:
        batch = algorithm.minibatch(prepared(algorithm, given))
        logp = batch.rollouts.logp_old.clone()
        algorithm.loss(Outputs(logp, logp), batch)

    go(lean)
    for column in needed:
        with pytest.raises(ValueError, match=f"needs the rollouts' '{column}'; got none"):
            go(lean.replace(**{column: None}))


@every_method
def test_repr_is_a_record(name: str) -> None:
    algorithm = METHODS[name]()
    assert algorithm == METHODS[name]()
    assert isinstance(algorithm, Algorithm)
    assert " at 0x" not in repr(algorithm)
