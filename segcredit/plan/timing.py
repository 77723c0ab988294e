"""Seconds of each phase of a step, from operations executed and bytes read."""

import math

from segcredit.plan import operations
from segcredit.plan.calibration import (
    ADAPTER_PASSES,
    ANNOTATE_SHARE,
    CACHE_SHARE,
    COMPILED_ANNOTATE,
    COMPILED_UPDATE,
    LAUNCH,
    LINK_SHARE,
    MATRIX_SHARE,
    STREAM_SHARE,
    UPDATE_SHARE,
    VLLM_TOKEN,
    WIDTH,
)
from segcredit.plan.job import Job

STEP_BYTES = 46
"""Per parameter: the norm, its limit, AdamW, and rounding into the weights."""
ADD_BYTES = 12
"""Per parameter and micro-batch: a gradient is made, and added up in float32."""


def seconds(job: Job) -> dict[str, float]:
    """Of each phase; grading the responses is left out, since it depends on them."""
    found = {"sample": _sample(job), "annotate": _annotate(job)}
    found["update policy"] = _update(job, operations.update_policy(job), job.policy_trained)
    if job.critic:
        critic = operations.update_critic(job)
        found["update critic"] = _update(job, critic, job.critic_trained)
    return found


def share_at(hidden: int, share: float) -> float:
    """Of the GPU's peak that layers reach, from the share where they are WIDTH wide.

    Matrix products grow with the square of the width, everything else with the width.
    """
    rest = (1 / share - 1 / MATRIX_SHARE) * WIDTH / hidden
    return 1 / (1 / MATRIX_SHARE + rest)


def _speed(job: Job, share: float) -> float:
    """Operations per second."""
    peak = job.gpu.bfloat16 if job.half else job.gpu.float32
    return share_at(job.shape.hidden, share) * peak * 1e12


def _launches(job: Job, passes: float) -> float:
    """Seconds that the host needs to start so many forward passes."""
    tower = job.shape.tower.depth if job.shape.tower else 0
    return passes * (job.shape.layers + tower) * LAUNCH


def _sample(job: Job) -> float:
    """A GPU's share of the responses, some rows at once."""
    rounds = math.ceil(job.own_responses / job.rows_at_once)
    decode = _decode_by_vllm(job) if job.vllm else _decode(job)
    return rounds * (_prefill(job) + decode)


def _prefill(job: Job) -> float:
    """Each distinct prompt once, padded to the longest, but by vLLM."""
    shape, lengths = job.shape, job.lengths
    length = lengths.prompt if job.vllm else lengths.longest
    each = operations.text_forward(job, length) + operations.tower_forward(job)
    total = job.prompts_at_once * each + job.rows_at_once * 2 * shape.embedding
    return max(total / _speed(job, ANNOTATE_SHARE), _launches(job, 1))


def _decode(job: Job) -> float:
    """One token of every row after another, until the longest response ends at the limit.

    The share of rows that still write falls as (1 − u)^k from the first token, u = 0, to the
    limit, u = 1, with k such that the mean length comes out.
    """
    shape, size, limit = job.shape, job.bytes, job.max_tokens
    share = job.lengths.response / limit
    # Σ over steps of rows that write, and of their cache's columns
    written = job.rows_at_once * job.lengths.response
    columns = written * job.lengths.longest + job.rows_at_once * limit**2 * share**2 / (1 + share)
    column = shape.layers * 2 * size * shape.key_width
    copies = shape.heads // shape.key_heads if job.copied_keys else 0
    traffic = column * (1 + 2 * copies)  # read; each copy is written and read again
    bandwidth = job.gpu.bandwidth * 1e9
    weights = limit * size * (shape.parameters - (shape.tower.parameters if shape.tower else 0))
    reading = weights / (STREAM_SHARE * bandwidth) + columns * traffic / (CACHE_SHARE * bandwidth)
    work = written * 2 * (shape.layer_weights + shape.embedding)
    return limit * shape.layers * LAUNCH + reading + work / _speed(job, ANNOTATE_SHARE)


def _decode_by_vllm(job: Job) -> float:
    """Rows that have ended make room for others, and only what is written is read.

    Weights are read while products are made. Its graphs need no launches, but one thread of the
    host, in the trainer's process, deals with every token before the next can be drawn.
    """
    shape, size = job.shape, job.bytes
    written = job.rows_at_once * job.lengths.response
    columns = written * (job.lengths.prompt + job.lengths.response / 2)
    cache = columns * shape.layers * 2 * size * shape.key_width
    own = shape.parameters - (shape.tower.parameters if shape.tower else 0)
    bandwidth = STREAM_SHARE * job.gpu.bandwidth * 1e9
    work = written * 2 * (shape.layer_weights + shape.embedding) / _speed(job, ANNOTATE_SHARE)
    reading = job.lengths.response * size * own / bandwidth
    return max(work, reading) + cache / bandwidth + written * VLLM_TOKEN


def _annotate(job: Job) -> float:
    """Time of the scoring passes. A tracker scores the previous and the current responses."""
    tracked = 2 * job.tracked
    passes = job.rescored + job.reference + tracked
    total = passes * operations.annotate_policy(job)
    total += operations.annotate_critic(job) if job.critic else 0.0
    speed = _speed(job, ANNOTATE_SHARE * (COMPILED_ANNOTATE if job.compile else 1.0))
    micros = job.micro_count(job.responses, job.mean_row)
    turns = math.ceil(micros / job.gpus)
    total = total * turns / micros
    # π_ref goes without an adapter, unless it is one
    adapted = job.rescored + job.critic + tracked
    adapted += job.reference and job.adapter is not None and job.adapter.reference
    adding = _beside(job, job.responses * job.mean_row)
    adding *= adapted * turns / micros
    models = passes + job.critic
    launches = _launches(job, turns * models)
    return max(total / speed + adding, launches, _gathering(job, turns * models))


def _beside(job: Job, tokens: float) -> float:
    """Seconds in which LoRA's products are scaled and added, in one pass over so many tokens."""
    if not job.adapter:
        return 0.0
    traffic = ADAPTER_PASSES * job.bytes * job.adapter.outputs * tokens
    return traffic / (STREAM_SHARE * job.gpu.bandwidth * 1e9)


def _update(job: Job, total: float, trained: int) -> float:
    """One model's gradient steps; GPUs share out the micro-batches of each mini-batch."""
    micros = job.micro_count(job.per_minibatch, job.mean_row)
    turns = math.ceil(micros / job.gpus)
    steps = job.epochs * job.minibatches
    speed = _speed(job, UPDATE_SHARE * (COMPILED_UPDATE if job.compile else 1.0))
    passes = 4 if job.recompute else 3
    adding = (passes - 1) * _beside(job, job.epochs * job.responses * job.mean_row)
    busy = (total / speed + adding) * turns / micros
    computing = max(busy, _launches(job, steps * turns * passes))
    stream = STREAM_SHARE * job.gpu.bandwidth * 1e9
    stepping = steps * trained * (STEP_BYTES / job.shares + turns * ADD_BYTES) / stream
    if job.shards:  # forward, backward, and a float32 sum, while the GPU computes
        talking = _gathering(job, steps * turns * (2 + 4 / job.bytes))
        return max(computing, talking) + stepping + _moving(job, trained)
    return computing + stepping + _adding(job, trained) * steps + _moving(job, trained)


def _gathering(job: Job, times: float) -> float:
    """Divided weights of one model, from all GPUs to all, so many times."""
    if not job.shards:
        return 0.0
    others = (job.gpus - 1) / job.gpus * job.bytes * job.shape.parameters
    return times * others / (LINK_SHARE * job.gpu.link * 1e9)


def _adding(job: Job, trained: int) -> float:
    """A sum of float32 gradients over the GPUs, around a ring."""
    if job.gpus == 1:
        return 0.0
    there_and_back = 2 * (job.gpus - 1) / job.gpus * 4 * trained
    return there_and_back / (LINK_SHARE * job.gpu.link * 1e9)


def _moving(job: Job, trained: int) -> float:
    """Moments and originals from main memory and back: once a step, or in every gradient step."""
    if not job.offload:
        return 0.0
    times = job.minibatches * job.epochs if job.stream else 1
    size = 12 if job.half and not job.shards else 8
    return times * 2 * size * trained / job.shares / (LINK_SHARE * job.gpu.host * 1e9)
