"""Compiled layers say what the others say; one compilation serves all layers and lengths."""

import pytest
import torch
from tiny_policies import drawn, encoded, engine, seeded, world
from torch._dynamo.utils import counters

from segcredit.models import Policy
from segcredit.models.layers import compile_layers, recompute_activations, set_attention
from segcredit.types import Sampling

LAYERS = 3


def tiny(name: str, recompute: bool) -> Policy:
    made = Policy.tiny(name, world(name).tokenizer(), hidden=32, heads=4, layers=LAYERS)
    set_attention(made.model, "packed")
    if recompute:
        recompute_activations(made.model)
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "recompute"),
    [("qwen2", True), pytest.param("qwen2_5_vl", True, marks=pytest.mark.gpu)],  # slow on a CPU
)
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_the_same_scores_and_gradients(name: str, recompute: bool) -> None:
    torch._dynamo.reset()
    counters.clear()
    rollouts = drawn(name)
    plain, fused = tiny(name, recompute), tiny(name, recompute)
    towers = 1 if name == "qwen2_5_vl" else 0
    assert compile_layers(fused.model, backend="aot_eager") == LAYERS + towers
    graphs = []
    for rows in ([0, 1, 2, 3, 4], [1, 3], [2, 4, 1]):  # of other lengths every time
        some = rollouts.select(torch.tensor(rows))
        found = []
        for policy in (plain, fused):
            policy.model.zero_grad()
            logp, _ = policy.score(some, 1.0)
            logp.sum().backward()
            grads = [x.grad for x in policy.model.parameters() if x.grad is not None]
            found.append((logp.detach(), torch.cat([x.flatten() for x in grads])))
        torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            found[0][1], found[1][1], rtol=1e-4, atol=1e-5 * float(found[0][1].abs().max())
        )
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0, "nothing was compiled"
    assert graphs[0] <= 16, "layers were compiled one by one"
    assert graphs[-1] == graphs[0], "lengths were compiled one by one"

    drawn_by = [engine(x).sample(encoded(name)[:3], Sampling(12), seeded()) for x in (plain, fused)]
    assert torch.equal(drawn_by[0].tokens, drawn_by[1].tokens)
    if not towers:  # pictures pass a tower without a cache
        assert counters["stats"]["unique_graphs"] == graphs[-1], "sampling was compiled"
    torch._dynamo.reset()
