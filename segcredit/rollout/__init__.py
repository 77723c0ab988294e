"""Engines that sample responses from the policy, behind one protocol."""

from segcredit.rollout.engines import ENGINES, EngineSettings, engine_problem, make_engine
from segcredit.rollout.hf import HFEngine
from segcredit.rollout.vllm import VllmEngine

__all__ = [
    "ENGINES",
    "EngineSettings",
    "HFEngine",
    "VllmEngine",
    "engine_problem",
    "make_engine",
]
