"""Explanations on the report page: a glossary, and what healthy curves look like."""

GLOSSARY = (
    ("segment", "Consecutive tokens of a response that share one advantage. SAPO ends a segment "
     "at the tokens with the highest entropy."),
    ("H", "Entropy of the next-token distribution, in nats. High: the policy hesitates."),
    ("V", "Value: the reward that the critic expects, given the prompt and the text so far."),
    ("Â", "Advantage: how much better the outcome was than expected, by the critic or by the "
     "mean over the prompt's responses. Positive makes the tokens more likely, negative less "
     "likely."),
    ("λ", "GAE parameter. Near 1, Â follows the final reward; near 0, it follows the change of V "
     "to the next segment."),
    ("ratio", "Probability under the current policy divided by that under the policy that sampled "
     "the response. 1: unchanged."),
    ("clip fraction", "Share of tokens whose gradient was removed because the ratio had left the "
     "clip range."),
)  # fmt: skip
"""Term and definition, in the order in which they build on each other."""

HEALTHY = {
    "accuracy": "rises",
    "reward": "rises; with a deviation of 0 there is nothing to learn",
    "entropy": "falls slowly; near 0 the policy no longer explores",
    "no_verdict": "0",
    "kl": "grows slowly",
    "clip_fraction": "below a few percent",
    "ratio": "near 1",
    "truncated": "near 0",
    "explained_variance": "above 0; a perfect critic has 1",
}
"""Metric → the column "healthy" of docs/metrics.md; other metrics have no usual range."""
NO_RANGE = "no universal range; depends on task and model"
"""Shown beside a curve whose metric has no entry."""
