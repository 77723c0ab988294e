"""Groups, trees, Monte-Carlo differences and the tracker against their oracles."""

import math

import oracles as o
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged import units
from strategies import tenths

from segcredit.core import group, tracker
from segcredit.core.advantages import value_difference

groups = st.lists(st.lists(tenths, min_size=2, max_size=5), min_size=1, max_size=4)


@given(groups, st.randoms(use_true_random=False))
def test_groups_in_any_order(rewards: list[list[float]], chooser: object) -> None:
    rows = [(r, 5 * g - 3, g, i) for g, rs in enumerate(rewards) for i, r in enumerate(rs)]
    chooser.shuffle(rows)
    reward = torch.tensor([r for r, *_ in rows], dtype=torch.float64)
    ids = torch.tensor([g for _, g, *_ in rows])
    for std, eps in (("sample", 1e-6), ("population", 1e-8), ("none", 0.0)):
        want = [o.group_zscore(rs, std, eps) for rs in rewards]
        if std == "population":  # an exactly zero deviation divides rounding noise by ε
            want = [
                w if len(set(rs)) > 1 else [0.0] * len(rs)
                for w, rs in zip(want, rewards, strict=True)
            ]
        got = group.group_zscore(reward, ids, std, eps).tolist()
        assert got == pytest.approx([want[g][i] for *_, g, i in rows], abs=1e-6)
    want = [o.leave_one_out(rs) for rs in rewards]
    got = group.leave_one_out(reward, ids).tolist()
    assert got == pytest.approx([want[g][i] for *_, g, i in rows])


@pytest.mark.parametrize("reward", [0.1, 0.3, 1 / 3])
def test_equal_rewards_give_no_credit_in_float32(reward: float) -> None:
    same = torch.full((7,), reward)
    one = torch.zeros(7, dtype=torch.long)
    assert group.group_zscore(same, one).abs().max().item() < 1e-6
    assert group.leave_one_out(same, one).abs().max().item() < 1e-6


trees = st.recursive(tenths, lambda t: st.lists(t, min_size=1, max_size=3), max_leaves=9).filter(
    lambda t: isinstance(t, list)
)


@given(st.lists(trees, min_size=1, max_size=3), st.booleans(), st.randoms(use_true_random=False))
def test_trees_of_any_shape(forest: list[object], normalize: bool, chooser: object) -> None:
    reward: list[float] = []
    parent: list[int] = []
    ids: list[int] = []
    want: list[float] = []

    def walk(tree: object, edges: object, above: int, g: int) -> None:
        for child, (advantage, below) in zip(tree, edges, strict=True):
            leaf = not isinstance(child, list)
            reward.append(child if leaf else 99.0)  # inner rewards must not be read
            parent.append(above)
            ids.append(g)
            want.append(advantage)
            if not leaf:
                walk(child, below, len(parent) - 1, g)

    for g, tree in enumerate(forest):
        walk(tree, o.tree_advantages(tree, normalize), -1, g)
    order = list(range(len(parent)))
    chooser.shuffle(order)
    place = {row: at for at, row in enumerate(order)}
    got, _ = group.tree_advantage(
        torch.tensor([reward[r] for r in order], dtype=torch.float64),
        torch.tensor([place[parent[r]] if parent[r] >= 0 else -1 for r in order]),
        torch.tensor([ids[r] for r in order]),
        normalize,
    )
    expected = [want[r] for r in order]
    # with ε = 1e-8, equal siblings divide rounding noise by almost nothing: compare off that case
    if normalize:
        keep = [i for i, w in enumerate(expected) if abs(w) > 1e-3]
        got, expected = got[keep], [expected[i] for i in keep]
    assert got.tolist() == pytest.approx(expected, abs=1e-6)


def test_a_cycle_is_refused() -> None:
    with pytest.raises(ValueError, match="cycle"):
        group.tree_advantage(torch.zeros(2), torch.tensor([1, 0]), torch.zeros(2, dtype=torch.long))


@given(
    st.lists(
        st.tuples(tenths, st.lists(st.one_of(st.none(), tenths), min_size=1, max_size=6)),
        min_size=1,
        max_size=4,
    )
)
def test_value_difference(rows: list[tuple[float, list[float | None]]]) -> None:
    width = max(len(values) for _, values in rows)
    mask = units([[1.0] * len(v) for _, v in rows], width).bool()
    reward = units([[0.0] * (len(v) - 1) + [r] for r, v in rows], width)
    known = units([[float(x is not None) for x in v] for _, v in rows], width).bool()
    value = units([[math.nan if x is None else x for x in v] for _, v in rows], width)
    reward[~mask] = math.nan
    got = value_difference(reward, value, mask, known)
    for i, (r, v) in enumerate(rows):
        assert got[i][mask[i]].tolist() == pytest.approx(o.value_difference(r, v))
    assert (got[~mask] == 0).all()


@given(
    st.lists(
        st.tuples(st.floats(0.1, 20), st.floats(0.1, 20), st.floats(0, 1), st.floats(0, 1)),
        min_size=1,
    )
)
def test_tracker(rows: list[tuple[float, float, float, float]]) -> None:
    alpha, beta, reward, drift = torch.tensor(rows, dtype=torch.float64).T
    new_alpha, new_beta = tracker.tracker_update(alpha, beta, reward, drift)
    for i, (a, b, r, d) in enumerate(rows):
        rho = o.tracker_rho(d, 0.06, 0.875, 0.96)
        want = o.tracker_update(a, b, r, rho)
        assert (new_alpha[i].item(), new_beta[i].item()) == pytest.approx(want)
    value = tracker.tracker_value(alpha, beta)
    assert value.tolist() == pytest.approx([o.tracker_value(a, b) for a, b, *_ in rows])
    weight = tracker.tracker_weight(value).tolist()
    assert weight == pytest.approx([o.tracker_weight(v, 0.05) for v in value.tolist()])


def test_first_visit_forgets_least() -> None:
    assert tracker.tracker_forgetting(torch.zeros(1)).item() == pytest.approx(0.96)


@given(st.lists(tenths, min_size=2, max_size=8).filter(lambda xs: len(set(xs)) > 1))
def test_batch_normalize(xs: list[float]) -> None:
    got = tracker.batch_normalize(torch.tensor(xs, dtype=torch.float64)).tolist()
    assert got == pytest.approx(o.batch_normalize(xs), abs=1e-6)
