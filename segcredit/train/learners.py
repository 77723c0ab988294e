"""Learners: a model, its optimizer, and how the loss reaches its weights."""

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor

from segcredit.models import Critic, Policy
from segcredit.train.optim import Optimizer
from segcredit.types import Algorithm, Batch, Outputs, Rollouts


@runtime_checkable
class Learner(Protocol):
    """A model that gradient steps train."""

    name: ClassVar[str]
    optimizer: Optimizer

    def output(self, rollouts: Rollouts) -> Tensor:
        """What the model computes for each token, with gradients; shape (B, T)."""
        ...

    def backward(
        self, algorithm: Algorithm, micro: Batch
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Add the gradients of a micro-batch; returns metrics and log π if it was computed."""
        ...


@dataclass
class PolicyLearner:
    """The policy π_θ."""

    name: ClassVar[str] = "policy"

    policy: Policy
    optimizer: Optimizer
    temperature: float
    """Temperature of log π in the loss."""

    def output(self, rollouts: Rollouts) -> Tensor:
        return self.policy.score(rollouts, self.temperature)[0]

    def backward(
        self, algorithm: Algorithm, micro: Batch
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        with self.policy.active():  # until the backward pass is done: it may recompute activations
            logp = self.output(micro.rollouts)
            loss = algorithm.loss(Outputs(logp, micro.rollouts.value), micro)
            loss.policy.backward()
        metrics = {key: x for key, x in loss.metrics.items() if key != "value_loss"}
        return metrics, logp.detach().float()


@dataclass
class CriticLearner:
    """The critic V_φ."""

    name: ClassVar[str] = "critic"

    critic: Critic
    optimizer: Optimizer

    def output(self, rollouts: Rollouts) -> Tensor:
        return self.critic(rollouts)

    def backward(
        self, algorithm: Algorithm, micro: Batch
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        with self.critic.active():  # until the backward pass is done: it may recompute activations
            outputs = Outputs(micro.rollouts.logp_old, self.output(micro.rollouts))
            loss = algorithm.loss(outputs, micro)
            if loss.value is None:
                raise ValueError(
                    f"expected a value loss to train the critic by; got none from {algorithm!r}."
                )
            loss.value.backward()
        return {"value_loss": loss.metrics["value_loss"]}, None
