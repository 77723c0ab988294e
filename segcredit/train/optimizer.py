"""AdamW with a schedule, a norm limit, and a refusal to step on what is not finite."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from segcredit.config import OptimizerSettings
from segcredit.models.weights import trained_weights
from segcredit.train.adam import make_adam
from segcredit.train.offload import HostCopies

PATIENCE = 5
"""Refused steps in a row after which the run stops."""


class NotFinite(RuntimeError):  # noqa: N818
    """Gradients stayed NaN or infinite."""

    def __init__(self, message: str, optimizer: "Optimizer | None" = None) -> None:
        super().__init__(message)
        self.optimizer = optimizer
        """Optimizer that refused the gradients."""


def rate(
    step: int, total: int, schedule: str, warmup: int = 0, end: float = 0.0, hold: float = 0.0
) -> float:
    """The learning rate's factor in step 0 … total − 1; it falls after a share ``hold`` of them."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    falls = max(warmup, round(hold * total))
    done = max(0, step - falls) / max(1, total - falls)
    if schedule == "linear":
        return end + (1.0 - end) * (1.0 - done)
    if schedule == "cosine":
        return end + (1.0 - end) * 0.5 * (1.0 + math.cos(math.pi * done))
    return 1.0


class Optimizer:
    """One model's AdamW.

    Weights of lower precision than float32 are copies: the optimizer holds the float32 originals,
    adds gradients up in float32, and writes the rounded result back after each step. A learning
    rate of 1e-6 would otherwise change nothing, since bfloat16 keeps three digits.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        lr: float,
        settings: OptimizerSettings,
        offload: bool = False,
        trained: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        """``trained``: which of the model's weights, by names that stay; all that have gradients.

        Adapters of several owners may stand on one model.
        """
        self.name = name
        self.lr = lr
        self.settings = settings
        self.refused = 0
        self.taken = 0
        """Number of steps taken by this object, without those before a resume."""
        trained = trained_weights(model) if trained is None else trained
        self.names = list(trained)
        self.weights: list[Tensor] = list(trained.values())
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._rounded = False
        self.parameters = self._originals(model)
        """What is stepped; holds the gradients."""
        self._adam = make_adam(
            settings.kind,
            _groups(self.parameters, settings.weight_decay),
            lr,
            (settings.beta1, settings.beta2),
            settings.eps,
        )
        self._host = HostCopies() if offload else None
        self._rest()

    def _originals(self, model: nn.Module) -> list[Tensor]:
        self._rounded = any(x.dtype != torch.float32 for x in self.weights)
        if not self._rounded:
            return self.weights
        originals = [x.detach().float().requires_grad_() for x in self.weights]
        self._hooks = [
            weight.register_post_accumulate_grad_hook(_moving_to(original))
            for weight, original in zip(self.weights, originals, strict=True)
        ]
        return originals

    def adopt(self, lr: float, settings: OptimizerSettings) -> None:
        """Continue with other settings and the same moments. The kind of AdamW cannot change."""
        self.lr = lr
        self.settings = settings
        decays = (settings.weight_decay, 0.0)  # in the order of _groups
        for group, decay in zip(self._adam.param_groups, decays, strict=True):
            group["betas"] = (settings.beta1, settings.beta2)
            group["eps"] = settings.eps
            group["weight_decay"] = decay

    def close(self) -> None:
        """Leave the weights alone; another optimizer takes them over."""
        for hook in self._hooks:
            hook.remove()

    def zero_grad(self) -> None:
        for x in (*self.weights, *self.parameters):
            x.grad = None

    def step(self, factor: float = 1.0) -> dict[str, float]:
        """Clip, refuse or step."""
        norm = float(self._clip())
        finite = math.isfinite(norm)
        if finite:
            for group in self._adam.param_groups:
                group["lr"] = self.lr * factor
            self._advance()
            self.refused = 0
            self.taken += 1
        else:
            self.refused += 1
            if self.refused >= PATIENCE:
                raise NotFinite(
                    f"the {self.name}'s gradient was NaN or infinite {PATIENCE} times in a row; no "
                    f"such step was taken, so the weights are whole. Lower the learning rate "
                    f"(now {self.lr * factor:g}), or look for NaN in rewards and values.",
                    self,
                )
        self.zero_grad()
        shown = {
            f"{self.name}/refused": 0.0 if finite else 1.0,
            f"{self.name}/lr": self.lr * factor,
        }
        return shown | ({f"{self.name}/grad_norm": norm} if finite else {})

    def _advance(self) -> None:
        """One step of AdamW, and the weights after it."""
        self._arrived()
        self._adam.step()
        self._write_back()

    def _clip(self) -> Tensor:
        """Scale the gradients down to the norm limit; the norm they had."""
        return nn.utils.clip_grad_norm_(self.parameters, self.settings.max_grad_norm)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """With its state on the device; with offloading, it rests in main memory otherwise.

        It is on its way while the first gradients are computed, and back while what follows is.
        """
        if self._host is None:
            yield
            return
        self._host.bring(self._resting())
        try:
            yield
        finally:
            self._rest()

    def _arrived(self) -> None:
        if self._host is not None:
            self._host.arrived()

    def _rest(self) -> None:
        if self._host is not None:
            self._host.send(self._resting())

    @property
    def numbers(self) -> dict[str, int]:
        """By which AdamW's own state knows each weight."""
        kept = self._adam.state_dict()["param_groups"]
        stepped = [x for group in self._adam.param_groups for x in group["params"]]
        known = dict(
            zip(map(id, stepped), (n for group in kept for n in group["params"]), strict=True)
        )
        return {name: known[id(x)] for name, x in zip(self.names, self.parameters, strict=True)}

    def state(self) -> dict[str, object]:
        """Everything to go on from; of a sharded one, this process's part."""
        if self._host is not None:
            self._host.settled()
        originals = [x.detach() for x in self.parameters] if self._rounded else None
        return {
            "adam": self._adam.state_dict(),
            "refused": self.refused,
            "originals": originals,
        }

    def load(self, state: dict[str, object]) -> None:
        with self.awake():  # moments go where the originals are: on the device, not where they rest
            self._arrived()
            self._adam.load_state_dict(state["adam"])  # type: ignore[arg-type]
            originals = state.get("originals")
            if self._rounded and isinstance(originals, list):
                with torch.no_grad():
                    torch._foreach_copy_(self.parameters, originals)
                self._write_back()
        self.refused = int(state["refused"])  # type: ignore[call-overload]

    @torch.no_grad()
    def _write_back(self) -> None:
        """Round the originals into the weights that the model uses."""
        if self._rounded:
            torch._foreach_copy_(self.weights, self.parameters)

    def _resting(self) -> list[Tensor]:
        """What only a step needs: moments, and originals where the weights are copies."""
        moments = [
            x
            for found in self._adam.state.values()
            for x in found.values()
            if isinstance(x, Tensor) and x.ndim
        ]
        return [*moments, *(self.parameters if self._rounded else ())]


def _moving_to(original: Tensor):  # type: ignore[no-untyped-def]
    """Adds a weight's gradient to its original's, in float32, as soon as it is complete."""

    def move(weight: Tensor) -> None:
        assert weight.grad is not None
        if original.grad is None:
            original.grad = weight.grad.float()
        else:
            original.grad.add_(weight.grad)
        weight.grad = None

    return move


def _groups(parameters: Iterable[Tensor], decay: float) -> list[dict[str, object]]:
    """Matrices are decayed, vectors (norms, biases) are not."""
    parameters = list(parameters)
    return [
        {"params": [x for x in parameters if x.ndim >= 2], "weight_decay": decay},
        {"params": [x for x in parameters if x.ndim < 2], "weight_decay": 0.0},
    ]
