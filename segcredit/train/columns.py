"""The providers of the built-in columns, and the table that assigns them.

Log-probabilities, critic, reference model and token texts are here; values tracked per prompt are
in tracker.py, trees of responses in tree.py, Monte-Carlo values in continuations.py.
"""

import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from segcredit import columns as named
from segcredit.columns import VALUE, Column, in_order
from segcredit.config import MismatchUnits, RecipeError
from segcredit.core.checks import finite, keep, require, sent
from segcredit.core.losses import k3
from segcredit.core.ratios import raw_ratio
from segcredit.models import Critic, Policy
from segcredit.models import lora as adapters
from segcredit.models.images import blacken
from segcredit.models.inputs import distinct, encode_all
from segcredit.models.layers import set_attention
from segcredit.partition import response, tokens
from segcredit.runlog.folder import CRITIC, REFERENCE, exists
from segcredit.train import checkpoint
from segcredit.train.collect import Context, forward_in_parts
from segcredit.train.continuations import ContinuationProvider
from segcredit.train.distributed import shard_critic, shard_policy
from segcredit.train.models import (
    detach_from_file,
    freeze,
    fuse_on_gpu,
    load_saved_policy,
    make_ready,
)
from segcredit.train.optim import CriticLearner, make_optimizer
from segcredit.train.provider import Provider, SavedRun
from segcredit.train.state import State
from segcredit.train.tracker import UnstartedTracker
from segcredit.train.tree import TreeProvider
from segcredit.types import Batch, Encoded, Prompt, Rollouts

ADAPTERS = "adapters"
"""Directory in a checkpoint with the trained LoRA adapters, in PEFT's format."""
MAX_SAMPLER_KL = 1.0
"""KL per token between sampler and trainer above which they cannot be the same model."""


@dataclass(frozen=True)
class PolicyProvider(Provider):
    """Provider of log π_old and H: as the engine returned them, or recomputed by the policy."""

    prepares_at_build = True

    recomputes: bool = False

    def prepare(self, state: State) -> Provider:
        return replace(self, recomputes=state.recipe.recomputes)

    def fill(self, context: Context, rollouts: Rollouts) -> Rollouts:
        state = context.state
        if not self.recomputes:
            return rollouts
        logp, entropy = forward_in_parts(
            state,
            rollouts,
            lambda part: state.policy.score(
                part, state.recipe.rollout.temperature, with_entropy=True
            ),
        )
        return rollouts.replace(logp_sampler=rollouts.logp_old, logp_old=logp, entropy=entropy)

    def describe(self, rollouts: Rollouts) -> dict[str, float]:
        return describe_mismatch(rollouts)

    def before_update(self, context: Context, batch: Batch) -> Batch:
        """Weight tokens by π_old / π_sampler (``rollout.mismatch_cap``), mask truncated ones."""
        settings = context.state.recipe.rollout
        if context.state.recipe.update.mask_truncated:
            batch = without_truncated(batch)
        if settings.mismatch_cap is None:
            return batch
        batch, metrics = weighted(
            batch,
            settings.mismatch_cap,
            settings.mismatch_over,
            settings.mismatch_mask,
            settings.mismatch_floor,
        )
        context.log.add(metrics)
        return batch


@torch.no_grad()
def describe_mismatch(rollouts: Rollouts) -> dict[str, float]:
    """Compare π_old as recomputed by the trainer with the sampler's probabilities.

    ``sampler_kl`` estimates KL(π_sampler ‖ π_old) per token by r − 1 − log r with
    r = π_old / π_sampler, which is never negative. Tokens without a sampler probability are left
    out. Returns nothing if π_old was not recomputed, or if no token has a sampler probability:
    vLLM reports those of some prompts, which dynamic sampling may have dropped.
    """
    if rollouts.logp_sampler is None:
        return {}
    known = rollouts.mask & ~rollouts.logp_sampler.isnan()
    log_ratio = _log_ratio(rollouts)[known]
    if not len(log_ratio):
        return {}
    kl = float((log_ratio.expm1() - log_ratio).mean())
    if not kl < MAX_SAMPLER_KL:
        raise ValueError(
            f"expected sampler and trained policy to agree; got KL = {kl:.3g} per token, so the "
            f"sampler uses another model. With vLLM (its weights are not up to date), set "
            f"rollout.engine=hf. With hf, set rollout.graphs=false. Please report the model."
        )
    return {
        "agreement/sampler_kl": kl,
        "agreement/sampler_difference": float(log_ratio.abs().mean()),
        "agreement/sampler_largest": float(log_ratio.abs().max()),
    }


@torch.no_grad()
def without_truncated(batch: Batch) -> Batch:
    """Remove truncated responses from the policy loss, its terms and their denominators."""
    finished = ~batch.rollouts.truncated
    return replace(batch, loss_mask=batch.loss_mask & finished[:, None], in_loss=finished)


@torch.no_grad()
def weighted(
    batch: Batch,
    cap: float,
    over: MismatchUnits = "token",
    mask: bool = False,
    floor: float | None = None,
) -> tuple[Batch, dict[str, float]]:
    """Weight each token's policy loss by r = π_old / π_sampler of its unit, at most ``cap``.

    The weight multiplies the token's loss term, not its credit, so whitening does not change it.
    Value targets and other loss terms are not weighted.

    Args:
        over: Unit of r: the token, the segment of credit, or the response, whose r is the product
            over its tokens.
        mask: Give units with r outside [floor, cap] weight 0 instead of truncating r.
        floor: Lower bound of r; None: none.
    """
    if batch.credit is None:
        raise ValueError(
            "rollout.mismatch_cap weights the advantages, and this method has none. Remove it."
        )
    rollouts, own = batch.rollouts, batch.credit.segments
    units = {"token": tokens, "segment": lambda _: own, "response": response}
    sampled = rollouts.column("logp_sampler", "the comparison of sampler and trainer")
    require(finite(rollouts.mask, logp_sampler=sampled))  # an engine may leave tokens out
    ratio = raw_ratio(rollouts.logp_old, sampled, units[over](rollouts.mask))
    outside = (ratio > cap) if floor is None else (ratio > cap) | (ratio < floor)
    kept = ratio.masked_fill(outside, 0.0) if mask else ratio.clamp(floor, cap)
    weight = kept.to(batch.credit.advantage.dtype)
    if batch.weight is not None:
        weight = weight * batch.weight
    share = float(outside[rollouts.mask].float().mean())
    return replace(batch, weight=weight), {"agreement/weights_cut": share}


def _log_ratio(rollouts: Rollouts) -> Float[Tensor, "B T"]:
    """Compute log π_old − log π_sampler; 0 off the mask."""
    sampled = rollouts.column("logp_sampler", "the comparison of sampler and trainer")
    return (rollouts.logp_old - sampled).masked_fill(~rollouts.mask, 0.0)


@dataclass(frozen=True)
class PiecesProvider(Provider):
    """Provider of each token's text, as the tokenizer decodes it alone."""

    prepares_at_build = True

    def fill(self, context: Context, rollouts: Rollouts) -> Rollouts:
        codec = context.state.policy.codec
        return rollouts.replace(pieces=[codec.pieces(row) for row in rollouts.tokens.tolist()])


@dataclass(frozen=True)
class ValueProvider(Provider):
    """Provider of the critic's values, before the critic is created."""

    def prepare(self, state: State) -> Provider:
        """Make a critic from the policy's weights, or load the one that the recipe names."""
        path = state.recipe.model.critic
        if path is None:
            return CriticProvider.of(state, Critic.from_policy(state.whole_policy()))
        return CriticProvider.of(state, _saved_critic(state, Path(path).expanduser()))

    def restore(self, state: State, saved: SavedRun) -> Provider | None:
        if state.policy.lora is not None:
            place = saved.place / ADAPTERS / CRITIC
            if place.exists():
                critic = Critic.from_policy(state.policy)
                critic.load_adapter(place)
                return CriticProvider.of(state, critic)
        elif (saved.place / CRITIC).exists():
            return CriticProvider.of(state, _saved_critic(state, saved.place / CRITIC))
        if VALUE in state.columns and state.stage_kind in ("pretrain_critic", "optimize"):
            raise saved.missing_error("this algorithm needs a critic", state.recipe)
        return None


def _saved_critic(state: State, place: Path) -> Critic:
    """Load a saved critic onto the policy's device."""
    settings = state.recipe.model
    critic = Critic.from_saved(place, getattr(torch, settings.dtype), state.policy.family)
    detach_from_file(critic)
    critic.to(state.policy.device)
    set_attention(critic.trunk, settings.attention)
    return critic


@dataclass(eq=False)
class CriticProvider(Provider):
    """Provider of the critic's values; the critic is trained along with the policy."""

    learners = (CriticLearner.name,)

    critic: Critic

    @classmethod
    def of(cls, state: State, critic: Critic) -> "CriticProvider":
        """Make a critic ready to train, and its optimizer."""
        settings = state.recipe.optimizer
        if critic.lora is None:  # with LoRA the trunk is the policy's, which is ready
            make_ready(critic.trunk, state.recipe)
        if state.shards:
            shard_critic(critic, state.parallel)
        optimizer = make_optimizer(
            CriticLearner.name,
            critic,
            settings.critic_lr,
            settings,
            state.recipe.memory.offload_optimizer,
            critic.trained(),
        )
        state.learners[CriticLearner.name] = CriticLearner(critic, optimizer)
        return cls(critic)

    def fill(self, context: Context, rollouts: Rollouts) -> Rollouts:
        (value,) = forward_in_parts(context.state, rollouts, lambda part: (self.critic(part),))
        return rollouts.replace(value=value)

    def models(self) -> Mapping[str, Policy | Critic]:
        return {CRITIC: self.critic}


@dataclass(frozen=True)
class InitialPolicyProvider(Provider):
    """Placeholder provider: makes that of the initial policy when reinforcement learning starts."""

    restarts: bool
    """Whether each update starts from it; otherwise it is the reference model."""

    def prepare(self, state: State) -> Provider:
        kept = _kept_policy(state)
        return self._of(state, kept or state.whole_policy().reference(copied=self.restarts))

    def restore(self, state: State, saved: SavedRun) -> Provider | None:
        lora = state.policy.lora
        if lora is not None and (saved.place / ADAPTERS / REFERENCE).exists():
            lora.load(adapters.REFERENCE, saved.place / ADAPTERS / REFERENCE)
        if not state.has_begun("optimize"):
            return None
        if (kept := _kept_policy(state)) is not None:
            return self._of(state, kept)
        if lora is None:
            return self._of(state, _saved_reference(state, saved))
        adapter = adapters.REFERENCE if adapters.REFERENCE in lora.names else None
        return self._of(state, replace(state.policy, adapter=adapter))

    def _of(self, state: State, reference: Policy) -> Provider:
        if reference is not _kept_policy(state):
            # the same kernels as the policy, since they are compared; LoRA shares the model
            shared = reference.model is state.policy.model
            fuse_on_gpu(reference.model, state.recipe.model.compile and shared)
            if state.shards:
                shard_policy(reference, state.parallel)
        return (RestartProvider if self.restarts else ReferenceProvider)(reference)


def _kept_policy(state: State) -> Policy | None:
    """Return the initial policy, if another column already holds it."""
    found = (x.reference for x in state.providers.values() if isinstance(x, KeptPolicy))
    return next(found, None)


def _saved_reference(state: State, saved: SavedRun) -> Policy:
    """Load the reference model, which a run saves once."""
    kept, config = saved.folder.checkpoints / REFERENCE, shlex.quote(str(saved.folder.config))
    if not exists(kept):
        raise RecipeError(
            f"this algorithm needs the reference model (the policy before reinforcement "
            f"learning); expected it in {kept}, got none. "
            f"Resume with the previous algorithm, put the folder back if it was moved, or start a "
            f"new run: segcredit train {config} …"
        )
    try:
        checkpoint.verify(kept)
    except checkpoint.CheckpointError as error:
        raise checkpoint.CheckpointError(
            f"the only copy of the reference model cannot be used: {error} So this run cannot be "
            f"resumed; start again: segcredit train {config}"
        ) from None
    reference = load_saved_policy(state.recipe, kept)
    reference.model.to(state.policy.device)
    set_attention(reference.model, state.recipe.model.attention)
    freeze(reference.model)
    return reference


@dataclass(eq=False)
class KeptPolicy(Provider):
    """Base class of providers that keep the policy as it was before reinforcement learning."""

    reference: Policy

    def fixed_models(self) -> Mapping[str, Policy]:
        return {REFERENCE: self.reference}


class ReferenceProvider(KeptPolicy):
    """Provider of log π_ref, at the temperature of the loss."""

    def fill(self, context: Context, rollouts: Rollouts) -> Rollouts:
        state = context.state
        (logp,) = forward_in_parts(
            state, rollouts, lambda part: self.reference.score(part, state.temperature)[:1]
        )
        return rollouts.replace(logp_ref=logp)


@dataclass(frozen=True)
class ImageKLProvider(Provider):
    """Provider of each token's dependence on its prompt's images."""

    prepares_at_build = True

    column: named.ImageKL

    def fill(self, context: Context, rollouts: Rollouts) -> Rollouts:
        """Score the responses again, with hidden images; a prompt's responses share them."""
        state = context.state
        assert rollouts.prompts is not None
        missing = torch.full_like(rollouts.logp_old, torch.nan)
        rows = torch.tensor([n for n, x in enumerate(rollouts.prompts) if x.prompt.images])
        if not len(rows):
            return rollouts.replace(image_kl=missing)
        few, which = distinct([rollouts.prompts[row] for row in rows.tolist()])
        hidden = encode_all(partial(self._hidden, context), [x.prompt for x in few])
        # only the images: the tokens of a tree's prompt contain the beginning of a response
        seen = [replace(x, vision=y.vision) for x, y in zip(few, hidden, strict=True)]
        again = rollouts.select(rows).replace(prompts=[seen[x] for x in which.tolist()])
        temperature = state.recipe.rollout.temperature
        (logp,) = forward_in_parts(
            state, again, lambda part: state.policy.score(part, temperature)[:1]
        )
        image_kl = keep(again.mask, k3(again.logp_old, logp, limit=10.0, log_ratio_limit=20.0))
        return rollouts.replace(image_kl=missing.index_copy(0, sent(rows, logp.device), image_kl))

    def _hidden(self, context: Context, prompt: Prompt) -> Encoded:
        patch, probability = self.column.patch, self.column.probability
        drawn = context.generator("hidden images", prompt.id, *context.purpose)
        images = tuple(blacken(x, patch, probability, drawn) for x in prompt.images)
        return context.state.policy.encode(replace(prompt, images=images), cache=False)

    def describe(self, rollouts: Rollouts) -> dict[str, float]:
        image_kl = rollouts.column("image_kl", "the metrics")
        seen = rollouts.mask & ~image_kl.isnan()
        found = {"image/responses": float(seen.any(dim=1).float().mean())}
        if bool(seen.any()):
            found["image/kl"] = float(image_kl[seen].mean())
        return found


class RestartProvider(KeptPolicy):
    """Provider that resets the policy to its initial weights before each update (RestEM)."""

    @torch.no_grad()
    def before_update(self, context: Context, batch: Batch) -> Batch:
        state, lora = context.state, context.state.policy.lora
        if lora is not None:
            current, initial = lora.parameters(adapters.POLICY), lora.parameters(adapters.REFERENCE)
        else:
            current, initial = state.policy.model.parameters(), self.reference.model.parameters()
        for now, then in zip(current, initial, strict=True):
            now.copy_(then)
        state.new_policy_optimizer(state.recipe.optimizer.lr, state.recipe.optimizer)
        return batch


PROVIDERS: dict[type[Column], Callable[[Any], Provider]] = {
    named.LogpOld: lambda _: PolicyProvider(),
    named.Entropy: lambda _: PolicyProvider(),
    named.Value: lambda _: ValueProvider(),
    named.InitialPolicy: lambda _: InitialPolicyProvider(restarts=True),
    named.LogpRef: lambda _: InitialPolicyProvider(restarts=False),
    named.ImageKL: ImageKLProvider,
    named.Pieces: lambda _: PiecesProvider(),
    named.Baseline: lambda _: UnstartedTracker(),
    named.Parent: lambda _: TreeProvider(),
    named.Continuations: ContinuationProvider,
}
"""The provider of each built-in column."""


def provider_of(column: Column) -> Provider:
    """Return the unprepared provider of a column; a user's column is its own provider."""
    if isinstance(column, Provider):
        return column
    if type(column) not in PROVIDERS:
        raise ValueError(
            f"expected a built-in column or a subclass of segcredit.train.provider.OwnColumn; got "
            f"{column!r}. Make {type(column).__name__} a subclass and define fill."
        )
    return PROVIDERS[type(column)](column)


def prepare_columns(state: State, columns: Iterable[Column]) -> None:
    """Prepare columns when a stage begins, unless they are already."""
    for column in columns:
        known = state.providers.get(column)
        if known is None or known.prepares_every_stage:
            state.providers[column] = provider_of(column).prepare(state)


def restore_columns(state: State, saved: SavedRun) -> None:
    """Restore the columns of the method, and the critic of an earlier method of the run."""
    for column in in_order({*state.columns, VALUE}):
        provider = provider_of(column).restore(state, saved)
        if provider is not None:
            state.providers[column] = provider
