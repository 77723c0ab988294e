"""verl's columns in, segments and credit out: what needs no verl."""

import pytest
import torch

from segcredit.algorithms import sapo_authors
from segcredit.integrations.verl.credit import (
    ENDS,
    RATIO_ENDS,
    VALUE_MASK,
    Totals,
    assign,
    rewards_on_mask,
    verl_shares,
)
from segcredit.integrations.verl.settings import (
    ACTOR,
    departures,
    make_method,
    parse_settings,
    read_keys,
)

MEAN = "seq-mean-token-mean"
PAPER = {
    "algorithm.gamma": 1.0,
    "algorithm.lam": 0.99,
    "algorithm.use_kl_in_reward": True,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.rollout_correction.rollout_is": None,
    f"{ACTOR}.clip_ratio_low": 0.2,
    f"{ACTOR}.clip_ratio_high": 0.2,
    f"{ACTOR}.clip_ratio_c": 1e6,
    f"{ACTOR}.loss_agg_mode": MEAN,
    f"{ACTOR}.entropy_coeff": 0,
    f"{ACTOR}.use_kl_loss": False,
    "critic.cliprange_value": 1e6,
    "critic.loss_agg_mode": MEAN,
}


def columns(mask: torch.Tensor) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    draw = {
        name: torch.rand(mask.shape, generator=random)
        for name in ("old_log_probs", "entropy", "values", "rm_scores")
    }
    return {"responses": mask.long(), "response_mask": mask.long(), **draw}


def test_a_mask_of_zeros_is_an_error_that_says_what_to_set() -> None:
    with pytest.raises(ValueError, match=r"none of 3 responses.*Set data\.max_response_length"):
        assign(
            make_method(parse_settings(None), PAPER),
            columns(torch.zeros(3, 5, dtype=torch.bool)),
            "rm_scores",
        )


def test_rows_without_a_token_get_zeros_and_change_nothing() -> None:
    mask = torch.ones(4, 10, dtype=torch.bool)
    mask[1, 6:] = False
    whole = columns(mask)
    with_padding = {name: x.clone() for name, x in whole.items()}
    with_padding["response_mask"][2] = 0
    some = {name: x[[0, 1, 3]] for name, x in whole.items()}
    for name in ("sapo", "sapo_authors", "ppo"):  # the last two whiten over the batch
        chosen = make_method(parse_settings({"algorithm": name}), PAPER)
        found, _ = assign(chosen, with_padding, "rm_scores")
        expected, _ = assign(chosen, some, "rm_scores")
        for key, x in found.items():
            assert not x[2].any(), key
            assert torch.equal(x[[0, 1, 3]], expected[key]), key


def test_columns_mark_ends_and_where_v_is_read() -> None:
    given = columns(torch.ones(1, 6, dtype=torch.bool))
    given["entropy"] = torch.tensor([[0.1, 1.2, 0.3, 0.2, 0.9, 0.05]])
    for name, read in (("sapo", [1, 0, 1, 0, 0, 1]), ("sapo_authors", [0, 1, 0, 0, 1, 1])):
        found, _ = assign(
            make_method(parse_settings({"algorithm": name}), PAPER), given, "rm_scores"
        )
        assert found[ENDS].tolist() == [[0, 1, 0, 0, 1, 1]]
        assert found[RATIO_ENDS].tolist() == [[0, 1, 0, 0, 1, 1]]
        assert found[VALUE_MASK].tolist() == [read]
    found, _ = assign(
        make_method(parse_settings({"algorithm": "sapo_token_ratio"}), PAPER), given, "rm_scores"
    )
    assert found[RATIO_ENDS].tolist() == [[1] * 6]


def test_a_reward_behind_the_last_token_counts_at_it() -> None:
    mask = torch.tensor([[True, True, False, False], [True, False, True, False]])
    reward = torch.tensor([[-0.1, 0.0, 0.0, 1.0], [0.0, 0.0, 0.5, 0.0]])
    expected = torch.tensor([[-0.1, 1.0, 0.0, 0.0], [0.0, 0.0, 0.5, 0.0]])
    assert torch.equal(rewards_on_mask(reward, mask), expected)


def test_shares_are_verls_averages() -> None:
    """By its formulas; that its own function agrees is seen by the losses' equality."""
    mask = torch.tensor([[True, True, True], [True, False, False]])
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 9.0, 9.0]])
    totals = Totals(num_workers=2, num_entries=8, num_responses=4)  # this is half of it
    expected = {
        "token-mean": 10 / 8 * 2,
        "seq-mean-token-mean": (2 + 4) / 4 * 2,
        "seq-mean-token-sum": (6 + 4) / 4 * 2,
        "seq-mean-token-sum-norm": (6 + 4) / 4 * 2 / 3,
    }
    for mode, value in expected.items():
        assert float((verl_shares(mask, mode, totals) * x).sum()) == pytest.approx(value), mode
    with pytest.raises(ValueError, match="loss_agg_mode must be one of token-mean"):
        verl_shares(mask, "mean", totals)


def test_departures_name_the_key_and_both_values() -> None:
    assert departures(parse_settings(None), PAPER) == []
    usual = PAPER | {
        "algorithm.lam": 1.0,
        "algorithm.use_kl_in_reward": False,
        f"{ACTOR}.clip_ratio_c": 3.0,
        f"{ACTOR}.loss_agg_mode": "token-mean",
        "critic.cliprange_value": 0.5,
        "critic.loss_agg_mode": "token-mean",
    }
    lines = departures(parse_settings(None), usual)
    assert "algorithm.lam=1.0; sapo as published has 0.99" in lines
    assert "critic.cliprange_value=0.5; sapo as published has none" in lines
    assert len(lines) == 6
    assert len(departures(parse_settings({"algorithm": "ppo"}), usual)) == 2  # λ, and no KL


def test_departures_tell_of_a_run_without_kl_and_of_terms_that_are_added() -> None:
    """verl's own default has no KL at all, and SAPO as stated has one."""
    (line,) = departures(parse_settings(None), PAPER | {"algorithm.use_kl_in_reward": False})
    assert line == "algorithm.use_kl_in_reward=False; sapo as published has True"
    adaptive = {"algorithm.kl_ctrl.type": "adaptive", "algorithm.kl_ctrl.kl_coef": 0.01}
    assert departures(parse_settings(None), PAPER | adaptive) == [
        "algorithm.kl_ctrl.type=adaptive; sapo as published has fixed",
        "algorithm.kl_ctrl.kl_coef=0.01; sapo as published has 0.001",
    ]
    assert departures(parse_settings(None), PAPER | {"algorithm.kl_penalty": "k1"}) == []
    for key, value, own in (
        (f"{ACTOR}.use_kl_loss", True, False),
        (f"{ACTOR}.entropy_coeff", 0.1, 0),
        ("algorithm.rollout_correction.rollout_is", "token", "none"),
    ):
        lines = departures(parse_settings(None), PAPER | {key: value})
        assert lines == [f"{key}={value}; sapo as published has {own}"]
    (line,) = departures(parse_settings({"lam_critic": 1.0}), PAPER)
    assert line == "segment.lam_critic=1.0; sapo as published has none"


def test_keys_are_read_from_verls_configuration() -> None:
    """One clip range sets both bounds; a key that verl leaves out is None."""
    config: dict[str, dict] = {}
    for key, value in PAPER.items():
        *path, last = key.split(".")
        place = config
        for name in path:
            place = place.setdefault(name, {})
        place[last] = value
    assert read_keys(config) == PAPER
    actor = config["actor_rollout_ref"]["actor"]
    actor |= {"clip_ratio": 0.3, "clip_ratio_low": None}
    config["algorithm"]["rollout_correction"] = None
    assert read_keys(config) == PAPER | {f"{ACTOR}.clip_ratio_low": 0.3}


def test_the_authors_rounding_survives_another_fraction() -> None:
    """Their code rounds k % in two ways; a fraction of one's own must not replace both."""
    given = {"algorithm": "sapo_authors", "partition": {"name": "entropy", "fraction": 0.1}}
    found, native = make_method(parse_settings(given), PAPER), sapo_authors(fraction=0.1)
    assert found.credit.over == native.credit.over
    assert found.ratio == native.ratio
