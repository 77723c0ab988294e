"""On a CUDA device: steps replayed from graphs draw what plain steps draw."""

import pytest
import torch
from tiny_policies import ARCHITECTURES, encoded, fresh_policy, seeded

from segcredit.models import Policy
from segcredit.models.layers import fuse_norms, set_attention
from segcredit.rollout import HFEngine, graphs
from segcredit.types import Encoded, Rollouts, Sampling

pytestmark = pytest.mark.gpu

LONG = Sampling(90)
WAYS = [LONG, Sampling(60, 0.7), Sampling(60, 0.0), Sampling(60, 1.3, 0.8, 20)]
CLOSE = 1e-5


def on_gpu(name: str, dtype: torch.dtype = torch.float32) -> Policy:
    """Few of its responses end early."""
    owner = fresh_policy(name)
    owner.model.generation_config.eos_token_id = owner.codec.tokenizer.eos_token_id
    owner.model.to("cuda", dtype)
    set_attention(owner.model, "auto")
    return owner


def engine(owner: Policy, graphs: bool | str, rows: int = 256) -> HFEngine:
    return HFEngine(owner.model, owner.end_tokens, owner.banned, rows, graphs)  # type: ignore[arg-type]


def many(name: str) -> list[Encoded]:
    return [x for x in encoded(name) for _ in range(5)]


def recorded(drawer: HFEngine) -> int:
    return 0 if drawer._fixed is None else len(drawer._fixed.graphs)


def check_same(a: Rollouts, b: Rollouts) -> None:
    for column in ("tokens", "mask", "truncated"):
        assert torch.equal(getattr(a, column), getattr(b, column)), column
    assert a.entropy is not None
    assert b.entropy is not None
    assert float((a.logp_old - b.logp_old).abs().max()) < CLOSE
    assert float((a.entropy - b.entropy).abs().max()) < CLOSE


def learn(owner: Policy, rollouts: Rollouts) -> None:
    """Something between two batches that takes memory and changes the weights in place."""
    trained = list(owner.model.parameters())
    adam = torch.optim.AdamW(trained, lr=1e-3, fused=True)
    owner.score(rollouts, 1.0)[0].sum().backward()
    adam.step()
    for x in trained:
        x.grad = None


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_replayed_steps_draw_what_plain_ones_draw(name: str) -> None:
    owner = on_gpu(name)
    plain, auto = engine(owner, False), engine(owner, "auto")
    for sampling in WAYS:
        for _ in range(2):  # recorded, and replayed from the first step on
            made = auto.sample(many(name), sampling, seeded(1))
            check_same(made, plain.sample(many(name), sampling, seeded(1)))
        before = recorded(auto)
    assert before >= len(WAYS)
    begun = [torch.arange(10, 10 + n % 9) for n in range(len(many(name)))]
    check_same(
        auto.continue_from(many(name), begun, LONG, seeded(2)),
        plain.continue_from(many(name), begun, LONG, seeded(2)),
    )


@pytest.mark.parametrize("name", ["qwen2", "qwen2_5_vl"])
def test_weights_change_in_place_between_batches(name: str) -> None:
    owner = on_gpu(name)
    plain, auto = engine(owner, False), engine(owner, "auto")
    first = auto.sample(many(name), LONG, seeded())
    known = recorded(auto)
    assert known
    for seed in range(3):
        learn(owner, auto.sample(many(name), LONG, seeded(seed)))
        made = auto.sample(many(name), LONG, seeded())
        check_same(made, plain.sample(many(name), LONG, seeded()))
    assert not torch.equal(made.tokens[:, :20], first.tokens[:, :20])
    assert auto._fixed is not None
    before = auto._fixed.graphs
    for x in owner.model.parameters():
        x.data = x.data.clone()
    made = auto.sample(many(name), LONG, seeded())
    check_same(made, plain.sample(many(name), LONG, seeded()))
    assert auto._fixed.graphs is not before


def test_several_parts_sizes_and_a_short_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "LIMIT", 2)
    owner = on_gpu("llama")
    plain, auto = engine(owner, False), engine(owner, "auto", rows=13)
    for count, width in [(30, 40), (7, 200), (30, 40), (3, 9)]:
        made = auto.sample(many("llama")[:count], Sampling(width), seeded(width))
        check_same(made, plain.sample(many("llama")[:count], Sampling(width), seeded(width)))
        assert recorded(auto) <= 2


def test_what_cannot_be_recorded_is_drawn_plainly() -> None:
    owner = on_gpu("qwen2")
    want = engine(owner, False).sample(many("qwen2"), LONG, seeded())
    owner.model.get_output_embeddings().register_forward_hook(
        lambda _, __, out: out + 0.0 * float(out.sum().isfinite())
    )
    auto = engine(owner, "auto")
    with pytest.warns(UserWarning, match="without CUDA graphs"):
        check_same(auto.sample(many("qwen2"), LONG, seeded()), want)
    check_same(auto.sample(many("qwen2"), LONG, seeded()), want)
    learn(owner, want)  # and the device goes on


def test_half_precision_and_packed_attention() -> None:
    owner = on_gpu("qwen2", torch.bfloat16)
    assert owner.packs
    auto = engine(owner, "auto")
    made = auto.sample(many("qwen2"), LONG, seeded())
    assert recorded(auto)
    with torch.no_grad():
        logp, _ = owner.score(made, 1.0)
    assert float((logp - made.logp_old)[made.mask].abs().mean()) < 0.05


def test_memory_is_kept_not_taken_again() -> None:
    owner = on_gpu("qwen2")
    auto = engine(owner, "auto")
    for seed in range(3):
        auto.sample(many("qwen2"), LONG, seeded(seed))
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    for seed in range(3):
        auto.sample(many("qwen2"), LONG, seeded(seed))
    assert torch.cuda.memory_allocated() <= held + 2**20
    auto.close()
    assert torch.cuda.memory_allocated() < held


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_norms_by_one_kernel_say_the_same(name: str) -> None:
    owner = on_gpu(name)
    rollouts = engine(owner, graphs=True).sample(many(name), LONG, seeded())
    plain, _ = owner.score(rollouts, 1.0)
    assert fuse_norms(owner.model) > 0
    fused, _ = owner.score(rollouts, 1.0)
    assert float((fused - plain)[rollouts.mask].detach().abs().max()) < 1e-4
    check_same(
        engine(owner, graphs=True).sample(many(name), LONG, seeded()),
        engine(owner, graphs=False).sample(many(name), LONG, seeded()),
    )
