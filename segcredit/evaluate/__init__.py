"""How good is a policy on held-out prompts: greedy, averaged over samples, best of k."""

from segcredit.evaluate.measure import (
    Evaluation,
    bootstrap_interval,
    evaluate,
    mean_interval,
    pass_at_k,
)

__all__ = ["Evaluation", "bootstrap_interval", "evaluate", "mean_interval", "pass_at_k"]
