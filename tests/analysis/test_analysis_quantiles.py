"""Quantiles of a weighted sample are numpy's of the sample written out."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from segcredit_lab.analysis.reading import positions, tail_starts


@st.composite
def weighted(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    num = draw(st.integers(1, 12))
    x = draw(st.lists(st.integers(-9, 9).map(lambda n: n / 3), min_size=num, max_size=num))
    counts = draw(st.lists(st.integers(0, 4), min_size=num, max_size=num).filter(any))
    return np.array(x), np.array(counts)


@given(weighted(), st.sampled_from([0.0, 0.25, 0.5, 0.7, 0.95, 1.0]))
def test_the_tail_holds_what_is_not_below_the_quantile(
    sample: tuple[np.ndarray, np.ndarray], q: float
) -> None:
    x, counts = sample
    order = np.argsort(x)
    tie = np.searchsorted(x[order], x[order])
    ((start,),) = tail_starts(tie, np.cumsum(counts[order])[None], np.array([q]))
    edge = np.quantile(np.repeat(x, counts), q)
    assert counts[order][start:].sum() == counts[x >= edge - 1e-9].sum()


def test_several_draws_are_searched_at_once() -> None:
    cumulative = np.cumsum([[0, 2, 0, 1], [1, 1, 1, 1], [5, 0, 0, 1]], axis=1)
    rank = np.array([[0, 1, 2], [0, 2, 3], [4, 5, 0]])
    assert positions(cumulative, rank).tolist() == [[1, 1, 3], [0, 2, 3], [0, 3, 0]]
