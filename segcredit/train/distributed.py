"""Several processes on one batch. Credit is computed for the whole batch by everyone.

The rollouts are gathered once, so segments, advantages and denominators come from all of them on
every rank; then each rank does its share of every mini-batch and gradients are added. No
denominator depends on the number of processes.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from segcredit.models import Critic, Policy
from segcredit.models.weights import shard, undivided
from segcredit.runlog.storage import CheckpointError
from segcredit.types import Encoded, Rollouts

Item = TypeVar("Item")
_PADDED = {"tokens", "mask", "logp_old", "entropy"}


@dataclass(frozen=True)
class Parallel:
    """This process among its peers."""

    rank: int = 0
    size: int = 1

    @classmethod
    def start(cls) -> "Parallel":
        """As torchrun says; alone without it."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        if torch.cuda.is_available():  # each its own, and never the first one's by default
            local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
            torch.cuda.set_device(local % torch.cuda.device_count())
        if not dist.is_initialized():
            # what lies in main memory (texts, metrics) goes by gloo
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        return cls(dist.get_rank(), size)

    def close(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    @property
    def first(self) -> bool:
        """Whether this process writes."""
        return self.rank == 0

    def own(self, items: Sequence[Item]) -> Sequence[Item]:
        """This rank's part of a list, in order."""
        return items[self._slice(len(items))]

    def before(self, items: Sequence[Item]) -> int:
        """How many items the ranks before this one have."""
        return self._slice(len(items)).start

    def turns(self, items: Sequence[Item], spare: Item | None = None) -> list[tuple[Item, bool]]:
        """This rank's items, each with True; with a spare one, everybody has equally many turns.

        Those who have fewer take the spare, with False: it must be worked on, and must not count.
        """
        own = [(item, True) for item in self.own(items)]
        most = -(-len(items) // self.size)
        return own if spare is None else own + [(spare, False)] * (most - len(own))

    def _slice(self, count: int) -> slice:
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def gather(self, items: Sequence[Item]) -> list[Item]:
        """Everyone's items, in rank order."""
        if self.size == 1:
            return list(items)
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, list(items))
        return [item for part in found for item in part]

    def share(self, item: Item) -> Item:
        """The first rank's item, for all."""
        if self.size == 1:
            return item
        found: list[Any] = [item if self.first else None]
        dist.broadcast_object_list(found)
        return found[0]

    def gather_rollouts(self, rollouts: Rollouts | None, prompts: Sequence[Encoded]) -> Rollouts:
        """Everyone's rollouts as one batch, on this rank's device."""
        if self.size == 1:
            assert rollouts is not None
            return rollouts
        own = None if rollouts is None else _columns(rollouts)
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, own)
        parts = [x for x in found if x is not None]
        width = max(x["tokens"].shape[1] for x in parts)
        for part in parts:
            for name in _PADDED & part.keys():
                missing = width - part[name].shape[1]
                part[name] = torch.nn.functional.pad(part[name], (0, missing))
        device = prompts[0].tokens.device if rollouts is None else rollouts.tokens.device
        joined = {name: torch.cat([x[name] for x in parts]).to(device) for name in parts[0]}
        joined["group"] = torch.arange(len(prompts), device=device)
        return Rollouts(**joined, prompts=list(prompts))  # type: ignore[arg-type]

    def add_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Sum over the ranks; a rank without rows adds zeros."""
        if self.size == 1:
            return
        for x in parameters:
            if x.grad is None:
                x.grad = torch.zeros_like(x)
            dist.all_reduce(x.grad)

    def add(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Metrics that add up, over the ranks."""
        if self.size == 1:
            return values
        names = sorted({name for part in self.gather([sorted(values)]) for name in part})
        stacked = torch.tensor([float(values.get(name, 0.0)) for name in names])
        dist.all_reduce(stacked)
        return dict(zip(names, stacked, strict=True))

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()


def _columns(rollouts: Rollouts) -> dict[str, Tensor]:
    names = (*sorted(_PADDED), "reward", "truncated")
    bare = replace(rollouts, prompts=None)
    found = {name: getattr(bare, name) for name in names}
    return {name: x.cpu() for name, x in found.items() if x is not None}  # vLLM knows no entropies


class Together:
    """Within it, what must be done by all goes on even after a write has failed.

    On leaving, everybody waits for everybody, and a failure anywhere is raised everywhere.
    """

    def __init__(self, parallel: Parallel, place: Path | None) -> None:
        self.parallel = parallel
        self.place = Path(parallel.share(str(place)))
        """Where to write: the first process's."""
        self._failed: Exception | None = None

    def __enter__(self) -> "Together":
        return self

    def write(self, work: Callable[[], object]) -> None:
        """Do it, unless something failed before."""
        if self._failed is not None:
            return
        try:
            work()
        except Exception as error:
            self._failed = error

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:  # no write's: the others cannot be asked any more
            return
        failed = self._failed
        number = failed.errno if isinstance(failed, OSError) else None
        told = None if failed is None else (self.parallel.rank, number, str(failed))
        others = [x for x in self.parallel.gather([told]) if x is not None]
        if failed is not None:
            raise failed
        if others:
            rank, number, text = others[0]
            message = f"process {rank} could not write its part: {text}"
            if number is not None and self.parallel.first:  # the disk's word, with what to type
                raise OSError(number, f"{os.strerror(number)} ({message})")
            raise CheckpointError(message)


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
