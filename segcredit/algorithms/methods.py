"""The table of methods as code: each is a short composition of parts.

The parts are in credit.py (advantages) and objective.py (ratios and everything else);
policy_gradient.py combines them. RestEM, DPO and DVO are not policy-gradient methods and
have their own files. ``ALGORITHMS`` names all methods for recipes and the command line.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from segcredit.algorithms.credit import (
    GAE,
    CreditPart,
    GroupZScore,
    ImageDependence,
    LeaveOneOut,
    LengthAdaptiveGAE,
    ReturnToGo,
    SegmentBootstrap,
    TopEntropyOnly,
    TrackedBaseline,
    TreeDifference,
    ValueDifference,
)
from segcredit.algorithms.dpo import dpo, dpo_positive
from segcredit.algorithms.dvo import dvo
from segcredit.algorithms.objective import (
    K3,
    Adjustment,
    BoundaryMSE,
    Clamp,
    Clipped,
    ClippedInsideMean,
    ClippedWeight,
    ConstantMean,
    GeometricMean,
    LogProb,
    LossKL,
    LowProbability,
    MicroBatchTokenMean,
    PositiveNLL,
    RawRatio,
    ReduceBy,
    ResponseMean,
    RewardKL,
    SoftGate,
    TokenMean,
    TokenRatio,
    TokenwiseGeometricMean,
    Unclipped,
    Whiten,
    reduction,
)
from segcredit.algorithms.policy_gradient import PolicyGradient
from segcredit.algorithms.restem import restem
from segcredit.columns import ImageKL
from segcredit.core.group import Std
from segcredit.core.losses import k2, k3
from segcredit.core.segments import ValueAt
from segcredit.partition import (
    Newline,
    Partition,
    ProbabilityCutpoints,
    Response,
    Token,
    TopEntropy,
    float_ceil,
    float_nudge,
    partition_of,
)
from segcredit.registry import Registry
from segcredit.types import Algorithm

FRACTION = 0.30
"""Share of the tokens after which SAPO cuts: k = 30 % (§5.1)."""


def _units(fraction: float, partition: Partition | None) -> Partition:
    if partition is None:
        return TopEntropy(fraction)
    if fraction != FRACTION:
        raise ValueError(
            f"pass fraction or partition, not both; got fraction={fraction} and {partition!r}."
        )
    return partition


def sapo(
    fraction: float = FRACTION,
    lam: float = 0.99,
    gamma: float = 1.0,
    clip: tuple[float, float] = (0.2, 0.2),
    kl: float = 0.001,
    partition: Partition | None = None,
    value_at: ValueAt = "start",
    whiten: bool = False,
    clamp: float | None = None,
    dual_clip: float | None = None,
    token_mean: bool = False,
    value_everywhere: bool = False,
) -> PolicyGradient:
    """Segment-Aligned Policy Optimization (arXiv 2605.01327, Algorithm 1), as the paper states it.

    Defaults: §5.1 (k = 30) and Table 7 (λ, γ, KL). The paper's ε is symmetric and never given;
    .2 is PPO's usual one. ``partition`` replaces the top-entropy segments (Table 3).

    ``value_at``, ``whiten``, ``clamp``, ``dual_clip`` and ``token_mean`` are settings for the
    differences of the authors' code: where V is read, whitened and clamped advantages, the dual
    clip, and a mean over all tokens instead of each response's own. ``value_everywhere`` is our
    addition: the critic is trained at every token, not only at boundaries.
    """
    segments = _units(fraction, partition)  # §4.2, Eq. 11
    adjust: tuple[Adjustment, ...] = (Whiten(),) if whiten else ()
    return PolicyGradient(
        credit=GAE(over=segments, lam=lam, gamma=gamma, value_at=value_at),  # Eq. 6–7
        ratio=GeometricMean(over=segments),  # Eq. 8
        surrogate=Clipped(*clip, dual=dual_clip),  # Eq. 9
        reduce=TokenMean() if token_mean else ResponseMean(),  # the 1/T of Eq. 9
        critic=BoundaryMSE(everywhere=value_everywhere),  # Eq. 10
        kl=RewardKL(kl) if kl else None,  # Table 7
        adjust=adjust if clamp is None else (*adjust, Clamp(clamp)),
    )


def sapo_token_ratio(
    fraction: float = FRACTION,
    lam: float = 0.99,
    gamma: float = 1.0,
    clip: tuple[float, float] = (0.2, 0.2),
    kl: float = 0.001,
    partition: Partition | None = None,
) -> PolicyGradient:
    """Table 2's "naive-IS": SAPO's credit with PPO's ratio, everything else equal."""
    return PolicyGradient(
        credit=GAE(over=_units(fraction, partition), lam=lam, gamma=gamma),
        ratio=TokenRatio(),
        surrogate=Clipped(*clip),
        reduce=ResponseMean(),
        critic=BoundaryMSE(),
        kl=RewardKL(kl) if kl else None,
    )


def sapo_authors(
    fraction: float = FRACTION, lam: float = 0.99, gamma: float = 1.0, kl: float = 0.001
) -> PolicyGradient:
    """SAPO as the authors' released code computes it (their run_sapo.sh).

    Each mathematical difference from the paper is on its own line; docs/deviations.md lists all
    differences, including those in the reward and the training loop.
    """
    return PolicyGradient(
        credit=GAE(
            over=TopEntropy(fraction, count=float_ceil),  # rounded in floating point
            lam=lam,
            gamma=gamma,
            value_at="end",  # V before the segment's last token
        ),
        ratio=GeometricMean(
            over=TopEntropy(fraction, count=float_nudge),  # rounded another way
            limit=20.0,  # log-ratios clamped per token
        ),
        surrogate=Clipped(0.2, 0.28, dual=3.0),  # asymmetric, dual-clipped
        reduce=MicroBatchTokenMean(),  # not 1/T, and dependent on the micro-batches
        critic=BoundaryMSE(reduce=MicroBatchTokenMean(), half=True, clip=0.5),
        kl=RewardKL(kl) if kl else None,
        adjust=(Whiten(), Clamp(5.0)),  # neither is in the paper
    )


VERL_CRITIC = BoundaryMSE(reduce=TokenMean(), half=True, clip=0.5)
"""verl's value loss: every token, ½, clipped at .5. The SAPO paper's baselines ran on verl."""


def ppo(
    lam: float = 0.95,
    gamma: float = 1.0,
    clip: tuple[float, float] = (0.2, 0.2),
    kl: float = 0.001,
) -> PolicyGradient:
    """Proximal Policy Optimization (arXiv 1707.06347) as the SAPO paper's baseline.

    λ, γ and KL are from SAPO's Table 7. The paper does not report the rest, which follows verl, on
    which the baseline ran: whitened advantages, token mean, dual clip 3, verl's value loss.
    """
    return PolicyGradient(
        credit=GAE(over=Token(), lam=lam, gamma=gamma),  # Eq. 4
        ratio=TokenRatio(),  # Eq. 2
        surrogate=Clipped(*clip, dual=3.0),  # Eq. 3
        reduce=TokenMean(),
        critic=VERL_CRITIC,
        kl=RewardKL(kl) if kl else None,
        adjust=(Whiten(),),
    )


def vc_ppo(
    lam: float = 0.99,
    lam_critic: float = 1.0,
    gamma: float = 1.0,
    clip: tuple[float, float] = (0.2, 0.2),
    kl: float = 0.001,
) -> PolicyGradient:
    """Value-Calibrated PPO (arXiv 2503.01491): decoupled GAE, λ_critic = 1.

    Defaults: SAPO, Table 7 (the original's λ_actor is about .95). VC-PPO also pretrains the critic
    on Monte-Carlo returns under the frozen policy; this is a stage of the run, not part of the
    loss.
    """
    return PolicyGradient(
        credit=GAE(over=Token(), lam=lam, gamma=gamma, lam_critic=lam_critic),
        ratio=TokenRatio(),
        surrogate=Clipped(*clip, dual=3.0),
        reduce=TokenMean(),
        critic=VERL_CRITIC,
        kl=RewardKL(kl) if kl else None,
        adjust=(Whiten(),),
    )


def vapo(
    alpha: float = 0.05,
    gamma: float = 1.0,
    clip: tuple[float, float] = (0.2, 0.28),
    positive_nll: float = 0.1,
    threshold: float = 0.5,
) -> PolicyGradient:
    """VAPO (arXiv 2504.05118): λ_actor = 1 − 1/(α l), λ_critic = 1, ε .2/.28, μ = .1.

    The paper samples 16 responses per prompt and pretrains the critic for 50 steps; both are
    settings of the run. λ is clamped to [0, 1]; the formula is negative below 20 tokens. The NLL
    term covers responses that the reward reports as correct; ``threshold`` is the minimum reward of
    a correct response if the reward does not report correctness.
    """
    return PolicyGradient(
        credit=LengthAdaptiveGAE(over=Token(), alpha=alpha, gamma=gamma, lam_critic=1.0),
        ratio=TokenRatio(),
        surrogate=Clipped(*clip),
        reduce=TokenMean(),
        critic=BoundaryMSE(reduce=TokenMean(), half=True),
        terms=(PositiveNLL(positive_nll, threshold),) if positive_nll else (),
    )


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


def gspo(
    clip: tuple[float, float] = (3e-4, 4e-4), kl: float = 0.0, tokenwise: bool = False
) -> PolicyGradient:
    """Group Sequence Policy Optimization (arXiv 2507.18071): ε 3e-4 / 4e-4.

    A response's mean log-ratio is far smaller than a token's, hence the narrow ε. ``tokenwise``
    is GSPO-token: the same value, the gradient through each token's own log-prob.
    """
    units = Response()
    return PolicyGradient(
        credit=GroupZScore(),
        ratio=TokenwiseGeometricMean(over=units) if tokenwise else GeometricMean(over=units),
        surrogate=Clipped(*clip),
        reduce=ResponseMean(),
        terms=(LossKL(kl),) if kl else (),
    )


def rloo(clip: tuple[float, float] = (0.2, 0.2), kl: float = 0.05) -> PolicyGradient:
    """REINFORCE leave-one-out with the raw sequence ratio clipped, so that batches can be reused.

    As in TRL: β = .05 (k1, summed into the reward), clip .2 on exp Σ x.
    """
    return PolicyGradient(
        credit=LeaveOneOut(),
        ratio=RawRatio(over=Response()),
        surrogate=Clipped(*clip),
        reduce=ResponseMean(),
        kl=RewardKL(kl) if kl else None,
    )


def rloo_reinforce(kl: float = 0.05) -> PolicyGradient:
    """RLOO as published (arXiv 2402.14740): −Â log π(y | x), no ratio, no clip, on-policy."""
    return PolicyGradient(
        credit=LeaveOneOut(),
        ratio=LogProb(),
        surrogate=Unclipped(),
        reduce=ConstantMean(1.0),
        kl=RewardKL(kl) if kl else None,
    )


def rloo_spo(clip: tuple[float, float] = (0.2, 0.2), kl: float = 1e-4) -> PolicyGradient:
    """RLOO as SPO's repository runs it (AIFrameResearch/SPO): Figure 4's baseline.

    ``grpo_spo`` with leave-one-out credit: token ratios, whitening, k3 in the loss.
    """
    return replace(grpo_spo(clip, kl), credit=LeaveOneOut())


def vineppo(
    samples: int = 9,
    clip: tuple[float, float] = (0.2, 0.2),
    kl: float = 1e-4,
    partition: Partition | None = None,
    most: int | None = None,
    truncated_reward: float | None = 0.0,
) -> PolicyGradient:
    """VinePPO (arXiv 2410.01679): K = 9 continuations per step, no critic.

    ``most`` limits the estimates to the prompt and that many steps (its GSM8K runs: 25). A
    truncated response or continuation gets ``truncated_reward``; None keeps its own reward.

    Whitened over each mini-batch; KL 1e-4 · k3, clamped to [0, 10], summed over the response
    (its code). Steps are lines; its own splitters differ by data set (docs/deviations.md).
    """
    return PolicyGradient(
        credit=ValueDifference(partition or Newline(), samples, most, truncated_reward),
        ratio=TokenRatio(),
        surrogate=Clipped(*clip),
        reduce=TokenMean(),
        adjust_minibatch=(Whiten(),),
        terms=(LossKL(kl, K3(limit=10.0), ConstantMean(1.0)),) if kl else (),
    )


def spo_chain(
    threshold: float = 0.9,
    every: int = 5,
    samples: int = 9,
    clip: tuple[float, float] = (0.2, 0.2),
    kl: float = 1e-4,
    truncated_reward: float | None = 0.0,
) -> PolicyGradient:
    """Segment Policy Optimization, chain (arXiv 2505.23564).

    Cut before every 5th token with π_old < .9; 9 continuations per cut; only tokens with π_old < .9
    enter whitening, policy loss and KL. Truncated responses and continuations get reward 0.
    """
    cuts = ProbabilityCutpoints(threshold, every)
    credit = ValueDifference(cuts, samples, truncated_reward=truncated_reward)
    return _spo(credit, threshold, clip, kl)


def spo_tree(
    threshold: float = 0.9,
    normalize: bool = False,
    clip: tuple[float, float] = (0.2, 0.2),
    kl: float = 1e-4,
) -> PolicyGradient:
    """SPO over a tree of continuations, each edge one row of the rollouts.

    V(node) = mean of its children, Â(edge) = V(child) − V(parent); ``normalize`` divides by the
    siblings' deviation (its "grpo"). The update is the chain's. A truncated leaf keeps its reward,
    as in SPO's code. Branching is a setting of the run.
    """
    return _spo(TreeDifference(normalize=normalize), threshold, clip, kl)


def _spo(
    credit: CreditPart, threshold: float, clip: tuple[float, float], kl: float
) -> PolicyGradient:
    """Build the update that SPO's chain and tree share (its ppo_trainer.py)."""
    # SPO's cap of 1e9 on the estimate has no effect: e^10 is 22026
    penalty = LossKL(kl, K3(log_ratio_limit=10.0), ConstantMean(1.0), only_in_loss=True)
    return PolicyGradient(
        credit=credit,
        ratio=TokenRatio(limit=10.0),
        surrogate=Clipped(*clip),
        reduce=TokenMean(),
        only=LowProbability(threshold),
        adjust_minibatch=(Whiten(),),
        terms=(penalty,) if kl else (),
    )


def single_stream_spo(
    clip: tuple[float, float] = (0.2, 0.28), dual_clip: float = 10.0
) -> PolicyGradient:
    """Single-stream Policy Optimization (arXiv 2509.13232): no group, no critic, no KL.

    The baseline is the tracker's v̂ before this step's update (core/tracker.py). ε .2/.28, dual
    clip 10.
    """
    return PolicyGradient(
        credit=TrackedBaseline(),
        ratio=TokenRatio(),
        surrogate=Clipped(*clip, dual=dual_clip),
        reduce=TokenMean(),
    )


def grpo_trl(clip: tuple[float, float] = (0.2, 0.2), kl: float = 0.0) -> PolicyGradient:
    """GRPO with the defaults of TRL 1.16's ``GRPOConfig``: its ``loss_type`` is "dapo".

    Mean over all tokens of the batch, sample deviation + 1e-4, no KL (β = 0), no dual clip.
    """
    return grpo(eps=1e-4, clip=clip, kl=kl, reduce="token")


def dapo(
    clip: tuple[float, float] = (0.2, 0.28), dual_clip: float | None = 10.0, eps: float = 1e-6
) -> PolicyGradient:
    """DAPO (arXiv 2503.14476): token mean, higher upper clip, no KL.

    ε: the paper; dual clip 10, log-ratios within ±20 and the deviation: its recipe on verl. DAPO's
    dynamic sampling and soft over-long penalty are settings of the run.
    """
    return grpo(eps=eps, clip=clip, kl=0.0, reduce="token", dual_clip=dual_clip, limit=20.0)


def dr_grpo(
    max_tokens: int = 3000, clip: tuple[float, float] = (0.2, 0.2), kl: float = 0.0
) -> PolicyGradient:
    """Dr. GRPO (arXiv 2503.20783): rewards only centered, sums divided by a constant length.

    Not dividing by the deviation keeps easy and hard prompts from counting more; not dividing by
    each response's own length keeps long wrong answers from being favored.

    Args:
        max_tokens: The constant; its code uses the response limit, 3000. In a recipe it is
            ``rollout.max_tokens`` unless set. It scales the loss and nothing else.
    """
    mean = ConstantMean(float(max_tokens))
    return PolicyGradient(
        credit=GroupZScore(std="none"),
        ratio=TokenRatio(),
        surrogate=Clipped(*clip),
        reduce=mean,
        terms=(LossKL(kl, reduce=mean),) if kl else (),
    )


def cispo(
    weight: tuple[float, float] = (0.0, 5.0), kl: float = 0.0, eps: float = 1e-6
) -> PolicyGradient:
    """CISPO (MiniMax-M1, arXiv 2506.13585): REINFORCE with clipped, constant importance weights.

    A clipped token keeps its gradient, unlike in PPO.

    Args:
        weight: Lower and upper bound of π_θ / π_old. The paper has no lower bound and does not
            report the upper one; 5 is what ScaleRL recommends and TRL documents.
    """
    return PolicyGradient(
        credit=GroupZScore(eps=eps),
        ratio=TokenRatio(),
        surrogate=ClippedWeight(*weight),
        reduce=TokenMean(),
        terms=(LossKL(kl, reduce=TokenMean()),) if kl else (),
    )


def gmpo(
    clip: tuple[float, float] = (0.4, 0.4), kl: float = 0.0, partition: Partition | None = None
) -> PolicyGradient:
    """Geometric-Mean Policy Optimization (arXiv 2507.20673).

    The loss is the geometric mean of a response's ratios, each clipped to (e^−.4, e^.4) first.
    ``partition`` takes the mean over segments instead of the response, which is our addition.
    """
    return PolicyGradient(
        credit=GroupZScore(),
        ratio=GeometricMean(over=partition or Response()),
        surrogate=ClippedInsideMean(*clip),
        reduce=ResponseMean(),
        terms=(LossKL(kl),) if kl else (),
    )


def soft_adaptive(
    positive: float = 1.0, negative: float = 1.05, kl: float = 0.0, eps: float = 1e-6
) -> PolicyGradient:
    """Soft Adaptive Policy Optimization (Qwen, arXiv 2511.20347); "SAPO" in verl and TRL.

    A sigmoid of the token's ratio replaces the clip; τ 1.0 for Â > 0 and 1.05 else.
    """
    return PolicyGradient(
        credit=GroupZScore(eps=eps),
        ratio=TokenRatio(),
        surrogate=SoftGate(positive, negative),
        reduce=ResponseMean(),
        terms=(LossKL(kl),) if kl else (),
    )


def high_entropy(
    fraction: float = 0.2,
    clip: tuple[float, float] = (0.2, 0.28),
    dual_clip: float | None = 10.0,
    eps: float = 1e-6,
) -> PolicyGradient:
    """The 80/20 rule (arXiv 2506.01939): DAPO with a gradient only on high-entropy tokens.

    The tokens are the 20 % of the rollout batch with the highest entropy under π_old; the loss is
    still averaged over all tokens. TRL selects per micro-batch, by the entropy of the policy being
    trained.
    """
    base = dapo(clip, dual_clip, eps)
    return replace(base, credit=TopEntropyOnly(base.credit, fraction))


def vppo(
    fraction: float = 0.4,
    floor: float = 0.9,
    clip: tuple[float, float] = (0.2, 0.28),
    dual_clip: float | None = 3.0,
    eps: float = 1e-6,
    patch: int = 14,
    probability: float = 0.5,
) -> PolicyGradient:
    """Visually-Perceptive Policy Optimization (arXiv 2510.09285): DAPO, weighted by image use.

    A token's dependence on the image is the change of its probability when random patches of the
    image are black. Each response keeps the gradient of its 40 % most dependent tokens, and
    responses that depend on the image more have larger advantages.

    Defaults are its repository's (huaixuheqing/VPPO-RL at a23c54b). Its entropy penalty of .06 is
    left out. Responses are compared over the rollout batch; in the repository, over a mini-batch.

    Args:
        fraction: Share of each response's tokens that keep their gradient; 1: all.
        floor: Weight of the response that depends least on the image; 1: no weights.
        patch: Side of the patches in pixels.
        probability: Probability with which a patch is black.
    """
    base = dapo(clip, dual_clip, eps)
    column = ImageKL(patch, probability)
    return replace(base, credit=ImageDependence(base.credit, fraction, floor, column))


def reinforce_pp(
    gamma: float = 1.0, clip: tuple[float, float] = (0.2, 0.2), kl: float = 0.01
) -> PolicyGradient:
    """REINFORCE++ (arXiv 2501.03262): PPO without a critic, normalized over the whole batch.

    Each token's advantage is its return, with the KL (k1) in the reward, whitened over the batch.
    KL .01, clip .2, token mean and log-ratios within ±20 are OpenRLHF's, its authors' library.
    """
    return PolicyGradient(
        credit=ReturnToGo(gamma),
        ratio=TokenRatio(limit=20.0),
        surrogate=Clipped(*clip),
        reduce=TokenMean(),
        kl=RewardKL(kl) if kl else None,
        adjust=(Whiten(),),
    )


def reinforce_pp_baseline(
    clip: tuple[float, float] = (0.2, 0.2), kl: float = 1e-5
) -> PolicyGradient:
    """REINFORCE++ with the group's mean as baseline, then normalized over the batch.

    KL as a k2 loss, 1e-5, as in OpenRLHF's train_reinforce_baseline scripts.
    """
    return PolicyGradient(
        credit=GroupZScore(std="none"),
        ratio=TokenRatio(limit=20.0),
        surrogate=Clipped(*clip),
        reduce=TokenMean(),
        adjust=(Whiten(),),
        terms=(LossKL(kl, k2, TokenMean()),) if kl else (),
    )


def sae(
    threshold: float = 0.2,
    lam: float = 0.95,
    lam_critic: float | None = None,
    clip: tuple[float, float] = (0.2, 0.2),
    kl: float = 0.001,
    partition: Partition | None = None,
) -> PolicyGradient:
    """Segmental Advantage Estimation (arXiv 2601.07320): PPO that bootstraps only at segment ends.

    Segments begin at tokens with π_old < ``threshold``; advantages, ratios and the critic stay
    per token. One token per segment is ``ppo``.

    This method is built from the paper's abstract and description, without its code. The threshold
    and λ are guesses, and so is the choice of our PPO's settings for everything else.
    """
    units = partition or ProbabilityCutpoints(threshold, every=1)
    return replace(
        ppo(lam, 1.0, clip, kl),
        credit=SegmentBootstrap(units, lam, lam_critic),
        critic=replace(VERL_CRITIC, everywhere=True),
    )


ALGORITHMS: Registry[Callable[..., Algorithm]] = Registry(
    "method",
    {
        "sapo": sapo,
        "sapo_authors": sapo_authors,
        "sapo_token_ratio": sapo_token_ratio,
        "ppo": ppo,
        "vc_ppo": vc_ppo,
        "vapo": vapo,
        "grpo": grpo,
        "grpo_verl": grpo_verl,
        "grpo_deepseekmath": grpo_deepseekmath,
        "grpo_spo": grpo_spo,
        "grpo_trl": grpo_trl,
        "dapo": dapo,
        "dr_grpo": dr_grpo,
        "cispo": cispo,
        "gmpo": gmpo,
        "soft_adaptive": soft_adaptive,
        "high_entropy": high_entropy,
        "vppo": vppo,
        "reinforce_pp": reinforce_pp,
        "reinforce_pp_baseline": reinforce_pp_baseline,
        "sae": sae,
        "gspo": gspo,
        "rloo": rloo,
        "rloo_reinforce": rloo_reinforce,
        "rloo_spo": rloo_spo,
        "vineppo": vineppo,
        "spo_chain": spo_chain,
        "spo_tree": spo_tree,
        "single_stream_spo": single_stream_spo,
        "restem": restem,
        "dpo": dpo,
        "dpo_positive": dpo_positive,
        "dvo": dvo,
    },
)


def make_algorithm(name: str, **settings: Any) -> Algorithm:
    """Make a method by name, e.g. ``make_algorithm("sapo", lam=0.95, partition="newline")``.

    ``"file.py:function"`` names a method of your own (docs/extending.md).
    """
    if settings.get("partition") is not None:
        settings["partition"] = partition_of(settings["partition"])
    made = ALGORITHMS.make(name, settings)
    if not isinstance(made, Algorithm):
        raise ValueError(
            f"expected {name} to return a method, such as a PolicyGradient, with needs, prepare, "
            f"minibatch and loss; got {made!r}."
        )
    return made
