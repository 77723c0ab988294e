"""Ratios, losses, reductions and adjustments against their oracles."""

import math

import oracles as o
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged import units
from strategies import Case, cases, tenths

from segcredit.core import losses, ratios
from segcredit.core.advantages import clamp, whiten
from segcredit.core.segments import Segments
from segcredit.partition import response


def made(case: Case) -> Segments:
    return Segments.from_ends(case.place.marks(case.ends), case.place.mask)


def pair(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """logp and logp_old whose difference is the case's log-ratio."""
    new = [
        [a + b for a, b in zip(x, v, strict=True)]
        for x, v in zip(case.log_ratio, case.value, strict=True)
    ]
    return case.place.put(new), case.place.put(case.value)


@given(cases())
def test_ratios(case: Case) -> None:
    logp, old = pair(case)
    segments, mask = made(case), case.place.mask
    geometric = ratios.geometric_mean_ratio(logp, old, segments)
    raw = ratios.raw_ratio(logp, old, segments)
    tokenwise = ratios.gspo_token_ratio(logp, old, segments)
    token = ratios.token_ratio(logp, old, mask)
    for i, (x, ends) in enumerate(zip(case.log_ratio, case.ends, strict=True)):
        want = o.spread(o.segment_ratio(x, ends), ends)
        assert case.place.take(geometric)[i] == pytest.approx(want)
        assert case.place.take(tokenwise)[i] == pytest.approx(want)
        assert case.place.take(raw)[i] == pytest.approx(
            o.spread(o.raw_segment_ratio(x, ends), ends)
        )
        assert case.place.take(token)[i] == pytest.approx([o.segment_ratio([v], [0])[0] for v in x])
    for ratio in (geometric, raw, tokenwise, token):
        assert (ratio[~mask] == 1).all()


def test_log_ratio_limit() -> None:
    mask = torch.ones(1, 3, dtype=torch.bool)
    x = torch.tensor([[50.0, -50.0, 1.0]])
    assert ratios.log_ratio(x, torch.zeros(1, 3), mask, 20.0).tolist() == [[20.0, -20.0, 1.0]]
    one = response(mask)
    mean = ratios.geometric_mean_ratio(x, torch.zeros(1, 3), one, 20.0)
    assert mean[0, 0].log().item() == pytest.approx(1 / 3)


@given(
    st.floats(0.01, 5.0),
    tenths,
    st.sampled_from([0.0, 0.2]),
    st.sampled_from([0.2, 0.28]),
    st.sampled_from([None, 1.5, 3.0]),
)
def test_clipped_surrogate(r: float, A: float, low: float, high: float, dual: float | None) -> None:
    ratio, advantage = torch.tensor([[r]]).double(), torch.tensor([[A]]).double()
    got = losses.clipped_surrogate(ratio, advantage, low, high, dual)
    assert got.item() == pytest.approx(
        o.clipped_term(ratio.item(), advantage.item(), low, high, dual)
    )


@given(st.floats(0.5, 1.5), tenths)
def test_clipped_tokens_are_those_without_gradient(r: float, A: float) -> None:
    ratio = torch.tensor([[r]], dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([[A]], dtype=torch.float64)
    losses.clipped_surrogate(ratio, advantage, 0.2, 0.28).sum().backward()
    clipped = losses.is_clipped(ratio, advantage, 0.2, 0.28).item()
    assert (ratio.grad.item() == 0) == (clipped or A == 0)


@given(cases(), st.sampled_from([None, 0.5]), st.booleans(), st.sampled_from(["start", "end"]))
def test_boundary_value_loss(case: Case, clip: float | None, half: bool, where: str) -> None:
    segments, put = made(case), case.place.put
    targets = [o.spread([float(m) for m in range(len(ends))], ends) for ends in case.ends]
    for name in ("response_mean", "token_mean"):
        got = losses.boundary_value_loss(
            put(case.value),
            put(case.entropy),
            put(targets),
            segments,
            where,
            clip,
            half,
            getattr(losses, name),
        )
        rows = [
            o.value_loss(
                case.value[i],
                case.entropy[i],
                [float(m) for m in range(len(ends))],
                ends,
                where,
                clip,
                half,
            )
            for i, ends in enumerate(case.ends)
        ]
        assert got.item() == pytest.approx(getattr(o, name)(rows))


@given(cases())
def test_reductions(case: Case) -> None:
    x, mask = case.place.put(case.value), case.place.mask
    assert losses.response_mean(x, mask).item() == pytest.approx(o.response_mean(case.value))
    assert losses.token_mean(x, mask).item() == pytest.approx(o.token_mean(case.value))
    got = losses.constant_mean(x, mask, 7.0).item()
    assert got == pytest.approx(o.constant_mean(case.value, 7.0 * len(mask)))


@given(cases())
def test_whole_policy_loss_is_its_parts(case: Case) -> None:
    logp, old = pair(case)
    segments, mask = made(case), case.place.mask
    A = case.place.put(case.reward)
    ratio = ratios.geometric_mean_ratio(logp, old, segments)
    per_token = losses.clipped_surrogate(ratio, A, 0.2, 0.28, 3.0)
    got, watched = losses.segment_policy_loss(logp, old, A, segments, 0.2, 0.28, 3.0)
    assert got.item() == pytest.approx(losses.response_mean(per_token, mask).item())
    assert watched["ratio"].item() == pytest.approx(losses.response_mean(ratio, mask).item())
    shares = losses.token_shares(mask, torch.float64)
    got, _ = losses.segment_policy_loss(logp, old, A, segments, 0.2, 0.28, 3.0, shares)
    assert got.item() == pytest.approx(losses.token_mean(per_token, mask).item())


def test_micro_batch_token_mean() -> None:
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    shares = losses.micro_batch_token_shares(mask, torch.tensor([0, 1, 1]), torch.float64)
    assert shares.tolist() == [[0.25, 0.25], [1 / 6, 0.0], [1 / 6, 1 / 6]]


@given(cases())
def test_whiten(case: Case) -> None:
    if sum(map(len, case.value)) < 2:
        return
    got = case.place.take(whiten(case.place.put(case.value), case.place.mask))
    for row, want in zip(got, o.whiten(case.value), strict=True):
        assert row == pytest.approx(want, abs=1e-6)


def test_clamp() -> None:
    assert clamp(torch.tensor([[-9.0, 3.0, 9.0]]), 5.0).tolist() == [[-5.0, 3.0, 5.0]]


@given(cases())
def test_kl_estimators_and_nll(case: Case) -> None:
    logp, ref = pair(case)
    for name in ("k1", "k2", "k3"):
        got = case.place.take(getattr(losses, name)(logp, ref))
        for row, new, old in zip(got, case.place.take(logp), case.place.take(ref), strict=True):
            want = [getattr(o, name)(a, b) for a, b in zip(new, old, strict=True)]
            assert row == pytest.approx(want, abs=1e-12)
    assert losses.response_mean(losses.nll(logp), case.place.mask).item() == pytest.approx(
        o.response_mean([[o.nll([v]) for v in row] for row in case.place.take(logp)])
    )


def test_k3_is_exact_for_tiny_differences() -> None:
    """e^u − u − 1 cancels to nothing in float32; expm1 keeps the digits that there are."""
    u = torch.tensor([[1e-3]])
    assert losses.k3(torch.zeros(1, 1), u).item() == pytest.approx(5.001667e-7, rel=1e-3)


def test_k3_clamps_log_ratio_and_estimate_apart() -> None:
    """u = 50 and −10.5: verl clamps u at ±20 and the estimate at 10, so −10.5 is left alone."""
    logp = torch.tensor([[-50.0, 10.5]], dtype=torch.float64)
    zero = torch.zeros(1, 2, dtype=torch.float64)
    got = losses.k3(logp, zero, limit=10.0, log_ratio_limit=20.0).tolist()[0]
    assert got == pytest.approx([10.0, 9.5 + math.exp(-10.5)])
    got = losses.k3(logp, zero, log_ratio_limit=10.0).tolist()[0]
    assert got == pytest.approx([math.exp(10) - 11, 9 + math.exp(-10)])


@pytest.mark.parametrize(
    ("limits", "want", "moves"),
    [
        ({"limit": 10.0}, [2 - math.log(3), 10.0, 10.0, 10.0], [True, False, False, False]),
        (
            {"log_ratio_limit": 10.0},
            [2 - math.log(3), math.exp(5) - 6, math.exp(10) - 11, math.exp(-10) + 9],
            [True, True, False, False],
        ),
    ],
)
def test_k3_limits(limits: dict[str, float], want: list[float], moves: list[bool]) -> None:
    """The result is clamped, or the log-ratio; beyond a limit there is no gradient, and no NaN."""
    u = torch.tensor([[math.log(3), 5.0, 2000.0, -2000.0]], dtype=torch.float64)
    logp = torch.zeros_like(u).requires_grad_()
    found = losses.k3(logp, u, **limits)
    found.sum().backward()
    assert found[0].tolist() == pytest.approx(want)
    assert logp.grad.isfinite().all()
    assert (logp.grad[0] != 0).tolist() == moves


@given(
    st.lists(st.tuples(tenths, tenths), min_size=1, max_size=5), st.sampled_from([0.0, 5.0, 50.0])
)
def test_preferences(pairs: list[tuple[float, float]], penalty: float) -> None:
    chosen, rejected = torch.tensor(pairs, dtype=torch.float64).T
    got = losses.dpo(chosen, rejected, 0.1).tolist()
    assert got == pytest.approx([o.dpo(w, x, 0.1) for w, x in pairs])
    got = losses.dpo_positive(chosen, rejected, 0.1, penalty).tolist()
    assert got == pytest.approx([o.dpo_positive(w, x, 0.1, penalty) for w, x in pairs])


@given(cases())
def test_direct_value(case: Case) -> None:
    segments = made(case)
    steps = segments.sum(case.place.put(case.log_ratio))
    target = units([[0.1 * m for m in range(len(ends))] for ends in case.ends], segments.width)
    got = losses.response_mean(losses.direct_value(steps, target, 0.1), segments.mask).item()
    rows = []
    for x, ends in zip(case.log_ratio, case.ends, strict=True):
        sums = [sum(x[b : e + 1]) for b, e in o.spans(ends)]
        rows.append(o.dvo(sums, [0.1 * m for m in range(len(ends))], 0.1))
    assert got == pytest.approx(sum(rows) / len(rows))


@given(cases(), st.floats(0.1, 1.0))
def test_probability_mask(case: Case, threshold: float) -> None:
    logp = case.place.put(case.prob).log()
    got = losses.probability_mask(logp, case.place.mask, threshold)
    rows = case.place.take(logp.exp())
    want = [[p < threshold for p in row] for row in rows]
    assert case.place.take(got) == want
    assert not got[~case.place.mask].any()
