"""GRPO: credit relative to the other responses to a prompt, token ratios; named presets."""

from segcredit.algorithms.credit import GroupZScore
from segcredit.algorithms.objective import K3, Clipped, LossKL, ReduceBy, Whiten, reduction
from segcredit.algorithms.policy_gradient import PolicyGradient
from segcredit.algorithms.ratio import TokenRatio
from segcredit.core.group import Std
from segcredit.core.losses import k3


def grpo(
    std: Std = "sample",
    eps: float = 1e-6,
    clip: tuple[float, float] = (0.2, 0.2),
    kl: float = 0.01,
    reduce: ReduceBy = "response",
    dual_clip: float | None = None,
    kl_clamp: float | None = None,
    kl_reduce: ReduceBy | None = None,
    limit: float | None = None,
    whiten: bool = False,
) -> PolicyGradient:
    """Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300), configurable.

    KL: SAPO, Table 7 (k3 loss, .01), with 8 samples per prompt. Deviation and ε as in verl;
    ``std="none"`` is Dr. GRPO's centering. The presets below are named after their source.

    Args:
        reduce: "response" (mean over responses of their token means) or "token" (mean over all
            tokens of the mini-batch).
        kl_clamp: upper bound of each token's k3.
        kl_reduce: how the KL is averaged; None: as the policy loss. "sum": sum over each response.
        limit: clamp of the log-ratios to π_old and to π_ref.
        whiten: whiten the advantages of each mini-batch over its tokens.
    """
    # without a clamp use plain k3, so that the recorded config of an unclamped run does not change
    estimator = k3 if limit is None and kl_clamp is None else K3(kl_clamp, limit)
    return PolicyGradient(
        credit=GroupZScore(std=std, eps=eps),
        ratio=TokenRatio(limit=limit),
        surrogate=Clipped(*clip, dual=dual_clip),
        reduce=reduction(reduce),
        adjust_minibatch=(Whiten(),) if whiten else (),
        terms=(LossKL(kl, estimator, reduction(kl_reduce or reduce)),) if kl else (),
    )


def grpo_verl(clip: tuple[float, float] = (0.2, 0.2), kl: float = 0.01) -> PolicyGradient:
    """GRPO as verl runs it: Table 1's baseline (the authors' code is verl 0.4.1).

    Token mean, dual clip 3, log-ratios clamped at ±20, k3 clamped at 10, sample deviation + 1e-6.
    """
    return grpo(clip=clip, kl=kl, reduce="token", dual_clip=3.0, kl_clamp=10.0, limit=20.0)


def grpo_deepseekmath(clip: tuple[float, float] = (0.2, 0.2), kl: float = 0.04) -> PolicyGradient:
    """GRPO as its paper states it (arXiv 2402.03300, Eq. 3-4): response mean, no dual clip.

    KL: k3, .04, unclamped. The paper gives no ε; .2 is PPO's usual one.
    """
    return grpo(clip=clip, kl=kl, reduce="response")


def grpo_spo(clip: tuple[float, float] = (0.2, 0.2), kl: float = 1e-4) -> PolicyGradient:
    """GRPO as SPO's repository runs it (AIFrameResearch/SPO): Figure 4's baseline.

    Population deviation + 1e-8, then whitened per mini-batch; token mean; no dual clip; log-ratios
    clamped at ±10; k3 summed over each response, its estimate unbounded.
    """
    return grpo(
        "population", 1e-8, clip, kl, reduce="token", kl_reduce="sum", limit=10.0, whiten=True
    )
