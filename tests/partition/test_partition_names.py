"""Partitions by name: what a recipe or a command line can write."""

import re
from typing import Any

import pytest
from each import each

from segcredit import partition
from segcredit.algorithms import ALGORITHMS, make_algorithm, sapo
from segcredit.partition import (
    PARTITIONS,
    FixedLength,
    Newline,
    Partition,
    ProbabilityCutpoints,
    TopEntropy,
    ValueJumps,
    partition_class,
    partition_of,
    spec_of,
)
from segcredit.report.data import shown_partitions

NAMES = (
    "The partitions are: entropy, probability, accumulate, newline, step, fixed, token, response, "
    "peaks, smooth, value."
)


def test_every_partition_has_a_name() -> None:
    kinds = {
        x for x in vars(partition).values() if isinstance(x, type) and issubclass(x, Partition)
    }
    assert set(PARTITIONS.values()) == kinds - {Partition}


def test_the_report_shows_them_all() -> None:
    """All but the one that needs the critic's values, which a run need not record."""
    assert {type(x) for x in shown_partitions()} == set(PARTITIONS.values()) - {ValueJumps}


def test_every_partition_describes_itself() -> None:
    for name, kind in PARTITIONS.items():
        example = kind(**kind.examples[0])
        assert kind.description().startswith(("Cut ", "The whole response")), name
        assert not kind.description().endswith("."), name
        assert example.label().startswith(kind.description())
        assert partition_of(spec_of(example)) == example


@each(
    ("spec", "expected"),
    [
        ("newline", Newline()),
        ("entropy", TopEntropy()),
        ({"name": "entropy", "fraction": 0.1}, TopEntropy(0.1)),
        ({"name": "probability", "threshold": 0.5, "every": 2}, ProbabilityCutpoints(0.5, 2)),
        ({"name": "fixed", "size": 8}, FixedLength(8)),
        (FixedLength(8), FixedLength(8)),
    ],
)
def test_a_name_or_a_name_with_settings(spec: Any, expected: Partition) -> None:
    assert partition_of(spec) == expected
    assert make_algorithm("sapo", partition=spec) == sapo(partition=expected)


def test_no_partition_is_the_methods_own() -> None:
    assert make_algorithm("sapo", partition=None) == sapo()


@pytest.mark.parametrize("method", ["sapo", "sapo_token_ratio", "vineppo", "dvo"])
def test_every_method_that_takes_a_partition_takes_a_name(method: str) -> None:
    expected = ALGORITHMS[method](partition=FixedLength(4))
    assert make_algorithm(method, partition={"name": "fixed", "size": 4}) == expected


def test_settings_are_numbers_alone() -> None:
    assert list(partition_class("entropy").setting_fields()) == ["fraction"], (
        "a rounding rule is no setting of a file"
    )
    assert partition_class("newline").setting_fields() == {}


@each(
    ("spec", "message"),
    [
        ("newlin", f"unknown partition 'newlin'. Did you mean 'newline'? {NAMES}"),
        ("Entropy", "Did you mean 'entropy'?"),
        ("?", f"unknown partition '?'. {NAMES}"),
        (
            3,
            "partition must be a name, or settings with a name, as in "
            f"{{name: entropy, fraction: 0.1}}; got 3. {NAMES}",
        ),
        ({"fraction": 0.1}, "got {'fraction': 0.1}."),
        (
            {"name": "entropy", "fractoin": 0.1},
            "partition entropy has no setting 'fractoin'. Did you mean 'fraction'? "
            "Its settings are: fraction.",
        ),
        ({"name": "entropy", "k": 30}, "no setting 'k'. Its settings are: fraction."),
        ({"name": "newline", "size": 3}, "newline has no setting 'size'. It has no settings."),
        ("fixed", "partition fixed needs the setting size, as in {name: fixed, size: 16}."),
        ({"name": "fixed", "size": "a"}, "partition fixed: size must be a number; got 'a'."),
        ({"name": "fixed", "size": True}, "partition fixed: size must be a number; got True."),
        ({"name": "fixed", "size": 1.5}, "size must be a whole number of tokens"),
        ({"name": "entropy", "fraction": 30}, "For top-30% pass 0.30."),
    ],
)
@pytest.mark.usefixtures("as_users_run_it")
def test_mistakes(spec: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        partition_of(spec)
