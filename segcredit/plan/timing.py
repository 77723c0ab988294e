"""Seconds of each phase of a step, from floating-point operations and bytes moved.

Operations include recomputed ones. Communication between GPUs is not counted: it was never
measured.
"""

import math

from segcredit.plan.job import Job

ANNOTATE_SHARE = 0.345
"""Share of the GPU's peak that forward passes reach."""
UPDATE_SHARE = 0.385
"""Share of the GPU's peak that forward and backward passes reach, recomputation included."""
WIDTH = 2048
"""Hidden size of the model with which both were measured."""
MATRIX_SHARE = 0.7
"""Share of the peak that matrix products alone reach (assumed); wider layers approach it."""
COMPILED_ANNOTATE = 1.28
COMPILED_UPDATE = 1.35
"""Speed-up by model.compile."""
LAUNCH = 0.95e-3
"""Seconds for the CPU to launch one layer's kernels for one forward pass."""
ADAPTER_PASSES = 8
"""Times that LoRA reads or writes a layer's output per forward or backward pass; measured on the
linear layers of a 7B model alone."""
CACHE_SHARE = 0.26
"""Share of the memory bandwidth at which sampling reads its KV cache."""
VLLM_TOKEN = 1.2e-5
"""CPU seconds per token that vLLM samples."""
LINK_SHARE = 0.7
"""Share of nominal speed that copies between CPU and GPU reach (assumed)."""
STREAM_SHARE = 0.8
"""Share of the memory bandwidth that element-wise passes reach (assumed)."""

STEP_BYTES = 46
"""Bytes moved per parameter by an optimizer step: norm, clipping, AdamW, rounding."""
ADD_BYTES = 12
"""Bytes moved per parameter and micro-batch to compute a gradient and add it in float32."""


def seconds(job: Job) -> dict[str, float]:
    """Predict the time of each phase; grading depends on the responses and is left out."""
    phases = {"sample": _sample(job), "annotate": _annotate(job)}
    phases["update policy"] = _update(job, update_policy(job), job.policy_trained)
    if job.critic:
        phases["update critic"] = _update(job, update_critic(job), job.critic_trained)
    return phases


def text_forward(job: Job, length: float) -> float:
    """Count the operations of the text layers on one row."""
    return _products(job, length) + _attention(job, length) + _lora_products(job, length)


def _products(job: Job, length: float) -> float:
    return 2 * job.shape.layer_weights * length


def _attention(job: Job, length: float) -> float:
    """Count the operations of attention; a causal mask halves them."""
    return 2 * job.shape.layers * job.shape.query_width * length * length


def _lora_products(job: Job, length: float) -> float:
    return 2 * job.adapter.text * length if job.adapter else 0.0


def _tower_forward(job: Job) -> float:
    """Count the operations of the vision tower on one prompt's images, without its attention."""
    tower = job.shape.tower
    if tower is None:
        return 0.0
    return 2 * (tower.patch_weights * tower.merge + tower.token_weights) * job.lengths.images


def _head_forward(job: Job) -> float:
    return 2 * job.shape.embedding * job.lengths.response


def trunk_forward(job: Job) -> float:
    """Count the operations on one prompt and response below the head, without the last token."""
    return text_forward(job, job.mean_row - 1) + _tower_forward(job)


def update_critic(job: Job) -> float:
    """Count the operations of the critic's update: forward, backward (twice that), recomputation.

    Frozen weights have no gradient, which saves half of the backward pass.
    """
    passes = 4 if job.recompute else 3
    frozen = 1 if job.adapter else 0
    length = job.mean_row - 1
    text = (passes - frozen) * _products(job, length)
    text += passes * (_attention(job, length) + _lora_products(job, length))
    tower = _tower_forward(job) * (1 if job.tower_frozen else passes - frozen)
    return job.epochs * job.responses * (text + tower)


def update_policy(job: Job) -> float:
    """Count the operations of the policy's update.

    These are the operations of the critic's update plus those of the language-model head, whose
    logits are always computed twice.
    """
    passes = 3 if job.adapter else 4
    return update_critic(job) + job.epochs * job.responses * passes * _head_forward(job)


def share_at(hidden: int, share: float) -> float:
    """Convert a share of the GPU's peak at hidden size WIDTH to another hidden size.

    Matrix products grow with the square of the width, everything else with the width.
    """
    rest = (1 / share - 1 / MATRIX_SHARE) * WIDTH / hidden
    return 1 / (1 / MATRIX_SHARE + rest)


def annotate_share(job: Job) -> float:
    """Return the share of the GPU's peak speed that this job's forward passes reach."""
    return share_at(job.shape.hidden, ANNOTATE_SHARE * (COMPILED_ANNOTATE if job.compile else 1.0))


def update_share(job: Job) -> float:
    """Return the share of the GPU's peak speed that this job's updates reach."""
    return share_at(job.shape.hidden, UPDATE_SHARE * (COMPILED_UPDATE if job.compile else 1.0))


def peak_flops(job: Job) -> float:
    """Peak TFLOP/s of the GPU in the job's dtype."""
    return job.gpu.bfloat16 if job.half else job.gpu.float32


def _sampling_speed(job: Job) -> float:
    """Return the operations per second while sampling, which is not compiled."""
    return share_at(job.shape.hidden, ANNOTATE_SHARE) * peak_flops(job) * 1e12


def _stream(job: Job) -> float:
    """Return the bytes per second of element-wise passes."""
    return STREAM_SHARE * job.gpu.bandwidth * 1e9


def _launches(job: Job, passes: float) -> float:
    """Estimate the seconds for the CPU to launch this many forward passes."""
    tower = job.shape.tower.depth if job.shape.tower else 0
    return passes * (job.shape.layers + tower) * LAUNCH


def _sample(job: Job) -> float:
    rounds = math.ceil(job.own_responses / job.rows_at_once)
    decode = _decode_with_vllm(job) if job.vllm else _decode(job)
    return rounds * (_prefill(job) + decode)


def _prefill(job: Job) -> float:
    """Read each distinct prompt once, padded to the longest except by vLLM."""
    length = job.lengths.prompt if job.vllm else job.lengths.longest
    each = text_forward(job, length) + _tower_forward(job)
    total = job.prompts_at_once * each + job.rows_at_once * 2 * job.shape.embedding
    return max(total / _sampling_speed(job), _launches(job, 1))


def _decode(job: Job) -> float:
    """Sample token by token until the longest response ends at the limit.

    The share of unfinished rows falls as (1 − u)^k from the first token, u = 0, to the limit,
    u = 1, with k chosen to match the mean length.
    """
    shape, size, limit = job.shape, job.bytes, job.max_tokens
    share = job.lengths.response / limit
    # sums over steps: of unfinished rows, and of their KV cache's columns
    written = job.rows_at_once * job.lengths.response
    columns = written * job.lengths.longest + job.rows_at_once * limit**2 * share**2 / (1 + share)
    copies = shape.heads // shape.key_heads if job.copied_keys else 0
    traffic = job.cached * (1 + 2 * copies)  # each copy is written and read again
    weights = limit * size * (shape.parameters - shape.tower_parameters)
    cache = columns * traffic / (CACHE_SHARE * job.gpu.bandwidth * 1e9)
    work = written * 2 * (shape.layer_weights + shape.embedding)
    reading = weights / _stream(job) + cache
    return limit * shape.layers * LAUNCH + reading + work / _sampling_speed(job)


def _decode_with_vllm(job: Job) -> float:
    """Estimate decoding with vLLM: new rows replace finished rows, and no padding is read.

    Weights are read while products are computed. CUDA graphs need no launches, but one CPU thread,
    in the trainer's process, handles every token before the next is sampled.
    """
    shape, size = job.shape, job.bytes
    written = job.rows_at_once * job.lengths.response
    columns = written * (job.lengths.prompt + job.lengths.response / 2)
    weights = size * (shape.parameters - shape.tower_parameters)
    work = written * 2 * (shape.layer_weights + shape.embedding) / _sampling_speed(job)
    reading = job.lengths.response * weights / _stream(job)
    return max(work, reading) + columns * job.cached / _stream(job) + written * VLLM_TOKEN


def _annotate(job: Job) -> float:
    """Estimate the scoring passes; a value tracker scores previous and current responses."""
    tracked = 2 * job.tracked
    passes = job.rescored + job.reference + job.hides_images + tracked
    total = passes * job.responses * (trunk_forward(job) + _head_forward(job))
    total += job.responses * trunk_forward(job) if job.critic else 0.0
    micros = job.micro_count(job.responses, job.mean_row)
    turns = math.ceil(micros / job.gpus)
    # π_ref runs without an adapter, unless it is one
    adapted = job.rescored + job.critic + job.hides_images + tracked
    adapted += job.reference and job.adapter is not None and job.adapter.reference
    adding = _lora_traffic(job, job.responses * job.mean_row) * adapted
    busy = (total / (annotate_share(job) * peak_flops(job) * 1e12) + adding) * turns / micros
    return max(busy, _launches(job, turns * (passes + job.critic)))


def _lora_traffic(job: Job, tokens: float) -> float:
    """Estimate the seconds to scale and add LoRA's products in one pass over this many tokens."""
    if not job.adapter:
        return 0.0
    return ADAPTER_PASSES * job.bytes * job.adapter.outputs * tokens / _stream(job)


def _update(job: Job, total: float, trained: int) -> float:
    """Estimate one model's gradient steps; micro-batches are divided among the GPUs."""
    micros = job.micro_count(job.per_minibatch, job.mean_row)
    turns = math.ceil(micros / job.gpus)
    steps = job.epochs * job.minibatches
    passes = 4 if job.recompute else 3
    adding = (passes - 1) * _lora_traffic(job, job.epochs * job.responses * job.mean_row)
    busy = (total / (update_share(job) * peak_flops(job) * 1e12) + adding) * turns / micros
    computing = max(busy, _launches(job, steps * turns * passes))
    stepping = steps * trained * (STEP_BYTES + turns * ADD_BYTES) / _stream(job)
    return computing + stepping + _offloading(job, trained)


def _offloading(job: Job, trained: int) -> float:
    """Estimate copying moments and master weights to the GPU and back, per (gradient) step."""
    if not job.offload:
        return 0.0
    times = job.minibatches * job.epochs if job.stream else 1
    size = 12 if job.half else 8
    return times * 2 * size * trained / (LINK_SHARE * job.gpu.host * 1e9)
