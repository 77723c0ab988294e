"""Engines that draw responses from the policy, behind one protocol."""

from segcredit.rollout.hf import HFEngine

__all__ = ["HFEngine"]
