"""The client of a judge model: order, retries, deadline, bad replies, and what it is shown."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from json_server import said, serving
from tables import choice_row, read, write_tsv

from segcredit.benchmarks import make_benchmark
from segcredit.benchmarks.judge import Judge
from segcredit.benchmarks.run import BenchmarkSettings, _graded, load_questions, run_benchmarks
from segcredit.rewards import client
from segcredit.rewards.verify import Verifier
from segcredit.types import Response

Reply = Callable[[str, int], tuple[int, bytes] | None]
"""Makes status and body from a prompt and the number of the request; None drops the connection."""


@contextmanager
def asking(reply: Reply) -> Iterator[tuple[str, list[str]]]:
    """Run a server; yield its URL and the prompts that it was asked."""
    asked: list[str] = []

    def answer(body: Any, number: int) -> tuple[int, bytes] | None:
        assert body["temperature"] == 0
        asked.append(body["messages"][0]["content"])
        return reply(asked[-1], number)

    with serving(answer) as (url, _):
        yield url, asked


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAUSE", 0.001)


def test_replies_are_in_the_order_of_the_prompts() -> None:
    def reply(prompt: str, number: int) -> tuple[int, bytes]:
        time.sleep(0.02 * (number % 3))
        return said(f"reply to {prompt}")

    with asking(reply) as (url, _):
        prompts = [str(i) for i in range(30)]
        assert Judge(url).ask(prompts) == [f"reply to {x}" for x in prompts]
        assert Judge(url).ask([]) == []


@pytest.mark.parametrize("failure", [(503, b""), (429, b"slow down"), None], ids=str)
def test_a_temporary_failure_is_tried_again(failure: tuple[int, bytes] | None) -> None:
    with asking(lambda _, number: failure if number <= 3 else said("A")) as (url, asked):
        assert Judge(url, "m").ask(["x"]) == ["A"]
        assert len(asked) == 4
    with (
        asking(lambda *_: failure) as (url, asked),
        pytest.raises(
            ValueError, match=r"expected an OpenAI-compatible judge at http://127.*leave"
        ),
    ):
        Judge(url, "m").ask(["x"])
    assert len(asked) == 4


@pytest.mark.parametrize(
    "reply",
    [
        (401, b"{}"),
        (404, b""),
        (200, b"<html>"),
        (200, b"{}"),
        (200, b"[]"),
        (200, b'{"choices": []}'),
        (200, b'{"choices": [{"message": null}]}'),
        (200, b'{"choices": [{"message": {"content": "' + b"x" * 2**20 + b'"}}]}'),
    ],
    ids=range(8),
)
def test_a_bad_reply_is_one_message_and_not_tried_again(reply: tuple[int, bytes]) -> None:
    with asking(lambda *_: reply) as (url, asked):
        with pytest.raises(ValueError, match="expected an OpenAI-compatible judge") as caught:
            Judge(url, "m").ask(["x"])
        assert len(asked) == 1
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("model", [None, "m"])
def test_the_check_asks_the_model(model: str | None) -> None:
    with asking(lambda *_: said("OK")) as (url, asked):
        Judge(url, model).check()
        assert len(asked) == 1
    with asking(lambda *_: (404, b"")) as (url, _), pytest.raises(ValueError, match="judge at"):
        Judge(url, model).check()


def test_the_deadline_ends_all_requests() -> None:
    def slow(*_: object) -> tuple[int, bytes]:
        time.sleep(0.5)
        return said("A")

    with asking(slow) as (url, asked):
        started = time.monotonic()
        with pytest.raises(ValueError, match="expected an OpenAI-compatible judge"):
            Judge(url, "m", seconds=0.7).ask([str(i) for i in range(100)])
        assert time.monotonic() - started < 5
        assert len(asked) < 100


def graded(name: str, text: str, reply: str, tmp_path: Path) -> tuple[dict, list[str]]:
    """Grade one response with a judge that always says the same."""
    options = {"A": "teddy bear", "B": "rabbit", "C": "cat"}
    row = choice_row(1, "What is it?", options, "C")
    (question,) = read(name, write_tsv(tmp_path / "x.tsv", [row]))
    verifier = Verifier()
    with asking(lambda *_: said(reply)) as (url, asked):
        (answer,) = _graded(
            [(question, 0)],
            [Response(question, text, 10, False, 100)],
            make_benchmark(name),
            verifier,
            Judge(url),
        )
    verifier.close()
    return {"answer": answer.answer, "correct": answer.correct, "judged": answer.judged}, asked


def test_a_judge_sees_only_the_text_after_the_thinking(tmp_path: Path) -> None:
    unclear = "<think>The secret is B.</think>An animal with whiskers."
    found, asked = graded("mmstar", unclear, "\\boxed{C}", tmp_path)
    assert found == {"answer": "C", "correct": True, "judged": True}
    assert "An animal with whiskers." in asked[0]
    assert "A. teddy bear" in asked[0]
    assert "secret" not in asked[0]
    assert "<image>" not in asked[0]


@pytest.mark.parametrize("reply", ["NONE", "NONE.", " NONE\n", "I do not know", "\\boxed{E}"])
def test_a_judge_that_finds_nothing(reply: str, tmp_path: Path) -> None:
    found, asked = graded("mmstar", "An animal with whiskers.", reply, tmp_path)
    assert found == {"answer": None, "correct": False, "judged": False}
    assert len(asked) == 1


@pytest.mark.parametrize(
    "text", ["The answer is B.", "<think>It is C.", "<think>It is C.</think>", ""]
)
def test_a_judge_is_asked_only_about_unclear_answers(text: str, tmp_path: Path) -> None:
    found, asked = graded("mmstar", text, "C", tmp_path)
    assert asked == []
    assert found["correct"] is False


def test_sets_without_a_judge_are_graded_by_rules() -> None:
    judged = {name: make_benchmark(name).judged for name in ("geo3k", "gsm8k", "mathverse", "mmmu")}
    assert judged == {"geo3k": False, "gsm8k": False, "mathverse": True, "mmmu": True}


def test_a_judge_that_dies_keeps_the_answers_so_far(
    model: Path, data: Path, tmp_path: Path
) -> None:
    def run(folder: Path, url: str) -> bytes:
        settings = BenchmarkSettings(max_tokens=8, chunk=3, judge=url, judge_model="m")
        sets = load_questions(["logicvista"], data)
        run_benchmarks(str(model), sets, folder, settings)
        return (folder / "answers/logicvista.jsonl").read_bytes()

    dead = threading.Event()

    def reply(_: str, number: int) -> tuple[int, bytes]:
        if number > 4 and not dead.is_set():
            return 401, b""
        return said("\\boxed{A}")

    with asking(reply) as (url, _):
        with pytest.raises(ValueError, match="expected an OpenAI-compatible judge"):
            run(tmp_path / "out", url)
        kept = (tmp_path / "out/answers/logicvista.jsonl").read_bytes()
        assert len(kept.splitlines()) == 3
        dead.set()
        resumed = run(tmp_path / "out", url)
        assert resumed.startswith(kept)
        assert resumed == run(tmp_path / "whole", url)
