"""The learning rate's factor along a stage."""

from typing import Any

import pytest

from segcredit.train.optim import rate


def curve(total: int, *settings: Any, **more: float) -> list[float]:
    return [rate(step, total, *settings, **more) for step in range(total)]


def test_by_hand() -> None:
    assert curve(3, "constant") == [1, 1, 1]
    assert curve(4, "linear") == pytest.approx([1, 0.75, 0.5, 0.25])
    assert curve(4, "linear", 0, 0.2) == pytest.approx([1, 0.8, 0.6, 0.4])
    assert curve(4, "cosine") == pytest.approx([1, 0.853553, 0.5, 0.146447], abs=1e-6)
    assert curve(5, "linear", 1) == pytest.approx([0.5, 1, 0.75, 0.5, 0.25])


def test_it_is_held_before_it_falls() -> None:
    assert curve(8, "linear", hold=0.5) == pytest.approx([1, 1, 1, 1, 1, 0.75, 0.5, 0.25])
    after_two = [1 / 3, 2 / 3, 1, 1, 1, 0.75, 0.5, 0.25]
    assert curve(8, "linear", 2, 0.0, 0.5) == pytest.approx(after_two)
    assert curve(4, "constant", hold=0.5) == [1] * 4
    # where the warm-up lasts longer than the hold, it falls from its end on
    assert curve(6, "linear", 4, 0.0, 0.5)[3:] == pytest.approx([0.8, 1, 0.5])
