"""Methods without a critic that verl 0.9.1 computes with its own estimators and losses.

A method runs on verl if verl has an advantage estimator for its credit (``estimator``), a policy
loss for its ratio and surrogate (``LOSSES``) and an average like its own (``average``). Where
verl's form differs in a detail, ``departures`` lists the difference; where a part is missing,
``missing`` names it. The names are those of verl's registries in
``verl/trainer/ppo/core_algos.py``.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from segcredit.algorithms.credit import (
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
from segcredit.algorithms.dpo import DirectPreference
from segcredit.algorithms.dvo import DirectValue
from segcredit.algorithms.objective import (
    Clipped,
    ClippedInsideMean,
    ClippedWeight,
    ConstantMean,
    GeometricMean,
    LogProb,
    LossKL,
    PositiveNLL,
    RawRatio,
    ResponseMean,
    SoftGate,
    TokenRatio,
    TokenwiseGeometricMean,
    Unclipped,
    Whiten,
)
from segcredit.algorithms.policy_gradient import PolicyGradient
from segcredit.algorithms.restem import RestEM
from segcredit.integrations.verl.settings import (
    ACTOR,
    NO_CLIP,
    VerlSettings,
    average_name,
    reward_kl,
)
from segcredit.partition import Response

GROUP_EPS = 1e-6
"""Constant that verl's GRPO adds to the standard deviation; it cannot be configured."""
LOG_RATIO_LIMIT = 20.0
"""Bound (±) at which verl clamps each token's log-ratio; it cannot be configured."""
KL_LIMIT = 10.0
"""Upper bound at which verl clamps k3; it cannot be configured."""

LOSSES: Mapping[tuple[type, type], str] = {
    (TokenRatio, Clipped): "vanilla",
    (RawRatio, Clipped): "vanilla",  # a departure: verl clips the ratio of each token
    (GeometricMean, Clipped): "gspo",
    (TokenwiseGeometricMean, Clipped): "gspo",
    (TokenRatio, ClippedWeight): "cispo",
    (TokenRatio, SoftGate): "sapo",
    (GeometricMean, ClippedInsideMean): "geo_mean",
    (LogProb, Unclipped): "gpg",
}
"""verl's ``policy_loss.loss_mode`` by the types of ratio and surrogate."""
ONLY_RESPONSE_MEANS = ("sapo", "geo_mean")
"""Losses of verl that ignore ``loss_agg_mode`` and average over responses."""
MISSING: Mapping[type, str] = {
    LengthAdaptiveGAE: "verl's GAE has one λ for all responses, and here λ depends on the length",
    PositiveNLL: "verl's policy losses have no NLL term on correct responses",
    SegmentBootstrap: (
        "verl's GAE bootstraps at every token, and the plugin's credits whole segments; neither "
        "bootstraps only at segment ends with one advantage per token"
    ),
    TopEntropyOnly: (
        "verl has no estimator or loss that selects tokens by entropy (clip_cov and kl_cov select "
        "by covariance)"
    ),
    ImageDependence: (
        "verl does not compute log-probabilities with hidden image patches, by which tokens and "
        "responses are weighted"
    ),
    ValueDifference: (
        "verl samples whole responses only, and the values come from continuations of prefixes"
    ),
    TreeDifference: "verl samples whole responses only, and no trees of continuations",
    TrackedBaseline: (
        "verl has no estimator with a tracked baseline per prompt (a recipe in verl-recipe has)"
    ),
    RestEM: (
        "verl's trainer has no rounds that reset the weights and train on the correct responses"
    ),
    DirectPreference: "verl has no loss over pairs of responses",
    DirectValue: (
        "verl samples whole responses only, and no continuations of steps, and it has no loss that "
        "regresses on their values"
    ),
}
"""What verl lacks, by the type of the method or of its part."""


def missing(method: object) -> list[str]:
    """List what verl lacks for the method; empty if it runs, possibly with departures."""
    if not isinstance(method, PolicyGradient):
        return [_lacks(method, "method")]
    reasons = []
    if estimator(method) is None:
        reasons.append(_lacks(method.credit, "advantage estimator"))
    ratio, surrogate = method.ratio, method.surrogate
    if (type(ratio), type(surrogate)) not in LOSSES:
        reasons.append(f"verl has no policy loss with {ratio!r} and {surrogate!r}")
    elif type(ratio) not in (TokenRatio, LogProb) and type(ratio.over) is not Response:
        reasons.append(
            f"verl's {_loss(method)} loss has one ratio per response; got one per unit of "
            f"{ratio.over!r}"
        )
    if average(method.reduce) is None:
        reasons.append(
            f"verl averages over tokens, over responses or by a constant; got {method.reduce!r}"
        )
    reasons += [_lacks(x, f"loss term {x.name}, like") for x in method.terms if not _is_kl(x)]
    return reasons


def _lacks(part: object, what: str) -> str:
    return MISSING.get(type(part), f"verl has no {what} {part!r}")


def _is_kl(term: object) -> bool:
    return isinstance(term, LossKL)


def estimator(method: PolicyGradient) -> str | None:
    """Return verl's ``adv_estimator`` for the method's credit; None if it has none."""
    credit = method.credit
    if type(credit) is GroupZScore:
        centered = credit.std == "none" and method.adjust == (Whiten(),)
        return "reinforce_plus_plus_baseline" if centered else "grpo"
    if type(credit) is LeaveOneOut:
        return "rloo"
    return "reinforce_plus_plus" if type(credit) is ReturnToGo else None


def average(reduce: object) -> VerlSettings | None:
    """Return the keys of verl's average; None if it has no such average."""
    key = f"{ACTOR}.loss_agg_mode"
    if isinstance(reduce, ConstantMean):
        if reduce.length == 1.0:
            return {key: "seq-mean-token-sum"}
        length = int(reduce.length) if reduce.length.is_integer() else reduce.length
        return {key: "seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor": length}
    name = average_name(reduce)
    return None if name is None else {key: name}


def _loss(method: PolicyGradient) -> str:
    return LOSSES[type(method.ratio), type(method.surrogate)]


def counterpart_settings(method: PolicyGradient) -> VerlSettings:
    """Translate a method of which nothing is ``missing`` to verl's settings."""
    averaged = average(method.reduce)
    assert averaged is not None
    settings: VerlSettings = {
        "trainer.v1.trainer_mode": "sync",
        "critic.enable": False,
        "algorithm.adv_estimator": estimator(method),
        f"{ACTOR}.policy_loss.loss_mode": _loss(method),
        **_surrogate(method.surrogate),
        **averaged,
        f"{ACTOR}.entropy_coeff": 0,
        f"{ACTOR}.use_kl_loss": False,
        **reward_kl(method),
    }
    credit = method.credit
    if settings["algorithm.adv_estimator"] == "grpo":
        assert isinstance(credit, GroupZScore)
        settings["algorithm.norm_adv_by_std_in_grpo"] = credit.std != "none"
    if isinstance(credit, ReturnToGo):
        settings["algorithm.gamma"] = credit.gamma
    for term in method.terms:
        assert isinstance(term, LossKL)
        settings |= {
            f"{ACTOR}.use_kl_loss": True,
            f"{ACTOR}.kl_loss_coef": term.coef,
            f"{ACTOR}.kl_loss_type": _kl_type(term) or "low_var_kl",
        }
    return settings


def _surrogate(surrogate: object) -> VerlSettings:
    """Return the keys of verl's policy loss; verl's CISPO has distances from 1, as its clips."""
    if isinstance(surrogate, SoftGate):
        return {f"{ACTOR}.tau_pos": surrogate.positive, f"{ACTOR}.tau_neg": surrogate.negative}
    if isinstance(surrogate, Clipped):
        return {
            **_clip(surrogate.low, surrogate.high),
            f"{ACTOR}.clip_ratio_c": surrogate.dual or NO_CLIP,
        }
    if isinstance(surrogate, ClippedInsideMean):
        return _clip(surrogate.low, surrogate.high)
    if isinstance(surrogate, ClippedWeight):
        return _clip(_exact(1 - surrogate.low), _exact(surrogate.high - 1))
    return {}


def _clip(low: float, high: float) -> VerlSettings:
    names = {"clip_ratio": low, "clip_ratio_low": low, "clip_ratio_high": high}
    return {f"{ACTOR}.{name}": x for name, x in names.items()}


def _exact(x: float) -> float:
    """Remove the rounding error of a difference: 1 - 0.8 is 0.19999999999999996."""
    return float(f"{x:.12g}")


def departures(name: str, method: PolicyGradient) -> Iterator[str]:
    """List how verl's form differs from the method, one sentence with a remedy each."""
    yield from _credit_departures(name, method)
    yield from _ratio_departures(name, method)
    yield from _loss_departures(name, method)
    for term in method.terms:
        assert isinstance(term, LossKL)
        if _kl_type(term) is None:
            yield (
                f"algorithm.kl: verl's KL loss is k3 clamped at {KL_LIMIT:g}, k2 or k1, and {name} "
                f"as set here uses another estimator. Use grpo_verl, set algorithm.kl_clamp="
                f"{KL_LIMIT:g} if the method has it, or set algorithm.kl=0"
            )
        if average(term.reduce) != average(method.reduce):
            yield (
                f"algorithm.kl: verl averages the KL loss as the policy loss; got {term.reduce!r} "
                f"beside {method.reduce!r}. Use grpo_verl, or set algorithm.kl=0"
            )


def _credit_departures(name: str, method: PolicyGradient) -> Iterator[str]:
    credit, own = method.credit, estimator(method)
    if isinstance(credit, GroupZScore):
        if credit.std == "population":
            yield (
                "algorithm.std: verl's GRPO divides by the sample standard deviation or by "
                "nothing; got population. Set it to sample or none"
            )
        if credit.std != "none" and credit.eps != GROUP_EPS:
            yield (
                f"algorithm.eps: verl's GRPO adds {GROUP_EPS:g} to the standard deviation; got "
                f"{credit.eps:g}. Set it to {GROUP_EPS:g}"
            )
    whitens = str(own).startswith("reinforce_plus_plus")
    if whitens and not method.adjust:
        yield f"algorithm: verl's {own} whitens the advantages; {name} as set here does not"
    adjusted = method.adjust != ((Whiten(),) if whitens else ()) and bool(method.adjust)
    if adjusted or method.adjust_minibatch or method.only is not None:
        yield (
            f"algorithm: {name} whitens, limits or masks advantages, and verl's {own} does "
            f"not. Use grpo_verl, or segcredit train"
        )


def _ratio_departures(name: str, method: PolicyGradient) -> Iterator[str]:
    ratio = method.ratio
    if isinstance(ratio, RawRatio):
        yield (
            f"algorithm: verl clips the ratio of each token; {name} clips that of the response. "
            f"Use segcredit train, or verl's own form"
        )
    elif isinstance(ratio, TokenRatio):
        if ratio.limit not in (None, LOG_RATIO_LIMIT):
            yield (
                f"algorithm.limit: verl clamps each token's log-ratio at {LOG_RATIO_LIMIT:g}; got "
                f"{ratio.limit:g}. Set it to {LOG_RATIO_LIMIT:g}"
            )
    elif isinstance(ratio, GeometricMean | TokenwiseGeometricMean) and ratio.limit is not None:
        yield (
            f"algorithm.limit: verl's {_loss(method)} does not clamp the log-ratio of tokens; got "
            f"{ratio.limit:g}. Set it to null"
        )


def _loss_departures(name: str, method: PolicyGradient) -> Iterator[str]:
    loss, surrogate = _loss(method), method.surrogate
    if loss in ONLY_RESPONSE_MEANS and not isinstance(method.reduce, ResponseMean):
        yield f"algorithm.reduce: verl's {loss} averages over responses; got {method.reduce!r}"
    if loss == "gspo" and isinstance(surrogate, Clipped) and surrogate.dual is not None:
        yield f"algorithm.dual_clip: verl's gspo has none; got {surrogate.dual:g}. Set it to null"
    # one ratio per response and one advantage per token: verl averages one of them
    if isinstance(method.ratio, GeometricMean) and isinstance(method.credit, ReturnToGo):
        yield (
            f"algorithm: verl's {loss} expects one advantage per response, and {name} has one per "
            f"token. Use segcredit train"
        )
    if loss == "geo_mean":
        yield (
            f"algorithm: verl's geo_mean averages each micro-batch and adds micro-batches up, so "
            f"its gradient grows with their number, and it takes the geometric mean of a "
            f"response's importance weights (rollout.mismatch_cap); {name} averages the mini-batch "
            f"and weights tokens. Use segcredit train, or verl's own form"
        )


VERLS_KL: Mapping[str, Callable[[Tensor], Tensor]] = {
    "kl": lambda x: -x,
    "mse": lambda x: 0.5 * x.square(),
    "low_var_kl": lambda x: (x.clamp(-20, 20).exp() - x.clamp(-20, 20) - 1).clamp(max=KL_LIMIT),
}
"""verl's KL losses (k1, k2, k3) by ``kl_loss_type``, as functions of log π_ref − log π."""


def _kl_type(term: LossKL) -> str | None:
    """Return the ``kl_loss_type`` that computes the same estimate; None if there is none."""
    x = torch.tensor([[-30.0, -15.0, -3.0, -0.1, 0.0, 0.2, 2.0, 2.5, 3.0, 5.0]])
    estimate: Any = term.estimator(torch.zeros_like(x), x)
    same = (name for name, verls in VERLS_KL.items() if torch.allclose(estimate, verls(x)))
    return next(same, None)
