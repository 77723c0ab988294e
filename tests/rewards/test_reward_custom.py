import datetime
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from each import each
from grading import children, needs_proc, response

from segcredit.rewards import CustomReward, RewardError, make_reward
from segcredit.rewards.custom import arguments
from segcredit.types import Prompt, Reward

RESPONSES = [
    response(f"say \\boxed{{{i}}}", str(i), id=f"p{i}", level=i, topic="sums") for i in range(4)
]

FILE = """
import asyncio, os, sys, time
import helper

def score(prompts, completions, level, **kwargs):
    print("hello", prompts)
    return [len(c) + n for c, n in zip(completions, level)]

def names(completions, **kwargs):
    return [len(kwargs)] * len(completions)

def narrow(completions, answer):
    return [float(a in c) for c, a in zip(completions, answer)]

async def later(completions, **kwargs):
    await asyncio.sleep(0.01)
    return [0.5] * len(completions)

def talk(completions, **kwargs):
    return [len(c[0]["content"]) for c in completions]

def bad(completions, level, **kwargs):
    for n in level:
        if n == 2:
            raise KeyError("two")
    return [0.0] * len(level)

def hangs(completions, level, **kwargs):
    if 2 in level:
        time.sleep(60)
    return [0.0] * len(level)

def quits(completions, level, **kwargs):
    if 2 in level:
        sys.exit("enough")
    return [0.0] * len(level)

def dies(completions, level, **kwargs):
    if 2 in level:
        os._exit(3)
    return [0.0] * len(level)

def crowd(completions, **kwargs):
    if len(completions) > 1:
        raise MemoryError("too many")
    return [0.0]

def wants(completions, missing, **kwargs):
    return [0.0] * len(completions)

def when(completions, day, **kwargs):
    return [0.0] * len(completions)

helped = helper.helped
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "helper.py").write_text("def helped(completions): return [7] * len(completions)")
    (tmp_path / "rewards.py").write_text(FILE)
    return str(tmp_path / "rewards.py")


def graded(function: "str | Callable[..., object]", **settings: object) -> list[float]:
    with CustomReward(function, **settings) as reward:
        return [r.value for r in reward(RESPONSES)]


def test_what_a_function_is_given() -> None:
    given = arguments(RESPONSES[:2])
    assert given == {
        "prompts": ["Why?", "Why?"],
        "completions": ["say \\boxed{0}", "say \\boxed{1}"],
        "answer": ["0", "1"],
        "solution": ["0", "1"],
        "ground_truth": ["0", "1"],
        "level": [0, 1],
        "topic": ["sums", "sums"],
        "num_tokens": [10, 10],
        "truncated": [False, False],
    }
    talk = arguments(RESPONSES[:1], conversational=True)
    assert talk["prompts"] == [[{"role": "user", "content": "Why?"}]]
    assert talk["completions"] == [[{"role": "assistant", "content": "say \\boxed{0}"}]]
    mixed = arguments([response("a", solution="mine"), response("b", "3")])
    assert mixed["solution"] == ["mine", None]  # a column of that name is left as it is
    assert mixed["answer"] == ["12", "3"]


@needs_proc
def test_a_function_in_a_file(file: str) -> None:
    before = children(os.getpid())
    with make_reward(f"{file}:score") as reward:
        first, *_ = reward(RESPONSES)
        assert (first.value, first.correct) == (13.0, None)
        assert first.reason == "rewards.py:score: 13"
        assert [r.value for r in reward(RESPONSES[2:])] == [15.0, 16.0]
        assert reward([]) == []
    assert children(os.getpid()) == before
    assert graded(f"{file}:names") == [8.0] * 4
    assert graded(f"{file}:narrow") == [1.0] * 4
    assert graded(f"{file}:later") == [0.5] * 4
    assert graded(f"{file}:talk", conversational=True) == [13.0] * 4
    assert graded(f"{file}:helped") == [7.0] * 4  # imported from its own folder


def test_a_callable() -> None:
    def score(completions: list[str], level: list[int], **kwargs: object) -> tuple[int, ...]:
        return tuple(level)

    assert graded(score) == [0.0, 1.0, 2.0, 3.0]
    assert graded(lambda completions: [True] * len(completions)) == [1.0] * 4
    assert [r.value for r in make_reward(score)(RESPONSES[:1])] == [0.0]


def test_a_function_may_say_what_is_correct(tmp_path: Path) -> None:
    """Plain numbers say nothing about it; a dict or a Reward does."""
    dicts = [
        {"reward": 0.7, "correct": True, "reason": "close\x1b[2J"},
        {"reward": 0.2, "correct": False},
    ]
    objects = [Reward(0.7, "close", True), Reward(0.0, "no time", False, verdict=False)]
    (tmp_path / "graders.py").write_text(f"def score(completions):\n    return {dicts!r}\n")
    for function in (lambda completions: dicts, str(tmp_path / "graders.py:score")):
        with make_reward(function) as reward:
            right, wrong = reward(RESPONSES[:2])
        assert (right.value, right.correct, right.verdict) == (0.7, True, True)
        assert right.reason.startswith("close")
        assert right.reason.isprintable()
        assert (wrong.value, wrong.correct) == (0.2, False)
        assert wrong.reason.endswith(": 0.2")
    first, second = make_reward(lambda completions: objects)(RESPONSES[:2])
    assert (first.correct, first.reason) == (True, "close")
    assert (second.correct, second.verdict, second.reason) == (False, False, "no time")
    assert all(r.correct is None for r in make_reward(lambda level: level)(RESPONSES))


def test_a_response_without_a_verdict_may_be_among_plain_numbers() -> None:
    lost = {"reward": 0.0, "verdict": False}
    for others, expected in (([1.0, 0.5], None), ([{"reward": 1, "correct": True}] * 2, True)):
        found = make_reward(lambda completions, x=others, **_: [x[0], lost, x[1]])(
            [response(text) for text in "abc"]
        )
        assert [x.verdict for x in found] == [True, False, True]
        assert [x.correct for x in found] == [expected, expected and False, expected]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bad", r"rewards.py:bad raised KeyError: 'two' \(.*rewards.py, line 25\) on prompt 'p2'"),
        pytest.param(
            "hangs",
            r"rewards.py:hangs was stopped after 1 s on prompt 'p2'",
            marks=pytest.mark.slow,
        ),
        ("quits", r"rewards.py:quits raised SystemExit: enough .* on prompt 'p2'"),
        ("dies", r"rewards.py:dies ended with exit status 3 on prompt 'p2'"),
    ],
)
@needs_proc
def test_the_culprit_is_named(file: str, name: str, message: str) -> None:
    before = children(os.getpid())
    start = time.monotonic()
    with CustomReward(f"{file}:{name}", deadline=1.0) as reward:
        with pytest.raises(RewardError, match=message + r", response 'say \\boxed\{2\}'"):
            reward(RESPONSES)
        assert [r.value for r in reward(RESPONSES[:2])] == [0.0, 0.0]  # and it goes on
    assert time.monotonic() - start < 10.0
    assert children(os.getpid()) == before


def test_a_failure_of_the_whole_batch_only(file: str) -> None:
    with pytest.raises(RewardError, match=r"raised MemoryError: too many .* on 4 responses togeth"):
        graded(f"{file}:crowd")


def test_a_callable_that_hangs_or_raises() -> None:
    def hangs(level: list[int]) -> list[float]:
        if 1 in level:
            time.sleep(3)
        return [0.0] * len(level)

    def raises(level: list[int]) -> list[float]:
        return [1 / (n - 3) for n in level]

    with pytest.raises(RewardError, match=r"hangs did not return within 0.3 s on prompt 'p1'"):
        graded(hangs, deadline=0.3)
    with pytest.raises(RewardError, match=r"raises raised ZeroDivisionError.*on prompt 'p3'"):
        graded(raises)


@each(
    ("result", "message"),
    [
        ([0.0, float("nan"), 0.0, 0.0], r"finite numbers; it returned nan on prompt 'p1'"),
        ([0.0, 0.0, float("inf"), 0.0], r"finite numbers; it returned inf on prompt 'p2'"),
        ([0.0, 0.0, 0.0, None], r"returned None, .* return 0.0 .* on prompt 'p3'"),
        ([0.0, "1", 0.0, 0.0], r"must return finite numbers; it returned str '1' on prompt 'p1'"),
        (
            [0.0, [1], 0.0, 0.0],
            r"must return finite numbers; it returned list \[1\] on prompt 'p1'",
        ),
        ([0.0, 1e400, 0.0, 0.0], r"finite numbers; it returned inf on prompt 'p1'"),
        ([0.0, 10**400, 0.0, 0.0], r"must return finite numbers; it returned int 1000"),
        ([0.0] * 3, r"one number per response; it returned 3 for 4"),
        ([], r"one number per response; it returned 0 for 4"),
        (0.5, r"a list with one number per response; it returned 'float 0.5'"),
        (None, r"a list with one number per response; it returned 'NoneType None'"),
        ("1111", r"a list with one number per response; it returned 'str '1111''"),
        ({"a": 1}, r"a list with one number per response; it returned 'dict"),
        ([0.0, {"score": 1}, 0.0, 0.0], r"a dict of reward, correct, reason, verdict; .*'p1'"),
        ([{"reward": 1.0, "correct": "yes"}] * 4, r"true, false or None as 'correct'; .*'p0'"),
        ([{"reward": None}] * 4, r"returned None, .* on prompt 'p0'"),
        ([{"reward": "1"}] * 4, r"must return finite numbers; it returned str '1' on prompt 'p0'"),
        (
            [{"reward": 1.0, "correct": True}, 0.5, 0.5, 0.5],
            r"'correct' for all responses or for none; it did for 1 of 4, but not on prompt 'p1'",
        ),
    ],
)
def test_what_is_returned_is_checked(result: object, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        graded(lambda completions: result)


def test_parameters_that_there_are_not(file: str) -> None:
    with pytest.raises(
        RewardError, match=r"wants requires 'missing'; it can have level, topic, answer"
    ):
        graded(f"{file}:wants")
    day = [response("a", day=datetime.date(2026, 1, 1))]
    with CustomReward(f"{file}:when") as reward, pytest.raises(RewardError, match="of date, which"):
        reward(day)
    with CustomReward(f"{file}:names") as reward:  # which does not ask for it
        assert reward(day)[0].value == 6.0
    assert CustomReward(lambda day: [d.year for d in day])(day)[0].value == 2026.0


def test_hints(file: str) -> None:
    with pytest.raises(RewardError, match="set conversational=True"):
        graded(f"{file}:talk")

    def alarmed(completions: list[str]) -> list[float]:
        import signal

        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return [0.0]

    with pytest.raises(RewardError, match=r"Pass it as 'file.py:function'"):
        graded(alarmed)


def test_hostile_text_in_messages_is_made_printable() -> None:
    hostile = response("\x1b[2J\ud800\x00" + "x" * 1000, id="p\n")
    with pytest.raises(RewardError) as failed:
        CustomReward(lambda completions: 1 / 0)([hostile])
    message = str(failed.value)
    assert message.isprintable()
    assert "prompt 'p↵', response '␛[2J‹U+D800›␀xxx" in message
    assert len(message) < 400


def test_surrogates_reach_a_function_in_a_file(file: str) -> None:
    with CustomReward(f"{file}:narrow") as reward:
        assert reward([response("\ud800\x00\n12")])[0].value == 1.0


def test_mistakes_in_the_file_are_found_before_the_run(tmp_path: Path, file: str) -> None:
    with pytest.raises(ValueError, match=r"no function 'scor'. Did you mean 'score'"):
        make_reward(f"{file}:scor")
    with pytest.raises(ValueError, match=r"there is no file .*absent.py"):
        make_reward(str(tmp_path / "absent.py:score"))
    with pytest.raises(ValueError, match=r"unknown reward 'rewards.py'.* 'file.py:Name'"):
        make_reward("rewards.py")
    with pytest.raises(ValueError, match=r"written 'file.py:function'; got 'rewards.py'"):
        CustomReward("rewards.py")
    (tmp_path / "broken.py").write_text("def score(:\n")
    with pytest.raises(RewardError, match=r"broken.py .* invalid syntax"):
        make_reward(str(tmp_path / "broken.py:score"))
    (tmp_path / "raises.py").write_text("def score(completions): ...\nimport no_such_module\n")
    with (
        make_reward(str(tmp_path / "raises.py:score")) as reward,
        pytest.raises(RewardError, match=r"cannot start: ModuleNotFoundError.*raises.py, line 2"),
    ):
        reward(RESPONSES)


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ("score = 1", False),
        ("score = [len]", False),
        ("import score", False),
        ("import score.parts", False),
        ("def other(x):\n    score = x\n    return score", False),
        ("print(score)", False),
        ("score = make()", True),
        ("score = lambda completions: [0.0]", True),
        ("score = None\nif True:\n    def score(completions): ...", True),
        ("try:\n    from fast import score\nexcept ImportError:\n    score = None", True),
        ("from rewards import *", True),
        ("from rewards import grade as score", True),
        ("a, score = pair()", True),
        ("class score: ...", True),
        ("def start():\n    global score\n    score = len", True),
    ],
)
def test_a_name_that_cannot_be_a_function_is_found_before_the_run(
    tmp_path: Path, text: str, accepted: bool
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text + "\n")
    if accepted:
        make_reward(f"{path}:score").close()
        return
    with pytest.raises(ValueError, match=r"'score', which is not one\.|has no function 'score'\."):
        make_reward(f"{path}:score")


def test_a_function_of_a_module_runs_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "graders"
    package.mkdir()
    (package / "__init__.py").write_text("import os\n")
    (package / "helper.py").write_text("WORTH = 0.5\n")
    (package / "mine.py").write_text(
        "import os\nfrom .helper import WORTH\n"
        "def score(completions):\n    return [WORTH + os.getpid()] * len(completions)\n"
        "def wants(completions, level): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with make_reward({"name": "graders.mine:score", "deadline": 30}) as reward:
        (graded,) = reward(RESPONSES[:1])
    assert graded.value % 1 == 0.5
    assert graded.value != 0.5 + os.getpid()
    assert "graders" not in sys.modules, "nothing of it is imported here"
    with pytest.raises(RewardError, match="requires 'level'"):
        CustomReward("graders.mine:wants").check_signature(rows_with())
    with pytest.raises(ValueError, match=r"mine.py has no function 'scor'. Did you mean 'score'"):
        make_reward("graders.mine:scor")
    for absent in ("graders.missing:score", "no_such_package.mine:score"):
        with pytest.raises(ValueError, match=r"there is no module .* name a file"):
            make_reward(absent)


@pytest.mark.usefixtures("as_users_run_it")
def test_settings_are_refused_early() -> None:
    for deadline in (0, "60", float("inf")):
        with pytest.raises(ValueError, match="deadline must be a positive number of seconds"):
            CustomReward(len, deadline=deadline)
    with pytest.raises(ValueError, match="conversational must be true or false; got 'no'"):
        CustomReward(len, conversational="no")
    with pytest.raises(ValueError, match=r"a callable or 'file.py:function'; got 3"):
        CustomReward(3)


# ── The signature, before anything is sampled ────────────────────────────────────────────────────


def rows_with(**columns: object) -> list[Prompt]:
    return [Prompt("a", ({"role": "user", "content": "?"},), answer="1", columns=columns)]


def any_columns(completions: list[str], level: list[int], **more: Any) -> list[float]:
    raise AssertionError("a check does not call it")


def with_a_default(completions: list[str], level: list[int] | None = None) -> list[float]:
    raise AssertionError("a check does not call it")


def test_a_parameter_that_the_rows_do_not_have_is_told_before_any_call() -> None:
    reward = CustomReward(any_columns)
    reward.check_signature(rows_with(level=3))
    CustomReward(with_a_default).check_signature(rows_with())
    with pytest.raises(RewardError) as told:
        reward.check_signature(rows_with(difficulty=3, source="x"))
    message = str(told.value)
    assert message.startswith("the reward function any_columns requires 'level', but the rows have")
    assert "'difficulty', 'source'" in message
    assert "completions, answer, solution, ground_truth" in message
    assert "give it a default" in message


def test_a_function_in_a_file_is_read_and_not_run(tmp_path: Path) -> None:
    file = tmp_path / "score.py"
    file.write_text(
        "raise SystemExit('run')\n"
        "def score(completions, golds, /, gold, scale=1, *, unit, other=2, **rest): ...\n"
        "async def plain(prompts, completions, answer, num_tokens, truncated): ...\n"
        "@decorated\ndef hidden(anything): ...\n"
    )
    with pytest.raises(RewardError, match="requires 'gold' and 'unit', but the rows have no such"):
        CustomReward(f"{file}:score").check_signature(rows_with())
    CustomReward(f"{file}:score").check_signature(rows_with(gold=1, unit=2))
    CustomReward(f"{file}:plain").check_signature(rows_with())
    CustomReward(f"{file}:hidden").check_signature(rows_with())


# ── The trial before a run ───────────────────────────────────────────────────────────────────────

TRIED = """
import time

def good(completions, answer, truncated):
    assert completions == [r"\\boxed{7}", "7"] and answer == ["7", "7"]
    return [1.0, 0.5]
def text(completions, **kwargs):
    return "good"
def scalar(completions, **kwargs):
    return 1.0
def one_for_all(completions, **kwargs):
    return [1.0]
def numbers_as_text(completions, **kwargs):
    return ["1" for x in completions]
def raises(completions, **kwargs):
    return [x["content"] for x in completions]
def hangs(completions, **kwargs):
    time.sleep(60)
"""


def test_a_trial_finds_what_would_fail_in_training(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(TRIED)
    prompt = Prompt("train:0", ({"role": "user", "content": "3 + 4 ?"},), (), "7", {})
    messages = {
        "text": "must return a list with one number per response; it returned",
        "scalar": "it returned 'float 1.0'",
        "one_for_all": "it returned 1 for 2, beginning on prompt",
        "numbers_as_text": "must return finite numbers; it returned",
        "raises": "If it reads completion[0]['content'], set conversational=True.",
        "hangs": "was stopped after 0.5 s on prompt",
    }
    with CustomReward(f"{file}:good") as reward:
        reward.try_once(prompt, max_tokens=8)
    for name, message in messages.items():
        with pytest.raises(RewardError) as error:
            CustomReward(f"{file}:{name}", deadline=0.5).try_once(prompt, max_tokens=8)
        said = str(error.value)
        assert f"the reward function mine.py:{name} " in said
        assert message in said
        assert "on prompt 'train:0', response '" in said
        assert said.endswith("Correct the function, then start again.")
