from each import each
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from segcredit.report.terminal import Bars, shorten


@each(
    ("text", "width", "short"),
    [
        ("abcdefgh", 8, "abcdefgh"),
        ("abcdefgh", 7, "abc…fgh"),
        ("abcdefgh", 6, "abc…gh"),
        ("abcdefgh", 1, "…"),
        ("直角三角形的面积", 9, "直角…面积"),
        ("直角三角形的面积", 8, "直角…积"),
    ],
)
def test_the_middle_goes(text, width, short):
    assert shorten(text, width) == short


@given(st.text(st.sampled_from("ab直角é ")), st.integers(1, 20))
def test_it_always_fits(text, width):
    assert cell_len(shorten(text, width)) <= width


def test_bars_grow_away_from_zero():
    bars = Bars([0.5, -1.0, 0.0], length=4)
    assert bars.draw(0.5).plain == "    │━━  "
    assert bars.draw(-1.0).plain == "━━━━│    "
    assert bars.draw(-0.125).plain == "   ╺│    "
    assert bars.draw(0.0).plain == "    │    "


def test_a_side_without_bars_takes_no_room():
    assert Bars([0.5, 1.0], length=4).draw(1.0).plain == "│━━━━"
    assert Bars([0.0], length=4).draw(0.0).plain == "│"
