"""On a CUDA device: kernels and plain torch give what the CPU gives."""

from collections.abc import Callable
from dataclasses import fields, replace
from unittest import mock

import pytest
import torch
from batches import fake_monte_carlo, story
from ragged import layout

from segcredit.algorithms import ALGORITHMS
from segcredit.core import advantages, losses
from segcredit.core.advantages import segment_gae
from segcredit.core.checks import has_kernels
from segcredit.core.losses import boundary_value_loss, segment_policy_loss
from segcredit.core.segments import Segments
from segcredit.partition import entropy, tokens, top_entropy
from segcredit.types import Outputs, Rollouts

pytestmark = pytest.mark.gpu

LENGTHS = (1, 5, 40, 333, 1024, 1025)


@pytest.fixture(params=["kernels", "plain torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain torch":
        for module in (advantages, entropy, losses):
            monkeypatch.setattr(module, "has_kernels", lambda *_: False)
    else:
        assert has_kernels(torch.zeros(1, device="cuda")), "Triton is missing"
    return request.param


def moved(rollouts: Rollouts) -> Rollouts:
    columns = {f.name: getattr(rollouts, f.name) for f in fields(rollouts)}
    return replace(
        rollouts, **{k: v.cuda() for k, v in columns.items() if isinstance(v, torch.Tensor)}
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_method_agrees_with_the_cpu(name: str, dtype: torch.dtype, way: str) -> None:
    if way == "kernels" and dtype == torch.float64:
        pytest.skip("the kernels take float32 only")
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
        (3.0 * loss.total).backward()
        grads = [logp.grad, torch.zeros(1) if value.grad is None else value.grad]
        advantage = batch.credit.advantage if batch.credit else torch.zeros(1)
        found.append([x.detach().cpu().double() for x in (loss.total, *grads, advantage)])
        assert loss.total.dtype == dtype
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-9}
    for cpu, gpu in zip(*found, strict=True):
        assert torch.allclose(cpu, gpu, **close)


def test_sapo_runs_on_the_kernels() -> None:
    """Without this, a condition that never holds would make the comparison above empty."""
    from segcredit.core import kernels

    names = ("top_entropy", "segment_gae", "policy_loss", "value_loss")
    rollouts = moved(story().lay_out(0, holes=True, dtype=torch.float32)[0])
    algorithm = ALGORITHMS["sapo"]()
    spies = {name: mock.patch.object(kernels, name, wraps=getattr(kernels, name)) for name in names}
    called = {name: spy.start() for name, spy in spies.items()}
    batch = algorithm.minibatch(algorithm.prepare(rollouts))
    algorithm.loss(Outputs(rollouts.logp_old, rollouts.value), batch)
    mock.patch.stopall()
    assert all(spy.called for spy in called.values())


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_segments_are_identical(dtype: torch.dtype) -> None:
    place = layout(LENGTHS, seed=2)
    H = place.put([[round((7 * t) % 11 / 10, 1) for t in range(n)] for n in LENGTHS]).to(dtype)
    for fraction in (0.01, 0.3, 1.0):
        cpu = top_entropy(H, place.mask, fraction)
        gpu = top_entropy(H.cuda(), place.mask.cuda(), fraction)
        for name in ("index", "num", "start", "starts", "end", "length", "mask"):
            assert torch.equal(getattr(cpu, name), getattr(gpu, name).cpu()), name


def as_slice(x: torch.Tensor) -> torch.Tensor:
    """The same numbers as a view into something wider, as full[:, prompt:] is."""
    return torch.cat([x, x], dim=1)[:, x.shape[1] :]


def as_transpose(x: torch.Tensor) -> torch.Tensor:
    return x.T.contiguous().T


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("view", [as_slice, as_transpose])
@pytest.mark.parametrize("units", ["entropy", "tokens"])
def test_views_and_selected_rows(view: Callable[[torch.Tensor], torch.Tensor], units: str) -> None:
    generator = torch.Generator().manual_seed(4)
    H, V, old, new, now = torch.randn(5, 6, 50, generator=generator)
    mask = torch.arange(50) < torch.tensor([[50], [1], [7], [30], [49], [2]])
    reward = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.5])
    rows = torch.tensor([4, 0, 3])

    def go(device: str, look: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        m, h, v, o, n, w = (look(x.to(device)) for x in (mask, H.abs(), V, old, new, now))
        made = top_entropy(h, m, 0.3) if units == "entropy" else tokens(m)
        credit = segment_gae(reward.to(device), v, made, 1.0, 0.9).select(rows.to(device))
        n, w = n.detach().requires_grad_(), w.detach().requires_grad_()
        part = rows.to(device)
        policy, watched = segment_policy_loss(
            n[part], o[part], credit.advantage, credit.segments, 0.2, 0.28
        )
        critic = boundary_value_loss(w[part], v[part], credit.value_target, credit.segments)
        (2.0 * policy + critic).backward()
        out = [policy, critic, *watched.values(), credit.advantage, n.grad, w.grad]
        return [x.detach().cpu() for x in out]

    for cpu, gpu in zip(go("cpu", lambda x: x), go("cuda", view), strict=True):
        assert torch.allclose(cpu, gpu, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("lam", [0.0, 0.5, 0.99, 1.0])
def test_long_responses(lam: float) -> None:
    generator = torch.Generator().manual_seed(0)
    H, V = torch.rand(2, 3, 32_768, generator=generator)
    mask = torch.arange(32_768) < torch.tensor([[32_768], [10_000], [1]])
    reward = torch.tensor([1.0, 0.0, 1.0])
    cpu = segment_gae(reward, V, top_entropy(H, mask, 0.3), 1.0, lam)
    segments = top_entropy(H.cuda(), mask.cuda(), 0.3)
    gpu = segment_gae(reward.cuda(), V.cuda(), segments, 1.0, lam)
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


@pytest.mark.usefixtures("way", "as_users_run_it")
def test_bad_input_is_named_there_too() -> None:
    H, mask = torch.rand(2, 4, device="cuda"), torch.ones(2, 4, dtype=torch.bool, device="cuda")
    bad = H.clone()
    bad[1, 2] = torch.nan
    with pytest.raises(ValueError, match=r"entropy must be finite .* response 1, position 2"):
        top_entropy(bad, mask, 0.3)
    segments = top_entropy(H, mask, 0.3)
    one = torch.ones(2, device="cuda")
    with pytest.raises(ValueError, match=r"value must be finite .* response 1, position 2"):
        segment_gae(one, bad, segments, 1.0, 0.9)
    with pytest.raises(ValueError, match="reward must be finite"):
        segment_gae(one * torch.inf, H, segments, 1.0, 0.9)
    with pytest.raises(ValueError, match="logp_old must have the shape"):
        segment_policy_loss(H, H[:, :3], H, segments, 0.2, 0.2)
    with pytest.raises(ValueError, match="value_target must have the shape"):
        boundary_value_loss(H, H, H[:, :3], segments)
    mask[0] = False
    with pytest.raises(ValueError, match="empty response"):
        top_entropy(H, mask, 0.3)
