"""Stop strings: the response ends after the token that completes one, whatever the engine does."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from each import each
from tiny_policies import TEXT, VISION, encoded, fresh_policy, policy, seeded
from torch import Tensor

from segcredit.models import Policy
from segcredit.models.inputs import as_responses
from segcredit.rollout import EngineSettings, HFEngine, hf, make_engine, vllm
from segcredit.rollout import graphs as fixed
from segcredit.rollout.stop import Decode, StopStrings
from segcredit.types import Rollouts, Sampling

LENGTH = 40


def engine(owner: Policy, graphs: bool = False, rows: int = 256) -> HFEngine:
    return HFEngine(owner.model, owner.end_tokens, owner.banned, rows, graphs, owner.codec.decode)


def texts(owner: Policy, made: Rollouts) -> list[str]:
    return [x.text for x in as_responses(made, owner.codec.decode, LENGTH)]


def shared_pairs(owner: Policy, made: Rollouts, count: int) -> list[str]:
    """Texts of two neighboring tokens each, cut inside both, that the responses contain."""
    found = []
    for row in range(len(made)):
        tokens = made.tokens[row][made.mask[row]].tolist()
        first, second = (owner.codec.decode(tokens[x : x + 1]) for x in (3, 4))
        if first.strip() and second.strip():
            found.append(first[-2:] + second[:1])
    assert len(found) >= count
    return found[:count]


def first_end(owner: Policy, tokens: Sequence[int], stop: Sequence[str]) -> int | None:
    """Index of the token with which the whole text first contains a stop string."""
    for number in range(len(tokens)):
        text = owner.codec.decode(list(tokens[: number + 1]))
        if any(x in text for x in stop):
            return number
    return None


@pytest.mark.parametrize("name", [TEXT[0], TEXT[1], VISION[0]])
@pytest.mark.parametrize("graphs", [False, True])
def test_a_response_ends_with_the_token_that_completes_it(name: str, graphs: bool) -> None:
    owner, prompts = policy(name), encoded(name) * 4
    free = engine(owner).sample(prompts, Sampling(LENGTH), seeded())
    stop = tuple(shared_pairs(owner, free, 3))
    made = engine(owner, graphs).sample(prompts, Sampling(LENGTH, stop=stop), seeded())
    stopped = 0
    for row in range(len(prompts)):
        whole = free.tokens[row][free.mask[row]].tolist()
        end = first_end(owner, whole, stop)
        expected = whole if end is None else whole[: end + 1]
        assert made.tokens[row][made.mask[row]].tolist() == expected
        length = len(expected)
        assert torch.allclose(made.logp_old[row, :length], free.logp_old[row, :length], atol=1e-5)
        assert not made.mask[row, length:].any()
        assert not made.logp_old[row, length:].any()
        if end is None:
            assert bool(made.truncated[row]) == bool(free.truncated[row])
        else:
            stopped += 1
            assert not made.truncated[row]
    assert 3 <= stopped < len(prompts)
    found = texts(owner, made)
    assert sum(any(x in text for x in stop) for text in found) == stopped


def test_it_depends_neither_on_the_batch_nor_on_when_text_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner, prompts = policy(TEXT[0]), encoded(TEXT[0]) * 3
    free = engine(owner).sample(prompts, Sampling(LENGTH), seeded())
    sampling = Sampling(LENGTH, stop=tuple(shared_pairs(owner, free, 2)))
    usual = engine(owner).sample(prompts, sampling, seeded())
    for every in (1, 3, 64):
        monkeypatch.setattr(hf, "DECODE_EVERY", every)
        made = engine(owner, rows=5).sample(prompts, sampling, seeded())
        for column in ("tokens", "mask", "truncated"):
            assert torch.equal(getattr(made, column), getattr(usual, column)), (every, column)
    for every in (1, 7):
        monkeypatch.setattr(fixed, "CHECK_EVERY", every)
        made = engine(owner, graphs=True).sample(prompts, sampling, seeded())
        assert torch.equal(made.mask, usual.mask)
        assert torch.equal(made.tokens, usual.tokens)


def test_sampling_ends_early_if_all_rows_have_stopped() -> None:
    owner = fresh_policy(TEXT[0])
    calls = []
    owner.model.register_forward_hook(lambda *_: calls.append(1))
    made = engine(owner).sample(encoded(TEXT[0]), Sampling(LENGTH, stop=(" ",)), seeded())
    assert made.mask.sum(dim=1).max() < 6
    assert len(calls) <= hf.DECODE_EVERY + 1
    calls.clear()
    engine(owner, graphs=True).sample(encoded(TEXT[0]), Sampling(LENGTH, stop=(" ",)), seeded())
    assert len(calls) <= fixed.CHECK_EVERY + 3


def test_the_last_allowed_token_may_complete_it() -> None:
    owner, prompts = policy(TEXT[0]), encoded(TEXT[0]) * 3
    free = engine(owner).sample(prompts, Sampling(9), seeded())
    row = int(free.truncated.nonzero()[0])
    tokens = free.tokens[row].tolist()
    stop = owner.codec.decode(tokens[6:])
    assert first_end(owner, tokens, [stop]) == 8
    for graphs in (False, True):
        made = engine(owner, graphs).sample(prompts, Sampling(9, stop=(stop,)), seeded())
        assert not made.truncated[row]
        assert made.tokens[row].tolist() == tokens
        assert made.mask[row].all()


def test_greedy_and_one_token() -> None:
    owner, prompts = policy(TEXT[0]), encoded(TEXT[0])
    free = engine(owner).sample(prompts, Sampling(1, 0.0), seeded())
    stop = (owner.codec.decode(free.tokens[0].tolist()),)
    for graphs in (False, True):
        made = engine(owner, graphs).sample(prompts, Sampling(1, 0.0, stop=stop), seeded())
        assert not made.truncated[0]
        assert made.tokens.tolist() == free.tokens.tolist()


@pytest.mark.parametrize("graphs", [False, True])
def test_a_string_that_begins_in_the_prefix_ends_the_continuation(graphs: bool) -> None:
    owner, prompts = policy(TEXT[0]), encoded(TEXT[0])
    free = engine(owner).sample(prompts, Sampling(12), seeded())
    prefixes = [free.tokens[row, :3] for row in range(len(prompts))]
    further = engine(owner).continue_from(prompts, prefixes, Sampling(12), seeded(1))
    row = int((further.mask.sum(dim=1) > 3).nonzero()[0])
    last = owner.codec.decode(prefixes[row].tolist())
    first = owner.codec.decode(further.tokens[row, :2].tolist())
    sampling = Sampling(12, stop=(last[-3:] + first[:-1],))
    made = engine(owner, graphs).continue_from(prompts, prefixes, sampling, seeded(1))
    assert int(made.mask[row].sum()) == 2
    assert not made.truncated[row]


def utf8(tokens: list[int]) -> str:
    """A token is a byte, as where a tokenizer does not know a character."""
    return bytes(tokens).decode(errors="replace")


def byte_fallback(tokens: list[int]) -> str:
    """Decode as tokenizers does with byte fallback: one bad byte spoils all of its neighbors."""
    try:
        return bytes(tokens).decode()
    except UnicodeDecodeError:
        return "�" * len(tokens)


def naive(decode: Decode, tokens: Sequence[int], stop: Sequence[str], prefix: int) -> int | None:
    ends = range(prefix, len(tokens))
    found = (n for n in ends if any(x in decode(list(tokens[: n + 1])) for x in stop))
    return next((n - prefix for n in found), None)


@each(
    ("text", "stop"),
    [
        ("one\n\ntwo", ["\n\n"]),
        ("ein 漢字 und 漢 und mehr", ["漢 "]),
        ("aaaa·bbbb" * 9, ["b·a"]),
        ("a" * 60 + "END" + "a" * 20, ["END", "never"]),
        ("no such text", ["漢"]),
        ("first", ["f"]),
        ("😀😀😀end😀", ["😀end", "😀😀😀😀"]),
        ("😀😀😀😀😀😀😀😀\n\n😀😀", ["\n\n"]),
        ("漢字\n漢字漢字漢字漢字漢\n\n漢字", ["\n\n"]),
    ],
)
def test_strings_of_many_bytes(text: str, stop: list[str]) -> None:
    data = list(text.encode())
    for prefix, decode, every in product((0, 2), (utf8, byte_fallback), (1, 4, 5, 7, 1000)):
        rows = torch.tensor([data[prefix:]])
        before = [torch.tensor(data[:prefix], dtype=torch.long)]
        expected = naive(decode, data, stop, prefix)
        found = StopStrings(stop, decode, before, rows.device)
        mask = torch.ones_like(rows, dtype=torch.bool)
        for done in [*range(every, rows.shape[1], every), rows.shape[1]]:
            found.check(rows, mask, done)
        assert found.ends.get(0) == expected
        assert found.stopped.tolist() == [expected is not None]
        length = rows.shape[1] if expected is None else expected + 1
        assert found.cut(mask).sum() == length


def test_end_tokens_come_first() -> None:
    """Text after the end token, where finished rows wait for the others, is not searched."""
    tokens = torch.tensor([[97, 0, 98, 99], [97, 98, 99, 100]])
    mask = torch.tensor([[True, True, False, False], [True] * 4])
    none = torch.zeros(0, dtype=torch.long)
    found = StopStrings(["bc"], utf8, [none, none], tokens.device)
    assert found.check(tokens, mask, 4).tolist() == [False, True]
    assert found.cut(mask).tolist() == [[True, True, False, False], [True, True, True, False]]


def test_trained_log_probs_are_those_of_the_sampled_tokens() -> None:
    """Also with top-p: log π of the whole policy, not of the truncated distribution."""
    owner, prompts = policy(TEXT[0]), encoded(TEXT[0]) * 3
    free = engine(owner).sample(prompts, Sampling(LENGTH), seeded())
    stop = tuple(shared_pairs(owner, free, 2))
    for top_p in (1.0, 0.7):
        sampling = Sampling(LENGTH, top_p=top_p, stop=stop)
        made = engine(owner).sample(prompts, sampling, seeded())
        with torch.no_grad():
            logp, _ = owner.score(made, 1.0)[:2]
        difference: Tensor = (logp - made.logp_old)[made.mask].abs()
        assert float(difference.max()) < 1e-4


def test_the_policy_gives_the_engine_its_tokenizer() -> None:
    owner = policy(TEXT[0])
    made = make_engine("hf", owner, EngineSettings(graphs=False))
    found = made.sample(encoded(TEXT[0]), Sampling(9, stop=(" ",)), seeded())
    assert found.mask.sum(dim=1).max() < 6
    bare = HFEngine(owner.model, owner.end_tokens)
    with pytest.raises(ValueError, match=r"found in decoded text; got \('x',\) and an engine with"):
        bare.sample(encoded(TEXT[0]), Sampling(9, stop=("x",)), seeded())
    with pytest.raises(ValueError, match="a stop string has at least one character"):
        bare.sample(encoded(TEXT[0]), Sampling(9, stop=("",)), seeded())


@dataclass
class Output:
    """What vLLM returns of a response."""

    token_ids: list[int]
    finish_reason: str

    @property
    def logprobs(self) -> SimpleNamespace:
        return SimpleNamespace(logprobs=[-1.0] * len(self.token_ids))


def test_what_vllm_returns_follows_the_same_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "vllm_problem", lambda: None)
    owner, prompts = policy(TEXT[0]), encoded(TEXT[0])[:3]
    made = vllm.VllmEngine(
        owner.model, owner.end_tokens, lambda _: None, lambda _: iter(()), 100, codec=owner.codec
    )
    names = ["a ", "b ", "c ", "d ", "e "]
    a, b, c, d, e = owner.codec.tokenizer.convert_tokens_to_ids(names)
    outputs = [
        Output([b, c, d, e], "length"),  # "a b" begins in its prefix
        Output([a, b, c], "stop"),  # with a token too many
        Output([b, c, d], "length"),
    ]
    prefixes = [torch.tensor(x, dtype=torch.long) for x in ([a], [], [])]
    found = made._rollouts(outputs, prompts, prefixes, Sampling(4, stop=("a b",)))
    assert found.mask.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]
    assert found.tokens.tolist() == [[b, 0, 0, 0], [a, b, 0, 0], [b, c, d, 0]]
    assert found.truncated.tolist() == [False, False, True]
    assert found.logp_old.tolist() == (-found.mask.float()).tolist()
    free = made._rollouts(outputs, prompts, prefixes, Sampling(4))
    assert free.mask.sum(dim=1).tolist() == [4, 3, 3]
    assert free.truncated.tolist() == [True, False, True]
