"""Columns in and out of verl's TransferQueue: the only file that knows of it.

verl means to replace the queue (its RFC 6988); whatever comes, only these functions change.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
import transfer_queue as queue
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta

Batch: TypeAlias = KVBatchMeta
"""verl's name for a batch whose columns lie in the queue."""


def read(batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
    """Columns as right-padded tensors; those that the queue does not hold are left out."""
    found = queue.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=list(names)
    )
    return {name: _padded(found[name]) for name in names if name in found.keys()}  # noqa: SIM118


def lengths(batch: Batch) -> list[int]:
    """Tokens of each response, whatever its mask."""
    found = queue.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask"]
    )
    return found["response_mask"].offsets().diff().tolist()


def write(batch: Batch, columns: Mapping[str, Tensor]) -> Batch:
    """Put columns of width T into the queue, each row as long as its response.

    Workers see only the columns that a batch names, so go on with the batch that is returned.
    """
    rows = lengths(batch)
    nested = {
        name: torch.nested.as_nested_tensor(
            [x[row, :length].contiguous() for row, length in enumerate(rows)], layout=torch.jagged
        )
        for name, x in columns.items()
    }
    put = queue.kv_batch_put(
        keys=batch.keys,
        partition_id=batch.partition_id,
        fields=TensorDict(nested, batch_size=len(rows)),
    )
    put.extra_info.update(batch.extra_info)
    return put


def _padded(x: Tensor) -> Tensor:
    return x.to_padded_tensor(padding=0) if x.is_nested else x
