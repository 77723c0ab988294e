"""What the viewer says of the library must be true of it."""

import inspect
import json

from each import each

from segcredit.algorithms import sapo
from segcredit.partition import (
    PARTITIONS,
    FixedLength,
    ProbabilityAccumulate,
    ProbabilityCutpoints,
    TopEntropy,
)
from segcredit.report.responses import EXAMPLE, STRATEGIES, Row, Settings, filled_lines, parse_row
from segcredit.report.segments import cut_row, partition_settings, partitions


def example() -> list[Row]:
    with open(EXAMPLE, "rb") as lines:
        return [parse_row(line) for _, line in filled_lines(EXAMPLE, lines)]


def test_every_strategy_has_a_partition():
    assert list(STRATEGIES) == list(PARTITIONS)


def test_the_defaults_are_the_librarys():
    default, paper = Settings(), inspect.signature(sapo).parameters
    made = partitions(default)
    assert made["entropy"] == TopEntropy()
    assert made["probability"] == ProbabilityCutpoints()
    assert made["accumulate"] == ProbabilityAccumulate()
    assert made["fixed"] == FixedLength(default.size)
    assert default.gamma == paper["gamma"].default
    assert default.lam == paper["lam"].default
    assert default.value_at.value == sapo().credit.value_at


def test_settings_are_shown_without_functions():
    assert partition_settings(TopEntropy(0.1)) == {"fraction": 0.1}


@each("strategy", STRATEGIES)
def test_segments_join_to_the_response(strategy):
    settings = Settings()
    for row in example():
        cut_ = cut_row(row, strategy, partitions(settings)[strategy], settings)
        assert "".join(segment.text for segment in cut_.segments) == "".join(row.pieces)
        assert [segment.end + 1 for segment in cut_.segments[:-1]] == [
            segment.start for segment in cut_.segments[1:]
        ]


def test_the_example_tells_its_story():
    right, wrong, steps = example()
    assert right.prompt == wrong.prompt
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert right.value[-1] > 0.9 > right.value[0] > wrong.value[-1]
    settings = Settings()
    in_steps = cut_row(steps, "step", partitions(settings)["step"], settings)
    assert [segment.text[:6] for segment in in_steps.segments] == ["Step 1", "Step 2", "Step 3"]
    for row in (right, wrong, steps):
        assert row.id is not None
        assert row.id.startswith("made-up-")  # whoever finds it in a file knows
        likely = dict(zip(row.entropy, row.prob, strict=True))
        assert likely[max(row.entropy)] < 0.5 < likely[min(row.entropy)]


def test_masks_of_ones_and_zeros_will_do():
    row = parse_row(json.dumps({"tokens": ["a", "b"], "mask": [1, 0]}).encode())
    assert row.on_mask == [True, False]
