"""Every partition against its oracle, holes and garbage included."""

import itertools

import oracles as o
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged import ends_of, layout
from strategies import Case, cases

from segcredit import partition
from segcredit.partition.entropy import exact_ceil, float_ceil, float_nudge

fractions = st.sampled_from([0.01, 0.1, 0.3, 0.5, 0.55, 1 / 3, 0.9, 1.0])


@given(cases(longest=15), fractions)
def test_top_entropy(case: Case, fraction: float) -> None:
    segments = partition.top_entropy(case.place.put(case.entropy), case.place.mask, fraction)
    exact = "1/3" if fraction == 1 / 3 else fraction
    want = [o.top_entropy_ends(row, exact) for row in case.entropy]
    assert ends_of(segments, case.place.mask) == want


@given(cases(longest=15), fractions, st.sampled_from([torch.exp, torch.sqrt, lambda x: 3 * x + 1]))
def test_only_the_ranks_of_entropy_matter(case: Case, fraction: float, transform: object) -> None:
    H, mask = case.place.put(case.entropy), case.place.mask
    before = partition.top_entropy(H, mask, fraction)
    after = partition.top_entropy(transform(H), mask, fraction)
    assert torch.equal(before.index, after.index)


def test_ties_go_to_the_earlier_token_at_any_length() -> None:
    for length in (10, 300, 5000):
        mask = torch.ones(1, length, dtype=torch.bool)
        segments = partition.top_entropy(torch.full((1, length), 0.7), mask, 0.3)
        n = -(-length * 3 // 10)
        assert segments.end[0].tolist() == [*range(n), length - 1]


def test_negative_zero_ties_with_zero() -> None:
    mask = torch.ones(1, 4, dtype=torch.bool)
    segments = partition.top_entropy(torch.tensor([[-0.0, 0.0, -0.0, 0.0]]), mask, 0.5)
    assert segments.end[0].tolist() == [0, 1, 3]


def test_counts_are_exact_where_floating_point_is_not() -> None:
    lengths = torch.arange(1, 32_769)
    for percent in range(1, 101):
        want = (lengths * percent + 99) // 100
        assert torch.equal(exact_ceil(lengths, percent / 100), want), percent
    assert int((float_ceil(lengths[:2048], 0.55) != exact_ceil(lengths[:2048], 0.55)).sum()) == 54
    assert torch.equal(float_nudge(lengths[:2048], 0.55), exact_ceil(lengths[:2048], 0.55))


@given(cases(longest=15), fractions)
def test_peaks_of_entropy(case: Case, fraction: float) -> None:
    segments = partition.entropy_peaks(case.place.put(case.entropy), case.place.mask, fraction)
    exact = "1/3" if fraction == 1 / 3 else fraction
    for row, found in zip(case.entropy, ends_of(segments, case.place.mask), strict=True):
        chosen = sorted(range(len(row)), key=lambda t: (-row[t], t))
        chosen = chosen[: o.exact_count(len(row), exact)]
        around = [-1e9, *row, -1e9]
        peaks = {t for t in chosen if around[t] < row[t] >= around[t + 2]}
        assert found == sorted({*peaks, len(row) - 1})


@given(cases(longest=15), fractions, st.integers(1, 6))
def test_smoothed_entropy(case: Case, fraction: float, window: int) -> None:
    H, mask = case.place.put(case.entropy), case.place.mask
    segments = partition.smooth_entropy(H, mask, fraction, window)
    exact = "1/3" if fraction == 1 / 3 else fraction
    for row, found in zip(case.entropy, ends_of(segments, mask), strict=True):
        mean = [sum(x := row[max(0, t - window + 1) : t + 1]) / len(x) for t in range(len(row))]
        n = o.exact_count(len(row), exact)
        lowest = sorted(mean, reverse=True)[n - 1]  # rounding may swap nearly equal means
        assert len(set(found) - {len(row) - 1}) in (n - 1, n)
        assert all(mean[t] > lowest - 1e-9 for t in found[:-1])


def test_a_window_of_one_is_the_entropy_itself() -> None:
    case = torch.rand(4, 30, dtype=torch.float64)
    mask = torch.ones(4, 30, dtype=torch.bool)
    plain = partition.top_entropy(case, mask, 0.3)
    assert torch.equal(partition.smooth_entropy(case, mask, 0.3, 1).index, plain.index)


@given(cases(longest=15), fractions)
def test_jumps_of_the_value(case: Case, fraction: float) -> None:
    segments = partition.value_jumps(case.place.put(case.value), case.place.mask, fraction)
    exact = "1/3" if fraction == 1 / 3 else fraction
    for row, found in zip(case.value, ends_of(segments, case.place.mask), strict=True):
        jumps = [abs(after - before) for before, after in itertools.pairwise(row)] + [0.0]
        assert found == o.top_entropy_ends(jumps, exact)


def test_neighbors_are_cut_once() -> None:
    entropy = torch.tensor([[0.1, 0.9, 0.8, 0.7, 0.1, 0.2, 0.1, 0.1, 0.1, 0.1]])
    mask = torch.ones(1, 10, dtype=torch.bool)
    assert partition.top_entropy(entropy, mask, 0.4).end[0].tolist() == [1, 2, 3, 5, 9]
    assert partition.entropy_peaks(entropy, mask, 0.4).end[0, :3].tolist() == [1, 5, 9]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    x = torch.tensor([[0.1, bad, 0.3]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    for cut in (partition.entropy_peaks, partition.value_jumps):
        with pytest.raises(ValueError, match="finite"):
            cut(x, mask, 0.3)
    with pytest.raises(ValueError, match="finite"):
        partition.smooth_entropy(x, mask, 0.3, 2)


@given(cases(longest=12), st.sampled_from([0.2, 0.5, 0.9]), st.integers(1, 4))
def test_probability_in_both_readings(case: Case, threshold: float, every: int) -> None:
    logp, mask = case.place.put(case.prob).log(), case.place.mask
    prob = case.place.take(logp.exp())
    spo = partition.probability_cutpoints(logp, mask, threshold, every)
    assert ends_of(spo, mask) == [o.probability_ends_spo(p, threshold, every) for p in prob]
    gather = partition.probability_accumulate(logp, mask, threshold, every)
    assert ends_of(gather, mask) == [
        o.probability_ends_accumulate(p, threshold, every) for p in prob
    ]


@given(cases(longest=12), st.integers(1, 15))
def test_plain_units(case: Case, size: int) -> None:
    mask = case.place.mask
    lengths = [len(row) for row in case.entropy]
    assert ends_of(partition.tokens(mask), mask) == [list(range(n)) for n in lengths]
    assert ends_of(partition.response(mask), mask) == [[n - 1] for n in lengths]
    want = [o.fixed_length_ends(n, size) for n in lengths]
    assert ends_of(partition.fixed_length(mask, size), mask) == want


pieces = st.lists(
    st.lists(
        st.sampled_from(
            [
                "a",
                " b",
                "\n",
                "\n\n",
                " \n",
                "c\n",
                "\nd",
                "",
                " ",
                "#",
                "**",
                "Step",
                " 1",
                " 12",
                "Step 1",
                "\nStep 2:",
                "## Step 3",
                " Step",
                "S",
                "tep 4",
                "step 5",
            ]
        ),
        min_size=1,
        max_size=10,
    ),
    min_size=1,
    max_size=3,
)


@given(pieces, st.integers(0, 99), st.booleans())
def test_text_partitions(rows: list[list[str]], seed: int, holes: bool) -> None:
    place = layout([len(row) for row in rows], seed, holes)
    texts = place.texts(rows)
    lines = partition.newline(texts, place.mask)
    assert ends_of(lines, place.mask) == [o.newline_ends(row) for row in rows]
    steps = partition.step_markers(texts, place.mask)
    assert ends_of(steps, place.mask) == [o.step_ends(row) for row in rows]


@pytest.mark.parametrize(
    ("texts", "ends"),
    [
        (["x", "=", "1", "\n", "y", ""], [3, 5]),  # the end-of-sequence token joins the last line
        (["x", "\n", "\n", " ", "\n", "y"], [4, 5]),  # blank lines join the line before
        (["\n", " ", "x", "\n", "y"], [3, 4]),  # at the beginning, the line after
        (["x", "y"], [1]),
        (["\n", "\n"], [1]),
    ],
)
def test_newline_by_hand(texts: list[str], ends: list[int]) -> None:
    mask = torch.ones(1, len(texts), dtype=torch.bool)
    assert partition.newline([texts], mask).end[0].tolist() == ends


@pytest.mark.parametrize(
    ("texts", "ends"),
    [
        (
            ["Let", " me", ".\n", "Step", " 1", ":", " a", "\n", "**", "Step", " 2", " b"],
            [2, 8, 11],
        ),
        (["Step", " 1", " a", "\n", "Step", " 2"], [3, 5]),
        (["## ", "Step", " 1", "\n", "Step", " 2"], [3, 5]),  # marks alone are no preamble
        (["see", " Step", " 1", "\n"], [3]),  # not at a line's start
        (["Step", " one", "\n"], [2]),  # no number
    ],
)
def test_step_markers_by_hand(texts: list[str], ends: list[int]) -> None:
    mask = torch.ones(1, len(texts), dtype=torch.bool)
    assert partition.step_markers([texts], mask).end[0].tolist() == ends


def test_equal_settings_are_equal_parts() -> None:
    assert partition.TopEntropy(0.3) == partition.TopEntropy(0.3)
    assert hash(partition.TopEntropy(0.3)) == hash(partition.TopEntropy(0.3))
    assert partition.TopEntropy(0.3) != partition.TopEntropy(0.4)
    assert partition.Token() != partition.Response()
