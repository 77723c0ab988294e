"""Floating-point operations that a step executes, recomputed ones included."""

from segcredit.plan.job import Job


def text_forward(job: Job, length: float) -> float:
    """Of the text layers on one row."""
    return _products(job, length) + _attention(job, length) + _adapted(job, length)


def _products(job: Job, length: float) -> float:
    """States times weights."""
    return 2 * job.shape.layer_weights * length


def _attention(job: Job, length: float) -> float:
    """A causal one computes half of its matrix."""
    return 2 * job.shape.layers * job.shape.query_width * length * length


def _adapted(job: Job, length: float) -> float:
    """States times LoRA's matrices."""
    return 2 * job.adapter.text * length if job.adapter else 0.0


def tower_forward(job: Job) -> float:
    """Of the vision tower on one prompt's pictures; its attention is not counted."""
    tower = job.shape.tower
    if tower is None:
        return 0.0
    factors = tower.patch_weights * tower.merge + tower.token_weights
    return 2 * factors * job.lengths.pictures


def head_forward(job: Job) -> float:
    """Of the head on one response."""
    return 2 * job.shape.embedding * job.lengths.response


def trunk_forward(job: Job) -> float:
    """Of one prompt with its response, up to the head; its last token is not read."""
    return text_forward(job, job.mean_row - 1) + tower_forward(job)


def annotate_policy(job: Job) -> float:
    """Of all responses, through a model with a head."""
    return job.responses * (trunk_forward(job) + head_forward(job))


def annotate_critic(job: Job) -> float:
    """The same through a critic."""
    return job.responses * trunk_forward(job)


def update_critic(job: Job) -> float:
    """All epochs: forward, backward twice as much, and forward again if nothing was kept.

    Weights that are frozen have no gradient, which is half of a backward pass.
    """
    passes = 4 if job.recompute else 3
    frozen = 1 if job.adapter else 0
    length = job.mean_row - 1
    text = (passes - frozen) * _products(job, length)
    text += passes * (_attention(job, length) + _adapted(job, length))
    tower = tower_forward(job) * (1 if job.tower_rests else passes - frozen)
    return job.epochs * job.responses * (text + tower)


def update_policy(job: Job) -> float:
    """The same with the head, whose logits are always made twice."""
    passes = 3 if job.adapter else 4
    return update_critic(job) + job.epochs * job.responses * passes * head_forward(job)
