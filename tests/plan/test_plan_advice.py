"""Advice that is followed must help."""

from dataclasses import replace
from itertools import product
from typing import Any

from accuracy import MODELS
from any_jobs import jobs
from hypothesis import HealthCheck, assume, given, settings
from small_models import large_shape

from segcredit.config import parse_recipe
from segcredit.plan import GPUS, Job, Lengths, advise, fits, memory, plan
from segcredit.plan.memory import over
from segcredit.plan.predict import large_enough

FIELDS = {
    "update.tokens_per_micro": "tokens_per_micro",
    "memory.recompute_activations": "recompute",
    "memory.offload_optimizer": "offload",
    "rollout.rows": "rows",
}


few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
"""Each plans a job many times over; jobs that are far too large are not drawn often."""


def applied(job: Job, changes: dict[str, Any]) -> Job:
    return replace(job, **{FIELDS[key]: value for key, value in changes.items()})


def common(**settings: Any) -> Job:
    given = {"prompts": 512, "max_tokens": 2048, "tokens_per_micro": 16_384} | settings
    return Job(large_shape(), Lengths(240, 720, 204, 1024), GPUS["H200"], **given)


@few
@given(jobs())
def test_what_fits_needs_no_advice_and_advice_fits(job: Job):
    trials = advise(job)
    if fits(job):
        assert trials == []
        return
    fitting = [x for x in trials if x.fits]
    assert trials[len(trials) - len(fitting) :] == fitting, "what fits stands at the end"
    times = [x.step for x in fitting]
    assert times == sorted(times, reverse=True), "and the fastest last"
    for trial in trials:
        changed = applied(job, trial.changes)
        assert changed == trial.job
        assert trial.fits == fits(changed)
        assert trial.peak == max(x.total for x in memory(changed).values())
        assert trial.changes, "a trial changes something"


@few
@given(jobs())
def test_nothing_is_left_untried(job: Job):
    """Where advice gives up, no settings of this kind would do."""
    trials = advise(job)
    assume(trials and not trials[-1].fits)
    for recompute, offload in product({job.recompute, True}, {job.offload, True}):
        begun = replace(job, recompute=recompute, offload=offload, rows=1)
        micro = job.tokens_per_micro
        while micro >= 256:
            other = replace(begun, tokens_per_micro=micro)
            assert not fits(other)
            micro //= 2


@few
@given(jobs())
def test_a_larger_gpu_that_is_named_would_do(job: Job):
    found = large_enough(job)
    assume(found is not None)
    assert found.job.gpu.memory > job.gpu.memory
    assert fits(applied(replace(job, gpu=found.job.gpu), found.changes))


def test_what_costs_least_is_tried_first():
    # a little too much in the update: smaller micro-batches suffice
    job = common(recompute=True, tokens_per_micro=65_536, rows=32)
    assert [x.changes for x in advise(job)] == [{"update.tokens_per_micro": 32_768}]
    # tiny ones would be slower than recomputation
    tried = advise(common(rows=32, max_tokens=512))
    assert [sorted(x.changes) for x in tried] == [
        ["update.tokens_per_micro"],
        ["memory.recompute_activations"],
    ]
    assert all(x.fits for x in tried)
    # far too much: then recomputation, with no smaller micro-batches than needed
    tried = [x.changes for x in advise(common(rows=32))]
    assert tried[-1] == {"memory.recompute_activations": True}
    # too much even between the phases: offloading
    smaller = replace(common(recompute=True, freeze_vision=True), gpu=GPUS["H100-80G"])
    tried = [x.changes for x in advise(smaller)]
    assert [sorted(x) for x in tried] == [
        ["update.tokens_per_micro"],
        ["memory.offload_optimizer"],
    ]


def test_rows_are_given_up_last_and_only_for_sampling():
    job = common(recompute=True, offload=True, rows=512, max_tokens=8192)
    assert over(job) == ["sample"]
    (trial,) = advise(job)
    assert set(trial.changes) == {"rollout.rows"}
    assert trial.fits


def test_settings_are_typed_as_a_recipe_takes_them():
    """From the recipe to the advice and back, as a user would."""
    recipe: dict[str, Any] = {
        "model": {"path": str(MODELS / "Qwen" / "Qwen2.5-VL-3B-Instruct"), "dtype": "bfloat16"},
        "data": {"train": ["rows.jsonl"]},
        "stages": [{"kind": "optimize", "steps": 1}],
        "rollout": {"prompts": 512, "max_tokens": 4096},
    }
    found = plan(parse_recipe(recipe), "1xH200")
    assert not found.fits
    assert found.trials[-1].fits
    for setting in found.trials[-1].settings:
        path, value = setting.split("=")
        section, key = path.split(".")
        typed = {"true": True, "false": False}.get(value, value)
        recipe.setdefault(section, {})[key] = int(typed) if isinstance(typed, str) else typed
    again = plan(parse_recipe(recipe), "1xH200")
    assert again.fits
    assert again.peak == found.trials[-1].peak
