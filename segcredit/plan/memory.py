"""Memory on each GPU at the peak of every phase of a step.

Activations are counted operation by operation as transformers computes its layers: a norm keeps
its input in float32, the normalized input and its result; attention keeps queries, keys, values
and its output; a gated feed-forward layer keeps four states of its width. With LoRA, a layer also
keeps the states between A and B, and its frozen norms no longer keep their normalized input.
"""

import math
from dataclasses import dataclass

from segcredit.plan.job import Job

FIXED = 0.07 * 2**30
"""Bytes allocated besides models: library workspaces, masks, buffers."""
PER_TOKEN = 64
"""Bytes per token of the batch (responses × max_tokens): tokens, log-probabilities, credit."""
CONTEXT = 0.6 * 2**30
"""Bytes of the CUDA context, which torch does not count (assumed)."""
COMMUNICATION = 0.5 * 2**30
"""Bytes of NCCL buffers with several GPUs (assumed)."""
FRAGMENTED = 0.03
"""Share of the peak lost to fragmentation (assumed)."""

PARTS = (
    *("weights", "originals", "moments", "gradients"),
    *("activations", "logits", "cache", "workspace"),
)
CACHE_STEP = 64
"""Columns by which the KV cache grows (rollout/prefill.py)."""


@dataclass(frozen=True)
class MemoryUse:
    """Memory in use at one point of a phase."""

    when: str
    parts: dict[str, float]
    """Bytes by part."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def memory(job: Job) -> dict[str, MemoryUse]:
    """Predict the peak of each phase."""
    phases = {"sample": _sample(job), "annotate": _annotate(job), "update policy": _policy(job)}
    if job.critic:
        phases["update critic"] = _backward(job, "critic", job.critic_trained, 0.0, 0.0)
    return {name: max(uses, key=lambda x: x.total) for name, uses in phases.items()}


def between(job: Job, stepped: bool = True) -> float:
    """Compute the bytes held between phases; before the first step there are no moments."""
    held = _held(job)
    return sum(x for name, x in held.items() if stepped or name != "moments")


def needed(job: Job) -> float:
    """Compute the bytes a GPU must have: the peak and the margin."""
    return _with_margin(max(use.total for use in memory(job).values()))


def available(job: Job) -> float:
    """Return the bytes of GPU memory."""
    return job.gpu.memory * 2**30


def over(job: Job) -> list[str]:
    """List the phases that do not fit."""
    return [name for name, x in memory(job).items() if _with_margin(x.total) > available(job)]


def fits(job: Job) -> bool:
    """Whether every phase fits."""
    return not over(job)


def _with_margin(peak: float) -> float:
    return peak * (1 + FRAGMENTED) + CONTEXT


def _held(job: Job, updating: str = "") -> dict[str, float]:
    """Compute the bytes of models and optimizers on the GPU.

    With offloading, only the optimizer of the model ``updating`` is there, or none if streamed.
    """
    models = {"policy": job.policy_trained} | ({"critic": job.critic_trained} if job.critic else {})
    updating = "" if job.stream else updating
    here = [name for name in models if not job.offload or name == updating]
    count = sum(models[name] for name in here)
    batch = PER_TOKEN * job.responses * job.max_tokens
    sizes = [x for name in here for x in job.trained_sizes(name == "critic")]
    return {
        "weights": _weights(job) + _copied_weights(job),
        # float32 weights need no separate master weights
        "originals": 4 * count if job.half else 0,
        "moments": 2.0 * sum(map(job.moment, sizes)) if job.eight_bit else 8 * count,
        "workspace": FIXED + batch + (COMMUNICATION if job.gpus > 1 else 0),
    }


def _weights(job: Job) -> int:
    """Compute the bytes of all weights; with LoRA, of one model and its adapters."""
    shape, adapter = job.shape, job.adapter
    head = 4 * (shape.hidden + 1) if job.critic else 0
    if adapter:
        sets = 1 + job.critic + (job.reference and adapter.reference)
        return job.bytes * (shape.parameters + sets * adapter.numbers) + head
    whole = shape.parameters * (2 if job.reference else 1)
    return job.bytes * (whole + (shape.trunk_parameters if job.critic else 0)) + head


def _copied_weights(job: Job) -> int:
    """Compute the bytes of the copy that samples ahead: the whole policy, adapters included."""
    if not job.copied:
        return 0
    return job.bytes * (job.shape.parameters + (job.adapter.numbers if job.adapter else 0))


def _use(held: dict[str, float], when: str, **more: float) -> MemoryUse:
    return MemoryUse(when, {name: held.get(name, 0) + more.get(name, 0) for name in PARTS})


def _norm(width: int, size: int, frozen: bool = False) -> int:
    return (4 + (1 if frozen else 2) * size) * width


def _state(job: Job) -> int:
    """Compute the bytes per token passed from one text layer to the next."""
    return job.bytes * job.shape.hidden


def _layer_kept(job: Job) -> int:
    """Compute the bytes per token that a text layer keeps for its backward pass."""
    size, shape = job.bytes, job.shape
    query, key = shape.query_width, shape.key_width
    # with padding, keys and values are expanded to one per query head
    shared = key if job.packed else query
    norms = 2 * _norm(shape.hidden, size, frozen=job.adapter is not None)
    kept = norms + size * (2 * query + 2 * shared) + 4 * shape.heads
    if job.adapter:
        kept += size * job.adapter.inner // shape.layers
    if shape.head_norms:
        kept += (4 + size) * (query + key)
    return kept + 4 * size * shape.intermediate


def _layer_forward(job: Job) -> int:
    """Compute the temporary bytes per token of a text layer without gradients."""
    size, shape = job.bytes, job.shape
    attention = 4 * shape.query_width + 4 * shape.key_width
    wide = 4 if job.adapter else 3  # LoRA's product, besides the output it is added to
    return size * (max(wide * shape.intermediate, attention) + 5 * shape.hidden)


def _text_kept(job: Job) -> int:
    """Compute the bytes per token that all text layers keep."""
    per_layer = _state(job) if job.recompute else _layer_kept(job)
    return job.shape.layers * per_layer + 2 * job.bytes * job.shape.head_width + 64


def _text_backward(job: Job) -> int:
    """Compute the bytes per token that the backward pass of one text layer adds."""
    recomputed = _layer_kept(job) if job.recompute else 0
    return recomputed + job.bytes * (2 * job.shape.intermediate + job.shape.hidden)


def _patches(job: Job, rows: float) -> float:
    """Count the image patches of this many rows."""
    return rows * job.lengths.images * job.shape.tower.merge if job.shape.tower else 0.0


def _pixels(job: Job, rows: float) -> float:
    """Compute the bytes of the images' pixels in float32."""
    return _patches(job, rows) * 4 * (job.shape.tower.pixels if job.shape.tower else 0)


def _tower_inputs(job: Job, patches: float, held: dict[str, float], when: str) -> list[MemoryUse]:
    """Compute the vision tower's peak without gradients; rotary embeddings are in float32."""
    tower, size = job.shape.tower, job.bytes
    if tower is None or not patches:
        return []
    block = max(3 * size * tower.intermediate, 24 * tower.hidden) + 5 * size * tower.hidden
    pixels = (4 + size) * tower.pixels
    return [_use(held, when, activations=patches * (block + pixels))]


def _block_kept(job: Job) -> int:
    """Compute the bytes per image patch that a vision block keeps for the backward pass."""
    tower, size = job.shape.tower, job.bytes
    if tower is None:
        return 0
    norms = 2 * _norm(tower.hidden, size, frozen=job.adapter is not None)
    return norms + size * 4 * (tower.hidden + tower.intermediate)


def _tower_kept(job: Job) -> float:
    """Compute the bytes that the vision tower keeps for one micro-batch; none if it is frozen."""
    tower, size = job.shape.tower, job.bytes
    if tower is None or job.tower_frozen:
        return 0.0
    per_block = size * tower.hidden if job.recompute else _block_kept(job)
    merger = _norm(tower.hidden, size) + 2 * size * tower.hidden
    rotations = 8 * tower.head_width
    per_patch = tower.depth * per_block + merger + rotations + size * tower.pixels
    return _patches(job, job.micro_rows(job.per_minibatch)) * per_patch


def _sample(job: Job) -> list[MemoryUse]:
    """Compute the peaks of sampling: padded prompts, and a KV cache of maximum length."""
    shape, size, held = job.shape, job.bytes, _held(job)
    if job.vllm:
        return [_use(held, "vLLM at work", cache=job.vllm * available(job))]
    few, rows, longest = job.prompts_at_once, job.rows_at_once, job.lengths.longest
    prompts = few * longest
    mask = few * longest**2
    full = rows * (longest + job.max_tokens)
    grown = (full + rows * CACHE_STEP) * job.cached
    copied = 2 * size * shape.query_width if job.copied_keys else 0  # of one layer
    logits = rows * shape.vocabulary * (size + 4 + 4 + 16)  # probabilities are summed in float64
    uses = [
        _use(
            held,
            "reading the prompts",
            activations=prompts * _layer_forward(job) + _pixels(job, few) + mask,
            cache=few * (longest + CACHE_STEP) * job.cached,
        ),
        _use(
            held,
            "sampling the last token",
            activations=full * copied,
            cache=grown + grown / shape.layers,
            logits=logits,
        ),
    ]
    return uses + _tower_inputs(job, _patches(job, few), held, "reading the images")


def _annotate(job: Job) -> list[MemoryUse]:
    held = _held(job)
    tokens, rows = job.micro_tokens(job.responses), job.micro_rows(job.responses)
    inside = tokens * _layer_forward(job) + _pixels(job, rows)
    uses = [
        _use(held, "in a layer", activations=inside),
        _use(held, "in the head", activations=2 * tokens * _state(job), logits=_chunk(job, tokens)),
    ]
    return uses + _tower_inputs(job, _patches(job, rows), held, "in the vision tower")


def _chunk(job: Job, tokens: float) -> float:
    """Compute the bytes of one chunk of logits."""
    from segcredit.core.logits import CHUNK

    rows = max(1, CHUNK // job.shape.vocabulary)
    rows = rows if rows < 256 else rows // 256 * 256
    return min(rows, math.ceil(tokens)) * job.shape.vocabulary * job.bytes


def _policy(job: Job) -> list[MemoryUse]:
    """Compute the policy's peaks; the head comes first, and a tied head keeps its gradient."""
    shape = job.shape
    tokens = job.micro_tokens(job.per_minibatch)
    head_trained = 0 if job.adapter else shape.embedding
    rounded = job.bytes * head_trained
    waiting = rounded if shape.tied else 0.0
    done = 0.0 if waiting else 4.0 * head_trained
    last_norm = _norm(shape.hidden, job.bytes, frozen=job.adapter is not None) + _state(job)
    head = _use(
        _held(job, "policy"),
        "in the head",
        activations=tokens * _text_kept(job) + _tower_kept(job) + tokens * last_norm,
        gradients=_accumulated(job, job.policy_trained),
        # summed over chunks in float32, and rounded at the end
        logits=max(_chunk(job, tokens), rounded if job.half else 0) + 4 * head_trained,
    )
    return [head, *_backward(job, "policy", job.policy_trained, waiting, done)]


def _accumulated(job: Job, trained: int) -> float:
    """Compute the bytes of float32 gradients that earlier micro-batches left."""
    return 4.0 * trained if job.accumulates else 0.0


def _backward(job: Job, model: str, trained: int, waiting: float, done: float) -> list[MemoryUse]:
    """Compute the backward pass's peaks: gradients grow while activations shrink.

    ``waiting`` has the bytes of a tied head's gradient, to which the embedding's is added last;
    ``done`` has the bytes of an untied head's gradient.
    """
    held = _held(job, model)
    rounded = 0.0 if job.adapter else float(job.bytes * job.shape.embedding)
    tokens, rows = job.micro_tokens(job.per_minibatch), job.micro_rows(job.per_minibatch)
    before = _accumulated(job, trained)
    layers = 4.0 * job.layers_trained
    current = tokens * _text_backward(job)
    images = _tower_kept(job)
    kept = tokens * _text_kept(job) + images
    # the embedding's gradient before it is added or while it is copied to float32; the first
    # float32 gradient is stored without a copy
    joining = rounded + waiting if job.accumulates else rounded if job.half or waiting else 0.0
    # without recomputation the last layer's states are already among those kept
    passing = _layer_forward(job) if job.recompute else _state(job)
    uses = [
        _use(
            held,
            "at the end of the forward pass",
            activations=kept + tokens * passing + _pixels(job, rows),
            gradients=before,
        ),
        _use(
            held,
            "in the last layer",
            activations=kept + current,
            gradients=(before or done) + waiting,
        ),
        _use(
            held,
            "in the first layer",
            activations=tokens * _state(job) + current + images,
            gradients=(before or layers + done) + waiting,
        ),
        _use(held, "in the embedding", gradients=4.0 * trained + joining),
    ]
    tower = job.shape.tower
    if images and tower:
        recomputed = _block_kept(job) if job.recompute else 0
        per_patch = recomputed + job.bytes * (2 * tower.intermediate + tower.hidden)
        current = _patches(job, rows) * per_patch + tokens * _state(job)
        trained_tower = 4.0 * job.tower_trained
        uses += [
            _use(
                held,
                "in the vision tower's last block",
                activations=images + current,
                gradients=(before or layers + done) + waiting,
            ),
            _use(
                held,
                "in the vision tower's first block",
                activations=current,
                gradients=(before or layers + done + trained_tower) + waiting,
            ),
        ]
    return uses
