"""The token ⇄ segment algebra against plain loops over lists."""

import oracles as o
import pytest
import torch
from hypothesis import given
from ragged import ends_of, layout
from strategies import Case, cases

from segcredit.core.segments import Segments, first_token


def made(case: Case) -> Segments:
    return Segments.from_ends(case.place.marks(case.ends), case.place.mask)


@given(cases())
def test_ends_and_starts_describe_the_same_segments(case: Case) -> None:
    segments = made(case)
    starts = [[b for b, _ in o.spans(ends)] for ends in case.ends]
    again = Segments.from_starts(case.place.marks(starts), case.place.mask)
    assert torch.equal(segments.index, again.index)
    assert ends_of(segments, case.place.mask) == case.ends
    assert segments.num.tolist() == [len(ends) for ends in case.ends]
    assert segments.width == max(len(ends) for ends in case.ends)


@given(cases())
def test_the_outermost_marks_may_be_left_out(case: Case) -> None:
    mask, marks = case.place.mask, case.place.marks(case.ends)
    last = case.place.marks([ends[-1:] for ends in case.ends])
    assert torch.equal(Segments.from_ends(marks & ~last, mask).index, made(case).index)
    starts = case.place.marks([[b for b, _ in o.spans(ends)] for ends in case.ends])
    assert torch.equal(
        Segments.from_starts(starts & ~first_token(mask), mask).index, made(case).index
    )


@given(cases())
def test_positions_lengths_and_masks(case: Case) -> None:
    segments = made(case)
    for i, ends in enumerate(case.ends):
        position = case.place.mask[i].nonzero().flatten().tolist()
        spans = o.spans(ends)
        pad = [0] * (segments.width - len(spans))
        assert segments.start[i].tolist() == [position[b] for b, _ in spans] + pad
        assert segments.end[i].tolist() == [position[e] for _, e in spans] + pad
        assert segments.length[i].tolist() == [e - b + 1 for b, e in spans] + pad
        assert segments.mask[i].tolist() == [True] * len(spans) + [False] * len(pad)


@given(cases())
def test_sum_mean_read_and_spread(case: Case) -> None:
    segments, x = made(case), case.place.put(case.value)
    total, mean = segments.sum(x), segments.mean(x)
    first, last = segments.at_start(x), segments.at_end(x)
    for i, ends in enumerate(case.ends):
        row = case.value[i]
        for m, (b, e) in enumerate(o.spans(ends)):
            assert total[i, m].item() == pytest.approx(sum(row[b : e + 1]))
            assert mean[i, m].item() == pytest.approx(sum(row[b : e + 1]) / (e - b + 1))
            assert first[i, m].item() == row[b]
            assert last[i, m].item() == row[e]
        for y in (total, mean, first, last):
            assert y[i, len(ends) :].tolist() == [0.0] * (segments.width - len(ends))
    spread = segments.spread(total)
    assert (spread[~case.place.mask] == 0).all()
    for i, ends in enumerate(case.ends):
        want = o.spread(total[i, : len(ends)].tolist(), ends)
        assert case.place.take(spread)[i] == pytest.approx(want)


@given(cases())
def test_sum_and_spread_are_adjoint(case: Case) -> None:
    """⟨sum(x), y⟩ = ⟨x, spread(y)⟩, which is what their gradients rest on."""
    segments, x = made(case), torch.where(case.place.mask, case.place.put(case.value), 0.0)
    y = torch.randn(segments.mask.shape, dtype=torch.float64)
    y = torch.where(segments.mask, y, 0.0)
    assert (segments.sum(x) * y).sum().item() == pytest.approx(
        (x * segments.spread(y)).sum().item()
    )


def test_gradients_by_finite_differences() -> None:
    place = layout([5, 2, 7], seed=3)
    segments = Segments.from_ends(place.marks([[1, 4], [1], [0, 3, 6]]), place.mask)
    x = torch.randn(place.mask.shape, dtype=torch.float64, requires_grad=True)
    y = torch.randn(segments.mask.shape, dtype=torch.float64, requires_grad=True)
    for f in (segments.sum, segments.mean, segments.at_start, segments.at_end):
        assert torch.autograd.gradcheck(f, (x,))
    assert torch.autograd.gradcheck(segments.spread, (y,))


def test_garbage_off_the_mask_has_no_gradient() -> None:
    place = layout([3, 1], seed=1)
    segments = Segments.from_ends(place.marks([[0, 2], [0]]), place.mask)
    x = place.put([[1.0, 2.0, 3.0], [4.0]]).requires_grad_()
    segments.spread(segments.mean(x)).exp().sum().backward()
    assert torch.isfinite(x.grad).all()
    assert (x.grad[~place.mask] == 0).all()


@given(cases())
def test_select_keeps_rows_and_width(case: Case) -> None:
    segments = made(case)
    rows = torch.arange(len(case.ends)).flip(0)
    chosen = segments.select(rows)
    assert torch.equal(chosen.index, segments.index[rows])
    assert torch.equal(chosen.start, segments.start[rows])
    assert chosen.width == segments.width


def test_index_is_minus_one_off_the_mask() -> None:
    mask = torch.tensor([[True, False, True, True, False]])
    segments = Segments.from_ends(torch.tensor([[True, False, False, True, False]]), mask)
    assert segments.index.tolist() == [[0, -1, 1, 1, -1]]
