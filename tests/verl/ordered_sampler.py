"""verl's replay buffer with an order that does not depend on who finished first. Tests only."""

import itertools
import types

from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class OrderedReplayBuffer(ReplayBuffer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        numbers = itertools.count()  # verl draws names by chance; these tell the order of prompts
        trainer_base.uuid = types.SimpleNamespace(uuid4=lambda: f"{next(numbers):08d}")

    def _materialize_batch(self, *args, **kwargs):
        batch = super()._materialize_batch(*args, **kwargs)
        order = sorted(range(len(batch.keys)), key=lambda i: batch.keys[i])
        batch.reorder(order)
        return batch
