r"""``geo3k`` against verl's scorer with MathRuler, whose scores are recorded in tests/fixtures."""

import json
import time
from collections import Counter
from pathlib import Path

import pytest
from grading import response

from segcredit.rewards import geo3k, geo3k_strict
from segcredit.rewards.extract import verl_format_ok
from segcredit.types import Reward

RECORDED = json.loads((Path(__file__).parents[1] / "fixtures" / "verl_geo3k.json").read_text())


def graded(cases: list[dict[str, str]]) -> list[Reward]:
    with geo3k(deadline=20.0, batch_seconds=300.0) as reward:
        return reward([response(x["response"], gold=x["gold"]) for x in cases])


def test_every_recorded_case_scores_as_in_verl() -> None:
    cases = RECORDED["cases"]
    assert len(cases) >= 100
    scores = Counter(x["verl"] for x in cases)
    assert min(scores[0.0], scores[0.1], scores[0.9], scores[1.0]) >= 10  # none is a rare score
    wrong = [
        (x, r.value, r.reason)
        for x, r in zip(cases, graded(cases), strict=True)
        if abs(r.value - x["verl"]) > 1e-6
    ]
    assert wrong == []


def test_departures_are_the_documented_ones() -> None:
    cases = RECORDED["departures"]
    ours = [r.value for r in graded(cases)]
    assert ours == [x["ours"] for x in cases]
    assert all(x["ours"] != x["verl"] for x in cases)


def one(text: str, *, strict: bool = False) -> Reward:
    with geo3k_strict() if strict else geo3k() as reward:
        return reward([response(text)])[0]


def test_a_box_inside_the_thinking_counts_in_geo3k_and_not_in_geo3k_strict() -> None:
    text = "<think>\\boxed{12}</think> so it is"
    assert (one(text).value, one(text).correct) == (0.9, True)
    assert (one(text, strict=True).value, one(text, strict=True).correct) == (0.0, False)


def test_no_format_reward_after_leading_white_space_in_geo3k() -> None:
    text = " <think></think>\\boxed{12}"
    assert one(text).value == 0.9
    assert one(text, strict=True).value == 1.0


def test_code_in_an_answer_is_not_run(tmp_path: Path) -> None:
    """sympy's parser evaluates text, and sympy functions evaluate strings once more."""
    target = tmp_path / "seen"
    attacks = [
        f"re(\"open('{target}','w')\")",
        f're(\'open("{target}","w")\')+0.5',
        "().__class__",
        "(1).real+11",
        "[12][0]",
    ]
    with geo3k() as reward:
        found = reward([response(f"\\boxed{{{x}}}", gold="12") for x in attacks])
    assert [x.correct for x in found] == [False] * len(attacks)
    assert not target.exists()


@pytest.mark.slow
def test_hostile_answers_end_soon_and_are_not_correct() -> None:
    hostile = [
        "9**9**9**9",
        "9^9^9^9",
        "((((9**99)**99)**99)**99)**99",
        "99999999!",
        "9!!!!!!!!",
        "(" * 140 + "12" + ")" * 140,
        "{" * 290 + "12",
        "\\frac" * 50,
        "\\sqrt{" * 40 + "x" + "}" * 40,
        "1,111" * 50,
        "- " * 140,
        "x**x**x",
        "1e999999999+0.5",
        "0.5**999999",
    ]
    started = time.monotonic()
    with geo3k(deadline=1.0, batch_seconds=5.0) as reward:
        found = reward([response(f"\\boxed{{{x}}}", gold="\\sqrt{144.5}") for x in hostile])
    assert [x.correct for x in found] == [False] * len(hostile)
    assert time.monotonic() - started < 15


def test_the_format_is_checked_in_linear_time() -> None:
    text = "<think>" + "</think>\\boxed{" * 100_000
    started = time.monotonic()
    assert not verl_format_ok(text)
    assert verl_format_ok(text + "}")
    assert time.monotonic() - started < 1.0


def test_long_responses_are_graded_in_linear_time() -> None:
    texts = ["\\boxed{" * 100_000, "\\boxed{" + "{" * 500_000, "\\boxed{" + "1," * 200_000 + "}"]
    started = time.monotonic()
    with geo3k() as reward:
        found = reward([response(x) for x in texts])
    assert [x.correct for x in found] == [False] * 3
    assert time.monotonic() - started < 3.0
