"""Memory of models that are divided among GPUs (memory.shard): what stays, and what passes through.

Counted from how FSDP2 works; on several GPUs nothing of it was measured.
"""

from segcredit.plan.job import Job

AT_ONCE = 2
"""Layers that are gathered at once: the one at work, and the next."""


def held(job: Job, awake: str) -> dict[str, float]:
    """A part of every model, and the whole policy to sample from."""
    shape = job.shape
    models = {"policy": shape.parameters}
    if job.critic:
        models["critic"] = shape.critic_parameters
    trained = {name: job.trainable(count) for name, count in models.items()}
    frozen = sum(models.values()) - sum(trained.values())
    reference = shape.parameters if job.reference else 0
    here = sum(x for name, x in trained.items() if not job.offload or name == awake)
    return {
        "weights": job.bytes * (shape.parameters + (frozen + reference) / job.gpus),
        "originals": 4 * sum(trained.values()) / job.gpus,
        "moments": 8 * here / job.gpus,
    }


def with_gathered(job: Job, found: dict[str, float]) -> dict[str, float]:
    """The same while a pass runs: some layers, and what belongs to none."""
    if not job.shards:
        return found
    gathered = job.bytes * (AT_ONCE * _layer(job) + _rest(job))
    return found | {"weights": found["weights"] + gathered}


def layer_gradients(job: Job) -> float:
    """A layer's gradient, whole, and its float32 copy that is summed over the GPUs."""
    return (job.bytes + 4) * _layer(job) if job.shards else 0.0


def last_gradients(job: Job) -> float:
    """The float32 copy for what belongs to no layer."""
    return 4.0 * _rest(job) if job.shards else 0.0


def _layer(job: Job) -> float:
    return job.shape.layer_parameters / job.shape.layers


def _rest(job: Job) -> float:
    tower = job.shape.tower.parameters if job.shape.tower else 0
    return job.shape.parameters - job.shape.layer_parameters - tower
