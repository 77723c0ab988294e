"""Bad input: each a ValueError that says what was expected, what came and what to type."""

import math
from collections.abc import Callable

import pytest
import torch
from batches import golden_rollouts
from each import each

from segcredit import algorithms, partition
from segcredit.core import advantages, group, losses, tracker
from segcredit.core import advantages as adjust
from segcredit.core.segments import Segments
from segcredit.types import Outputs

pytestmark = pytest.mark.usefixtures("as_users_run_it")

H = torch.tensor([[0.1, 0.9, 0.3], [0.5, 0.2, 0.4]])
MASK = torch.tensor([[True, True, True], [True, True, False]])
ZEROS = torch.zeros(2, 3, dtype=torch.bool)
EMPTY_ROW = torch.tensor([[True, True, True], [False, False, False]])
NAN = torch.tensor([[0.1, math.nan, 0.3], [0.5, 0.2, math.nan]])
INF = torch.tensor([[0.1, 0.2, 0.3], [0.5, math.inf, math.nan]])
ONE = torch.tensor([1.0, 0.0])


def segments() -> Segments:
    return partition.top_entropy(H, MASK, 0.3)


def credit(reward: torch.Tensor = H, value: torch.Tensor = H, **settings: object) -> object:
    return advantages.segment_gae(
        reward, value, segments(), **{"gamma": 1.0, "lam": 0.9, **settings}
    )


CASES: list[tuple[str, Callable[[], object], list[str]]] = [
    ("percentage", lambda: partition.top_entropy(H, MASK, 30), ["(0, 1]", "got 30", "pass 0.30"]),
    ("percentage in a part", lambda: partition.TopEntropy(30.0), ["(0, 1]", "got 30.0", "0.30"]),
    ("zero fraction", lambda: partition.top_entropy(H, MASK, 0.0), ["(0, 1]", "got 0.0"]),
    ("NaN fraction", lambda: partition.top_entropy(H, MASK, math.nan), ["(0, 1]", "got nan"]),
    (
        "empty response",
        lambda: partition.top_entropy(H, EMPTY_ROW, 0.3),
        ["empty response", "[1]", "mask.any(dim=1)"],
    ),
    (
        "empty response, newline",
        lambda: partition.newline([["a"] * 3] * 2, EMPTY_ROW),
        ["empty response", "[1]"],
    ),
    ("empty response, tokens", lambda: partition.tokens(EMPTY_ROW), ["empty response", "[1]"]),
    ("empty response, response", lambda: partition.response(EMPTY_ROW), ["empty response", "[1]"]),
    (
        "empty response, probability",
        lambda: partition.probability_cutpoints(-H, EMPTY_ROW),
        ["empty response"],
    ),
    (
        "mask of zeros",
        lambda: partition.top_entropy(H, ZEROS, 0.3),
        ["mask of zeros", "True marks response tokens"],
    ),
    ("mask of zeros in a mean", lambda: losses.token_mean(H, ZEROS), ["mask of zeros"]),
    ("no responses", lambda: partition.tokens(MASK[:0]), ["at least one response", "(0, 3)"]),
    ("no tokens", lambda: partition.tokens(MASK[:, :0]), ["at least one token", "(2, 0)"]),
    (
        "integer mask",
        lambda: partition.top_entropy(H, MASK.long(), 0.3),
        ["boolean", "int64", "mask.bool()"],
    ),
    ("shape, entropy", lambda: partition.top_entropy(H[:, :2], MASK, 0.3), ["(2, 3)", "(2, 2)"]),
    ("shape, value", lambda: credit(value=H[:1]), ["value", "(2, 3)", "(1, 3)"]),
    ("shape, reward", lambda: credit(reward=H[:, :2]), ["reward", "(2, 3)", "(2, 2)"]),
    (
        "one reward too many",
        lambda: credit(reward=torch.ones(3)),
        ["one number per response", "(2,)", "(3,)"],
    ),
    (
        "reward per token",
        lambda: advantages.terminal_reward(H, MASK),
        ["one number per response", "(2, 3)"],
    ),
    ("shape, ratio", lambda: losses.clipped_surrogate(H, H[:, :2], 0.2, 0.2), ["(2, 3)", "(2, 2)"]),
    (
        "NaN entropy",
        lambda: partition.top_entropy(NAN, MASK, 0.3),
        ["entropy", "finite", "nan", "response 0, position 1", "(1 in all)"],
    ),
    (
        "inf entropy",
        lambda: partition.top_entropy(INF, MASK, 0.3),
        ["entropy", "inf", "response 1, position 1"],
    ),
    ("NaN value", lambda: credit(value=NAN), ["value", "finite", "nan", "response 0, position 1"]),
    ("NaN reward", lambda: credit(reward=NAN), ["reward", "finite", "nan"]),
    (
        "NaN probability",
        lambda: partition.probability_accumulate(NAN, MASK),
        ["logp_old", "finite"],
    ),
    ("lambda", lambda: credit(lam=1.5), ["lam", "[0, 1]", "1.5", "0.99"]),
    ("lambda of the critic", lambda: credit(lam_critic=-0.1), ["lam_critic", "[0, 1]", "-0.1"]),
    (
        "negative lambda per response",
        lambda: credit(lam=torch.tensor([-2.3, 0.5])),
        ["[0, 1]", "clamp"],
    ),
    ("gamma", lambda: credit(gamma=99.0), ["gamma", "[0, 1]", "99"]),
    ("value_at", lambda: credit(value_at="begin"), ["'start'", "'end'", "'begin'"]),
    (
        "hole in gae",
        lambda: advantages.gae(H, H, ~MASK | torch.tensor([[True, False, True]]), 1.0, 0.9),
        ["hole", "segment_gae"],
    ),
    ("stray mark", lambda: Segments.from_ends(~ZEROS, MASK), ["ends", "(1, 2)", "ends & mask"]),
    (
        "clip bounds",
        lambda: losses.clipped_surrogate(H, H, 0.2, -1.0),
        ["clip_low", "clip_high", "0.28"],
    ),
    (
        "dual clip",
        lambda: losses.clipped_surrogate(H, H, 0.2, 0.2, 0.5),
        ["dual_clip", "greater than 1", "3.0"],
    ),
    (
        "group of one",
        lambda: group.group_zscore(ONE, torch.tensor([4, 9])),
        ["at least two responses", "group 4", "samples_per_prompt"],
    ),
    (
        "leave out the only one",
        lambda: group.leave_one_out(ONE, torch.tensor([4, 9])),
        ["at least two responses"],
    ),
    (
        "group std",
        lambda: group.group_zscore(ONE, torch.tensor([4, 4]), "std"),
        ["'sample'", "'population'", "'std'"],
    ),
    (
        "tracker reward",
        lambda: tracker.tracker_update(ONE, ONE, 2 * ONE, ONE),
        ["[0, 1]", "2.0", "Rescale"],
    ),
    ("batch of one", lambda: tracker.batch_normalize(ONE[:1]), ["at least two responses", "got 1"]),
    ("whiten one", lambda: adjust.whiten(H[:1, :1], MASK[:1, :1]), ["at least two", "got 1"]),
    ("fixed length", lambda: partition.fixed_length(MASK, 0), ["size", "at least 1", "0"]),
    (
        "probability threshold",
        lambda: partition.ProbabilityCutpoints(threshold=90),
        ["(0, 1]", "90", "0.9"],
    ),
    ("every", lambda: partition.ProbabilityAccumulate(every=0), ["every", "at least 1"]),
    ("too few pieces", lambda: partition.newline([["a"]], MASK), ["2 responses", "got 1"]),
    (
        "short pieces",
        lambda: partition.newline([["a"], ["b", "c"]], MASK),
        ["pieces[0]", "at least 3", "got 1"],
    ),
    (
        "unknown method",
        lambda: algorithms.make_algorithm("sappo"),
        ["unknown method 'sappo'", "Did you mean 'sapo'?", "grpo"],
    ),
    (
        "unknown setting",
        lambda: algorithms.make_algorithm("sapo", lamda=0.9),
        ["no setting 'lamda'", "Did you mean 'lam'?", "fraction"],
    ),
    ("clip in a part", lambda: algorithms.sapo(clip=(0.8, -1.28)), ["clip_low", "0.28"]),
    ("lambda in a part", lambda: algorithms.sapo(lam=95), ["lam", "[0, 1]", "95"]),
    ("method with a dash", lambda: algorithms.make_algorithm("VC-PPO"), ["Did you mean 'vc_ppo'?"]),
    (
        "split",
        lambda: algorithms.sapo().prepare(golden_rollouts()[0]).split(3),
        ["2 responses", "3 mini-batches"],
    ),
    (
        "unknown column",
        lambda: golden_rollouts()[0].replace(entropies=H),
        ["no column 'entropies'", "entropy"],
    ),
    (
        "no sampler",
        lambda: algorithms.dvo(partition=partition.Token()).prepare(golden_rollouts()[0]),
        ["monte_carlo="],
    ),
]


@each(("call", "said"), [c[1:] for c in CASES])
def test_message(call: Callable[[], object], said: list[str]) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        call()
    for words in said:
        assert words in str(caught.value)


def test_no_critic_output() -> None:
    rollouts, outputs = golden_rollouts()
    method = algorithms.sapo()
    batch = method.minibatch(method.prepare(rollouts))
    with pytest.raises(ValueError, match="trains a critic; got outputs without values"):
        method.loss(Outputs(outputs.logp), batch)


def test_garbage_off_the_mask_is_no_error() -> None:
    mask = MASK.clone()
    mask[0, 1] = False
    assert partition.top_entropy(NAN, mask, 0.3).num.tolist() == [1, 2]


def test_the_input_is_never_changed() -> None:
    H_before, mask_before = H.clone(), MASK.clone()
    credit()
    assert torch.equal(H, H_before)
    assert torch.equal(MASK, mask_before)
