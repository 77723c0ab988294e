"""Policies and critics, for text and vision-language models of transformers."""

from segcredit.models.codec import Codec
from segcredit.models.critic import Critic
from segcredit.models.families import (
    FAMILIES,
    TINY,
    Family,
    QwenVL,
    TinySizes,
    VisionFamily,
    find_family,
    tiny_config,
)
from segcredit.models.loading import ModelError
from segcredit.models.policy import Policy

__all__ = [
    "FAMILIES",
    "TINY",
    "Codec",
    "Critic",
    "Family",
    "ModelError",
    "Policy",
    "QwenVL",
    "TinySizes",
    "VisionFamily",
    "find_family",
    "tiny_config",
]
