"""Training methods, each a short composition of parts; methods.py is the table of them."""

from segcredit.algorithms.dpo import dpo, dpo_positive
from segcredit.algorithms.dvo import dvo
from segcredit.algorithms.methods import (
    ALGORITHMS,
    grpo,
    grpo_deepseekmath,
    grpo_spo,
    grpo_verl,
    gspo,
    make_algorithm,
    ppo,
    rloo,
    rloo_reinforce,
    rloo_spo,
    sapo,
    sapo_authors,
    sapo_token_ratio,
    single_stream_spo,
    spo_chain,
    spo_tree,
    vapo,
    vc_ppo,
    vineppo,
)
from segcredit.algorithms.policy_gradient import PolicyGradient
from segcredit.algorithms.restem import restem

__all__ = [
    "ALGORITHMS",
    "PolicyGradient",
    "dpo",
    "dpo_positive",
    "dvo",
    "grpo",
    "grpo_deepseekmath",
    "grpo_spo",
    "grpo_verl",
    "gspo",
    "make_algorithm",
    "ppo",
    "restem",
    "rloo",
    "rloo_reinforce",
    "rloo_spo",
    "sapo",
    "sapo_authors",
    "sapo_token_ratio",
    "single_stream_spo",
    "spo_chain",
    "spo_tree",
    "vapo",
    "vc_ppo",
    "vineppo",
]
