"""Partitions of a response into segments: functions on tensors, and frozen objects by name.

``PARTITIONS`` is the only list of partitions: recipes, ``segcredit segment``, the report page and
verl read it. A partition of your own is named by its file: ``my_partitions.py:EntropyAbove``.
"""

import sys
from collections.abc import Mapping
from dataclasses import MISSING
from typing import Any

from segcredit.partition.base import (
    FixedLength,
    Partition,
    Response,
    Token,
    fixed_length,
    response,
    tokens,
)
from segcredit.partition.entropy import (
    EntropyPeaks,
    SmoothEntropy,
    TopEntropy,
    ValueJumps,
    entropy_peaks,
    exact_ceil,
    float_ceil,
    float_nudge,
    smooth_entropy,
    top_entropy,
    value_jumps,
)
from segcredit.partition.probability import (
    ProbabilityAccumulate,
    ProbabilityCutpoints,
    probability_accumulate,
    probability_cutpoints,
)
from segcredit.partition.text import Newline, StepMarkers, newline, step_markers
from segcredit.registry import USER_MODULES, Registry, require_settings

PARTITIONS: Registry[type[Partition]] = Registry(
    "partition",
    {
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
    },
)


def make_partition(name: str, **settings: Any) -> Partition:
    """Make the partition of that name, e.g. ``make_partition("entropy", fraction=0.1)``."""
    kind = partition_class(name)
    known = kind.setting_fields()
    require_settings(f"partition {name}", settings, known)
    for setting, value in settings.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if known[setting].type in (int, float, "int", "float") and not number:
            raise ValueError(f"partition {name}: {setting} must be a number; got {value!r}.")
    for setting, field in known.items():
        if field.default is field.default_factory is MISSING and setting not in settings:
            example = kind.examples[0].get(setting, "…")
            raise ValueError(
                f"partition {name} needs the setting {setting}, "
                f"as in {{name: {name}, {setting}: {example}}}."
            )
    return kind(**settings)


def partition_class(name: str) -> type[Partition]:
    """Look up a partition by its name, or load ``file.py:Name``."""
    kind: object = PARTITIONS[name]
    if not (isinstance(kind, type) and issubclass(kind, Partition)):
        raise ValueError(
            f"partition {name!r} must be a class derived from segcredit.partition.Partition; "
            f"got {kind!r}. docs/extending.md shows one."
        )
    return kind


def partition_of(spec: object) -> Partition:
    """Make a partition from a name, or from a mapping with a name and settings, as in recipes."""
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


def spec_of(partition: Partition) -> dict[str, Any]:
    """Return the name and settings that :func:`partition_of` makes this partition from."""
    kind = type(partition)
    names = [name for name, known in PARTITIONS.items() if known is kind]
    module = sys.modules[kind.__module__]
    place = kind.__module__
    if place.startswith(USER_MODULES):
        place = str(module.__file__)
    name = names[0] if names else f"{place}:{kind.__qualname__}"
    return {"name": name, **partition.settings()}


__all__ = [
    "PARTITIONS",
    "EntropyPeaks",
    "FixedLength",
    "Newline",
    "Partition",
    "ProbabilityAccumulate",
    "ProbabilityCutpoints",
    "Response",
    "SmoothEntropy",
    "StepMarkers",
    "Token",
    "TopEntropy",
    "ValueJumps",
    "entropy_peaks",
    "exact_ceil",
    "fixed_length",
    "float_ceil",
    "float_nudge",
    "make_partition",
    "newline",
    "partition_class",
    "partition_of",
    "probability_accumulate",
    "probability_cutpoints",
    "response",
    "smooth_entropy",
    "spec_of",
    "step_markers",
    "tokens",
    "top_entropy",
    "value_jumps",
]
