"""``segcredit segment`` in the terminal: colored text, tables, bars, and why credit is missing."""

import io
import re

import pytest
from each import each
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

from segcredit.cli import app
from segcredit.report.responses import CreditSettings, Row
from segcredit.report.segments import cut_row, load_partitions
from segcredit.report.terminal import Bars, Page, Palette, response_text, shorten

ROW = Row(
    id="r",
    tokens=["So", " x", ".\n", "<tool>", "\n", " y", ""],
    mask=[True, True, True, False, False, True, True],
    entropy=[0.9, 0.1, 0.2, 0.0, 0.0, 0.3, 0.1],
    value=[0.5, 0.2, 0.9, 0.0, 0.0, 0.9, 0.8],
    reward=1.0,
)
CHINESE = Row(
    tokens=["直角三角形的面积等于两条直角边乘积的一半，" * 4, "答案是三十。"], entropy=[1.0, 0.5]
)


def cut_of(row: Row, strategy: str):
    return cut_row(row, strategy, load_partitions([], {})[strategy], CreditSettings())


def page(row: Row, strategy: str, width: int = 80, color_system: str | None = None) -> str:
    file = io.StringIO()
    console = Console(
        file=file,
        width=width,
        force_terminal=color_system is not None,
        color_system=color_system,
        no_color=False,
    )
    page = Page(console, CreditSettings())
    page.row(row, row.id or "line 1", [cut_of(row, strategy)])
    page.legend()
    return file.getvalue()


def test_without_color_bars_stand_between_segments_and_brackets_around_holes():
    text = response_text(ROW, cut_of(ROW, "token"), Palette(color=False)).plain
    assert text == "So┃ x┃.↵┃\n⟦<tool>↵⟧\n y┃∅"


def test_with_color_there_are_no_bars_and_neighbors_differ():
    palette = Palette(color=True)
    text = response_text(ROW, cut_of(ROW, "token"), palette)
    assert text.plain == "So x.↵\n⟦<tool>↵⟧\n y∅"
    assert palette.body(0) != palette.body(1) != palette.last(1)
    assert "\x1b[48;" in page(ROW, "token", color_system="truecolor").replace("38;2;28;33;40;", "")


@pytest.mark.parametrize("color_system", [None, "standard"])
def test_few_colors_mean_bars(color_system):
    shown = page(ROW, "token", color_system=color_system)
    assert "So┃ x" in re.sub(r"\x1b\[[0-9;]*m", "", shown)


def test_a_segment_goes_on_behind_a_hole():
    cut_ = cut_of(ROW, "entropy")
    assert [segment.text for segment in cut_.segments] == ["So", " x.\n y", ""]
    assert cut_.index == [0, 1, 1, -1, -1, 1, 2]


def test_columns_need_their_numbers():
    numberless = page(Row(text="a b"), "token")
    assert not re.search(r"\b[HV]\b|Â|R̂", numberless.replace("no Â:", ""))
    only_value = page(ROW.model_copy(update={"reward": None, "entropy": None}), "token")
    assert re.search(r"tokens +V\n", re.sub(r" +\n", "\n", only_value))
    assert re.search(r"tokens +H +V +Â +R̂", page(ROW, "token"))


@each("width", [40, 80, 120])
@each("row", [ROW, CHINESE])
def test_no_line_is_wider_than_the_terminal(row, width):
    for line in page(row, "entropy", width).splitlines():
        assert cell_len(line) <= width, line


def test_bars_are_drawn_where_there_is_room():
    assert "│━" in page(ROW, "token", 80)
    assert "│━" not in page(ROW, "token", 60)


def test_on_a_narrow_terminal_the_text_stays_and_numbers_go():
    shown = page(ROW, "token", 40)
    assert re.search(r"# +text +H +V +Â +\n", shown)
    assert re.search(r"1  So +0\.90", shown)


def test_a_long_table_leaves_out_its_middle():
    def numbers(num_tokens: int) -> list[str]:
        return re.findall(r"^ +(\d+|⋮)  ", page(Row(tokens=["a"] * num_tokens), "token"), re.M)

    assert numbers(41) == [str(m) for m in range(1, 42)]
    assert numbers(100) == [str(m) for m in range(1, 31)] + ["⋮"] + [str(m) for m in range(91, 101)]
    assert "60 more" in page(Row(tokens=["a"] * 100), "token")


def test_the_heading_counts():
    assert "TopEntropy(fraction=0.3)  3 segments · 5 tokens · 2 off the mask" in page(
        ROW, "entropy"
    )
    assert "Response()  1 segment · 1 token\n" in re.sub(
        r" +\n", "\n", page(Row(tokens=["a"]), "response")
    )


def test_a_token_of_blanks_and_one_of_nothing_can_be_seen():
    shown = page(Row(tokens=["  ", "", "\n"]), "token")
    assert re.search(r"1  ␣ ", shown)
    assert re.search(r"2  ∅ ", shown)
    assert re.search(r"3  ↵ ", shown)


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


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"tokens": ["a", "b"], "entropy": [1, 2], "reward": 1}', "no Â: this row has no value"),
        ('{"tokens": ["a", "b"], "value": [1, 2]}', "no Â: this row has no reward"),
        ('{"text": "a b"}', "no Â: this row has no value and no reward"),
    ],
)
def test_why_there_is_no_credit(row: str, reason: str) -> None:
    shown = CliRunner().invoke(app, ["segment", "-"], input=row)
    assert shown.exit_code == 0
    assert reason in shown.output


def test_nothing_is_said_when_there_is_credit() -> None:
    row = '{"tokens": ["a"], "entropy": [1], "value": [0.5], "reward": 1}'
    assert "no Â" not in CliRunner().invoke(app, ["segment", "-"], input=row).output
