"""Settings of the methods, for docs/settings.md: what each means and which values it takes."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from segcredit.algorithms import ALGORITHMS


class Meaning(NamedTuple):
    """Description of a setting, and its limits such as ``> 0``."""

    text: str
    limits: tuple[str, ...] = ()


UNIT = ("≥ 0", "≤ 1")
SHARE = ("> 0", "≤ 1")
MEANINGS = {
    "fraction": Meaning(
        "Share of a response's tokens after which SAPO cuts it; high_entropy: share of the batch's "
        "tokens that keep their gradient; vppo: share of each response's tokens that keep it.",
        SHARE,
    ),
    "lam": Meaning("λ of GAE, per segment or per token: the reach of credit.", UNIT),
    "lam_critic": Meaning("λ of the critic's targets. None: lam.", UNIT),
    "gamma": Meaning("Discount γ per segment or per token.", UNIT),
    "clip": Meaning(
        "[low, high]: the ratio is clipped to 1 − low … 1 + high; gmpo: each token's to "
        "e^−low … e^high."
    ),
    "dual_clip": Meaning(
        "Bound of the ratio for negative advantages (dual-clip PPO). None: no bound.", ("> 1",)
    ),
    "kl": Meaning("Coefficient of the KL penalty to the reference model. 0: none.", ("≥ 0",)),
    "partition": Meaning(
        "Segments instead of the method's own: a name, or {name: …} with settings (partitions.md). "
        "None: the method's own."
    ),
    "value_at": Meaning(
        "Where V is read. start: before the segment's first token, as in the paper. end: before "
        "its last token, as in the authors' code."
    ),
    "value_everywhere": Meaning("Whether the critic is trained at every token."),
    "whiten": Meaning(
        "Whether advantages are whitened: sapo over the batch, grpo over each mini-batch."
    ),
    "clamp": Meaning("Clamp advantages to ± this value. None: no clamp."),
    "token_mean": Meaning(
        "Whether the loss is the mean over all tokens instead of over each response's own."
    ),
    "alpha": Meaning("α of λ = 1 − 1/(α · length).", ("> 0",)),
    "positive_nll": Meaning("Coefficient of the imitation of correct responses. 0: none."),
    "threshold": Meaning(
        "vapo, restem, dpo: minimum reward of a correct response, if the reward does not report "
        "correctness. sae, spo_chain, spo_tree: probability below which a token counts as "
        "unlikely, which is where sae and spo_chain cut."
    ),
    "std": Meaning("Deviation that a group's rewards are divided by. none: only centered."),
    "eps": Meaning("ε, added to that deviation.", ("≥ 0",)),
    "reduce": Meaning(
        "Average of the loss. response: mean over responses of their token means. token: mean over "
        "all tokens of the mini-batch. sum: sum over each response."
    ),
    "kl_reduce": Meaning("Average of the KL. None: as reduce."),
    "kl_clamp": Meaning("Upper bound of a token's KL estimate (k3). None: no bound.", ("> 0",)),
    "limit": Meaning("Clamp log-ratios to ± this value. None: no clamp.", ("> 0",)),
    "max_tokens": Meaning(
        "Constant length by which summed losses are divided; in a recipe rollout.max_tokens, "
        "unless set."
    ),
    "weight": Meaning("[low, high]: bounds of the importance weight π_θ / π_old."),
    "positive": Meaning("τ of the gate for positive advantages.", ("> 0",)),
    "negative": Meaning("τ of the gate for other advantages.", ("> 0",)),
    "floor": Meaning("Weight of the response that depends least on its image. 1: none.", UNIT),
    "patch": Meaning("Side of the patches that are hidden, in pixels.", ("≥ 1",)),
    "probability": Meaning("Probability with which a patch is hidden.", SHARE),
    "tokenwise": Meaning("Whether the gradient goes through each token's own log π (GSPO-token)."),
    "samples": Meaning("Continuations per prefix, whose mean reward is its value.", ("≥ 1",)),
    "most": Meaning("Maximum number of steps with a value. None: all.", ("≥ 1",)),
    "truncated_reward": Meaning("Reward of a truncated response. None: its own."),
    "every": Meaning("Cut before every n-th unlikely token.", ("≥ 1",)),
    "normalize": Meaning("Whether to divide by the deviation of the siblings."),
    "per_prompt": Meaning("Maximum number of kept responses per prompt.", ("≥ 1",)),
    "temperature": Meaning(
        "Temperature of log π in the loss. None: the sampling temperature.", ("> 0",)
    ),
    "beta": Meaning("β: scale of the log-ratio to the reference model.", ("> 0",)),
    "pairs_per_prompt": Meaning("Maximum number of pairs per prompt.", ("≥ 1",)),
    "penalty": Meaning("λ of DPO+'s penalty on the chosen response.", ("≥ 0",)),
    "weight_cap": Meaning("Upper bound of a step's weight. None: no weight.", ("> 0",)),
}
"""Meaning of every setting of a built-in method, in the order of the page."""


def settings_of_methods() -> dict[str, dict[str, inspect.Parameter]]:
    """Return the parameters of the built-in methods: setting → method → parameter."""
    found: dict[str, dict[str, inspect.Parameter]] = {}
    for method in ALGORITHMS:
        make: Callable[..., Any] = ALGORITHMS[method]
        for name, parameter in inspect.signature(make).parameters.items():
            found.setdefault(name, {})[method] = parameter
    return found
