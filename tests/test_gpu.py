"""On a CUDA device: kernels and plain torch give what the CPU gives."""

from dataclasses import fields, replace

import pytest
import torch
from batches import fake_monte_carlo, story
from ragged import layout

from segcredit.algorithms import ALGORITHMS
from segcredit.core import advantages, losses
from segcredit.core.advantages import segment_gae, terminal_reward
from segcredit.core.device import has_kernels
from segcredit.core.segments import Segments
from segcredit.partition import entropy, top_entropy
from segcredit.types import Outputs, Rollouts

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["kernels", "plain torch"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "plain torch":
        for module in (advantages, entropy, losses):
            monkeypatch.setattr(module, "has_kernels", lambda *_: False)
    else:
        assert has_kernels(torch.zeros(1, device="cuda")), "Triton is missing"


def moved(rollouts: Rollouts) -> Rollouts:
    columns = {f.name: getattr(rollouts, f.name) for f in fields(rollouts)}
    return replace(
        rollouts, **{k: v.cuda() for k, v in columns.items() if isinstance(v, torch.Tensor)}
    )


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_method_agrees_with_the_cpu(name: str, dtype: torch.dtype) -> None:
    rollouts, _ = story(num_groups=4, longest=300, seed=1).lay_out(0, holes=True, dtype=dtype)
    algorithm = ALGORITHMS[name]()
    found = []
    for given in (rollouts, moved(rollouts)):
        batch = algorithm.minibatch(algorithm.prepare(given, fake_monte_carlo))
        old = batch.rollouts.logp_old
        wobble = 0.3 * torch.sin(37.0 * old.double()).to(dtype)
        logp = (old + wobble).requires_grad_()
        value = (batch.rollouts.value + wobble).requires_grad_()
        loss = algorithm.loss(Outputs(logp, value), batch)
        loss.total.backward()
        grads = [logp.grad, torch.zeros(1) if value.grad is None else value.grad]
        advantage = batch.credit.advantage if batch.credit else torch.zeros(1)
        found.append([x.detach().cpu().double() for x in (loss.total, *grads, advantage)])
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-9}
    for cpu, gpu in zip(*found, strict=True):
        assert torch.allclose(cpu, gpu, **close)


@pytest.mark.usefixtures("_way")
def test_segments_are_identical() -> None:
    place = layout([1, 5, 40, 333, 1024, 1025], seed=2)
    H = place.put(
        [[round((7 * t) % 11 / 10, 1) for t in range(n)] for n in (1, 5, 40, 333, 1024, 1025)]
    )
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for fraction in (0.01, 0.3, 1.0):
            cpu = top_entropy(H.to(dtype), place.mask, fraction)
            gpu = top_entropy(H.to(dtype).cuda(), place.mask.cuda(), fraction)
            for name in ("index", "num", "start", "starts", "end", "length", "mask"):
                assert torch.equal(getattr(cpu, name), getattr(gpu, name).cpu()), name


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("lam", [0.0, 0.5, 0.99, 1.0])
def test_long_responses(lam: float) -> None:
    generator = torch.Generator().manual_seed(0)
    H, V = torch.rand(2, 3, 32_768, generator=generator)
    mask = torch.arange(32_768) < torch.tensor([[32_768], [10_000], [1]])
    reward = terminal_reward(torch.tensor([1.0, 0.0, 1.0]), mask)
    cpu = segment_gae(reward, V, top_entropy(H, mask, 0.3), 1.0, lam)
    on = [x.cuda() for x in (reward, V, H, mask)]
    gpu = segment_gae(on[0], on[1], top_entropy(on[2], on[3], 0.3), 1.0, lam)
    assert torch.allclose(cpu.advantage, gpu.advantage.cpu(), rtol=1e-5, atol=1e-5)
    assert torch.allclose(cpu.value_target, gpu.value_target.cpu(), rtol=1e-5, atol=1e-5)


def test_gradients_by_finite_differences() -> None:
    place = layout([5, 2, 7], seed=3)
    made = Segments.from_ends(place.marks([[1, 4], [1], [0, 3, 6]]).cuda(), place.mask.cuda())
    x = torch.randn(place.mask.shape, dtype=torch.float64, device="cuda", requires_grad=True)
    y = torch.randn(made.mask.shape, dtype=torch.float64, device="cuda", requires_grad=True)
    for f in (made.sum, made.mean, made.smooth, made.at_start, made.at_end):
        assert torch.autograd.gradcheck(f, (x,), nondet_tol=1e-12)
    assert torch.autograd.gradcheck(made.spread, (y,), nondet_tol=1e-12)


@pytest.mark.usefixtures("_way")
def test_bad_input_is_named_there_too() -> None:
    H, mask = torch.rand(2, 4, device="cuda"), torch.ones(2, 4, dtype=torch.bool, device="cuda")
    H[1, 2] = torch.nan
    with pytest.raises(ValueError, match=r"entropy must be finite .* response 1, position 2"):
        top_entropy(H, mask, 0.3)
    mask[0] = False
    with pytest.raises(ValueError, match="empty response"):
        top_entropy(torch.rand(2, 4, device="cuda"), mask, 0.3)
