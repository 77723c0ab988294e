"""Jobs of all kinds, for properties that hold for every one of them."""

from hypothesis import strategies as st
from small_models import large_shape

from segcredit.plan import GPUS, Job, Lengths


@st.composite
def jobs(draw: st.DrawFn, gpus: int | None = None) -> Job:
    """About Qwen2.5-VL-3B, with or without eyes, on any GPU."""
    seeing = draw(st.booleans())
    prompt = draw(st.integers(8, 2000))
    most = draw(st.integers(8, 8192))
    lengths = Lengths(
        prompt=prompt,
        longest=draw(st.integers(prompt, 4 * prompt)),
        images=draw(st.floats(0, prompt)) if seeing else 0.0,
        response=draw(st.floats(1, most)),
    )
    prompts, samples = draw(st.integers(1, 512)), draw(st.integers(1, 8))
    flags = {
        name: draw(st.booleans())
        for name in (
            *("critic", "reference", "tracked", "rescored", "half", "packed", "compile"),
            *("freeze_vision", "recompute", "offload", "eight_bit", "copied_keys"),
        )
    }
    return Job(
        shape=large_shape(seeing),
        lengths=lengths,
        gpu=GPUS[draw(st.sampled_from(sorted(GPUS)))],
        gpus=gpus or draw(st.integers(1, 16)),
        prompts=prompts,
        samples=samples,
        max_tokens=most,
        rows=draw(st.integers(1, 512)),
        minibatches=draw(st.integers(1, min(8, prompts * samples))),
        epochs=draw(st.integers(1, 3)),
        tokens_per_micro=draw(st.integers(256, 65_536)),
        **flags,
    )
