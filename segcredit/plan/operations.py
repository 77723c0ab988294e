"""Floating-point operations that a step executes, recomputed ones included."""

from segcredit.plan.job import Job


def text_forward(job: Job, length: float) -> float:
    """Of the text layers on one row; a causal attention computes half of its matrix."""
    shape = job.shape
    attention = 2 * shape.layers * shape.query_width * length * length
    return 2 * shape.layer_weights * length + attention


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
    """All epochs: forward, backward twice as much, and forward again if nothing was kept."""
    passes = 4 if job.recompute else 3
    tower = tower_forward(job) * (1 if job.freeze_vision else passes)
    text = text_forward(job, job.mean_row - 1) * passes
    return job.epochs * job.responses * (text + tower)


def update_policy(job: Job) -> float:
    """The same with the head, whose logits are always made twice."""
    return update_critic(job) + job.epochs * job.responses * 4 * head_forward(job)
