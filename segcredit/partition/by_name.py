"""Partitions by name, for recipes and the command line."""

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from difflib import get_close_matches
from typing import Any

from segcredit.partition.base import Partition
from segcredit.partition.entropy import TopEntropy
from segcredit.partition.informed import EntropyPeaks, SmoothEntropy, ValueJumps
from segcredit.partition.probability import ProbabilityAccumulate, ProbabilityCutpoints
from segcredit.partition.text import Newline, StepMarkers
from segcredit.partition.units import FixedLength, Response, Token

PARTITIONS: dict[str, type[Partition]] = {
    "entropy": TopEntropy,
    "probability": ProbabilityCutpoints,
    "accumulate": ProbabilityAccumulate,
    "newline": Newline,
    "step": StepMarkers,
    "fixed": FixedLength,
    "token": Token,
    "response": Response,
    "peaks": EntropyPeaks,
    "smooth": SmoothEntropy,
    "value": ValueJumps,
}
EXAMPLES = {"size": 16}
"""Of settings without a default, for the message."""


def make_partition(name: str, **settings: object) -> Partition:
    """The partition of that name, e.g. ``make_partition("entropy", fraction=0.1)``."""
    if name not in PARTITIONS:
        raise ValueError(
            f"unknown partition {name!r}.{_hint(name.lower(), PARTITIONS)} "
            f"The partitions are: {', '.join(PARTITIONS)}."
        )
    known = {field.name: field for field in _settable(PARTITIONS[name])}
    for setting, value in settings.items():
        if setting not in known:
            its = f"Its settings are: {', '.join(known)}." if known else "It has no settings."
            raise ValueError(
                f"partition {name} has no setting {setting!r}.{_hint(setting, known)} {its}"
            )
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"partition {name}: {setting} must be a number; got {value!r}.")
    for setting, field in known.items():
        if field.default is MISSING and setting not in settings:
            raise ValueError(
                f"partition {name} needs its {setting}, "
                f"as in {{name: {name}, {setting}: {EXAMPLES[setting]}}}."
            )
    return PARTITIONS[name](**settings)


def partition_of(spec: object) -> Partition:
    """From a partition, a name, or a mapping with a name and settings, as recipes hold it."""
    if isinstance(spec, Partition):
        return spec
    if isinstance(spec, str):
        return make_partition(spec)
    if isinstance(spec, Mapping) and isinstance(spec.get("name"), str):
        return make_partition(**spec)
    raise ValueError(
        f"partition must be a name, or settings with a name, as in {{name: entropy, fraction: "
        f"0.1}}; got {spec!r}. The partitions are: {', '.join(PARTITIONS)}."
    )


def settings_of(name: str) -> list[str]:
    """The names of a partition's settings."""
    return [field.name for field in _settable(PARTITIONS[name])]


def _settable(kind: type[Partition]) -> list[Field[Any]]:
    """Numbers; a function, such as a rounding rule, is set in Python alone."""
    return [field for field in fields(kind) if not callable(field.default)]


def _hint(name: str, known: Mapping[str, object]) -> str:
    near = get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
