"""Dividing a run's models among its processes, and putting them together again."""

import torch
from torch.distributed.device_mesh import init_device_mesh

from segcredit.models import Critic, Policy
from segcredit.models.sharded import shard
from segcredit.models.weights import undivided
from segcredit.train.parallel import Parallel


def shard_policy(policy: Policy, parallel: Parallel) -> None:
    """Divide a policy that is whole on every process."""
    # found by passes of one's own, and remembered
    assert policy.plain_head is not None
    assert policy.end_tokens is not None
    shard(policy.model, init_device_mesh(policy.device.type, (parallel.size,)))


def shard_critic(critic: Critic, parallel: Parallel) -> None:
    """The same; its head computes in float32 whatever the trunk is in."""
    device = critic.head.weight.device
    shard(critic, init_device_mesh(device.type, (parallel.size,)), apart=[critic.head])


def whole_policy(policy: Policy, device: torch.device, keep: bool = True) -> Policy | None:
    """A copy of a divided policy as it is now; everyone must ask, also who does not keep it."""
    model = undivided(policy.model, device, keep)
    return None if model is None else Policy(model, policy.codec)


def whole_critic(critic: Critic, device: torch.device, keep: bool = True) -> Critic | None:
    """The same of a critic."""
    found = undivided(critic, device, keep)
    assert found is None or isinstance(found, Critic)
    return found
