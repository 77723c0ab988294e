"""Benchmark data beside the checkout, and models that answer without a network."""

import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import pytest

from segcredit.benchmarks import Score, find_data, make_benchmark, score
from segcredit.rewards.verify import Verifier
from segcredit.types import Prompt, Response

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "bench"
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
