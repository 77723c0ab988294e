"""Bootstrap intervals cover the truth as often as they say, because responses are drawn."""

import numpy as np
import pytest

from segcredit_lab.analysis.lift import TokenPool, lift, lift_of_draws, lift_over_responses
from segcredit_lab.analysis.reading import draws, percentile_interval

Q, D = np.array([0.7, 0.9]), np.array([0.9])
RESPONSES, TOKENS = 64, 12


def simulated(rng: np.random.Generator, responses: int = RESPONSES) -> TokenPool:
    """Tokens of one response resemble each other, in H and in ΔV."""
    shared_h, shared_v = rng.normal(size=(2, responses, 1))
    noise_h, noise_v = rng.normal(size=(2, responses, TOKENS))
    h = 0.8 * shared_h + 0.6 * noise_h
    v = 0.8 * shared_v + 0.6 * (0.5 * noise_h + 0.87 * noise_v)
    owner = np.repeat(np.arange(responses), TOKENS)
    return TokenPool(owner, np.exp(h).ravel(), np.exp(v).ravel(), responses)


@pytest.mark.slow
def test_intervals_cover_at_their_nominal_rate() -> None:
    rng = np.random.default_rng(0)
    truth = lift(simulated(rng, 40_000), Q, D)[0]
    by_response, by_token = [], []
    for number in range(250):
        pool = simulated(rng)
        low, high = percentile_interval(lift_over_responses([pool], Q, D, 150, number)[0])[:, 0]
        by_response.append((low <= truth) & (truth <= high))
        alone = TokenPool(np.arange(len(pool.owner)), pool.entropy, pool.jump, len(pool.owner))
        drawn = lift_of_draws(alone, draws(rng, len(pool.owner), 60), Q, D)
        low, high = percentile_interval(drawn)[:, 0]
        by_token.append((low <= truth) & (truth <= high))
    rate = np.mean(by_response, axis=0)
    assert (rate >= 0.90).all(), rate
    assert (rate <= 0.99).all(), rate
    assert (np.mean(by_token, axis=0) < 0.88).all(), "drawing tokens would have been seen"


def test_draws() -> None:
    counts = draws(np.random.default_rng(0), 7, 500)
    assert (counts.sum(axis=1) == 7).all()
    assert counts.mean(axis=0) == pytest.approx(np.ones(7), abs=0.2)
    assert (counts == 0).any(axis=1).mean() > 0.9, "with replacement"


def test_the_seed_decides() -> None:
    pools = [simulated(np.random.default_rng(0), 8)] * 2
    one, same, other = (lift_over_responses(pools, Q, D, 20, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)
    assert not np.array_equal(one[0], one[1]), "each step draws for itself"


def test_percentiles() -> None:
    x = np.arange(1001.0)[:, None]
    low, high = percentile_interval(np.hstack([x, np.full_like(x, np.nan)]))
    assert (low[0], high[0]) == pytest.approx((25.0, 975.0))
    assert np.isnan([low[1], high[1]]).all()
