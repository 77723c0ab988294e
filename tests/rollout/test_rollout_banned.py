"""Tokens that a policy must not write: never drawn, of no probability, and harmless to the rest."""

from dataclasses import replace

import pytest
import torch
from tiny_policies import (
    TEXT,
    VISION,
    changed_head,
    encoded,
    engine,
    fresh_policy,
    policy,
    seeded,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from segcredit.models import Policy, tiny_config
from segcredit.models.codec import Codec
from segcredit.models.families import QwenVL
from segcredit.types import Rollouts, Sampling

SETTINGS = [Sampling(12), Sampling(12, 0.7), Sampling(12, 0.0), Sampling(12, 1.0, 0.9, 20)]


def pushed(width: int, ids: list[int]) -> Tensor:
    """Something to add to logits, so that these tokens are all but certain."""
    change = torch.zeros(width)
    change[ids] = 30.0
    return change


def check_scores(owner: Policy, rollouts: Rollouts, temperature: float) -> None:
    """Sampled and scored are one distribution, without the banned tokens."""
    with torch.no_grad():
        logp, h = owner.score(rollouts, temperature, with_entropy=True)
    mask = rollouts.mask
    assert h is not None
    assert rollouts.entropy is not None
    assert logp.isfinite().all()
    assert h.isfinite().all()
    assert (logp - rollouts.logp_old)[mask].abs().max() < 1e-5
    assert (h - rollouts.entropy)[mask].abs().max() < 1e-5


@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize("name", VISION)
def test_vision_tokens(name: str, sampling: Sampling) -> None:
    """One <|image_pad|> in a response, and scoring would miss an image."""
    vocabulary = policy(name).codec.tokenizer.get_vocab()
    ids = [vocabulary[token] for token in QwenVL.prompt_only_tokens]
    owner = changed_head(name, pushed(len(vocabulary), ids))
    assert owner.banned is not None
    assert owner.banned.nonzero().flatten().tolist() == sorted(ids)
    rollouts = engine(owner).sample(encoded(name), sampling, seeded())
    assert not torch.isin(rollouts.tokens[rollouts.mask], torch.tensor(ids)).any()
    check_scores(owner, rollouts, sampling.temperature or 1.0)
    # and the others are as if the vision tokens had never been there
    plain = engine(fresh_policy(name)).sample(encoded(name), sampling, seeded())
    assert torch.equal(plain.tokens, rollouts.tokens)
    assert (plain.logp_old - rollouts.logp_old).abs().max() < 1e-5


@pytest.mark.parametrize("name", VISION)
def test_a_banned_token_has_no_probability(name: str) -> None:
    owner = changed_head(name, pushed(len(policy(name).codec.tokenizer), [3, 4, 5, 6]))
    rollouts = engine(owner).sample(encoded(name)[:2], Sampling(4), seeded())
    rollouts.tokens[0, 0] = owner.codec.tokenizer.convert_tokens_to_ids("<|vision_start|>")
    with torch.no_grad():
        logp, h = owner.score(rollouts, 1.0, with_entropy=True)
    assert logp[0, 0] == -torch.inf
    assert h is not None
    assert h.isfinite().all()
    assert logp[1].isfinite().all()


@pytest.mark.parametrize("with_entropy", [False, True])
def test_banned_tokens_off_the_mask_leave_the_gradient_alone(with_entropy: bool) -> None:
    """The likeliest token is banned, and behind the end stands one."""
    name = VISION[0]
    owner = changed_head(name, pushed(len(policy(name).codec.tokenizer), [3, 4, 5, 6]))
    rollouts = engine(owner).sample(encoded(name), Sampling(12), seeded())
    tokens = rollouts.tokens.masked_fill(~rollouts.mask, 5)
    assert (tokens == 5).any()
    weight = owner.model.get_input_embeddings().weight
    gradients = []
    for made in (rollouts, rollouts.replace(tokens=tokens)):
        logp, h = owner.score(made, 1.0, with_entropy)
        assert logp.isfinite().all()
        x = logp[made.mask].sum() if h is None else (logp + h)[made.mask].sum()
        gradients.append(torch.autograd.grad(x, weight)[0])
    assert gradients[0].isfinite().all()
    assert torch.equal(*gradients)


@pytest.mark.parametrize("name", [*TEXT, *VISION])
def test_rows_of_the_head_that_no_token_has(name: str) -> None:
    """Heads are often padded to a round number of rows."""
    known = len(policy(name).codec.tokenizer)
    owner = fresh_policy(name)
    owner.model.resize_token_embeddings(known + 13, mean_resizing=False)
    unused = list(range(known, known + 13))
    change = pushed(known + 13, unused)
    owner.model.get_output_embeddings().register_forward_hook(lambda _, __, out: out + change)
    assert owner.banned is not None
    assert owner.banned[known:].all()
    assert int(owner.banned.sum()) == 13 + len(owner.codec.banned)
    rollouts = engine(owner).sample(encoded(name), Sampling(12), seeded())
    assert int(rollouts.tokens.max()) < known
    check_scores(owner, rollouts, 1.0)


def test_a_text_model_s_whole_vocabulary_is_allowed() -> None:
    assert policy("llama").banned is None
    assert policy("llama").codec.banned == ()


def test_a_vocabulary_with_gaps() -> None:
    """Ids beyond the vocabulary's size are tokens too, if the tokenizer says so: the end here."""
    words = {"a": 0, "b": 1, "?": 4, "<end>": 7}
    core = Tokenizer(WordLevel(words, unk_token="?"))
    core.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<end>", pad_token="<end>", unk_token="?"
    )
    assert len(tokenizer) == 4
    config = tiny_config("llama", tokenizer, hidden=32, heads=4)
    config.vocab_size = 9
    owner = Policy(
        AutoModelForCausalLM.from_config(config).eval(), Codec(tokenizer, template="{question}")
    )
    assert owner.banned is not None
    assert (~owner.banned).nonzero().flatten().tolist() == [0, 1, 4, 7]
    asked = replace(encoded("llama")[0].prompt, messages=({"role": "user", "content": "a b"},))
    rollouts = engine(owner).sample([owner.encode(asked)] * 20, Sampling(20), seeded())
    assert set(rollouts.tokens[rollouts.mask].tolist()) == {0, 1, 4, 7}
    assert not rollouts.truncated.all()
    check_scores(owner, rollouts, 1.0)
