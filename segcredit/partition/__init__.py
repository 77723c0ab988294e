"""Ways to cut a response into segments: functions on tensors, and the same as frozen parts."""

from segcredit.partition.base import Partition
from segcredit.partition.by_name import PARTITIONS, make_partition, partition_of, settings_of
from segcredit.partition.entropy import (
    TopEntropy,
    exact_ceil,
    float_ceil,
    float_nudge,
    top_entropy,
)
from segcredit.partition.informed import (
    EntropyPeaks,
    SmoothEntropy,
    ValueJumps,
    entropy_peaks,
    smooth_entropy,
    value_jumps,
)
from segcredit.partition.probability import (
    ProbabilityAccumulate,
    ProbabilityCutpoints,
    probability_accumulate,
    probability_cutpoints,
)
from segcredit.partition.text import Newline, StepMarkers, newline, step_markers
from segcredit.partition.units import (
    FixedLength,
    Response,
    Token,
    fixed_length,
    response,
    tokens,
)

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
    "partition_of",
    "probability_accumulate",
    "probability_cutpoints",
    "response",
    "settings_of",
    "smooth_entropy",
    "step_markers",
    "tokens",
    "top_entropy",
    "value_jumps",
]
