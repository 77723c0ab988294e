"""Figures: what a page needs of an SVG, names as they are, the same bytes every time."""

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from PIL import Image
from recorded_runs import metric_lines, row, some_rollouts, write_run

from segcredit.runlog import read_run
from segcredit_lab.analysis import INK, Analysis, AnalysisSettings, analyses, png, svg, write
from segcredit_lab.analysis.drawing import COLORS, powers_of_ten

QUICK = AnalysisSettings(resamples=10)
HOSTILE = "a $\\frac$ <script>alert('1')<!-- & \"角 \u202e_x_^2\x1b[31m"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[Analysis]:
    """Every analysis but the probe's, of a run with a hostile name and of a second one."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [
        write_run(
            folder,
            name,
            some_rollouts(6, seed=n),
            metric_lines(9, 1.0 + n),
            lam=n,
            algorithm={"name": "sapo", "value_everywhere": True},
        )
        for n, name in enumerate([HOSTILE, "b"])
    ]
    return analyses([read_run(run) for run in runs], QUICK)


@pytest.fixture(scope="module")
def pages(made: list[Analysis]) -> list[str]:
    return [svg(x) for x in made]


def test_every_analysis_is_there(made: list[Analysis]) -> None:
    of_a_run = ["lift", "ratio_bias", "segments", "within", "jumps", "targets"]
    assert [x.name for x in made] == [*of_a_run, *of_a_run, "value_loss", "entropy", "length"]
    for analysis in made:
        json.dumps(analysis.numbers, allow_nan=False)
        assert all(len(x) == len(analysis.table.columns) for x in analysis.table.rows)
        assert analysis.note.endswith(".")


@pytest.mark.slow
def test_an_svg_fits_into_a_page(pages: list[str]) -> None:
    for text in pages:
        root = ElementTree.fromstring(text)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert text.startswith("<svg ")
        for unwanted in ("<style", "<metadata", "<script", "<!DOCTYPE", "<?xml"):
            assert unwanted not in text
        ids = {x.get("id") for x in root.iter()} - {None}
        wanted = {*re.findall(r'(?:url\(|href=")#([^")]+)', text)}
        assert wanted <= ids, "nothing points nowhere"
    shared = [{*re.findall(r'\bid="([^"]+)"', text)} for text in pages]
    assert sum(map(len, shared)) == len(set.union(*shared)), "figures of one page have own ids"


def test_all_ink_is_one_color_and_the_ground_is_transparent(pages: list[str]) -> None:
    """So that a page can put its own text color in its place."""
    for text in pages:
        colors = {*re.findall(r"#[0-9a-fA-F]{6}\b", text)}
        assert INK in colors
        assert colors <= {INK, *COLORS}
        for style in re.findall(r"<text style=\"([^\"]*)\"", text):
            assert f"fill: {INK}" in style
        assert "<text" in text, "text is text"
        assert not re.search(r'<g>\s*<path d="[^"]*" style="fill: #ffffff', text)


@pytest.mark.slow
def test_the_same_numbers_give_the_same_bytes(
    made: list[Analysis], pages: list[str], tmp_path: Path
) -> None:
    assert svg(made[0]) == pages[0]
    assert svg(made[-1]) == pages[-1]
    first, second = (write(made[1], tmp_path / name) for name in "ab")
    assert [x.name for x in first] == ["ratio_bias.png", "ratio_bias.svg", "ratio_bias.json"]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
    record = json.loads(first[2].read_text())
    assert record["numbers"] == made[1].numbers
    ElementTree.fromstring(first[1].read_text(encoding="utf-8"))
    with Image.open(first[0]) as picture:
        assert picture.width > 1000
        assert picture.convert("RGB").getpixel((1, 1)) == (255, 255, 255)


def test_names_are_shown_as_they_are(made: list[Analysis], pages: list[str]) -> None:
    """No mathematics, no markup, no control characters."""
    (name,) = made[0].runs
    assert name.startswith("a $\\frac$ <script>alert('1')<!-- & \"角 ")
    assert name.isprintable()
    png(made[2])
    texts = [x.text for x in ElementTree.fromstring(pages[-1]).iter() if x.text]
    assert name in texts


def test_whatever_style_the_caller_has_set(made: list[Analysis], pages: list[str]) -> None:
    loud = {"axes.linewidth": 5, "text.color": "green", "font.size": 30, "svg.fonttype": "path"}
    with matplotlib.rc_context(loud):
        assert svg(made[3]) == pages[3]
        assert matplotlib.rcParams["font.size"] == 30, "which stays as it was"


def test_numbers_without_any_spread_can_be_drawn(tmp_path: Path) -> None:
    """One step, one response, nothing moved, one token per segment but one."""
    rng = np.random.default_rng(0)
    still = row(rng, 0)
    count = len(still["tokens"])
    still |= {"ratio": [1.0] * count, "value": [0.5] * count, "entropy": [0.0] * count}
    spec = {"name": "sapo", "value_everywhere": True}
    made = write_run(tmp_path, rollouts={11: [still]}, metrics=metric_lines(1), algorithm=spec)
    found = analyses([read_run(made)], QUICK)
    names = {x.name: x for x in found}
    assert {*names} >= {"lift", "ratio_bias", "segments", "value_loss"}
    assert "all ratios are 1" in svg(names["ratio_bias"])
    svg(names["lift"])
    svg(names["segments"])
    assert names["lift"].numbers["by_threshold"]["0.9"]["all"]["lift"] == [1.0] * 10


def test_many_runs_with_long_names(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path, "long-" * 20 + str(n), metrics=metric_lines(3, 1.0 + n), lam=n)
        for n in range(9)
    ]
    found = analyses([read_run(run) for run in runs], QUICK)
    (entropy,) = [x for x in found if x.name == "entropy"]
    assert len({*entropy.runs}) == 9, "cut names are told apart"
    with Image.open(BytesIO(png(entropy))) as picture:
        colors = {c for _, c in picture.convert("RGB").getcolors(2**24) or ()}
    assert {tuple(bytes.fromhex(c[1:])) for c in COLORS} <= colors


def test_ticks() -> None:
    class Axis:
        def __getattr__(self, name: str) -> Any:
            return Axis()

        def __call__(self, *arguments: Any) -> None:
            shown.extend(x for x in arguments if hasattr(x, "func"))

    shown: list[Any] = []
    powers_of_ten(Axis(), y=False)
    (formatter,) = shown
    assert [formatter.func(x) for x in (1e-12, 0.1, 1, 1000.0, 0)] == [
        "10⁻¹²",
        "10⁻¹",
        "10⁰",
        "10³",
        "",
    ]


def test_figures_of_several_runs_are_told_apart(made: list[Analysis], pages: list[str]) -> None:
    """Equal curves, but ids of their own, since they may stand on one page."""
    assert svg(replace(made[3], runs=("another",))) != pages[3]
