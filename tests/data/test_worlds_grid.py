"""The grid: its pictures, its counts, its two styles."""

import io
import random
import re
from collections import Counter

import pytest
from PIL import Image

from segcredit.data.worlds import ShapeGrid, grid
from segcredit.data.worlds.drawing import COLORS, SHAPES, draw_grid
from segcredit.data.worlds.grid import listing
from segcredit.types import Prompt

MANY = 1000


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the pictures empty: drawing them takes most of the time, and here nobody looks."""
    monkeypatch.setattr(grid, "draw_grid", lambda *arguments: b"")


def open_png(prompt: Prompt) -> Image.Image:
    (image,) = prompt.images
    assert isinstance(image, bytes)
    assert image.startswith(b"\x89PNG")
    return Image.open(io.BytesIO(image))


def count_in(prompt: Prompt) -> list[int]:
    """Each term's value by the plainest reading."""
    text = prompt.messages[0]["content"].removeprefix("<image>count ").removesuffix(" ?")
    values = []
    for term in re.split(" plus | minus | times ", text):
        words = term.split()
        double = words[0] == "twice"
        values.append((2 if double else 1) * prompt.columns["cells"].count(" ".join(words[-2:])))
    return values


@pytest.mark.parametrize(("size", "cell"), [(3, 28), (2, 32), (5, 14)])
def test_picture_has_one_square_per_cell(size: int, cell: int) -> None:
    picture = open_png(ShapeGrid(size=size, cell=cell).prompt("train", 0))
    assert picture.size == (size * cell, size * cell)
    assert picture.mode == "RGB"


def test_picture_shows_the_cells() -> None:
    """The color in the middle of each cell; and one kind, one look."""
    world = ShapeGrid(size=4, colors=6, shapes=6)
    look: dict[str, set[bytes]] = {}
    for prompt in world.prompts("train", 0, 60):
        picture = open_png(prompt)
        for number, words in enumerate(prompt.columns["cells"]):
            y, x = (28 * z for z in divmod(number, 4))
            tile = picture.crop((x, y, x + 28, y + 28))
            expected = COLORS[words.split()[0]] if words else "#ffffff"
            assert "#{:02x}{:02x}{:02x}".format(*tile.getpixel((14, 14))) == expected
            look.setdefault(words, set()).add(tile.tobytes())
    assert len(look) == 37
    assert all(len(tiles) == 1 for tiles in look.values())
    assert len(set.union(*look.values())) == 37


def test_shapes_are_smooth_and_inside_their_cells() -> None:
    for shape in SHAPES:
        picture = Image.open(io.BytesIO(draw_grid([("black", shape)], 1, 28)))
        gray = list(picture.convert("L").tobytes())
        assert len({x for x in gray if 60 < x < 200}) > 2  # neither the ink nor the paper
        assert min(gray[:28] + gray[-28:] + gray[::28] + gray[27::28]) > 200  # the frame


def test_one_mark_per_image() -> None:
    world = ShapeGrid()
    for prompt in (world.prompt("test", 1), world.demonstration(1, "look").prompt):
        assert len(prompt.messages) == len(prompt.images) == 1
        assert prompt.messages[0]["role"] == "user"
        assert prompt.messages[0]["content"].startswith("<image>")
        assert prompt.messages[0]["content"].count("<image>") == 1


@pytest.mark.usefixtures("undrawn")
def test_answer_is_what_the_picture_shows() -> None:
    for prompt in ShapeGrid().prompts("test", 0, 300):
        assert prompt.answer == str(sum(count_in(prompt)))
    world = ShapeGrid(operations=("minus", "times"))
    for prompt in world.prompts("test", 0, 300):
        left, right = count_in(prompt)
        minus = " minus " in prompt.messages[0]["content"]
        assert prompt.answer == str(left - right if minus else left * right)
        assert 0 <= int(prompt.answer) <= 20


@pytest.mark.usefixtures("undrawn")
def test_questions_read_from_left_to_right() -> None:
    world = ShapeGrid(terms=3, operations=("plus", "minus", "times"))
    seen = set()
    for prompt in world.prompts("train", 0, 300):
        a, b, c = count_in(prompt)
        asked = re.findall("plus|minus|times", prompt.messages[0]["content"])
        by = {"plus": int.__add__, "minus": int.__sub__, "times": int.__mul__}
        assert prompt.answer == str(by[asked[1]](by[asked[0]](a, b), c))
        seen.add(tuple(asked))
    assert len(seen) == 9


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"twice": False},
        {"terms": 1, "twice": False},
        {"size": 2, "twice": False},
        {"operations": ("minus",), "twice": False},
        {"operations": ("times",)},
        {"terms": 3, "operations": ("plus", "minus", "times")},
    ],
)
def test_guessing_does_not_pay(settings: dict[str, object]) -> None:
    """Neither the most common answer, nor the most common one for the wording."""
    prompts = ShapeGrid(**settings).prompts("test", 0, 500)
    answers = Counter(x.answer for x in prompts)
    assert answers.most_common(1)[0][1] / 500 < 0.25
    by_words: dict[str, Counter[str | None]] = {}
    for prompt in prompts:
        words = re.sub(
            " (red|green|blue) (circle|square|triangle)", "", prompt.messages[0]["content"]
        )
        by_words.setdefault(words, Counter())[prompt.answer] += 1
    best = sum(found.most_common(1)[0][1] for found in by_words.values())
    assert best / 500 < 0.45


@pytest.mark.usefixtures("undrawn")
def test_lengths() -> None:
    world = ShapeGrid()
    tokenizer = world.tokenizer()
    assert len(tokenizer) <= 110
    lengths = [len(tokenizer(world.demonstration(n).response)["input_ids"]) for n in range(MANY)]
    assert (min(lengths), max(lengths)) == (19, 27)  # and the end token
    looks = [
        len(tokenizer(world.demonstration(n, "look").response)["input_ids"]) for n in range(300)
    ]
    assert max(looks) <= 44


def attempts(world: ShapeGrid) -> list[tuple[str, bool, int]]:
    """Style, whether right and how far off per glance or check of many demonstrations."""
    found = []
    for number in range(MANY):
        shown = world.demonstration(number)
        *lines, total, box = shown.response.split("\n")
        said = [int(line.split(" = ")[1]) for line in lines]
        assert total == f"total = {sum(said)}"
        assert box == f"\\boxed{{{sum(said)}}}"
        for line, claim, true in zip(lines, said, count_in(shown.prompt), strict=True):
            step = 2 if " twice " in line else 1
            found.append((line.split()[0], claim == true, (claim - true) // step))
    return found


@pytest.mark.usefixtures("undrawn")
def test_quality_of_demonstrations() -> None:
    found = attempts(ShapeGrid())
    styles = Counter(style for style, _, _ in found)
    assert styles["check"] / len(found) == pytest.approx(0.5, abs=0.03)
    assert all(right for style, right, _ in found if style == "check")
    wrong = [off for style, right, off in found if style == "glance" and not right]
    assert set(wrong) == {-1, 1}
    assert len(wrong) / styles["glance"] == pytest.approx(0.5, abs=0.04)


@pytest.mark.usefixtures("undrawn")
def test_share_of_right_demonstrations() -> None:
    """(1 − ½·½)², and a little for two errors that cancel."""
    world = ShapeGrid()
    shown = [world.demonstration(n) for n in range(MANY)]
    right = sum(x.response.endswith(f"{{{x.prompt.answer}}}") for x in shown)
    assert right / MANY == pytest.approx(0.5625 + 0.01, abs=0.035)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("settings", "style", "share"),
    [
        ({"careful": 1.0}, "check", 1.0),
        ({"careful": 0.0, "glance_error": 0.0}, "glance", 1.0),
        ({"careful": 0.0, "glance_error": 1.0}, "glance", 0.0),
        ({"careful": 0.0, "glance_error": 0.2}, "glance", 0.8),
    ],
)
def test_quality_as_configured(settings: dict[str, float], style: str, share: float) -> None:
    found = attempts(ShapeGrid(**settings))
    assert {x for x, _, _ in found} == {style}
    assert sum(right for _, right, _ in found) / len(found) == pytest.approx(share, abs=0.03)


def test_check_counts_row_by_row() -> None:
    world = ShapeGrid(careful=1.0)
    for number in range(50):
        shown = world.demonstration(number)
        for line in shown.response.split("\n")[:2]:
            words = line.split()
            step = 2 if words[1] == "twice" else 1
            kind, counts = " ".join(words[step : step + 2]), words[step + 2 : -2]
            cells = shown.prompt.columns["cells"]
            rows = [cells[0:3], cells[3:6], cells[6:9]]
            assert counts == [str(step * row.count(kind)) for row in rows]
            assert words[-1] == str(step * cells.count(kind))


@pytest.mark.usefixtures("undrawn")
def test_totals_stay_where_there_are_numbers() -> None:
    """A wrong glance may make a difference negative; the demonstration then says 0."""
    world = ShapeGrid(operations=("minus",), careful=0.0, glance_error=1.0)
    totals = []
    for number in range(400):
        first, second, total, _ = world.demonstration(number).response.split("\n")
        left, right, said = (int(x.split(" = ")[1]) for x in (first, second, total))
        assert said == max(0, left - right)
        totals.append(left - right)
    assert min(totals) < 0


def test_look_lists_everything_in_any_order() -> None:
    world = ShapeGrid()
    in_order = 0
    for number in range(100):
        shown = world.demonstration(number, "look")
        assert shown.prompt.answer is None
        assert shown.prompt.messages[0]["content"] == "<image>list ?"
        assert shown.prompt.images == world.prompt("train", number).images
        pairs = [line.split(" = ") for line in shown.response.split("\n")]
        there = Counter(x for x in shown.prompt.columns["cells"] if x)
        assert {kind: int(count) for kind, count in pairs} == there
        in_order += [kind for kind, _ in pairs] == sorted(there)
    assert in_order < 30


def test_look_at_an_empty_picture() -> None:
    assert listing([None, None], random.Random(0)) == "none"
