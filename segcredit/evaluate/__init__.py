"""Accuracy on held-out prompts: greedy, averaged over samples (avg@k), best of k (pass@k)."""

from segcredit.evaluate.measure import (
    Evaluation,
    bootstrap_interval,
    evaluate,
    mean_interval,
    pass_at_k,
)

__all__ = ["Evaluation", "bootstrap_interval", "evaluate", "mean_interval", "pass_at_k"]
