"""Main memory of one process: what rests there, and what passes through."""

from segcredit.plan.calibration import PROCESS
from segcredit.plan.job import Job

SLAB = 2**32
"""Bytes of page-locked memory that are taken at once (train/offload.py)."""


def main_memory(job: Job) -> dict[str, float]:
    """Bytes, by part."""
    shape = job.shape
    parts = {
        "process": PROCESS,
        # loaded there first, and gone before the rest comes
        "weights while loading": float(job.bytes * shape.parameters),
    }
    if shape.tower is not None and job.lengths.pictures:
        patches = job.prompts * job.lengths.pictures * shape.tower.merge
        parts["pictures of a step"] = patches * shape.tower.pixels * 4
    if job.offload:
        parts["optimizers at rest"] = _resting(job)
    return parts


def main_memory_peak(job: Job) -> float:
    """Of one process: loading is over when optimizers come to rest."""
    parts = main_memory(job)
    loading = parts.pop("weights while loading")
    return parts["process"] + max(loading, sum(parts.values()) - parts["process"])


def _resting(job: Job) -> float:
    """In slabs, as they are filled: originals first, then two moments per parameter."""
    total = _optimizer(job, job.trained_sizes(critic=False))
    return total + (_optimizer(job, job.trained_sizes(critic=True)) if job.critic else 0.0)


def _optimizer(job: Job, counts: list[int]) -> float:
    originals = [4 * count for count in counts] if job.half and not job.shards else []
    parts = [-(-count // job.shares) for count in counts]
    moments = [job.moment(count) for count in parts for _ in range(2)]
    return _slabs([*originals, *moments])


def _slabs(sizes: list[int]) -> float:
    taken, left = 0, 0
    for size in sizes:
        size = -(-size // 512) * 512
        if size > left:
            left = max(SLAB, size)
            taken += left
        left -= size
    return float(taken)
