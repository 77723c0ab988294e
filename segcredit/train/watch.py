"""The same held-out prompts with the same dice at every evaluation: what the policy does now."""

from dataclasses import replace

from segcredit.algorithms.policy_gradient import PolicyGradient
from segcredit.train.collect import collect
from segcredit.train.continuations import Continuations
from segcredit.train.metrics import Metrics
from segcredit.train.state import State
from segcredit.train.step import Stepped
from segcredit.types import Batch


def watch(state: State) -> Stepped | None:
    """Responses to the watched prompts with the credit they would get; nothing is learned."""
    count = state.recipe.evaluation.watch
    if state.test is None or not count:
        return None
    if state.test.size is not None:
        count = min(count, state.test.size)
    algorithm = state.algorithm
    # a tracker knows training prompts alone; pairs and filters give no credit to look at
    missing = {"baseline"}
    missing |= {"value"} if state.critic is None else set()  # before its stage, or without one
    missing |= {"logp_ref"} if state.reference is None else set()
    credited = isinstance(algorithm, PolicyGradient) and not missing & algorithm.needs
    needs = algorithm.needs if credited else frozenset()
    log = Metrics()
    collected = collect(state, state.test.take(0, count), needs, log, "watch")
    rollouts = collected.rollouts
    batch = Batch(rollouts, rollouts.mask)
    if credited:
        batch = algorithm.prepare(rollouts, Continuations(state, log, ("watch",)))
    # nothing moved, so there is no ratio to look at
    return Stepped(collected, replace(batch, ratio_segments=None), rollouts.logp_old, {})
