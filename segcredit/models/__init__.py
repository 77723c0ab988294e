"""Policies and critics, text and vision-language, from a folder, a hub id or made tiny in code."""

from segcredit.models.codec import Codec
from segcredit.models.critic import Critic
from segcredit.models.loading import ModelError
from segcredit.models.policy import Policy
from segcredit.models.tiny import TINY, tiny_config

__all__ = ["TINY", "Codec", "Critic", "ModelError", "Policy", "tiny_config"]
