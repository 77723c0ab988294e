"""What is recorded while sampling is what the model says when it reads the response again."""

import pytest
import torch
from tiny_policies import (
    ARCHITECTURES,
    VISION,
    drawn,
    encoded,
    engine,
    fresh_policy,
    policy,
    seeded,
)
from torch import Tensor
from torch.nn.functional import pad

import segcredit.rollout.hf as hf
from segcredit.models import Policy
from segcredit.models.inputs import prompt_inputs
from segcredit.types import Rollouts, Sampling

CLOSE = 1e-5
COLUMNS = ("tokens", "mask", "logp_old", "entropy")


@torch.no_grad()
def scores(owner: Policy, rollouts: Rollouts, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    logp, h = owner.score(rollouts, temperature, with_entropy=True)
    assert h is not None
    return logp, h


def off(a: Tensor, b: Tensor, mask: Tensor) -> float:
    """The largest difference at tokens."""
    return float((a - b)[mask].detach().abs().max())


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_teacher_forcing_gives_what_was_recorded(name: str, temperature: float) -> None:
    rollouts = drawn(name, temperature)
    lengths = [len(prompt.tokens) for prompt in encoded(name)]
    assert max(lengths) > 8 * min(lengths)  # left padding of every width
    assert len(set(rollouts.mask.sum(dim=1).tolist())) > 3
    logp, h = scores(policy(name), rollouts, temperature)
    assert off(logp, rollouts.logp_old, rollouts.mask) < CLOSE
    assert rollouts.entropy is not None
    assert off(h, rollouts.entropy, rollouts.mask) < CLOSE
    other = 1.0 if temperature == 0.7 else 0.7
    assert off(scores(policy(name), rollouts, other)[0], logp, rollouts.mask) > 0.1
    assert (rollouts.logp_old[~rollouts.mask] == 0).all()
    assert (rollouts.entropy[~rollouts.mask] == 0).all()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_scores_without_entropy_are_the_same(name: str) -> None:
    rollouts = drawn(name)
    logp, none = policy(name).score(rollouts, 0.7)
    assert none is None
    assert logp.requires_grad
    assert off(logp, scores(policy(name), rollouts, 0.7)[0], rollouts.mask) < CLOSE


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_neighbors_order_and_padding_change_nothing(name: str) -> None:
    """Alone in the batch, in pairs, backwards, and with columns of rubbish on the right."""
    rollouts = drawn(name)
    num = len(rollouts)
    logp, h = scores(policy(name), rollouts)
    mask, width = rollouts.mask, rollouts.tokens.shape[1]
    for rows in (*([n] for n in range(num)), [0, num - 1], [2, 1], list(range(num))[::-1]):
        chosen = torch.tensor(rows)
        some, some_h = scores(policy(name), rollouts.select(chosen))
        assert some.shape == (len(rows), width)
        assert off(some, logp[chosen], mask[chosen]) < CLOSE, rows
        assert off(some_h, h[chosen], mask[chosen]) < CLOSE, rows
    rubbish = torch.randint(0, 70, (num, width + 37), generator=seeded(3))
    rubbish[:, ::3] = 5  # a picture's token, in vision models
    columns = {name: pad(getattr(rollouts, name), (0, 37)) for name in COLUMNS}
    wide = rollouts.replace(**columns)
    wide = wide.replace(tokens=wide.tokens.where(wide.mask, rubbish))
    padded, padded_h = scores(policy(name), wide)
    assert padded.shape == padded_h.shape == wide.tokens.shape
    assert padded.isfinite().all()
    assert padded_h.isfinite().all()
    assert off(padded[:, :width], logp, mask) < CLOSE
    assert off(padded_h[:, :width], h, mask) < CLOSE


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_hole_is_read_but_not_scored(name: str) -> None:
    """A tool's answer: later tokens depend on it, its own place in the mask does not matter."""
    rollouts = drawn(name)
    row = int(rollouts.mask.sum(dim=1).argmax())
    length = int(rollouts.mask[row].sum())
    one = rollouts.select(torch.tensor([row]))
    mask = one.mask.clone()
    mask[0, 2:4] = False
    logp = scores(policy(name), one)[0]
    holed = scores(policy(name), one.replace(mask=mask))[0]
    assert off(holed, logp, mask) < CLOSE
    tokens = one.tokens.clone()
    tokens[0, 2:4] = (tokens[0, 2:4] + 1) % 9 + 10
    other = scores(policy(name), one.replace(tokens=tokens, mask=mask))[0]
    assert off(other[:, :2], logp[:, :2], mask[:, :2]) < CLOSE
    assert off(other[:, 4:length], logp[:, 4:length], mask[:, 4:length]) > 1e-3


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_how_many_are_drawn_at_once_and_when_the_finished_leave_changes_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Rollouts] = []
    sizes: list[list[int]] = []
    owner = fresh_policy(name)
    owner.model.get_output_embeddings().register_forward_hook(
        lambda _, __, out: sizes[-1].append(len(out))
    )
    for rows in (1, 3, 256):
        for below in (0.0, 0.75, 1.0):
            monkeypatch.setattr(hf, "COMPACT_BELOW", below)
            sizes.append([])
            sampling = Sampling(16, temperature=0.7)
            made.append(engine(owner, rows).sample(encoded(name), sampling, seeded()))
    never, sometimes, always = (sizes[6 + n] for n in range(3))
    assert set(never) == {len(encoded(name))}
    assert len(set(always)) > 2  # rows left, several times
    assert sum(always) < sum(sometimes) <= sum(never)
    first = made[0]
    assert first.truncated.any()
    assert not first.truncated.all()
    for other in made[1:]:
        for column in ("tokens", "mask", "truncated"):
            assert torch.equal(getattr(other, column), getattr(first, column)), column
        assert off(other.logp_old, first.logp_old, first.mask) < CLOSE
        assert other.entropy is not None
        assert first.entropy is not None
        assert off(other.entropy, first.entropy, first.mask) < CLOSE


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_is_transformers_own_generate(name: str) -> None:
    owner, prompts = fresh_policy(name), encoded(name)
    ours = engine(owner).sample(prompts, Sampling(14, temperature=0.0), seeded())
    given = prompt_inputs(prompts).arguments()
    del given["position_ids"]
    if name in VISION:
        image = owner.model.config.image_token_id
        given["mm_token_type_ids"] = (given["input_ids"] == image).long()
    banned = owner.banned
    never = None if banned is None else banned.nonzero().flatten().tolist()
    theirs = owner.model.generate(
        **given,
        do_sample=False,
        max_new_tokens=14,
        suppress_tokens=never,
        return_dict_in_generate=True,
        output_scores=True,
    )
    tokens = theirs.sequences[:, given["input_ids"].shape[1] :]
    logp = torch.stack(theirs.scores, dim=1).log_softmax(-1)
    logp = logp.gather(-1, tokens[..., None]).squeeze(-1)
    width, mask = ours.tokens.shape[1], ours.mask
    assert tokens.shape[1] == width
    assert torch.equal(ours.tokens[mask], tokens[mask])
    assert off(ours.logp_old, logp, mask) < CLOSE
    # and it ends where transformers begins to pad
    ended = torch.isin(tokens, torch.tensor(owner.end_tokens)).int().cumsum(1)
    assert torch.equal(
        mask, (ended == 0) | ((ended == 1) & torch.isin(tokens, torch.tensor(owner.end_tokens)))
    )
