"""What every engine promises, asked of each that is installed: the same questions, one answer."""

from functools import lru_cache
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from tiny_policies import VISION, ask, picture, seeded, text_prompts, vision_prompts, world
from torch import Tensor

from segcredit.models import Policy
from segcredit.models.layers import full_weights
from segcredit.rollout import HFEngine, VllmEngine
from segcredit.types import Encoded, RolloutEngine, Rollouts, Sampling

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
CLOSE = 0.1 if ON_GPU else 1e-4
"""In bfloat16 two computations of one logit differ in the second digit."""

vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
ENGINES = ["hf", pytest.param("vllm", marks=[vllm, pytest.mark.filterwarnings("ignore")])]
NAMES = ["qwen2", "qwen2_5_vl", "qwen3_vl"]
STARTED: set[str] = set()


def pairs() -> list[object]:
    return [
        pytest.param(*[getattr(kind, "values", [kind])[0], name], marks=getattr(kind, "marks", ()))
        for kind in ENGINES
        for name in NAMES
    ]


each = pytest.mark.parametrize(("kind", "name"), pairs())


def fresh(name: str, seed: int = 0) -> Policy:
    """Large enough for GPU kernels, and far from uniform."""
    made = Policy.tiny(name, world(name).tokenizer(), seed=seed, hidden=256, heads=4)
    with torch.no_grad():
        for key, x in made.model.named_parameters():
            if "q_proj" in key or "k_proj" in key or "lm_head" in key:
                x *= 2.0
    ends = [made.codec.tokenizer.eos_token_id, *range(20, 26)]  # so that many responses end
    made.model.generation_config.eos_token_id = ends
    if ON_GPU and name == "qwen2_5_vl":  # its 3B has one matrix for both
        tie(made)
    made.model.to(DEVICE, DTYPE)
    return made


def tie(owner: Policy) -> None:
    """Embeddings and head become one."""
    owner.model.config.tie_word_embeddings = True
    owner.model.get_output_embeddings().weight = owner.model.get_input_embeddings().weight


@lru_cache
def policy(name: str) -> Policy:
    return fresh(name)


@lru_cache
def prompts(name: str) -> list[Encoded]:
    some = vision_prompts() if name in VISION else text_prompts()
    return [policy(name).encode(prompt) for prompt in some]


@lru_cache
def engine(kind: str, name: str) -> RolloutEngine:
    """Of the shared policy; one of each kind, since vLLM takes a while to start."""
    owner = policy(name)
    if kind == "hf":
        return HFEngine(owner.model, owner.end_tokens, owner.banned)
    if ON_GPU and STARTED - {name}:  # a vLLM that can sleep is alone in its process
        pytest.skip(f'vLLM runs for {min(STARTED)} here; type: pytest -k "vllm and {name}"')
    STARTED.add(name)
    return VllmEngine(
        owner.model,
        owner.end_tokens,
        owner.save_without_weights,
        full_weights,
        window=512,
        banned=owner.banned,
        memory=0.1,
        eager=True,
    )


@torch.no_grad()
def scored(owner: Policy, rollouts: Rollouts, temperature: float = 1.0) -> Tensor:
    return owner.score(rollouts, temperature)[0]


def off(a: Tensor, b: Tensor, mask: Tensor) -> float:
    difference = (a - b)[mask].abs()
    return float(difference.mean() if ON_GPU else difference.max())


@each
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_log_probabilities_are_the_models(kind: str, name: str, temperature: float) -> None:
    made = engine(kind, name).sample(prompts(name), Sampling(20, temperature), seeded())
    assert off(made.logp_old, scored(policy(name), made, temperature), made.mask) < CLOSE
    other = scored(policy(name), made, 1.7 - temperature)
    assert off(made.logp_old, other, made.mask) > (0.02 if ON_GPU else 0.05)
    assert (made.logp_old[~made.mask] == 0).all()
    assert made.prompts == prompts(name)


@each
def test_drawn_as_often_as_probable(kind: str, name: str) -> None:
    """The first token of many responses to one prompt, against the exact probabilities."""
    count, prompt = 4000, prompts(name)[2]
    made = engine(kind, name).sample([prompt] * count, Sampling(1, 1.0), seeded(3))
    everything = made.select(torch.zeros(1, dtype=torch.long, device=DEVICE))
    vocabulary = torch.arange(len(policy(name).codec.tokenizer), device=DEVICE)
    rows = torch.zeros(len(vocabulary), dtype=torch.long, device=DEVICE)
    each_token = everything.select(rows).replace(tokens=vocabulary[:, None])
    chance = scored(policy(name), each_token).exp().flatten().double()
    assert float(chance.sum()) == pytest.approx(1.0, abs=0.02 if ON_GPU else 1e-4)
    seen = torch.bincount(made.tokens[:, 0], minlength=len(chance)).double()
    often = chance * count >= 5  # the usual condition for χ²
    assert int(often.sum()) >= 4
    assert (seen[chance == 0] == 0).all()  # banned
    chi = float(((seen - chance * count)[often] ** 2 / (chance * count)[often]).sum())
    degrees = int(often.sum())
    assert chi < degrees + 5 * (2 * degrees) ** 0.5


@each
def test_responses_end_at_end_tokens_or_the_limit(kind: str, name: str) -> None:
    made = engine(kind, name).sample(prompts(name) * 6, Sampling(12), seeded(1))
    ends = torch.isin(made.tokens, torch.tensor(policy(name).end_tokens, device=DEVICE)) & made.mask
    lengths = made.mask.sum(dim=1)
    for row, length in enumerate(lengths.tolist()):
        assert made.mask[row, :length].all()
        assert not made.mask[row, length:].any()
        assert bool(made.truncated[row]) == (not ends[row].any())
        assert not made.truncated[row] or length == 12
        if ends[row].any():
            assert ends[row].nonzero().tolist() == [[length - 1]]
    assert made.truncated.any()
    assert not made.truncated.all()


@each
def test_greedy_is_the_likeliest(kind: str, name: str) -> None:
    made = engine(kind, name).sample(prompts(name), Sampling(8, temperature=0.0), seeded())
    twice = [x for x in prompts(name) for _ in range(2)]  # one and the same object
    again = engine(kind, name).sample(twice, Sampling(8, temperature=0.0), seeded(9))
    assert torch.equal(made.tokens, again.tokens[::2])
    assert torch.equal(made.tokens, again.tokens[1::2])
    if ON_GPU:
        return  # two computations in bfloat16 may part ways at a near tie
    ours = engine("hf", name).sample(prompts(name), Sampling(8, temperature=0.0), seeded())
    assert torch.equal(made.tokens, ours.tokens)


@each
def test_begun_responses_go_on(kind: str, name: str) -> None:
    first = engine(kind, name).sample(prompts(name), Sampling(6), seeded())
    begun = [tokens[mask][:3].cpu() for tokens, mask in zip(first.tokens, first.mask, strict=True)]
    begun = [x[~torch.isin(x, torch.tensor(policy(name).end_tokens))] for x in begun]
    made = engine(kind, name).continue_from(prompts(name), begun, Sampling(9), seeded(2))
    lengths = made.mask.sum(dim=1).cpu()
    assert all(len(x) + n <= 9 and n >= 1 for x, n in zip(begun, lengths.tolist(), strict=True))
    rows = []
    for prefix, tokens, mask in zip(begun, made.tokens, made.mask, strict=True):
        rows.append(torch.cat([prefix.to(DEVICE), tokens[mask]]))
    whole = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    where = torch.arange(whole.shape[1]) < torch.tensor([len(x) for x in rows])[:, None]
    zeros = torch.zeros(whole.shape, device=DEVICE)
    read = made.replace(tokens=whole, mask=where.to(DEVICE), logp_old=zeros, entropy=None)
    logp = scored(policy(name), read)
    later = [logp[row, len(x) : len(x) + int(lengths[row])] for row, x in enumerate(begun)]
    recorded = made.logp_old[made.mask]
    assert off(recorded, torch.cat(later), torch.ones_like(recorded).bool()) < CLOSE
    full = torch.zeros(9, dtype=torch.long)
    with pytest.raises(ValueError, match="nothing is left of max_tokens=9"):
        engine(kind, name).continue_from(prompts(name)[:1], [full], Sampling(9), seeded())


@each
def test_new_weights_are_drawn_from(kind: str, name: str) -> None:
    """Images and prompts seen before are not remembered as the old weights saw them."""
    before = engine(kind, name).sample(prompts(name), Sampling(8), seeded())
    other = fresh(name, seed=5)
    try:
        engine(kind, name).load_weights(other.model)
        made = engine(kind, name).sample(prompts(name), Sampling(8), seeded())
        assert off(made.logp_old, scored(other, made), made.mask) < CLOSE
        assert off(made.logp_old, scored(policy(name), made), made.mask) > 5 * CLOSE
    finally:
        engine(kind, name).load_weights(policy(name).model)
    after = engine(kind, name).sample(prompts(name), Sampling(8), seeded())
    assert off(after.logp_old, scored(policy(name), after), after.mask) < CLOSE
    if not ON_GPU:
        assert torch.equal(before.tokens, after.tokens)


@each
def test_seeds_decide_and_nobody_elses_chance_is_used(kind: str, name: str) -> None:
    torch.manual_seed(0)
    state, other = torch.get_rng_state(), np.random.get_state()[1].copy()
    made = [
        engine(kind, name).sample(prompts(name) * 4, Sampling(10), seeded(seed))
        for seed in (0, 0, 1)
    ]
    assert torch.equal(torch.get_rng_state(), state)
    assert (np.random.get_state()[1] == other).all()
    if not ON_GPU:
        assert torch.equal(made[0].tokens, made[1].tokens)
    assert made[0].tokens.shape != made[2].tokens.shape or not torch.equal(
        made[0].tokens, made[2].tokens
    )


@each
def test_siblings_differ_and_keep_their_order(kind: str, name: str) -> None:
    some = [x for x in prompts(name)[:3] for _ in range(5)]
    made = engine(kind, name).sample(some, Sampling(10), seeded())
    assert made.prompts == some
    assert off(made.logp_old, scored(policy(name), made), made.mask) < CLOSE
    assert len({tuple(x) for x in made.tokens[:5].tolist()}) > 1


@each
@pytest.mark.parametrize("sampling", [Sampling(4, 1.0, top_p=0.3), Sampling(4, 1.0, top_k=2)])
def test_unlikely_tokens_can_be_left_out(kind: str, name: str, sampling: Sampling) -> None:
    prompt = prompts(name)[0]
    few = engine(kind, name).sample([prompt] * 200, sampling, seeded())
    many = engine(kind, name).sample([prompt] * 200, Sampling(4), seeded())
    assert few.tokens[:, 0].unique().numel() < many.tokens[:, 0].unique().numel()
    if sampling.top_k:
        assert few.tokens[:, 0].unique().numel() <= 2


@each
def test_what_means_nothing_is_refused(kind: str, name: str) -> None:
    with pytest.raises(ValueError, match="nothing to sample"):
        engine(kind, name).sample([], Sampling(4), seeded())
    with pytest.raises(ValueError, match=r"For 95 % pass 0\.95"):
        engine(kind, name).sample(prompts(name), Sampling(4, top_p=95.0), seeded())


@pytest.mark.parametrize("kind", [ENGINES[1]])
def test_vllm_says_when_a_prompt_is_too_long(kind: str) -> None:
    with pytest.raises(ValueError, match=r"started for\s+512\. Set data\.max_prompt_tokens"):
        engine(kind, "qwen2").sample(prompts("qwen2"), Sampling(600), seeded())


@pytest.mark.parametrize("kind", [ENGINES[1]])
def test_vllm_need_not_tell_all_log_probabilities(kind: str) -> None:
    some = engine(kind, "qwen2")
    assert isinstance(some, VllmEngine)
    some.compared = 0.5
    try:
        made = some.sample(prompts("qwen2")[:4], Sampling(10), seeded())
    finally:
        some.compared = 1.0
    told = ~made.logp_old.isnan()
    assert told[::2].all()
    assert torch.equal(~told[1::2], made.mask[1::2])
    assert off(made.logp_old, scored(policy("qwen2"), made), made.mask & told) < CLOSE


@pytest.mark.parametrize("kind", ENGINES)
def test_equal_images_in_different_prompts(kind: str) -> None:
    owner = policy("qwen2_5_vl")
    same, other = picture(56, 84, seed=1), picture(56, 84, seed=2)
    asked = [ask("<image>list ?", x) for x in (same, other, same)]
    asked.append(ask("count <image>red circle plus <image> blue square ?", same, same))
    some = [owner.encode(x) for x in asked]
    made = engine(kind, "qwen2_5_vl").sample(some, Sampling(10), seeded())
    assert off(made.logp_old, scored(owner, made), made.mask) < CLOSE


@pytest.mark.skipif(ON_GPU, reason="there the log-probabilities are compared with a tied head")
@pytest.mark.parametrize("kind", [ENGINES[1]])
def test_vllm_on_a_cpu_refuses_a_tied_head(kind: str) -> None:
    owner = fresh("qwen2")
    tie(owner)
    drawer = VllmEngine(
        owner.model,
        owner.end_tokens,
        owner.save_without_weights,
        full_weights,
        window=512,
        eager=True,
    )
    with pytest.raises(ValueError, match=r"tied.* rollout\.engine=hf"):
        drawer.start()


@pytest.mark.parametrize("kind", [ENGINES[1]])
def test_what_vllm_refuses_is_one_message(kind: str) -> None:
    owner = policy("qwen2")
    much = VllmEngine(
        owner.model,
        owner.end_tokens,
        owner.save_without_weights,
        full_weights,
        window=10**6,
        eager=True,
    )
    with pytest.raises(ValueError, match=r"vLLM does not start: .* rollout\.engine=hf"):
        much.start()
