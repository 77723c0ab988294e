"""Benchmark data beside the checkout, and models that answer without a network."""

import json
import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import pytest
from tiny_policies import picture

from segcredit.benchmarks import Score, find_data, make_benchmark, score
from segcredit.rewards.verify import Verifier
from segcredit.types import Prompt, Response

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "bench"
ANSWERS = ["A", "B", "A, C", "D", "A", "3", "B", "C", "A"]
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="needs the data beside the checkout")


@lru_cache
def questions(name: str) -> list[Prompt]:
    benchmark = make_benchmark(name)
    found = find_data(benchmark.layouts, [DATA])
    assert found is not None
    return benchmark.read(found)


def scores(
    name: str, asked: Sequence[Prompt], answer: Callable[[Prompt], str]
) -> tuple[dict[str, Score], list[bool]]:
    """Grade what ``answer`` says to every question."""
    benchmark = make_benchmark(name)
    responses = [Response(x, answer(x), 10, False, 100) for x in asked]
    verifier = Verifier()
    try:
        grades = benchmark.grade(responses, verifier)
    finally:
        verifier.close()
    right = [x.correct for x in grades]
    return score(benchmark, asked, [right]), right


def box(text: str | None) -> str:
    return f"<think>Perhaps A, or B.</think>The answer is \\boxed{{{text}}}."


def random_letters(asked: Sequence[Prompt], letters: str, seed: int) -> dict[str, str]:
    """Draw a letter per question id."""
    drawn = random.Random(seed)
    return {x.id: drawn.choice(letters) for x in asked}


def write_logicvista(folder: Path) -> Path:
    """Write nine questions in the layout of LogicVista's repository, and one without a text."""
    place = folder / "logicvista/data"
    (place / "images").mkdir(parents=True)
    rows = {}
    for n, answer in enumerate(ANSWERS):
        (place / f"images/v1_{n}.png").write_bytes(picture(56, 56, seed=n))
        rows[f"v1_{n}"] = {
            "imagename": f"v1_{n}.png",
            "question": f"Which figure comes next? Number {n}.",
            "answer": answer,
            "skill": ["spatial" if n % 2 else "inductive"],
        }
    rows["v1_9"] = {"imagename": "v1_9.png", "question": "", "answer": "", "skill": ["spatial"]}
    (place / "dataset.json").write_text(json.dumps(rows))
    return folder
