"""AdamW with a schedule, a norm limit, and a refusal to step on what is not finite."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from segcredit.config import OptimizerSettings

PATIENCE = 5
"""Refused steps in a row after which the run stops."""


class NotFinite(RuntimeError):  # noqa: N818
    """Gradients stayed NaN or infinite."""


def rate(step: int, total: int, schedule: str, warmup: int = 0, end: float = 0.0) -> float:
    """The learning rate's factor in step 0 … total − 1."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, total - warmup)
    if schedule == "linear":
        return end + (1.0 - end) * (1.0 - done)
    if schedule == "cosine":
        return end + (1.0 - end) * 0.5 * (1.0 + math.cos(math.pi * done))
    return 1.0


class Optimizer:
    """One model's AdamW."""

    def __init__(self, name: str, model: nn.Module, lr: float, settings: OptimizerSettings) -> None:
        self.name = name
        self.lr = lr
        self.settings = settings
        self.parameters = [x for x in model.parameters() if x.requires_grad]
        self.refused = 0
        self._adam = torch.optim.AdamW(
            _groups(self.parameters, settings.weight_decay),
            lr=lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
        )

    def zero_grad(self) -> None:
        self._adam.zero_grad(set_to_none=True)

    def step(self, factor: float = 1.0) -> dict[str, float]:
        """Clip, refuse or step."""
        norm = nn.utils.clip_grad_norm_(self.parameters, self.settings.max_grad_norm)
        finite = bool(torch.isfinite(norm))
        if finite:
            for group in self._adam.param_groups:
                group["lr"] = self.lr * factor
            self._adam.step()
            self.refused = 0
        else:
            self.refused += 1
            if self.refused >= PATIENCE:
                raise NotFinite(
                    f"the {self.name}'s gradient was NaN or infinite {PATIENCE} times in a row; no "
                    f"such step was taken, so the weights are whole. Lower the learning rate "
                    f"(now {self.lr * factor:g}), or look for NaN in rewards and values."
                )
        self.zero_grad()
        shown = {
            f"{self.name}/refused": 0.0 if finite else 1.0,
            f"{self.name}/lr": self.lr * factor,
        }
        return shown | ({f"{self.name}/grad_norm": float(norm)} if finite else {})

    def state(self) -> dict[str, object]:
        return {"adam": self._adam.state_dict(), "refused": self.refused}

    def load(self, state: dict[str, object]) -> None:
        self._adam.load_state_dict(state["adam"])  # type: ignore[arg-type]
        self.refused = int(state["refused"])  # type: ignore[call-overload]


def _groups(parameters: Iterable[Tensor], decay: float) -> list[dict[str, object]]:
    """Matrices are decayed, vectors (norms, biases) are not."""
    parameters = list(parameters)
    return [
        {"params": [x for x in parameters if x.ndim >= 2], "weight_decay": decay},
        {"params": [x for x in parameters if x.ndim < 2], "weight_decay": 0.0},
    ]
