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

IN_THE_PICTURE = (
    ("segment", "segment", "Tokens between two marks. They share one Â."),
    ("V", "value", "Value: the reward that the critic expects (text color; line of the chart)."),
    ("Â", "advantage", "Advantage: better (blue) or worse (orange) than expected."),
    ("H", "entropy", "Entropy: how uncertain the policy was (bars of the chart)."),
)
"""Term, the recorded column without which it has no meaning, and where to see it."""

HEALTHY = {
    "accuracy": "rises",
    "reward": "rises",
    "reward_std": "above 0; with 0 there is nothing to learn",
    "entropy": "falls slowly; near 0 the policy no longer explores",
    "no_verdict": "0",
    "groups/zero_std": "below a half for GRPO, GSPO and RLOO, which learn only from differences "
    "within a prompt",
    "refill/batches": "low, because every further batch adds sampling time",
    "refill/groups_found": "1; below 1, the limit `rollout.refills` was reached",
    "truncated": "near 0",
    "kl": "grows slowly",
    "ratio": "near 1",
    "clip_fraction": "below a few percent",
    "agreement/ratio_error": "0 except for rounding (1e-6 in float32)",
    "advantage_mean": "near 0",
    "value_mean": "near `return_mean`",
    "return_mean": "near `value_mean`",
    "explained_variance": "above 0; a perfect critic has 1",
    "policy/refused": "0",
    "critic/refused": "0",
    "continuations/left_out": "0, or as planned",
    "continuations/value": "near `reward`",
    "selected/items": "above 0",
    "nll": "falls",
    "value_regression": "falls",
    "step_weight": "near 1",
}
"""Metric → its healthy range; docs/metrics.md is written from it. Others have no usual range."""
NO_RANGE = "no universal range"
"""Shown beside a curve whose metric has no entry."""
