"""Keys that heads share, not copied: the same attention as transformers' own."""

import pytest
import torch
from tiny_policies import ARCHITECTURES, encoded, engine, fresh_policy, seeded

from segcredit.models.layers import GROUPED, grouped_attention, set_attention
from segcredit.rollout.hf import enough_threads
from segcredit.types import Sampling

CLOSE = 1e-5


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sampling_scores_and_gradients_are_sdpas(name: str) -> None:
    ours, theirs = fresh_policy(name), fresh_policy(name)
    assert ours.model.config._attn_implementation == GROUPED, "what a policy begins with"
    set_attention(theirs.model, "sdpa")
    drawn = [engine(x).sample(encoded(name) * 2, Sampling(16), seeded()) for x in (ours, theirs)]
    assert torch.equal(drawn[0].tokens, drawn[1].tokens)
    assert float((drawn[0].logp_old - drawn[1].logp_old).abs().max()) <= CLOSE
    grads = []
    for owner in (ours, theirs):
        logp, h = owner.score(drawn[0], 1.0, with_entropy=True)
        assert h is not None
        (logp.sum() + h.sum()).backward()
        grads.append(
            torch.cat([x.grad.flatten() for x in owner.model.parameters() if x.grad is not None])
        )
    assert float((grads[0] - grads[1]).abs().max()) <= CLOSE * float(grads[1].abs().max())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("heads", [2, 6])
def test_one_token_by_hand(heads: int, masked: bool) -> None:
    query = torch.randn(3, heads, 1, 4, generator=seeded(1))
    key, value = (torch.randn(3, 2, 5, 4, generator=seeded(n)) for n in (2, 3))
    mask = torch.rand(3, 1, 1, 5, generator=seeded(4)) > 0.4 if masked else None
    if mask is not None:
        mask[..., -1] = True
    with torch.no_grad():
        found, _ = grouped_attention(torch.nn.Identity(), query, key, value, mask, 0.7)
    for row in range(3):
        for head in range(heads):
            k, v = (x[row, head // (heads // 2)] for x in (key, value))
            scores = 0.7 * (k @ query[row, head, 0])
            if mask is not None:
                scores = scores.masked_fill(~mask[row, 0, 0], -torch.inf)
            expected = scores.softmax(0) @ v
            torch.testing.assert_close(found[row, 0, head], expected)


def test_small_steps_take_one_thread() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with enough_threads(torch.zeros(64, 100)):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with enough_threads(torch.zeros(64, 50_000)):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
