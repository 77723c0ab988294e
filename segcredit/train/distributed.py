"""Division of a batch: data-parallel ranks, sharded models, collective writes, micro-batches.

Rollouts are gathered once, so that every rank computes segments, advantages and denominators from
the whole batch. Then each rank processes its share of every mini-batch, and gradients are summed.
No denominator depends on the number of ranks.
"""

import heapq
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Int
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from segcredit.evaluate.measure import Peers
from segcredit.models import Critic, Policy
from segcredit.models.inputs import distinct
from segcredit.models.layers import shard, unshard
from segcredit.runlog.storage import CheckpointError
from segcredit.types import Encoded, Rollouts

Item = TypeVar("Item")
_PADDED = {"tokens", "mask", "logp_old", "entropy"}


@dataclass(frozen=True)
class Parallel(Peers):
    """This process's rank and the number of ranks, with the collective operations of a run."""

    rank: int = 0
    size: int = 1

    @classmethod
    def start(cls) -> "Parallel":
        """Join the process group that torchrun describes; without torchrun there is one rank."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        if torch.cuda.is_available():  # otherwise every rank would use the first GPU
            local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
            torch.cuda.set_device(local % torch.cuda.device_count())
        if not dist.is_initialized():
            # texts and metrics are in CPU memory, which NCCL does not transfer
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        return cls(dist.get_rank(), size)

    def close(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes files."""
        return self.rank == 0

    def own(self, items: Sequence[Item]) -> Sequence[Item]:
        """Return this rank's contiguous part of a list."""
        return items[self._slice(len(items))]

    def before(self, items: Sequence[Item]) -> int:
        """Count the items of lower ranks."""
        return self._slice(len(items)).start

    def turns(self, items: Sequence[Item], spare: Item | None = None) -> list[tuple[Item, bool]]:
        """Return this rank's items, each with True; ``spare`` items pad all ranks to equal length.

        Ranks with fewer items get the spare item with False: they must process it, because forward
        passes are collective operations, and its result must not count.
        """
        own = [(item, True) for item in self.own(items)]
        most = -(-len(items) // self.size)
        return own if spare is None else own + [(spare, False)] * (most - len(own))

    def _slice(self, count: int) -> slice:
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def gather(self, items: Sequence[Item]) -> list[Item]:
        """Gather the items of all ranks, in rank order."""
        if self.size == 1:
            return list(items)
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, list(items))
        return [item for part in found for item in part]

    def share(self, item: Item) -> Item:
        """Broadcast the item of rank 0."""
        if self.size == 1:
            return item
        found: list[Any] = [item if self.first else None]
        dist.broadcast_object_list(found)
        return found[0]

    def gather_rollouts(
        self, rollouts: Rollouts | None, prompts: Sequence[Encoded], device: torch.device
    ) -> Rollouts:
        """Gather the rollouts of all ranks as one batch on this rank's device.

        Args:
            rollouts: This rank's rollouts; None: it has none, since there are few prompts.
        """
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
        joined = {name: torch.cat([x[name] for x in parts]).to(device) for name in parts[0]}
        joined["group"] = torch.arange(len(prompts), device=device)
        return Rollouts(**joined, prompts=list(prompts))  # type: ignore[arg-type]

    def add_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Sum gradients over all ranks; a rank without rows adds zeros."""
        if self.size == 1:
            return
        for x in parameters:
            if x.grad is None:
                x.grad = torch.zeros_like(x)
            dist.all_reduce(x.grad)

    def add(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sum metrics over all ranks."""
        if self.size == 1:
            return values
        names = sorted({name for part in self.gather([sorted(values)]) for name in part})
        stacked = torch.tensor([float(values.get(name, 0.0)) for name in names])
        dist.all_reduce(stacked)
        return dict(zip(names, stacked, strict=True))

    def maximum(self, x: Tensor) -> Tensor:
        """Compute the elementwise maximum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x, dist.ReduceOp.MAX)
        return x

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()


def _columns(rollouts: Rollouts) -> dict[str, Tensor]:
    names = (*sorted(_PADDED), "reward", "truncated")
    bare = replace(rollouts, prompts=None)
    found = {name: getattr(bare, name) for name in names}
    # vLLM returns no entropies
    return {name: x.cpu() for name, x in found.items() if x is not None}


class CollectiveWrite:
    """Context in which all ranks write files, and a failure on one rank is raised on all.

    Collective operations inside it continue after a failed write, so that no rank waits forever.
    Leaving the context waits for all ranks.
    """

    def __init__(self, parallel: Parallel, place: Path | None) -> None:
        self.parallel = parallel
        self.place = Path(parallel.share(str(place)))
        """Folder to write to, chosen by rank 0."""
        self._failed: Exception | None = None

    def __enter__(self) -> "CollectiveWrite":
        return self

    def write(self, work: Callable[[], object]) -> None:
        """Run a write, unless an earlier one failed."""
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
        if error is not None:  # not from a write: the ranks are out of step, so do not gather
            return
        failed = self._failed
        number = failed.errno if isinstance(failed, OSError) else None
        report = None if failed is None else (self.parallel.rank, number, str(failed))
        others = [x for x in self.parallel.gather([report]) if x is not None]
        if failed is not None:
            raise failed
        if others:
            rank, number, text = others[0]
            message = f"process {rank} could not write its part: {text}"
            if number is not None and self.parallel.first:  # rank 0 reports disk errors in full
                raise OSError(number, f"{os.strerror(number)} ({message})")
            raise CheckpointError(message)


def shard_policy(policy: Policy, parallel: Parallel) -> None:
    """Shard a policy that is whole on every rank."""
    # both are computed by a forward pass and cached; afterwards passes are collective
    assert policy.plain_head is not None
    assert policy.end_tokens is not None
    shard(policy.model, init_device_mesh(policy.device.type, (parallel.size,)))


def shard_critic(critic: Critic, parallel: Parallel) -> None:
    """Shard a critic; its head computes in fp32 for any dtype of the trunk."""
    device = critic.head.weight.device
    shard(critic, init_device_mesh(device.type, (parallel.size,)), apart=[critic.head])


def whole_model(
    model: Policy | Critic, device: torch.device, keep: bool = True
) -> Policy | Critic | None:
    """Return an unsharded copy of a sharded model; every rank must call it (collective operation).

    Args:
        keep: Whether this rank keeps the copy; otherwise it returns None.
    """
    if isinstance(model, Policy):
        found = unshard(model.model, device, keep)
        return None if found is None else Policy(found, model.codec)
    critic = unshard(model, device, keep)
    assert critic is None or isinstance(critic, Critic)
    return critic


def split_padded(rollouts: Rollouts, budget: int, item: int = 1) -> list[Tensor]:
    """Split rows into padded micro-batches of at most ``budget`` prompt and response tokens.

    Rows of one prompt stay together, so that the prompt is read once. Prompts whose longest rows
    have similar lengths stay together, so that there is little padding. One row (or ``item``
    neighboring rows that must stay together) is a micro-batch even if it alone exceeds the budget.
    Returns the row numbers of each micro-batch, in CPU memory.
    """
    assert rollouts.prompts is not None
    both = _lengths(rollouts).view(-1, item, 2).amax(dim=1)
    prompt = distinct(rollouts.prompts)[1][::item]
    order = _longest_first(both.sum(dim=1), prompt).tolist()
    parts: list[list[int]] = []
    longest = (0, 0)
    for i in order:
        ask, write = both[i].tolist()
        grown = (max(longest[0], ask), max(longest[1], write))
        if parts and (len(parts[-1]) + 1) * item * sum(grown) <= budget:
            parts[-1].append(i)
            longest = grown
        else:
            parts.append([i])
            longest = (ask, write)
    return [_rows(part, item) for part in parts]


def _lengths(rollouts: Rollouts) -> Int[Tensor, "B 2"]:
    """Count the tokens of each prompt, and of each response up to its last token."""
    assert rollouts.prompts is not None
    position = torch.arange(1, rollouts.mask.shape[1] + 1)
    written = (rollouts.mask.cpu() * position).amax(dim=1)
    asked = torch.tensor([len(x.tokens) for x in rollouts.prompts])
    return torch.stack([asked, written], dim=1)


def _rows(items: list[int], item: int) -> Tensor:
    return (torch.tensor(items)[:, None] * item + torch.arange(item)).flatten()


def _longest_first(length: Int[Tensor, " N"], prompt: Int[Tensor, " N"]) -> Int[Tensor, " N"]:
    """Sort by the longest row of the same prompt, then by prompt, then by length."""
    longest = torch.zeros_like(length).scatter_reduce(0, prompt, length, "amax")[prompt]
    order = length.argsort(descending=True, stable=True)
    order = order[prompt[order].argsort(stable=True)]
    return order[longest[order].argsort(descending=True, stable=True)]


def split_packed(rollouts: Rollouts, budget: int, item: int = 1) -> list[Tensor]:
    """Split rows into packed micro-batches, without padding and of about equal length.

    Rows are assigned from longest to shortest, each to the micro-batch with the fewest tokens.
    """
    length = _lengths(rollouts).sum(dim=1).view(-1, item).sum(dim=1)
    order = length.argsort(descending=True, stable=True).tolist()
    count = max(1, -(-int(length.sum()) // budget))
    while True:
        heap = [(0, number) for number in range(count)]
        parts: list[list[int]] = [[] for _ in heap]
        for i in order:
            filled, number = heapq.heappop(heap)
            parts[number].append(i)
            heapq.heappush(heap, (filled + int(length[i]), number))
        fits = all(filled <= budget or len(parts[number]) == 1 for filled, number in heap)
        if fits or count == len(order):
            return [_rows(part, item) for part in parts if part]
        count += 1


def micro_batch_numbers(parts: list[Tensor], rows: int) -> Int[Tensor, " B"]:
    """Return the number of each row's micro-batch."""
    number = torch.empty(rows, dtype=torch.long)
    for i, part in enumerate(parts):
        number[part] = i
    return number


def micro_batches(
    rollouts: Rollouts, budget: int, packed: bool = False, item: int = 1
) -> list[Tensor]:
    """Split rows into packed or padded micro-batches."""
    return (split_packed if packed else split_padded)(rollouts, budget, item)
