"""Bytes of one token or patch in a model: kept for the backward pass, or needed for a moment.

Counted operation by operation as transformers writes these layers: a norm keeps its input in
float32, what it normed, and its result; attention keeps queries, keys, values and its output; a
gated feed-forward part keeps four states of its width. LoRA keeps what lies between A and B, and
norms, then frozen, keep no longer what they normed.
"""

from segcredit.plan.job import Job


def _norm(width: int, size: int, frozen: bool = False) -> int:
    return (4 + (1 if frozen else 2) * size) * width


def state(job: Job) -> int:
    """What goes from one text layer to the next."""
    return job.bytes * job.shape.hidden


def layer_kept(job: Job) -> int:
    """What one text layer keeps for its backward pass."""
    size, shape = job.bytes, job.shape
    query, key = shape.query_width, shape.key_width
    # behind padding, keys and values are written out once per query head
    shared = key if job.packed else query
    norms = 2 * _norm(shape.hidden, size, frozen=job.adapter is not None)
    kept = norms + size * (2 * query + 2 * shared) + 4 * shape.heads
    if job.adapter:
        kept += size * job.adapter.inner // shape.layers
    if shape.head_norms:
        kept += (4 + size) * (query + key)
    if job.eager:
        kept += shape.heads * job.longest_row * (4 + size)
    return kept + 4 * size * shape.intermediate


def layer_backward(job: Job) -> int:
    """What its backward pass adds for a moment: gradients inside the feed-forward part."""
    return job.bytes * (2 * job.shape.intermediate + job.shape.hidden)


def layer_forward(job: Job) -> int:
    """What a text layer takes for a moment without gradients."""
    size, shape = job.bytes, job.shape
    attention = 4 * shape.query_width + 4 * shape.key_width
    wide = 4 if job.adapter else 3  # the product, beside what it is added to
    return size * (max(wide * shape.intermediate, attention) + 5 * shape.hidden)


def text_kept(job: Job) -> int:
    """What all text layers keep between the passes."""
    per_layer = state(job) if job.recompute else layer_kept(job)
    return job.shape.layers * per_layer + 2 * job.bytes * job.shape.head_width + 64


def text_backward(job: Job) -> int:
    """What the layer that is at work adds to it."""
    again = layer_kept(job) if job.recompute else 0
    return again + layer_backward(job)


def last_norm(job: Job) -> int:
    """What the norm behind the layers keeps, and its result."""
    return _norm(job.shape.hidden, job.bytes, frozen=job.adapter is not None) + state(job)


def patch_inputs(job: Job) -> int:
    """A patch's pixels, in float32 and as the tower reads them."""
    return (4 + job.bytes) * job.shape.tower.pixels if job.shape.tower else 0


def block_kept(job: Job) -> int:
    """What one block of the vision tower keeps, per patch."""
    tower, size = job.shape.tower, job.bytes
    if tower is None:
        return 0
    norms = 2 * _norm(tower.hidden, size, frozen=job.adapter is not None)
    return norms + size * 4 * (tower.hidden + tower.intermediate)


def block_forward(job: Job) -> int:
    """What it takes for a moment without gradients: rotations are in float32."""
    tower, size = job.shape.tower, job.bytes
    if tower is None:
        return 0
    return max(3 * size * tower.intermediate, 24 * tower.hidden) + 5 * size * tower.hidden


def tower_kept(job: Job) -> int:
    """What the whole tower keeps, per patch; nothing if it is frozen."""
    tower, size = job.shape.tower, job.bytes
    if tower is None or job.tower_rests:
        return 0
    per_block = size * tower.hidden if job.recompute else block_kept(job)
    merger = _norm(tower.hidden, size) + 2 * size * tower.hidden
    rotations = 8 * tower.head_width
    return tower.depth * per_block + merger + rotations + size * tower.pixels


def tower_backward(job: Job) -> int:
    """What the block that is at work adds, per patch."""
    tower, size = job.shape.tower, job.bytes
    if tower is None or job.tower_rests:
        return 0
    again = block_kept(job) if job.recompute else 0
    return again + size * (2 * tower.intermediate + tower.hidden)
