import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from each import each
from grading import boxed, children, needs_proc, response

from segcredit.rewards import ExactReward, MathReward, geo3k, gsm8k
from segcredit.rewards.math import authors_length_penalty, math
from segcredit.rewards.verify import Verifier
from segcredit.types import RewardFn

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    made = Verifier(deadline=20.0)
    yield made
    made.close()


def test_reasons() -> None:
    with MathReward() as reward:
        graded = reward(
            [
                boxed("12"),
                boxed("11"),
                response("twelve"),
                response("so \\boxed{1", truncated=True),
                boxed("11=12"),
                boxed("24/2"),
                boxed("\\foo bar"),
            ]
        )
    assert [(r.value, r.correct) for r in graded] == [
        (1.0, True),
        (0.0, False),
        (0.0, False),
        (0.0, False),
        (0.0, False),
        (1.0, True),
        (0.0, False),
    ]
    assert [r.reason for r in graded[:6]] == [
        "right: 12",
        "wrong: 11, expected 12",
        "no \\boxed{} answer",
        "no \\boxed{} answer: truncated at 100 tokens",
        "refused: an equation whose left side is more than a name",
        "right: 24/2",
    ]
    assert "expected 12" in graded[6].reason


def test_parts_add_up() -> None:
    text = "<think>hm</think> \\boxed{12}"
    (reward,) = geo3k(length_penalty="authors")([response(text, num_tokens=95)])
    assert reward.parts == {"accuracy": 0.9, "format": 0.1, "length": pytest.approx(-0.005)}
    assert reward.value == pytest.approx(0.995)
    plain, neither = geo3k()([boxed("12"), response("no")])
    assert (plain.value, neither.value) == (0.9, 0.0)
    (formatted,) = geo3k()([response("<think></think>\\boxed{13}")])
    assert (formatted.value, formatted.correct) == (0.1, False)


@each(
    ("num_tokens", "penalty"),
    [(0, 0.0), (900, 0.0), (901, 0.001), (998, 0.098), (999, 0.399), (1000, 0.4), (2000, 0.5)],
)
def test_the_authors_length_penalty(num_tokens: int, penalty: float) -> None:
    assert authors_length_penalty(num_tokens, 1000) == pytest.approx(penalty)


def test_where_the_answer_is_read() -> None:
    texts = ["\\boxed{12}", "#### 12", "\\boxed{12} #### 13", "#### $12.00"]
    responses = [response(text) for text in texts]
    for extract, right in {
        "boxed": [1, 0, 1, 0],
        "hash": [0, 1, 0, 1],
        "auto": [1, 1, 1, 1],
    }.items():
        with MathReward(extract=extract) as reward:
            assert [r.value for r in reward(responses)] == right
    (none,) = MathReward(extract="auto")([response("")])
    assert none.reason == "no \\boxed{} or #### answer"


@needs_proc
def test_plain_answers_start_no_process() -> None:
    before = children(os.getpid())
    reward = math()
    answers = ["12", "12.0", "+12", "$12$", "12.", "\\(12\\)", "13", "1,200", "9^{9^9}", ""]
    values = [r.value for r in reward([boxed(a) for a in answers])]
    assert values == [1, 1, 1, 1, 1, 1, 0, 0, 0, 0]
    assert [r.value for r in reward([boxed("1,234.50", "1234.5")])] == [1]
    assert children(os.getpid()) == before


@each(
    ("gold", "answer"),
    [
        ("\\frac{1}{2}", "0.5"),
        ("\\frac{1}{2}", "\\dfrac12"),
        ("5 \\sqrt { 13 }", "\\sqrt{325}"),
        ("5 \\sqrt { 13 }", "5\\sqrt{13}\\text{ cm}"),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3, \\pi/2)"),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3, π/2)"),
        ("10,\\!080", "10080"),
        ("x=5", "5"),
        ("5", "x = 5"),
        ("\\text{Evelyn}", "Evelyn"),
        ("5.4 \\text{ cents}", "5.4"),
        ("(0,9) \\cup (9,36)", "(9,36) \\cup (0,9)"),
        ("1, 2", "2 \\text{ or } 1"),
        ("y = 2x + 3", "y = 3 + 2x"),
        ("p - q", "-q + p"),
        ("45", "45°"),
        ("-45", "−45"),
        ("0.3333333", "0.3333334"),
        ("\\angle 3 \\cong \\angle Z", "\\angle 3\\cong\\angle Z"),
    ],
)
def test_other_spellings_are_right(verifier: Verifier, gold: str, answer: str) -> None:
    verdict = verifier([(gold, answer)])[0]
    assert verdict.right, verdict.reason


@each(
    ("gold", "answer"),
    [
        ("45", "44 @ 45"),
        ("45", "44 \\sim 45"),
        ("45", "44 \\to 45"),
        ("45", "44 \\mid 45"),
        ("45", "44, 45"),
        ("45", "\\{44, 45\\}"),
        ("45", "44 45"),
        ("45", "The answer is 45"),
        ("45", "44 \\color{red}{45}"),
        ("x=5", "4=5"),
        ("1, 2", "1, 2, 3"),
        ("(1, 2)", "(2, 1)"),
        ("0.33333", "0.33334"),
        ("52_8", "52_9"),
        ("\\angle 3 \\cong \\angle Z", "\\angle 3 \\cong \\angle 4"),
    ],
)
def test_hedges_and_errors_are_wrong(verifier: Verifier, gold: str, answer: str) -> None:
    assert verifier([(gold, answer)])[0].right is False


def golds() -> list[str]:
    if not DATA.is_dir():
        pytest.skip("no data beside the checkout: GSM8K, MATH500, Geometry3K")
    files = {
        "gsm8k/test.jsonl": "answer",
        "math500/test.jsonl": "answer",
        "geometry3k/test.jsonl": "ground_truth",
    }
    chosen = []
    for file, column in files.items():
        rows = [json.loads(line)[column] for line in (DATA / file).read_text().splitlines()]
        chosen += random.Random(0).sample(sorted(set(rows)), 25)
    return chosen


def test_real_golds_are_right_against_themselves(verifier: Verifier) -> None:
    rows = golds()
    hashed = [gold for gold in rows if "####" in gold]
    assert len(hashed) == 25
    assert all(r.value == 1.0 for r in gsm8k()([response(gold, gold) for gold in hashed]))
    others = [gold for gold in rows if "####" not in gold]
    with MathReward() as reward:
        assert all(r.correct for r in reward([boxed(gold, gold) for gold in others]))
    # and by mathematics, not only because the text is the same
    replies = verifier.pool.ask([{"gold": gold, "answer": gold} for gold in others])
    assert [gold for gold, reply in zip(others, replies, strict=True) if not reply["right"]] == []


def test_equal_pairs_are_graded_once_and_order_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    with MathReward() as reward:
        ask = reward._verifier.pool.ask
        monkeypatch.setattr(
            reward._verifier.pool, "ask", lambda q, **limits: asked.extend(q) or ask(q, **limits)
        )
        answers = ["24/2", "12", "25/2", "24/2", "11", "25/2", "36/3"]
        graded = reward([boxed(a) for a in answers] * 3)
    assert [q["answer"] for q in asked] == ["24/2", "25/2", "36/3"]
    assert [r.value for r in graded] == [1, 1, 0, 1, 0, 0, 1] * 3


HOSTILE = [
    "9^{9^{9}}",
    "(10^7)!",
    "{" * 20_000 + "}" * 20_000,
    "7" * 1_000_000,
    "\\frac{" * 40 + "1" + "}{2}" * 40,
    "1\x002",
    "\x00",
    "\ud800\udfff12",
    "‮12",
    "\x1b[2J12",
    "__import__('os').system('touch {marker}')",
    "eval(\"__import__('os').system('touch {marker}')\")",
    "\\input{/etc/passwd}",
    "(" * 290,
    "\\sqrt" * 70,
    "1+" * 149 + "1",
    "-" * 299 + "1",
    "\n" * 100 + "11" + "\n" * 100,
]
STUCK = [
    "\\binom{10^8}{5\\cdot 10^7}",
    "((9^{999})^{999})^{999}",
    "\\Gamma(10^8)",
]


@pytest.mark.slow
@needs_proc
def test_hostile_answers_cost_their_deadline_and_nothing_else(tmp_path: Path) -> None:
    before = children(os.getpid())
    marker = tmp_path / "marker"
    deadline = 1.0
    responses = [boxed(a.replace("{marker}", str(marker))) for a in HOSTILE + STUCK]
    start = time.monotonic()
    with MathReward(deadline=deadline) as reward:
        graded = reward([boxed("24/2"), *responses, boxed("36/3")])
        took = time.monotonic() - start
    first, *between, last = graded
    assert (first.reason, last.reason) == ("right: 24/2", "right: 36/3")
    for r in between:
        assert r.value == 0.0
        assert r.correct is not True
        r.reason.encode("utf-8")
        assert r.reason.isprintable()
        assert len(r.reason) < 200
    stuck = between[len(HOSTILE) :]
    assert all(r.reason.startswith("no verdict: the verifier was stopped after 1 s") for r in stuck)
    assert all((r.correct, r.verdict) == (False, False) for r in stuck), "counted, and as wrong"
    assert first.verdict
    assert stuck[0].reason.endswith("on '\\binom{10^8}{5\\cdot 10^7}'")
    assert took < len(graded) * deadline
    assert not marker.exists()
    assert children(os.getpid()) == before


def test_exact() -> None:
    reward = ExactReward()
    graded = reward([boxed("12"), boxed("12.0"), response("12"), boxed(" a b ", "a b")])
    assert [(r.value, r.correct) for r in graded] == [
        (1.0, True),
        (0.0, False),
        (0.0, False),
        (1.0, True),
    ]
    hashed = gsm8k()(
        [
            response("#### 1,234", "$1234"),
            response("#### 12", "a\n#### 12"),
            response("\\boxed{12}"),
            response("#### north", "north"),
        ]
    )
    assert [r.value for r in hashed] == [1.0, 1.0, 0.0, 0.0]
    assert hashed[2].reason == "no #### answer"
    reward.close()


@pytest.mark.parametrize("make", [math, geo3k, gsm8k, ExactReward])
def test_a_prompt_without_an_answer_is_named(make: type) -> None:
    reward = make()
    assert isinstance(reward, RewardFn)
    assert reward([]) == []
    for gold, word in ((None, "none"), ("  ", "empty")):
        with pytest.raises(ValueError, match=rf"prompt 'p7' has (an )?{word}"):
            reward([boxed("1"), response("\\boxed{1}", gold, id="p7")])


@pytest.mark.usefixtures("as_users_run_it")
@each(
    ("settings", "message"),
    [
        ({"extract": "box"}, "extract must be one of boxed, hash, auto; got 'box'"),
        ({"accuracy": -1.0}, "accuracy must be a finite"),
        ({"format": float("nan")}, "format must be a finite number"),
        ({"accuracy": "1"}, "accuracy must be a finite .*got '1'"),
        ({"length_penalty": "paper"}, "None, 'authors' or 'soft'; got 'paper'"),
        ({"deadline": 0.0}, "deadline must be a positive number of seconds"),
        ({"workers": 0}, "workers must be a whole number"),
        ({"workers": 2.0}, "workers must be a whole number"),
    ],
)
def test_settings_are_refused_early(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MathReward(**settings)


def test_what_was_configured_is_what_runs() -> None:
    assert repr(math()) == repr(MathReward())
    assert math() == MathReward()
    assert "deadline=5.0" in repr(math())
    with pytest.raises(AttributeError):
        math().deadline = 3.0


@each(
    ("text", "gold", "correct"),
    [
        ("#### 18.00", "18", True),
        ("#### 18.", "18", True),
        ("#### 18", "18.0", True),
        ("#### 1,800.50", "1800.5", True),
        ("#### 18.01", "18", False),
        ("#### 180", "18", False),
        ("#### -18.0", "18", False),
    ],
)
def test_gsm8k_compares_numbers(text: str, gold: str, correct: bool) -> None:
    (found,) = gsm8k()([response(text, gold)])
    assert (found.correct, found.value) == (correct, float(correct))


@pytest.mark.slow
def test_a_batch_ends_within_its_seconds_and_says_what_was_left() -> None:
    slow = ["\\frac{" * (10 + i) + "1" + "}{2}" * (10 + i) for i in range(16)]
    started = time.monotonic()
    with math(deadline=5.0, batch_seconds=1.0) as reward:
        graded = reward([boxed("24/2"), *[boxed(a, "\\sqrt{2}") for a in slow]])
    assert time.monotonic() - started < 10  # starting two workers included; 40 s without
    left = [r for r in graded if not r.verdict]
    assert len(left) >= 4
    assert all(r.correct is False and "batch's 1 s were used up" in r.reason for r in left)
    assert graded[0].verdict
