"""More of anything never takes less memory or time."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from any_jobs import jobs
from hypothesis import assume, given
from hypothesis import strategies as st

from segcredit.plan import Job, memory, seconds
from segcredit.plan.memory import needed

Change = Callable[[Job, int], Job]
NEARLY = 1 + 1e-9
"""Sums in another order differ in their last digits."""


def field(name: str) -> Change:
    return lambda job, times: replace(job, **{name: getattr(job, name) * times})


def length(*names: str) -> Change:
    def change(job: Job, times: int) -> Job:
        longer = {name: getattr(job.lengths, name) * times for name in names}
        return replace(job, lengths=replace(job.lengths, **longer))

    return change


def shape(*names: str) -> Change:
    def change(job: Job, times: int) -> Job:
        larger: dict[str, Any] = {name: getattr(job.shape, name) * times for name in names}
        sizes = tuple((count * times, vision) for count, vision in job.shape.sizes)
        return replace(job, shape=replace(job.shape, **larger, sizes=sizes))

    return change


def tower(*names: str) -> Change:
    def change(job: Job, times: int) -> Job:
        assume(job.shape.tower is not None)
        larger = {name: getattr(job.shape.tower, name) * times for name in names}
        return replace(job, shape=replace(job.shape, tower=replace(job.shape.tower, **larger)))

    return change


WEIGHTS = ("parameters", "trunk_parameters", "layer_parameters", "layer_weights")
BOTH: dict[str, Change] = {
    "prompts": field("prompts"),
    "max_tokens": field("max_tokens"),
    "prompt and its picture": length("prompt", "longest", "images"),
    "longest prompt": length("longest"),
    "layers": shape("layers", *WEIGHTS),
    "width": shape("hidden", "intermediate", "head_width", *WEIGHTS),
    "feed-forward width": shape("intermediate", *WEIGHTS),
    "vocabulary": shape("vocabulary", "parameters", "trunk_parameters"),
    "tower": tower("depth", "patch_weights"),
    "tower's width": tower("hidden", "intermediate", "patch_weights", "token_weights"),
}


@pytest.mark.parametrize("name", BOTH)
@given(jobs(gpus=1), st.integers(2, 5))
def test_larger_sizes_take_more(name: str, job: Job, times: int):
    larger = BOTH[name](job, times)
    before, after = memory(job), memory(larger)
    for phase in before:
        assert before[phase].total <= after[phase].total * NEARLY, phase
    assert needed(job) <= needed(larger) * NEARLY
    before_time, after_time = seconds(job), seconds(larger)
    for phase in before_time:
        assert before_time[phase] <= after_time[phase] * NEARLY, phase


@given(jobs(gpus=1), st.integers(2, 5))
def test_more_samples_of_a_prompt_take_more(job: Job, times: int):
    """But those drawn at once share fewer prompts, which are read once."""
    more = replace(job, samples=job.samples * times)
    for phase, moment in memory(job).items():
        if phase != "sample":
            assert moment.total <= memory(more)[phase].total * NEARLY
    assert sum(seconds(job).values()) <= sum(seconds(more).values()) * NEARLY


@given(jobs(), st.integers(2, 5))
def test_more_rows_at_once_take_more_memory(job: Job, times: int):
    more = replace(job, rows=job.rows * times)
    assert memory(job)["sample"].total <= memory(more)["sample"].total * NEARLY


@given(jobs(), st.integers(2, 5))
def test_longer_micro_batches_take_more_memory_while_there_are_several(job: Job, times: int):
    """A mini-batch that is a single one has no gradients waiting, and may take less."""
    more = replace(job, tokens_per_micro=job.tokens_per_micro * times)
    assume(more.accumulates)
    for phase, moment in memory(job).items():
        assert moment.total <= memory(more)[phase].total * NEARLY


@given(jobs(gpus=1), st.floats(1.0, 4.0))
def test_longer_responses_and_more_epochs_take_more_time(job: Job, times: float):
    longest = min(job.max_tokens, job.lengths.response * times)
    longer = replace(job, lengths=replace(job.lengths, response=longest))
    for other in (longer, replace(job, epochs=job.epochs + 1)):
        for phase, found in seconds(job).items():
            assert found <= seconds(other)[phase] * NEARLY


@given(jobs())
def test_settings_for_memory_save_memory_and_cost_time(job: Job):
    plain = replace(job, recompute=False, offload=False)
    for saving in (replace(plain, recompute=True), replace(plain, offload=True)):
        for phase, moment in memory(saving).items():
            assert moment.total <= memory(plain)[phase].total * NEARLY
        assert sum(seconds(plain).values()) <= sum(seconds(saving).values()) * NEARLY


@given(jobs(gpus=1), st.integers(2, 16))
def test_more_gpus_hold_the_same_models_and_take_less_time_to_sample(job: Job, gpus: int):
    many = replace(job, gpus=gpus)
    for part in ("weights", "originals", "moments"):
        assert memory(many)["annotate"].parts[part] == memory(job)["annotate"].parts[part]
    assert seconds(many)["sample"] <= seconds(job)["sample"] * NEARLY
    assert seconds(many)["annotate"] <= seconds(job)["annotate"] * NEARLY


@given(jobs())
def test_no_critic_no_reference(job: Job):
    without = replace(job, critic=False, reference=False)
    assert "update critic" not in memory(without)
    assert "update critic" not in seconds(without)
    weights = memory(without)["sample"].parts["weights"]
    assert weights == job.bytes * job.shape.parameters
    assert needed(without) <= needed(job)
