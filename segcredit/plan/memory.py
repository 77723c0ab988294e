"""Memory on each GPU, part by part, at the fullest moment of every phase of a step."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from segcredit.plan import activations as per
from segcredit.plan import divided
from segcredit.plan.calibration import COMMUNICATION, CONTEXT, FIXED, FRAGMENTED, PER_TOKEN
from segcredit.plan.job import Job

PARTS = (
    "weights",
    "originals",
    "moments",
    "gradients",
    "activations",
    "logits",
    "cache",
    "workspace",
)
PHASES = ("sample", "annotate", "update policy", "update critic")
CACHE_ROOM = 64
"""Columns by which the cache grows (rollout/cache.py)."""


@dataclass(frozen=True)
class Moment:
    """What lies on the device at one moment."""

    when: str
    parts: dict[str, float]
    """Bytes."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def memory(job: Job) -> dict[str, Moment]:
    """The fullest moment of each phase."""
    phases = {"sample": _sample(job), "annotate": _annotate(job), "update policy": _policy(job)}
    if job.critic:
        phases["update critic"] = _critic(job)
    return {name: max(moments, key=lambda x: x.total) for name, moments in phases.items()}


def between(job: Job, stepped: bool = True) -> float:
    """Bytes held between the phases; before the first step there are no moments."""
    held = _held(job)
    return sum(x for name, x in held.items() if stepped or name != "moments")


def needed(job: Job) -> float:
    """Bytes that a GPU must have."""
    peak = max(moment.total for moment in memory(job).values())
    return peak * (1 + FRAGMENTED) + CONTEXT


def room(job: Job) -> float:
    """Bytes that it has."""
    return job.gpu.memory * 2**30


def over(job: Job) -> list[str]:
    """Phases that do not fit."""
    return [
        name
        for name, moment in memory(job).items()
        if moment.total * (1 + FRAGMENTED) + CONTEXT > room(job)
    ]


def fits(job: Job) -> bool:
    """Whether every phase does."""
    return needed(job) <= room(job)


def _held(job: Job, awake: str = "") -> dict[str, float]:
    """Models and optimizers; ``awake``: whose optimizer is on the device if they rest elsewhere."""
    if job.shards:
        return divided.held(job, awake) | _workspace(job)
    trained = {"policy": job.policy_trained}
    if job.critic:
        trained["critic"] = job.critic_trained
    awake = "" if job.stream else awake
    here = sum(x for name, x in trained.items() if not job.offload or name == awake)
    return {
        "weights": _weights(job),
        # float32 weights are their own originals
        "originals": 4 * here if job.half else 0,
        "moments": _moments(job, trained, awake) if job.eight_bit else 8 * here,
    } | _workspace(job)


def _workspace(job: Job) -> dict[str, float]:
    batch = PER_TOKEN * job.responses * job.max_tokens
    return {"workspace": FIXED + batch + (COMMUNICATION if job.gpus > 1 else 0)}


def _moments(job: Job, trained: Iterable[str], awake: str) -> float:
    """Tensor by tensor, as small ones have more than eight bits."""
    here = [name for name in trained if not job.offload or name == awake]
    sizes = [x for name in here for x in job.trained_sizes(critic=name == "critic")]
    return 2.0 * sum(map(job.moment, sizes))


def _weights(job: Job) -> int:
    """Of all models: with LoRA one, and adapters."""
    shape, adapter = job.shape, job.adapter
    head = 4 * (shape.hidden + 1) if job.critic else 0
    if adapter:
        sets = 1 + job.critic + (job.reference and adapter.reference)
        return job.bytes * (shape.parameters + sets * adapter.numbers) + head
    whole = shape.parameters * (2 if job.reference else 1)
    return job.bytes * (whole + (shape.trunk_parameters if job.critic else 0)) + head


def _moment(held: dict[str, float], when: str, **more: float) -> Moment:
    return Moment(when, {name: held.get(name, 0) + more.get(name, 0) for name in PARTS})


def _patches(job: Job, rows: float) -> float:
    """Of the pictures of so many rows."""
    return rows * job.lengths.pictures * job.shape.tower.merge if job.shape.tower else 0.0


def _pixels(job: Job, rows: float) -> float:
    """Bytes of their pictures as the model is given them."""
    return _patches(job, rows) * 4 * (job.shape.tower.pixels if job.shape.tower else 0)


def _sample(job: Job) -> list[Moment]:
    """Prompts are read padded to the longest; then the cache grows, at worst to the limit."""
    shape, size, held = job.shape, job.bytes, _held(job)  # no weights are gathered meanwhile
    if job.vllm:
        return [_moment(held, "vLLM at work", cache=job.vllm * room(job))]
    few, rows, longest = job.prompts_at_once, job.rows_at_once, job.lengths.longest
    column = shape.layers * 2 * size * shape.key_width
    asked = few * longest
    patches, pixels = _patches(job, few), _pixels(job, few)
    mask = few * longest**2
    begun = few * (longest + CACHE_ROOM) * column
    full = rows * (longest + job.max_tokens)
    grown = (full + rows * CACHE_ROOM) * column
    copied = 2 * size * shape.query_width if job.copied_keys else 0  # of one layer
    drawn = rows * shape.vocabulary * (size + 4 + 4 + 16)  # probabilities are summed in float64
    moments = [
        _moment(
            held,
            "reading the prompts",
            activations=asked * per.layer_forward(job) + pixels + mask,
            cache=begun,
        ),
        _moment(
            held,
            "drawing the last token",
            activations=full * copied,
            cache=grown + grown / shape.layers,
            logits=drawn,
        ),
    ]
    if patches:
        inside = patches * (per.block_forward(job) + per.patch_inputs(job))
        moments.append(_moment(held, "reading the pictures", activations=inside))
    return moments


def _annotate(job: Job) -> list[Moment]:
    """Forward passes alone."""
    held = divided.with_gathered(job, _held(job))
    tokens, rows = job.micro_tokens(job.responses), job.micro_rows(job.responses)
    patches, pixels = _patches(job, rows), _pixels(job, rows)
    moments = [
        _moment(held, "in a layer", activations=tokens * per.layer_forward(job) + pixels),
        _moment(
            held, "in the head", activations=2 * tokens * per.state(job), logits=_chunk(job, tokens)
        ),
    ]
    if patches:
        inside = patches * (per.block_forward(job) + per.patch_inputs(job))
        moments.append(_moment(held, "in the vision tower", activations=inside))
    return moments


def _chunk(job: Job, tokens: float) -> float:
    """Logits that stand at once: bytes."""
    from segcredit.core.logits import CHUNK

    rows = max(1, CHUNK // job.shape.vocabulary)
    rows = rows if rows < 256 else rows // 256 * 256
    return min(rows, math.ceil(tokens)) * job.shape.vocabulary * job.bytes


def _policy(job: Job) -> list[Moment]:
    """With the head, whose gradient waits for the embedding's where they are one."""
    shape = job.shape
    tokens = job.micro_tokens(job.per_minibatch)
    head_trained = 0 if job.adapter else shape.embedding
    rounded = job.bytes * head_trained
    # divided, it waits in any case: with all that belongs to no layer
    waiting = rounded if shape.tied or job.shards else 0.0
    done = 0.0 if waiting else 4.0 * head_trained
    held = divided.with_gathered(job, _held(job, "policy"))
    before = _before(job, job.policy_trained)
    kept = tokens * per.text_kept(job) + _patches_kept(job)
    head = _moment(
        held,
        "in the head",
        activations=kept + tokens * per.last_norm(job),
        gradients=before,
        # summed over chunks in float32, and rounded at the end
        logits=max(_chunk(job, tokens), rounded if job.half else 0) + 4 * head_trained,
    )
    return [head, *_backward(job, held, job.policy_trained, waiting, done)]


def _critic(job: Job) -> list[Moment]:
    held = divided.with_gathered(job, _held(job, "critic"))
    return _backward(job, held, job.critic_trained, 0.0, 0.0)


def _before(job: Job, trained: int) -> float:
    """Gradients that an earlier micro-batch left: float32."""
    return 4.0 * trained / job.shares if job.adds_up else 0.0


def _patches_kept(job: Job) -> float:
    return _patches(job, job.micro_rows(job.per_minibatch)) * per.tower_kept(job)


def _backward(
    job: Job, held: dict[str, float], trained: int, waiting: float, done: float
) -> list[Moment]:
    """From the last layer to the embedding; gradients grow while activations go.

    ``waiting``: the head's gradient until the embedding's joins it; ``done``: one of its own.
    """
    rounded = 0.0 if job.adapter else float(job.bytes * job.shape.embedding)
    tokens = job.micro_tokens(job.per_minibatch)
    every = 4.0 * trained / job.shares
    before = _before(job, trained)
    layers = 4.0 * job.layers_trained / job.shares
    summed = divided.layer_gradients(job)
    at_work = tokens * per.text_backward(job)
    pictures = _patches_kept(job)
    kept = tokens * per.text_kept(job) + pictures
    # the embedding's gradient before it is added, or while it is copied to float32; a first
    # float32 one is taken as it is
    joining = rounded + waiting if job.adds_up else rounded if job.half or waiting else 0.0
    joining += divided.last_gradients(job)
    # without recomputation the last layer's own states are among the kept ones already
    passing = per.layer_forward(job) if job.recompute else per.state(job)
    moments = [
        _moment(
            held,
            "at the end of the forward pass",
            activations=kept + tokens * passing + _pixels(job, job.micro_rows(job.per_minibatch)),
            gradients=before,
        ),
        _moment(
            held,
            "in the last layer",
            activations=kept + at_work,
            gradients=(before or done) + waiting + summed,
        ),
        _moment(
            held,
            "in the first layer",
            activations=tokens * per.state(job) + at_work + pictures,
            gradients=(before or layers + done) + waiting + summed,
        ),
        _moment(held, "in the embedding", gradients=every + joining),
    ]
    if pictures:
        patches = _patches(job, job.micro_rows(job.per_minibatch))
        at_work = patches * per.tower_backward(job) + tokens * per.state(job)
        tower = 4.0 * job.tower_trained / job.shares
        moments += [
            _moment(
                held,
                "in the vision tower's last block",
                activations=pictures + at_work,
                gradients=(before or layers + done) + waiting,
            ),
            _moment(
                held,
                "in the vision tower's first block",
                activations=at_work,
                gradients=(before or layers + done + tower) + waiting,
            ),
        ]
    return moments
