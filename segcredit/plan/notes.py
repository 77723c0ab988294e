"""What a reader of a prediction must know: where numbers come from, and what is wasted."""

import math

from segcredit.plan.calibration import (
    ANNOTATE_SHARE,
    CACHE_SHARE,
    COMPILED_ANNOTATE,
    COMPILED_UPDATE,
    CONTEXT,
    FRAGMENTED,
    LAUNCH,
    LINK_SHARE,
    UPDATE_SHARE,
    VLLM_TOKEN,
)
from segcredit.plan.job import Job
from segcredit.plan.timing import share_at


def assumptions(job: Job) -> list[str]:
    """Each in one line."""
    lengths = job.lengths
    wide = job.shape.hidden
    annotate = share_at(wide, ANNOTATE_SHARE * (COMPILED_ANNOTATE if job.compile else 1))
    update = share_at(wide, UPDATE_SHARE * (COMPILED_UPDATE if job.compile else 1))
    peak = job.gpu.bfloat16 if job.half else job.gpu.float32
    kind = "bfloat16" if job.half else "float32"
    here = "" if job.gpu.name == "H200" and job.half else ", carried over from bfloat16 on an H200"
    pictures = f", {lengths.pictures:.0f} of them pictures" if lengths.pictures else ""
    found = [
        f"prompts: {lengths.prompt:.0f} tokens{pictures}, the longest {lengths.longest} "
        f"({lengths.prompt_from})",
        f"responses: {lengths.response:.0f} tokens ({lengths.response_from}); memory counts all of "
        f"them at rollout.max_tokens={job.max_tokens}",
        f"forward passes reach {annotate:.1%}, updates {update:.1%} of {peak:,g} TFLOP/s in "
        f"{kind}{here}",
        f"sampling by vLLM: {VLLM_TOKEN * 1e6:g} µs of the host for every token"
        if job.vllm
        else f"sampling: {LAUNCH * 1e3:g} ms per layer and token on the host, the cache read at "
        f"{CACHE_SHARE:.0%} of {job.gpu.bandwidth:,g} GB/s; not measured since keys are no longer "
        f"copied",
        f"a GPU must have the peak, {FRAGMENTED:.0%} for fragments, and {CONTEXT / 2**30:.1f} GiB "
        f"for CUDA itself",
        "not counted: grading the responses, evaluations, checkpoints, decoding of pictures",
    ]
    found += [f"not counted either: {what}" for what in job.uncounted]
    if job.adapter:
        found.append(
            f"LoRA: one frozen model, and {job.adapter.numbers / 1e6:,.1f} M parameters in each "
            f"adapter; the host's work for them while sampling is not counted"
        )
    if job.compile:
        found.append("model.compile: its gain in speed is counted, its smaller memory is not")
    if job.shards:
        found.append(
            f"memory.shard: weights are gathered and gradients summed at {LINK_SHARE:.0%} of "
            f"{job.gpu.link:,g} GB/s while the GPU computes; counted, and never measured"
        )
    if not job.shape.full_attention:
        found.append(
            "this model has layers other than full attention; they are counted as if they were"
        )
    return found


def warnings(job: Job) -> list[str]:
    """What works, but not as one might think."""
    found = []
    if job.gpus > 1:
        if not job.shards:
            way_out = "" if job.adapter else "; memory.shard=true divides them"
            found.append(
                f"each of the {job.gpus} GPUs holds whole models and optimizers, so more GPUs save "
                f"time, not memory{way_out}"
            )
        micros = job.micro_count(job.per_minibatch, job.mean_row)
        if micros % job.gpus:
            turns = math.ceil(micros / job.gpus)
            found.append(
                f"a mini-batch makes {micros} micro-batches for {job.gpus} GPUs, so "
                f"{turns * job.gpus - micros} of {turns * job.gpus} turns are idle: set "
                f"update.tokens_per_micro so that they share out evenly"
            )
    if not job.half:
        found.append(
            f"float32: {job.gpu.name} multiplies bfloat16 "
            f"{job.gpu.bfloat16 / job.gpu.float32:.0f} times as fast; model.dtype=bfloat16 keeps "
            f"float32 originals in the optimizer"
        )
    if job.longest_row > job.tokens_per_micro:
        found.append(
            f"one prompt and response may have {job.longest_row:,} tokens, more than "
            f"update.tokens_per_micro={job.tokens_per_micro:,}: such a row is a micro-batch of its "
            f"own, and sets the peak"
        )
    return found
