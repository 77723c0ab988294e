"""Engines that draw responses from the policy, behind one protocol."""

from segcredit.rollout.hf import HFEngine
from segcredit.rollout.vllm import VllmEngine

__all__ = ["HFEngine", "VllmEngine"]
