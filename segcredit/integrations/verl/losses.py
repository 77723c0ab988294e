"""Policy and value losses for verl's workers, with verl's columns, averages and metric names."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, kl_penalty
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.padding import no_padding_2_padding

from segcredit.algorithms.credit import GAE
from segcredit.algorithms.policy_gradient import PolicyGradient
from segcredit.core.advantages import Credit
from segcredit.core.segments import Segments
from segcredit.integrations.verl.credit import ENDS, RATIO_ENDS, Totals, verl_shares
from segcredit.types import Batch, Outputs, Rollouts

LossResult = tuple[Tensor, dict[str, Any]]
SUM, MEAN = AggregationType.SUM, AggregationType.MEAN


def _totals(data: Any, scale: float | None) -> Totals:
    return Totals(data["dp_size"], data["batch_num_tokens"], data["global_batch_size"], scale)


def _select(data: Any, *names: str) -> dict[str, Tensor]:
    """Return the columns, padded to the longest response of the micro-batch."""
    columns = data.select(*(name for name in names if name in data)).to_padded_tensor()
    return {name: columns[name] for name in columns.keys()}  # noqa: SIM118


@dataclass(frozen=True)
class PolicyLoss:
    """Policy loss: Σ share · surrogate over ratio units, then verl's entropy bonus and KL loss."""

    method: PolicyGradient
    loss_agg_mode: str
    loss_scale_factor: float | None = None
    entropy_coeff: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "low_var_kl"

    @classmethod
    def of(cls, method: PolicyGradient, actor: Any) -> "PolicyLoss":
        """Make the loss from verl's actor configuration."""
        return cls(
            method=replace(method, critic=None),
            loss_agg_mode=actor.loss_agg_mode,
            loss_scale_factor=actor.loss_scale_factor,
            entropy_coeff=actor.entropy_coeff,
            use_kl_loss=actor.use_kl_loss,
            kl_loss_coef=actor.kl_loss_coef,
            kl_loss_type=actor.kl_loss_type,
        )

    def __call__(self, model_output: Any, data: Any, dp_group: Any = None) -> LossResult:
        logp = no_padding_2_padding(model_output["log_probs"], data)
        columns = _select(
            data,
            *("response_mask", "old_log_probs", "advantages", RATIO_ENDS, "rollout_is_weights"),
            *(("ref_log_prob",) if self.use_kl_loss else ()),
        )
        totals = _totals(data, self.loss_scale_factor)
        loss, details = self.surrogate(logp, columns, totals)
        metrics: dict[str, Any] = {"actor/pg_loss": Metric(SUM, loss)}
        metrics["actor/pg_clipfrac"] = Metric(SUM, details["clip_fraction"])
        metrics["actor/ratio"] = Metric(SUM, details["ratio"])
        mask = columns["response_mask"].bool()
        moved = torch.where(mask, columns["old_log_probs"] - logp.detach(), 0.0)
        metrics["actor/ppo_kl"] = Metric(MEAN, moved.sum() / mask.sum().clamp(min=1))
        average = {
            "loss_mask": mask,
            "loss_agg_mode": self.loss_agg_mode,
            "dp_size": totals.num_workers,
            "batch_num_tokens": totals.num_entries,
            "global_batch_size": totals.num_responses,
            "loss_scale_factor": self.loss_scale_factor,
        }
        entropy = model_output.get("entropy", None)
        if entropy is not None:
            entropy_loss = agg_loss(loss_mat=no_padding_2_padding(entropy, data), **average)
            loss = loss - self.entropy_coeff * entropy_loss
            metrics["actor/entropy_loss"] = Metric(SUM, entropy_loss)
        if self.use_kl_loss:
            kl = kl_penalty(
                logprob=logp, ref_logprob=columns["ref_log_prob"], kl_penalty=self.kl_loss_type
            )
            kl_loss = agg_loss(loss_mat=kl, **average)
            loss = loss + self.kl_loss_coef * kl_loss
            metrics["kl_loss"] = Metric(SUM, kl_loss)
            metrics["kl_coef"] = self.kl_loss_coef
        return loss, metrics

    def surrogate(
        self, logp: Tensor, columns: dict[str, Tensor], totals: Totals
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute our policy loss, ignoring rows without a valid token (verl's padding)."""
        rows = columns["response_mask"].bool().any(dim=1).nonzero().flatten()
        if len(rows) == 0:
            zero = logp.sum() * 0.0
            return zero, {"ratio": zero.detach(), "clip_fraction": zero.detach()}
        mask = columns["response_mask"][rows].bool()
        segments = Segments.from_ends(columns[RATIO_ENDS][rows].bool(), mask)
        shares = verl_shares(mask, self.loss_agg_mode, totals)
        if "rollout_is_weights" in columns:  # the surrogate is linear in its shares
            shares = shares * columns["rollout_is_weights"][rows]
        batch = Batch(
            rollouts=Rollouts.from_columns(mask, logp_old=columns["old_log_probs"][rows]),
            loss_mask=mask,
            credit=Credit(columns["advantages"][rows], None, segments),
            ratio_segments=segments,
            shares={"policy": shares},
        )
        losses = self.method.loss(Outputs(logp[rows].float()), batch)
        return losses.policy, dict(losses.metrics)


@dataclass(frozen=True)
class ValueLoss:
    """Squared error at the tokens where V was read, averaged over them."""

    method: PolicyGradient
    loss_agg_mode: str
    loss_scale_factor: float | None = None

    @classmethod
    def of(cls, method: PolicyGradient, critic: Any) -> "ValueLoss":
        """Make the loss from verl's critic configuration."""
        return cls(method, critic.loss_agg_mode, critic.loss_scale_factor)

    def __call__(self, model_output: Any, data: Any, dp_group: Any = None) -> LossResult:
        value = no_padding_2_padding(model_output["values"], data)
        columns = _select(data, "response_mask", "values", "returns", ENDS)
        loss = self.boundary(value, columns, _totals(data, self.loss_scale_factor))
        mask = columns["response_mask"].bool()
        clip = self.method.critic.clip if self.method.critic is not None else None
        moved = (value.detach() - columns["values"]).abs()
        clipped = mask & (moved > (torch.inf if clip is None else clip))
        num = mask.sum().clamp(min=1)
        return loss, {
            "critic/vf_loss": Metric(SUM, loss),
            "critic/vf_clipfrac": (clipped.sum() / num).item(),
            "critic/vpred_mean": (torch.where(mask, value.detach(), 0.0).sum() / num).item(),
        }

    def boundary(self, value: Tensor, columns: dict[str, Tensor], totals: Totals) -> Tensor:
        """Compute our value loss; rows without a valid token are ignored."""
        rows = columns["response_mask"].bool().any(dim=1).nonzero().flatten()
        critic, part = self.method.critic, self.method.credit
        assert critic is not None
        assert isinstance(part, GAE)
        if len(rows) == 0:
            return value.sum() * 0.0
        mask = columns["response_mask"][rows].bool()
        segments = Segments.from_ends(columns[ENDS][rows].bool(), mask)
        returns = columns["returns"][rows]
        credit = Credit(torch.zeros_like(returns), returns, segments, part.value_at)
        shares = verl_shares(segments.mask, self.loss_agg_mode, totals)
        return critic(value[rows].float(), columns["values"][rows], credit, shares)
