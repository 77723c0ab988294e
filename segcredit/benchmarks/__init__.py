"""The benchmarks of the SAPO paper: read questions, grade responses, fill the paper's tables."""

from segcredit.benchmarks.benchmark import (
    BENCHMARKS,
    Benchmark,
    Grade,
    Score,
    ask,
    make_benchmark,
    score,
)
from segcredit.benchmarks.readers import BenchmarkData, BenchmarkRow, Layout, find_data

__all__ = [
    "BENCHMARKS",
    "Benchmark",
    "BenchmarkData",
    "BenchmarkRow",
    "Grade",
    "Layout",
    "Score",
    "ask",
    "find_data",
    "make_benchmark",
    "score",
]
