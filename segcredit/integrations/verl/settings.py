"""The ``segment`` section of verl's configuration, and the method that it and verl's keys make.

γ, λ, clipping, averaging, the value clip, KL and entropy have keys in verl; they keep them. Only
what verl has no word for stands under ``segment``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from segcredit.algorithms import make_algorithm
from segcredit.algorithms.credit import GAE
from segcredit.algorithms.objective import Clipped, ResponseMean
from segcredit.algorithms.policy_gradient import PolicyGradient
from segcredit.algorithms.ratio import GeometricMean
from segcredit.columns import VALUE, resolve
from segcredit.partition import Partition, TopEntropy, partition_of
from segcredit.registry import nearest

METHODS = ("sapo", "sapo_authors", "sapo_token_ratio", "ppo", "vc_ppo")
"""Those of ours whose credit comes from a critic; verl has the group methods itself."""
NO_VALUES = (
    "on verl the critic is asked after responses are cut, so they cannot be cut by its values. "
    "Take entropy, peaks or smooth"
)
NO_CLIP = 1e6
"""verl has no way to say "do not clip"; a bound as wide as this says it."""


class SegmentSettings(BaseModel):
    """What verl has no key for. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    algorithm: str = "sapo"
    """sapo, sapo_authors, sapo_token_ratio, ppo or vc_ppo."""
    partition: dict[str, Any] | None = None
    """Where responses are cut: as in recipes, ``{name: entropy, fraction: 0.3}``; null: as the
    method does."""
    lam_critic: float | None = Field(None, ge=0, le=1)
    """λ of the value targets; null: the method's (vc_ppo 1, else ``algorithm.lam``)."""
    critic_pretraining_steps: int = Field(0, ge=0)
    """First steps in which the critic alone learns, from full returns (VC-PPO)."""
    recorded_responses: int = Field(16, ge=0)
    """Of each recorded step: responses that ``trainer.rollout_data_dir`` gets with their tokens,
    segments, values and credit."""
    recorded_every: int = Field(10, ge=1)
    """Steps between two recorded ones; the first is one."""

    @field_validator("algorithm")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in METHODS:
            raise ValueError(_unknown("algorithm", name, METHODS))
        return name

    @field_validator("partition", mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        """A name alone has its default settings; settings alone are those of ``entropy``."""
        if given is None:
            return None
        spec = {"name": given} if isinstance(given, str) else given
        spec = {"name": "entropy", **spec} if isinstance(spec, Mapping) else spec
        try:
            cut = partition_of(spec)
        except ValueError as error:
            raise ValueError(f"segment.partition: {error}") from None
        if VALUE in resolve(cut.needs):
            raise ValueError(f"segment.partition: {NO_VALUES}")
        return spec

    def cut(self) -> Partition | None:
        """The partition as an object; None: the method's own."""
        return None if self.partition is None else partition_of(self.partition)


def _unknown(key: str, given: str, known: Any) -> str:
    choice = ", ".join(known) or "nothing"
    return f"segment.{key}: expected one of {choice}; got {given!r}.{nearest(given, known)}"


def parse(section: Any) -> SegmentSettings:
    """The section as settings, or one message on all that is wrong with it."""
    try:
        return SegmentSettings.model_validate(section or {})
    except ValidationError as error:
        raise ValueError(" ".join(_sentence(x) for x in error.errors())) from None


def _sentence(found: Any) -> str:
    where = ".".join(str(x) for x in found["loc"])
    if found["type"] == "extra_forbidden":
        return _unknown("", where, list(SegmentSettings.model_fields)).replace(
            "segment.:", "segment:"
        )
    text = str(found["msg"]).removeprefix("Value error, ")
    return (
        text if text.startswith("segment.") else f"segment.{where}: {text}; got {found['input']!r}."
    )


@dataclass(frozen=True)
class VerlKeys:
    """What the method takes from verl's own configuration, under verl's names."""

    gamma: float
    lam: float
    clip_ratio_low: float
    clip_ratio_high: float
    clip_ratio_c: float
    loss_agg_mode: str
    cliprange_value: float
    critic_loss_agg_mode: str
    kl_in_reward: tuple[str, str, float] | None = None
    """kl_penalty, and type and coefficient of kl_ctrl; None: ``algorithm.use_kl_in_reward`` is
    off."""
    kl_loss: tuple[str, float] | None = None
    """kl_loss_type and kl_loss_coef; None: ``actor.use_kl_loss`` is off."""
    entropy_coeff: float = 0.0
    rollout_is: str | None = None

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> "VerlKeys":
        """Read them from a translated recipe, without KL and extra terms, which verl applies."""
        actor = "actor_rollout_ref.actor"
        return cls(
            gamma=settings["algorithm.gamma"],
            lam=settings["algorithm.lam"],
            clip_ratio_low=settings[f"{actor}.clip_ratio_low"],
            clip_ratio_high=settings[f"{actor}.clip_ratio_high"],
            clip_ratio_c=settings[f"{actor}.clip_ratio_c"],
            loss_agg_mode=settings[f"{actor}.loss_agg_mode"],
            cliprange_value=settings["critic.cliprange_value"],
            critic_loss_agg_mode=settings["critic.loss_agg_mode"],
        )

    @classmethod
    def of(cls, config: Any) -> "VerlKeys":
        """From verl's whole configuration."""
        actor, critic, algorithm = config.actor_rollout_ref.actor, config.critic, config.algorithm
        control = algorithm.kl_ctrl
        reward = (str(algorithm.kl_penalty), str(control.type), float(control.kl_coef))
        loss = (str(actor.kl_loss_type), float(actor.kl_loss_coef))
        correction = algorithm.get("rollout_correction") or {}

        def distance(x: Any) -> float:
            return float(actor.clip_ratio if x is None else x)

        return cls(
            gamma=float(algorithm.gamma),
            lam=float(algorithm.lam),
            clip_ratio_low=distance(actor.clip_ratio_low),
            clip_ratio_high=distance(actor.clip_ratio_high),
            clip_ratio_c=float(actor.clip_ratio_c),
            loss_agg_mode=str(actor.loss_agg_mode),
            cliprange_value=float(critic.cliprange_value),
            critic_loss_agg_mode=str(critic.loss_agg_mode),
            kl_in_reward=reward if algorithm.use_kl_in_reward else None,
            kl_loss=loss if actor.use_kl_loss else None,
            entropy_coeff=float(actor.entropy_coeff),
            rollout_is=correction.get("rollout_is"),
        )


def asks_the_critic(made: PolicyGradient) -> bool:
    """Whether responses are cut by the critic's values."""
    return VALUE in resolve(made.credit.over.needs | made.ratio.over.needs)


def method(settings: SegmentSettings, keys: VerlKeys) -> PolicyGradient:
    """The method as it will run: ours, with verl's numbers in it.

    Averages are no part of it here: verl's denominators span workers, so the losses apply them.
    """
    made = stated(settings)
    credit, critic = made.credit, made.critic
    assert isinstance(credit, GAE)
    assert critic is not None
    lam_critic = credit.lam_critic if settings.lam_critic is None else settings.lam_critic
    return replace(
        made,
        credit=replace(credit, gamma=keys.gamma, lam=keys.lam, lam_critic=lam_critic),
        surrogate=Clipped(
            keys.clip_ratio_low, keys.clip_ratio_high, dual=_or_none(keys.clip_ratio_c)
        ),
        critic=replace(critic, clip=_or_none(keys.cliprange_value)),
        kl=None,
    )


def _or_none(bound: float | None) -> float | None:
    """Return the bound, or None if it is too wide to have an effect."""
    return None if bound is None or bound >= NO_CLIP else bound


def stated(settings: SegmentSettings) -> PolicyGradient:
    """The method as its paper or code states it, over the chosen partition."""
    made = make_algorithm(settings.algorithm)
    assert isinstance(made, PolicyGradient)
    assert isinstance(made.credit, GAE)
    cut = settings.cut()
    if cut is None:
        return made
    if settings.algorithm in ("ppo", "vc_ppo"):
        raise ValueError(
            f"segment.partition: {settings.algorithm} credits tokens; got {cut!r}. Remove "
            f"segment.partition, or set +segment.algorithm=sapo."
        )
    ratio = made.ratio
    if isinstance(ratio, GeometricMean):
        ratio = replace(ratio, over=_cut_as(ratio.over, cut))
    return replace(
        made, credit=replace(made.credit, over=_cut_as(made.credit.over, cut)), ratio=ratio
    )


def _cut_as(own: Partition, cut: Partition) -> Partition:
    """Return the chosen partition, with the method's rounding of its fraction."""
    if type(own) is TopEntropy and type(cut) is TopEntropy:
        return replace(own, fraction=cut.fraction)
    return cut


def departures(settings: SegmentSettings, keys: VerlKeys) -> list[str]:
    """Where verl's keys say something other than the method's own statement, one line each."""
    made = stated(settings)
    credit, surrogate, critic = made.credit, made.surrogate, made.critic
    assert isinstance(credit, GAE)
    assert isinstance(surrogate, Clipped)
    assert critic is not None

    def average(x: object) -> str:
        return "seq-mean-token-mean" if isinstance(x, ResponseMean) else "token-mean"

    def clip(x: float | None) -> float | str:
        return _or_none(x) or "none"

    kl = None if made.kl is None else ("kl", "fixed", made.kl.coef)
    own_lam, lam = credit.lam_critic, settings.lam_critic
    wanted: list[tuple[str, object, object]] = [
        ("algorithm.gamma", keys.gamma, credit.gamma),
        ("algorithm.lam", keys.lam, credit.lam),
        ("actor_rollout_ref.actor.clip_ratio_low", keys.clip_ratio_low, surrogate.low),
        ("actor_rollout_ref.actor.clip_ratio_high", keys.clip_ratio_high, surrogate.high),
        ("actor_rollout_ref.actor.clip_ratio_c", clip(keys.clip_ratio_c), clip(surrogate.dual)),
        ("actor_rollout_ref.actor.loss_agg_mode", keys.loss_agg_mode, average(made.reduce)),
        ("critic.cliprange_value", clip(keys.cliprange_value), clip(critic.clip)),
        ("critic.loss_agg_mode", keys.critic_loss_agg_mode, average(critic.reduce)),
        ("segment.lam_critic", own_lam if lam is None else lam, own_lam),
        ("algorithm.use_kl_in_reward, kl_penalty, kl_ctrl", _kl(keys.kl_in_reward), _kl(kl)),
        ("actor_rollout_ref.actor.use_kl_loss, kl_loss_…", _kl(keys.kl_loss), _kl(None)),
        ("actor_rollout_ref.actor.entropy_coeff", keys.entropy_coeff, 0),
        ("algorithm.rollout_correction.rollout_is", keys.rollout_is or "none", "none"),
    ]
    return [
        f"{key}={given}, where {settings.algorithm} as it is stated has {own}"
        for key, given, own in wanted
        if given != own
    ]


def _kl(penalty: tuple[object, ...] | None) -> str:
    """Describe a KL penalty in a few words; verl has two names for k1."""
    if penalty is None:
        return "none"
    estimate, *rest = penalty
    return " ".join(str(x) for x in ("k1" if estimate == "kl" else estimate, *rest))
