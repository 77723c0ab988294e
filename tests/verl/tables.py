"""Prints verl's tables of names, and where each function of its modules comes from."""

import json
import sys

from verl.trainer.ppo import core_algos
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
from verl.workers.engine import EngineRegistry
from verl.workers.utils import losses  # noqa: F401

functions = {}
for name, module in sorted(sys.modules.items()):
    if name == "verl" or name.startswith("verl."):
        for key, x in vars(module).items():
            if callable(x) and getattr(x, "__module__", ""):
                functions[f"{name}.{key}"] = f"{x.__module__}.{getattr(x, '__qualname__', '')}"

print(
    json.dumps(
        {
            "trainers": sorted(TRAINER_REGISTRY),
            "estimators": sorted(map(str, core_algos.ADV_ESTIMATOR_REGISTRY)),
            "losses": sorted(core_algos.POLICY_LOSS_REGISTRY),
            "engines": sorted(
                f"{kind} {backend} {device}"
                for kind, backends in EngineRegistry._engines.items()
                for backend, devices in backends.items()
                for device in devices
            ),
            "functions": functions,
        }
    )
)
