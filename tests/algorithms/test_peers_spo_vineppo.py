"""SPO, VinePPO, RestEM, DPO+ and DVO against numbers that their authors' own code computed.

The numbers are recorded in tests/fixtures/spo.json and vineppo.json, with repository and commit.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ragged import Layout, layout
from torch import Tensor

from segcredit import algorithms
from segcredit.core.logits import token_logp
from segcredit.core.segments import Segments
from segcredit.partition import FixedLength
from segcredit.train.tree import rows_with_credit
from segcredit.types import Algorithm, Batch, Outputs, Rollouts

FIXTURES = Path(__file__).parent.parent / "fixtures"
SPO = json.loads((FIXTURES / "spo.json").read_text())
VINE = json.loads((FIXTURES / "vineppo.json").read_text())
CLOSE = {"rel": 1e-8, "abs": 1e-9}


def cases(found: dict[str, Any], name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", found[name], ids=lambda case: f"seed{case['seed']}")


def laid_out(case: dict[str, Any], **columns: Any) -> tuple[Layout, Rollouts, Tensor]:
    """The case's rows as rollouts with holes and padding; log π of the update."""
    rows = case["rows"]
    place = layout([len(row["logp"]) for row in rows], case["seed"])

    def column(name: str) -> Tensor:
        return place.put([row[name] for row in rows])

    num = len(rows)
    given = {
        "reward": torch.zeros(num).double(),
        "group": torch.arange(num),
        "truncated": torch.tensor([row.get("truncated", False) for row in rows]),
        **columns,
    }
    if "pieces" in rows[0]:
        given["pieces"] = place.texts([row["pieces"] for row in rows])
    rollouts = Rollouts(
        tokens=place.mask.long(),
        mask=place.mask,
        logp_old=column("logp_old"),
        logp_ref=column("logp_ref"),
        **given,
    )
    return place, rollouts, column("logp").requires_grad_()


def assert_rows(got: Sequence[Sequence[float]], want: Sequence[Sequence[float]]) -> None:
    for x, y in zip(got, want, strict=True):
        assert x == pytest.approx(y, **CLOSE)


def assert_update(
    algorithm: Algorithm, batch: Batch, logp: Tensor, case: dict[str, Any], rows: list[int]
) -> None:
    """Advantages of the loss, loss with its KL, and the gradient by log π, as the peer's."""
    batch = algorithm.minibatch(batch)
    loss = algorithm.loss(Outputs(logp[torch.tensor(rows)]), batch)
    loss.policy.backward()
    assert loss.policy.item() == pytest.approx(case["loss"], **CLOSE)
    assert loss.metrics["kl_loss"].item() == pytest.approx(case["kl_loss"], **CLOSE)
    assert batch.credit is not None
    mask = batch.rollouts.mask
    for i, (white, grad) in enumerate(zip(case["whitened"], case["grad"], strict=True)):
        learned = batch.loss_mask[i][mask[i]]
        got = batch.credit.advantage[i][mask[i]][learned]
        assert got.tolist() == pytest.approx(
            torch.tensor(white, dtype=torch.float64)[learned].tolist(), **CLOSE
        )
        assert logp.grad[rows[i]][mask[i]].tolist() == pytest.approx(grad, **CLOSE)


def values_of(algorithm: Any, case: dict[str, Any], place: Layout) -> Any:
    """A sampler whose continuations are the case's; states are found by where they begin."""

    def monte_carlo(
        rollouts: Rollouts, segments: Segments, estimated: Tensor, samples: int
    ) -> Tensor:
        values = torch.full(estimated.shape, torch.nan, dtype=torch.float64)
        for i, row in enumerate(case["rows"]):
            token_of = place.mask[i].cumsum(0) - 1  # holes are no tokens of the peer's
            found = {}
            for m in estimated[i].nonzero().flatten().tolist():
                found[int(token_of[segments.start[i, m]])] = m
            assert sorted(found) == [state["start"] for state in row["states"]]
            for state in row["states"]:
                graded = torch.tensor(state["graded"]).double()
                counted = algorithm.credit.scored(graded, torch.tensor(state["truncated"]))
                assert counted.mean().item() == pytest.approx(state["value"])
                values[i, found[state["start"]]] = counted.mean()
        return values

    return monte_carlo


@cases(VINE, "vineppo")
def test_vineppo(case: dict[str, Any]) -> None:
    graded = torch.tensor([row["graded"] for row in case["rows"]]).double()
    place, rollouts, logp = laid_out(case, reward=graded)
    algorithm = algorithms.vineppo(most=case["most"])
    batch = algorithm.prepare(rollouts, values_of(algorithm, case, place))
    assert batch.credit is not None
    assert_rows(place.take(batch.credit.advantage), [row["raw"] for row in case["rows"]])
    assert_update(algorithm, batch, logp, case, list(range(len(case["rows"]))))


@pytest.mark.parametrize("case", VINE["vineppo_states"], ids=str)
def test_vineppo_estimates_the_query_and_so_many_steps(case: dict[str, Any]) -> None:
    mask = torch.ones(1, case["steps"], dtype=torch.bool)
    rollouts = Rollouts(
        mask.long(), mask, -mask.double(), torch.ones(1), torch.zeros(1).long(), ~mask[:, 0]
    )
    algorithm = algorithms.vineppo(most=case["most"], partition=FixedLength(1), kl=0.0)
    segments = algorithm.credit.over(rollouts)
    assert int(algorithm.credit.estimated(rollouts, segments).sum()) == case["states"]


@cases(SPO, "spo_chain")
def test_spo_chain(case: dict[str, Any]) -> None:
    graded = torch.tensor([row["graded"] for row in case["rows"]]).double()
    place, rollouts, logp = laid_out(case, reward=graded)
    algorithm = algorithms.spo_chain(every=SPO["settings"]["cutpoint_interval"])
    batch = algorithm.prepare(rollouts, values_of(algorithm, case, place))
    assert batch.credit is not None
    kept = batch.credit.advantage.where(batch.loss_mask, 0.0)  # theirs is 0 at likely tokens
    assert_rows(place.take(kept), [row["raw"] for row in case["rows"]])
    assert_update(algorithm, batch, logp, case, list(range(len(case["rows"]))))


@cases(SPO, "spo_tree")
def test_spo_tree(case: dict[str, Any]) -> None:
    """A truncated leaf keeps the grade of what it says, there as here."""
    rows = case["rows"]
    assert any(row["truncated"] and row["reward"] == row["graded"] == 1.0 for row in rows)
    _, rollouts, logp = laid_out(
        case,
        reward=torch.tensor([row["graded"] if row["leaf"] else 0.0 for row in rows]).double(),
        group=torch.tensor([row["group"] for row in rows]),
        parent=torch.tensor([row["parent"] for row in rows]),
    )
    algorithm = algorithms.spo_tree(normalize=case["adv_method"] == "grpo")
    batch = algorithm.prepare(rollouts)
    assert batch.credit is not None
    kept = rows_with_credit(batch)
    assert kept.tolist() == case["kept"]
    first = batch.credit.segments.at_start(batch.credit.advantage)[:, 0]
    want = [rows[row]["advantage"] for row in case["kept"]]
    assert first[kept].tolist() == pytest.approx(want, **CLOSE)
    assert_update(algorithm, batch.select(kept), logp, case, case["kept"])


@cases(SPO, "dvo")
def test_dvo(case: dict[str, Any]) -> None:
    assert any(other["weight_clip_fraction"] > 0.0 for other in SPO["dvo"]), "the cap acts"
    rows = case["rows"]
    reward = torch.tensor([row["reward"] for row in rows]).double()
    place, rollouts, logp = laid_out(case, reward=reward)
    algorithm = algorithms.dvo(beta=case["beta"], partition=FixedLength(case["step_tokens"]))

    def monte_carlo(
        rollouts: Rollouts, segments: Segments, estimated: Tensor, samples: int
    ) -> Tensor:
        values = torch.zeros(estimated.shape).double()
        values[estimated] = torch.tensor(
            [v for row in rows for v in row["values"]], dtype=torch.float64
        )
        return values

    batch = algorithm.minibatch(algorithm.prepare(rollouts, monte_carlo))
    loss = algorithm.loss(Outputs(logp), batch)
    loss.policy.backward()
    assert loss.policy.item() == pytest.approx(case["loss"], **CLOSE)
    assert loss.metrics["step_weight"].item() == pytest.approx(case["weight"], **CLOSE)
    assert_rows(place.take(logp.grad), case["grad"])


def sampled(case: dict[str, Any]) -> Rollouts:
    """The case's responses, numbered in their only token, to select from."""
    answers = case["responses"]
    mask = torch.ones(len(answers), 1, dtype=torch.bool)
    return Rollouts(
        tokens=torch.arange(len(answers))[:, None],
        mask=mask,
        logp_old=-mask.double(),
        reward=torch.tensor([x["graded"] for x in answers]).double(),
        group=torch.tensor([x["group"] for x in answers]),
        truncated=torch.tensor([x["truncated"] for x in answers]),
    )


def fitted(case: dict[str, Any], algorithm: Algorithm, rows_per_item: int) -> None:
    """Loss and gradient by the logits at the peer's temperature."""
    rows = case["rows"]
    place = layout([len(row["tokens"]) for row in rows], case["seed"])
    mask, num_logits = place.mask, len(rows[0]["logits"][0])
    tokens = torch.zeros(mask.shape, dtype=torch.long)
    tokens[mask] = torch.tensor([t for row in rows for t in row["tokens"]])

    def placed(name: str) -> Tensor:
        x = torch.zeros(*mask.shape, num_logits, dtype=torch.float64)
        x[mask] = torch.tensor([v for row in rows for v in row[name]], dtype=torch.float64)
        return x

    logits = placed("logits").requires_grad_()
    logp = token_logp(logits, tokens, case["temperature"])
    num = len(rows)
    rollouts = Rollouts(
        tokens, mask, logp.detach(), torch.ones(num), torch.arange(num), torch.zeros(num).bool()
    )
    if "logits_ref" in rows[0]:
        reference = token_logp(placed("logits_ref"), tokens, case["temperature"])
        rollouts = rollouts.replace(logp_ref=reference)
    batch = algorithm.minibatch(Batch(rollouts, mask, rows_per_item=rows_per_item))
    loss = algorithm.loss(Outputs(logp), batch).policy
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], **CLOSE)
    got = [logits.grad[i][mask[i]].flatten().tolist() for i in range(num)]
    assert_rows(got, [[v for token in row for v in token] for row in case["grad_logits"]])


@cases(VINE, "restem")
def test_restem(case: dict[str, Any]) -> None:
    algorithm = algorithms.restem(threshold=case["threshold"], per_prompt=case["per_prompt"])
    kept = algorithm.prepare(sampled(case)).rollouts.tokens[:, 0]
    assert kept.tolist() == case["kept"]
    fitted(case, algorithm, 1)


@cases(VINE, "dpo_positive")
def test_dpo_positive(case: dict[str, Any]) -> None:
    settings = {"beta": case["beta"], "penalty": float(case["penalty"])}
    algorithm = algorithms.dpo_positive(**settings)
    number = algorithm.prepare(sampled(case)).rollouts.tokens[:, 0]
    pairs = number.view(-1, 2).tolist()
    assert sorted(pairs) == sorted(case["all_pairs"])

    few = algorithms.dpo_positive(pairs_per_prompt=3, **settings)
    drawn = torch.Generator().manual_seed(case["seed"])
    some = few.prepare(sampled(case), generator=drawn).rollouts.tokens[:, 0].view(-1, 2).tolist()
    assert len(some) == len(case["at_most_3"])
    assert len({tuple(x) for x in some}) == len(some), "without replacement"
    assert all(x in case["all_pairs"] for x in some)
    fitted(case, algorithm, 2)
