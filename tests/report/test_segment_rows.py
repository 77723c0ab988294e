"""Rows of ``segcredit segment``: how text is split, and partitions as strategies."""

import inspect
import json

from each import each
from hypothesis import given
from hypothesis import strategies as st

from segcredit.algorithms import sapo
from segcredit.commands.segment import segment
from segcredit.partition import (
    PARTITIONS,
    FixedLength,
    ProbabilityAccumulate,
    ProbabilityCutpoints,
    TopEntropy,
)
from segcredit.report.responses import (
    EXAMPLE,
    CreditSettings,
    Row,
    filled_lines,
    parse_row,
    split_text,
)
from segcredit.report.segments import cut_row, load_partitions


def test_words_keep_the_blanks_before_them_and_line_ends_stand_alone():
    assert split_text("So  x = 2.\n\n Then\r\ny ") == [
        *["So", "  x", " =", " 2.", "\n", "\n", " Then", "\r\n", "y", " "]
    ]


@given(st.text(st.characters() | st.sampled_from(" \t\r\n\x0b\x1c\u2028\u3000ab")))
def test_pieces_join_to_the_text(text):
    pieces = split_text(text)
    assert "".join(pieces) == text
    assert all(pieces)
    assert all("\n" not in piece[:-1] for piece in pieces)


def example() -> list[Row]:
    with open(EXAMPLE, "rb") as lines:
        return [parse_row(line) for _, line in filled_lines(EXAMPLE, lines)]


def test_the_help_page_names_the_partitions_of_each_option_and_their_default():
    """The help page does not import torch, so it cannot read the registry."""
    options = inspect.get_annotations(segment)
    made = load_partitions([], {})
    settings = {key for x in made.values() for key in x.settings()}
    for name in settings:
        option = options[name].__metadata__[0]
        named = option.help.partition(":")[0].split(", ")
        known = {x: made[x].settings()[name] for x in made if name in made[x].settings()}
        assert named == list(known), name
        assert {option.show_default} == {str(x) for x in known.values()}, name


def test_options_are_settings_of_the_partitions_that_have_them():
    made = load_partitions(["{name: fixed, size: 3}"], {"size": 8, "fraction": 0.5})
    assert made["fixed"] == FixedLength(8)
    assert made["{name: fixed, size: 3}"] == FixedLength(3)
    assert made["entropy"] == TopEntropy(0.5)
    assert made["probability"] == ProbabilityCutpoints()


def test_the_defaults_are_the_librarys():
    default, paper = CreditSettings(), inspect.signature(sapo).parameters
    made = load_partitions([], {})
    assert made["entropy"] == TopEntropy()
    assert made["probability"] == ProbabilityCutpoints()
    assert made["accumulate"] == ProbabilityAccumulate()
    assert made["fixed"] == FixedLength(16)
    assert default.gamma == paper["gamma"].default
    assert default.lam == paper["lam"].default
    assert default.value_at.value == sapo().credit.value_at


def test_settings_are_shown_without_functions():
    assert TopEntropy(0.1).settings() == {"fraction": 0.1}


@each("strategy", PARTITIONS)
def test_segments_join_to_the_response(strategy):
    partition = load_partitions([], {})[strategy]
    for row in example():
        cut_ = cut_row(row, strategy, partition, CreditSettings())
        assert "".join(segment.text for segment in cut_.segments) == "".join(row.pieces)
        assert [segment.end + 1 for segment in cut_.segments[:-1]] == [
            segment.start for segment in cut_.segments[1:]
        ]


def test_the_example_tells_its_story():
    right, wrong, steps = example()
    assert right.prompt == wrong.prompt
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert right.value[-1] > 0.9 > right.value[0] > wrong.value[-1]
    in_steps = cut_row(steps, "step", load_partitions([], {})["step"], CreditSettings())
    assert [segment.text[:6] for segment in in_steps.segments] == ["Step 1", "Step 2", "Step 3"]
    for row in (right, wrong, steps):
        assert row.id is not None
        assert row.id.startswith("made-up-")  # recognizable in any file
        likely = dict(zip(row.entropy, row.prob, strict=True))
        assert likely[max(row.entropy)] < 0.5 < likely[min(row.entropy)]


def test_masks_of_ones_and_zeros_will_do():
    row = parse_row(json.dumps({"tokens": ["a", "b"], "mask": [1, 0]}).encode())
    assert row.on_mask == [True, False]
