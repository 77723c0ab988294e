"""The ``segment`` section of verl's configuration, and the method it configures with verl's keys.

γ, λ, clipping, averaging, the value clip, KL and entropy keep their verl keys. The ``segment``
section holds only settings that verl has no key for.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging.version import Version
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from segcredit.algorithms import make_algorithm
from segcredit.algorithms.credit import GAE
from segcredit.algorithms.objective import (
    Clipped,
    GeometricMean,
    MicroBatchTokenMean,
    ResponseMean,
    TokenMean,
)
from segcredit.algorithms.policy_gradient import PolicyGradient
from segcredit.columns import VALUE, resolve
from segcredit.partition import Partition, Token, TopEntropy, partition_of, spec_of
from segcredit.registry import names_code, nearest

METHODS = ("sapo", "sapo_authors", "sapo_token_ratio", "ppo", "vc_ppo")
"""Built-in methods with a critic, which the plugin runs; verl has the group methods itself."""
NO_VALUES = (
    "on verl the critic runs after responses are cut into segments, so they cannot be cut by its "
    "values. Use entropy, peaks or smooth"
)
NO_CLIP = 1e6
"""verl cannot turn clipping off; a bound this wide has no effect."""
TESTED_FROM, TESTED_BEFORE = "0.9.1", "0.9.2"
"""First verl release that the plugin was tested with, and first later release without a test."""
UNTESTED = "SEGCREDIT_VERL_UNTESTED"
"""Environment variable; 1 lets the plugin load with any verl."""


def refusal(version: str, allowed: bool = False) -> str | None:
    """Explain why the plugin must not load with this verl version; None if it may."""
    if allowed or Version(TESTED_FROM) <= Version(version) < Version(TESTED_BEFORE):
        return None
    return (
        f"segcredit's plugin was tested with verl >={TESTED_FROM},<{TESTED_BEFORE}; this is verl "
        f"{version}. Type: pip install 'verl=={TESTED_FROM}', or look for a newer segcredit. "
        f"To try this version anyway, set {UNTESTED}=1 in the environment of every node."
    )


class SegmentSettings(BaseModel):
    """Settings of the ``segment`` section. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    algorithm: str = "sapo"
    """sapo, sapo_authors, sapo_token_ratio, ppo, vc_ppo, or one of your own with a critic as
    /absolute/path/file.py:name."""
    partition: dict[str, Any] | None = None
    """Partition of the responses, as in recipes: ``{name: entropy, fraction: 0.3}``; null: the
    method's own."""
    lam_critic: float | None = Field(None, ge=0, le=1)
    """λ of the value targets; null: the method's (vc_ppo 1, else ``algorithm.lam``)."""
    critic_pretraining_steps: int = Field(0, ge=0)
    """First steps in which only the critic is trained, on full returns (VC-PPO)."""
    recorded_responses: int = Field(16, ge=0)
    """Responses of each recorded step that are written to ``trainer.rollout_data_dir`` with their
    tokens, segments, values and advantages."""
    recorded_every: int = Field(10, ge=1)
    """Number of steps between recorded steps; the first step is recorded."""

    @field_validator("algorithm")
    @classmethod
    def _check_algorithm(cls, name: str) -> str:
        if name not in METHODS and not names_code(name):
            raise ValueError(_unknown("algorithm", name, METHODS))
        return name

    @field_validator("partition", mode="before")
    @classmethod
    def _check_partition(cls, given: Any) -> Any:
        """Read a partition: a name without settings, or settings of ``entropy`` without a name."""
        if given is None:
            return None
        spec = {"name": given} if isinstance(given, str) else given
        spec = {"name": "entropy", **spec} if isinstance(spec, Mapping) else spec
        try:
            partition = partition_of(spec)
        except ValueError as error:
            raise ValueError(f"segment.partition: {error}") from None
        if VALUE in resolve(partition.needs):
            raise ValueError(f"segment.partition: {NO_VALUES}")
        return spec


def _unknown(key: str, given: str, known: Any) -> str:
    where = f"segment.{key}" if key else "segment"
    return f"{where}: expected one of {', '.join(known)}; got {given!r}.{nearest(given, known)}"


def parse_settings(section: Any) -> SegmentSettings:
    """Parse the section; raise ValueError with one message about all mistakes in it."""
    try:
        return SegmentSettings.model_validate(section or {})
    except ValidationError as error:
        raise ValueError(" ".join(_sentence(x) for x in error.errors())) from None


def _sentence(mistake: Any) -> str:
    where = ".".join(str(x) for x in mistake["loc"])
    if mistake["type"] == "extra_forbidden":
        return _unknown("", where, list(SegmentSettings.model_fields))
    text = str(mistake["msg"]).removeprefix("Value error, ")
    return (
        text
        if text.startswith("segment.")
        else f"segment.{where}: {text}; got {mistake['input']!r}."
    )


ACTOR = "actor_rollout_ref.actor"
KL, ROLLOUT_IS = "algorithm.use_kl_in_reward", "algorithm.rollout_correction.rollout_is"
KL_DETAILS = ("algorithm.kl_penalty", "algorithm.kl_ctrl.type", "algorithm.kl_ctrl.kl_coef")
KEYS = (
    *("algorithm.gamma", "algorithm.lam", KL, *KL_DETAILS, ROLLOUT_IS),
    *(f"{ACTOR}.clip_ratio_{x}" for x in ("low", "high", "c")),
    *(f"{ACTOR}.{x}" for x in ("loss_agg_mode", "entropy_coeff", "use_kl_loss")),
    *("critic.cliprange_value", "critic.loss_agg_mode"),
)
"""verl's keys that determine the method."""
VerlSettings = dict[str, Any]


def read_keys(config: Any) -> VerlSettings:
    """Read ``KEYS`` from verl's whole configuration."""
    keys = {key: _look_up(config, key) for key in KEYS}
    for key in (f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"):
        keys[key] = _look_up(config, f"{ACTOR}.clip_ratio") if keys[key] is None else keys[key]
    return keys


def _look_up(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = None if config is None else config.get(name)
    return config


def method_name(spec: str | Mapping[str, Any]) -> str:
    """Return the method's name from a recipe's ``algorithm``."""
    return spec if isinstance(spec, str) else str(spec["name"])


def method_settings(spec: str | Mapping[str, Any], method: PolicyGradient) -> VerlSettings:
    """Translate a method with a critic, which the plugin runs, to verl's settings.

    ``spec`` is the recipe's ``algorithm``; ``method`` is the object built from it. Methods that
    verl runs itself are translated by counterparts.py.
    """
    surrogate = method.surrogate
    assert isinstance(surrogate, Clipped)
    return {
        f"{ACTOR}.clip_ratio": surrogate.low,
        f"{ACTOR}.clip_ratio_low": surrogate.low,
        f"{ACTOR}.clip_ratio_high": surrogate.high,
        f"{ACTOR}.clip_ratio_c": surrogate.dual or NO_CLIP,
        f"{ACTOR}.loss_agg_mode": average_name(method.reduce),
        f"{ACTOR}.entropy_coeff": 0,
        f"{ACTOR}.use_kl_loss": False,
        **reward_kl(method),
        **_segment_settings(spec, method),
    }


def reward_kl(method: PolicyGradient) -> VerlSettings:
    """Return the keys of the KL penalty in the reward."""
    settings: VerlSettings = {"algorithm.use_kl_in_reward": method.kl is not None}
    if method.kl is not None:
        settings |= {"algorithm.kl_penalty": "kl", "algorithm.kl_ctrl.kl_coef": method.kl.coef}
    return settings


def _segment_settings(spec: str | Mapping[str, Any], method: PolicyGradient) -> VerlSettings:
    """Return the keys of a method with a critic, which the plugin runs."""
    credit, critic = method.credit, method.critic
    assert isinstance(credit, GAE)
    assert critic is not None
    settings: VerlSettings = {
        "trainer.v1.trainer_mode": "segment_sync",
        "+segment.algorithm": absolute(method_name(spec)),
        "algorithm.adv_estimator": "gae",
        "algorithm.gamma": credit.gamma,
        "algorithm.lam": credit.lam,
        "critic.enable": True,
        "critic.cliprange_value": critic.clip or NO_CLIP,
        "critic.loss_agg_mode": average_name(critic.reduce),
    }
    if credit.lam_critic is not None:
        settings["+segment.lam_critic"] = credit.lam_critic
    if not isinstance(credit.over, Token):  # a class from a user's file has its absolute path
        settings |= {f"+segment.partition.{key}": x for key, x in spec_of(credit.over).items()}
    return settings


def absolute(spec: str) -> str:
    """Make the path of ``file.py:Name`` absolute, since Ray's workers run in other directories."""
    file, _, name = spec.rpartition(":")
    return f"{Path(file).expanduser().absolute()}:{name}" if file.endswith(".py") else spec


def average_name(average: object) -> str | None:
    """Return verl's name for a reduction; None if verl does not have it."""
    if isinstance(average, ResponseMean):
        return "seq-mean-token-mean"
    # verl removed means per micro-batch after the authors forked it
    return "token-mean" if isinstance(average, TokenMean | MicroBatchTokenMean) else None


def cut_by_values(method: PolicyGradient) -> bool:
    """Whether the method cuts responses by the critic's values."""
    return VALUE in resolve(method.credit.over.needs | method.ratio.over.needs)


def make_method(settings: SegmentSettings, keys: Mapping[str, Any]) -> PolicyGradient:
    """Build segcredit's method with the values of verl's keys.

    It does not include averaging: verl's denominators span workers, so the losses apply them.
    """
    method = published_method(settings)
    credit, critic = method.credit, method.critic
    assert isinstance(credit, GAE)
    assert critic is not None
    lam_critic = credit.lam_critic if settings.lam_critic is None else settings.lam_critic
    return replace(
        method,
        credit=replace(
            credit,
            gamma=float(keys["algorithm.gamma"]),
            lam=float(keys["algorithm.lam"]),
            lam_critic=lam_critic,
        ),
        surrogate=Clipped(
            float(keys[f"{ACTOR}.clip_ratio_low"]),
            float(keys[f"{ACTOR}.clip_ratio_high"]),
            dual=_or_none(keys[f"{ACTOR}.clip_ratio_c"]),
        ),
        critic=replace(critic, clip=_or_none(keys["critic.cliprange_value"])),
        kl=None,
    )


def _or_none(bound: float) -> float | None:
    """Return the bound, or None if it is too wide to have an effect."""
    return None if bound >= NO_CLIP else float(bound)


def has_segment_critic(method: object) -> bool:
    """Whether the plugin can run the method: GAE with a critic and a clipped surrogate."""
    return (
        isinstance(method, PolicyGradient)
        and isinstance(method.credit, GAE)
        and type(method.surrogate) is Clipped
        and method.critic is not None
    )


def published_method(settings: SegmentSettings) -> PolicyGradient:
    """Build the method with its own numbers, over the chosen partition."""
    method = make_algorithm(settings.algorithm)
    if not has_segment_critic(method):
        raise ValueError(
            f"segment.algorithm: expected a method with GAE, a critic and a clipped surrogate; got "
            f"{settings.algorithm}. Build on segcredit.algorithms.sapo, or use segcredit train."
        )
    assert isinstance(method, PolicyGradient)
    assert isinstance(method.credit, GAE)
    if settings.partition is None:
        return method
    partition = partition_of(settings.partition)
    if isinstance(method.credit.over, Token):
        raise ValueError(
            f"segment.partition: {settings.algorithm} credits tokens; got {partition!r}. Remove "
            f"segment.partition, or set +segment.algorithm=sapo."
        )
    ratio = method.ratio
    if isinstance(ratio, GeometricMean):
        ratio = replace(ratio, over=_with_rounding_of(ratio.over, partition))
    credit = replace(method.credit, over=_with_rounding_of(method.credit.over, partition))
    return replace(method, credit=credit, ratio=ratio)


def _with_rounding_of(own: Partition, chosen: Partition) -> Partition:
    """Return the chosen partition, with the method's rounding of its fraction."""
    if type(own) is TopEntropy and type(chosen) is TopEntropy:
        return replace(own, fraction=chosen.fraction)
    return chosen


def departures(settings: SegmentSettings, keys: Mapping[str, Any]) -> list[str]:
    """List, one line each, the verl keys that differ from the method's published numbers."""
    method = published_method(settings)
    published: VerlSettings = {"algorithm.kl_ctrl.type": "fixed", ROLLOUT_IS: None}
    published |= method_settings(settings.algorithm, method)
    both = keys[KL] and published[KL]
    rows = [(x, keys[x], published[x]) for x in KEYS if both or x not in KL_DETAILS]
    assert isinstance(method.credit, GAE)
    own, lam = method.credit.lam_critic, settings.lam_critic
    rows.append(("segment.lam_critic", own if lam is None else lam, own))
    return [
        f"{key}={_shown(given)}; {settings.algorithm} as published has {_shown(own)}"
        for key, given, own in rows
        if _shown(given) != _shown(own)
    ]


def _shown(x: Any) -> Any:
    """Return a value for comparison and messages; verl has two names for k1."""
    if x is None or (isinstance(x, int | float) and x >= NO_CLIP):
        return "none"
    return "k1" if x == "kl" else x


def check_config(config: Any, use_critic: bool) -> None:
    """Raise ValueError on the first verl setting that segment credit does not support."""
    for problem in _config_problems(config, use_critic):
        raise ValueError(problem)


def _config_problems(config: Any, use_critic: bool) -> Iterator[str]:
    actor, critic, algorithm = config.actor_rollout_ref.actor, config.critic, config.algorithm
    if not use_critic or str(algorithm.adv_estimator) != "gae":
        yield (
            f"segment credit needs a critic; got algorithm.adv_estimator="
            f"{algorithm.adv_estimator} and critic.enable={critic.enable}. "
            f"Set algorithm.adv_estimator=gae critic.enable=True."
        )
    correction = algorithm.get("rollout_correction") or {}
    if correction.get("bypass_mode", False):
        yield (
            "segments are cut by the entropies of π_old, which bypass mode does not compute. "
            "Set algorithm.rollout_correction.bypass_mode=False."
        )
    if correction.get("rollout_rs") is not None:
        yield (
            f"rejection sampling removes tokens after responses were cut into segments; got "
            f"algorithm.rollout_correction.rollout_rs={correction.get('rollout_rs')}. "
            f"Set algorithm.rollout_correction.rollout_rs=null; importance weights (rollout_is) "
            f"may stay."
        )
    loss_mode = actor.policy_loss.get("loss_mode", "vanilla")
    if loss_mode != "vanilla":
        yield (
            f"segment.algorithm chooses the policy loss; got "
            f"actor_rollout_ref.actor.policy_loss.loss_mode={loss_mode}. Leave it at vanilla."
        )
    if critic.model.get("use_fused_kernels", False):
        yield (
            "fused kernels compute log-probabilities, which a value model does not have. "
            "Set critic.model.use_fused_kernels=False."
        )
    if critic.model.get("lora_rank", 0):
        yield (
            "with LoRA the value head would stay frozen at its initial 0. "
            "Set critic.model.lora_rank=0."
        )
    distillation = config.get("distillation") or {}
    if distillation.get("enabled", False):
        yield "segment credit does not support distillation. Set distillation.enabled=False."
    section = config.get("segment") or {}
    if section.get("critic_pretraining_steps", 0) and config.trainer.critic_warmup:
        yield (
            f"two settings for steps without a policy update: trainer.critic_warmup="
            f"{config.trainer.critic_warmup} and segment.critic_pretraining_steps="
            f"{section['critic_pretraining_steps']}. Set trainer.critic_warmup=0."
        )
