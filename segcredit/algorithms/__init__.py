"""Every method as a short composition. ``ALGORITHMS`` names them for the command line."""

from collections.abc import Callable
from difflib import get_close_matches
from inspect import signature

from segcredit.algorithms.dpo import dpo, dpo_positive
from segcredit.algorithms.dvo import dvo
from segcredit.algorithms.grpo import grpo, grpo_deepseekmath, grpo_spo, grpo_verl
from segcredit.algorithms.gspo import gspo
from segcredit.algorithms.policy_gradient import PolicyGradient
from segcredit.algorithms.ppo import ppo
from segcredit.algorithms.restem import restem
from segcredit.algorithms.rloo import rloo, rloo_reinforce, rloo_spo
from segcredit.algorithms.sapo import sapo, sapo_authors, sapo_token_ratio
from segcredit.algorithms.single_stream_spo import single_stream_spo
from segcredit.algorithms.spo import spo_chain, spo_tree
from segcredit.algorithms.vapo import vapo
from segcredit.algorithms.vc_ppo import vc_ppo
from segcredit.algorithms.vineppo import vineppo
from segcredit.partition import partition_of
from segcredit.types import Algorithm

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
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
}


def make_algorithm(name: str, **settings: object) -> Algorithm:
    """The method of that name, e.g. ``make_algorithm("sapo", lam=0.95, partition="newline")``."""
    if name not in ALGORITHMS:
        near = get_close_matches(name.lower().replace("-", "_"), ALGORITHMS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"unknown method {name!r}.{hint} The methods are: {', '.join(ALGORITHMS)}."
        )
    known = list(signature(ALGORITHMS[name]).parameters)
    for setting in settings:
        if setting not in known:
            near = get_close_matches(setting, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"{name} has no setting {setting!r}.{hint} Its settings are: {', '.join(known)}."
            )
    if settings.get("partition") is not None:
        settings["partition"] = partition_of(settings["partition"])
    return ALGORITHMS[name](**settings)


__all__ = ["ALGORITHMS", "PolicyGradient", "make_algorithm", *ALGORITHMS]
