"""Hypothesis strategies: a few ragged responses with numbers that produce ties, zeros and signs."""

from dataclasses import dataclass

from hypothesis import strategies as st
from ragged import Layout, layout

tenths = st.integers(-20, 20).map(lambda n: n / 10)
positive_tenths = st.integers(0, 20).map(lambda n: n / 10)
discount = st.sampled_from([0.0, 0.3, 0.9, 0.99, 1.0])


@dataclass(frozen=True)
class Case:
    """Responses as lists, and one way to lay them out."""

    entropy: list[list[float]]
    value: list[list[float]]
    reward: list[list[float]]
    log_ratio: list[list[float]]
    prob: list[list[float]]
    ends: list[list[int]]
    place: Layout

    def __repr__(self) -> str:
        return f"Case(lengths={[len(r) for r in self.entropy]}, ends={self.ends}, {self.place})"


@st.composite
def cases(draw: st.DrawFn, most_rows: int = 4, longest: int = 9) -> Case:
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=most_rows))

    def rows(elements: st.SearchStrategy[float]) -> list[list[float]]:
        return [draw(st.lists(elements, min_size=n, max_size=n)) for n in lengths]

    ends = [sorted({*draw(st.sets(st.integers(0, n - 1))), n - 1}) for n in lengths]
    return Case(
        entropy=rows(positive_tenths),
        value=rows(tenths),
        reward=rows(tenths),
        log_ratio=rows(tenths),
        prob=rows(st.integers(1, 20).map(lambda n: n / 20)),
        ends=ends,
        place=layout(lengths, seed=draw(st.integers(0, 999)), holes=draw(st.booleans())),
    )
