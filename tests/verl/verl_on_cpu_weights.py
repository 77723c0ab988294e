"""Weights from a trainer to rollout servers elsewhere, by way of a file: the transports that verl
has for it want GPUs. Tests only; verl imports it as its ``custom_backend_module``."""

import os
from pathlib import Path

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

FOLDER = "ROLLOUT_WEIGHTS"
"""The variable that says where."""


@CheckpointEngineRegistry.register("file")
class FileCheckpointEngine(CheckpointEngine):
    """The first actor writes all weights under their step, every server waits for that file."""

    def __init__(self, bucket_size, is_master=False):
        self.is_master = is_master

    def prepare(self):
        return {}

    @classmethod
    def build_topology(cls, actor_wg_world_size, rollout_world_size, metadata):
        return {"rank": list(range(actor_wg_world_size))}, {"rank": list(range(rollout_world_size))}

    def init_process_group(self, rank):
        pass

    def finalize(self):
        pass

    def place(self, step):
        return Path(os.environ[FOLDER], f"{step}.pt")

    async def send_weights(self, weights, global_steps=None):
        found = {name: x.detach().cpu().clone() for name, x in weights}  # all workers gather
        if self.is_master:
            place = self.place(global_steps)
            torch.save(found, place.with_suffix(".part"))
            place.with_suffix(".part").rename(place)

    async def receive_weights(self, global_steps=None):
        import asyncio

        while not self.place(global_steps).exists():
            await asyncio.sleep(0.1)
        for item in torch.load(self.place(global_steps), weights_only=True).items():
            yield item
