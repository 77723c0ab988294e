"""Learners and their AdamW: for whole, offloaded, streamed and sharded models, with checkpoints.

A learner is a model with its optimizer, and knows how a loss reaches the model's weights.

Every variant computes the same step. They differ in where fp32 master weights and moments are kept
between steps: on the device, in CPU memory (``offload``, ``stream``) or sharded over ranks.
"""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from segcredit.config import OptimizerSettings
from segcredit.installing import install_command
from segcredit.models import Critic, Policy
from segcredit.models.layers import is_sharded, trained_weights, without_data
from segcredit.runlog.storage import Part, Parts, file_name, save_parts
from segcredit.train.offload import CpuOffload
from segcredit.types import Algorithm, Batch, Outputs, Rollouts

LIBRARY = "bitsandbytes"
Kind = Literal["adamw", "adamw_8bit"]


def missing_requirement(kind: Kind) -> str | None:
    """Say which package to install for this kind of optimizer; None if nothing is missing."""
    if kind == "adamw_8bit" and find_spec(LIBRARY) is None:
        return f"{kind} needs {LIBRARY}. Type: {install_command('8bit')}"
    return None


def make_adam(
    kind: Kind, groups: Sequence[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    """Create AdamW over parameter groups, each with its own weight decay.

    ``adamw_8bit`` quantizes moments in blocks of 256 values with one scale each; tensors with fewer
    than 4096 values keep fp32 moments. All are plain tensors, so offloading and checkpoints work.
    """
    if kind == "adamw":
        held: list[Tensor] = [x for group in groups for x in group["params"]]
        fused = True if all(x.is_cuda for x in held) else None
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=fused)
    if problem := missing_requirement(kind):
        raise ValueError(f"optimizer.kind: {problem}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it still uses the deprecated torch.jit
        from bitsandbytes.optim import AdamW8bit
    return AdamW8bit(groups, lr=lr, betas=betas, eps=eps)


PATIENCE = 5
"""The run stops after this many refused steps in a row."""


class NotFinite(RuntimeError):  # noqa: N818
    """Gradients were NaN or infinite several times in a row."""

    def __init__(self, message: str, optimizer: "Optimizer | None" = None) -> None:
        super().__init__(message)
        self.optimizer = optimizer
        """Optimizer that refused the gradients."""


def rate(
    step: int, total: int, schedule: str, warmup: int = 0, end: float = 0.0, hold: float = 0.0
) -> float:
    """Compute the learning-rate factor of a step in 0 … total − 1.

    Linear warmup over ``warmup`` steps; decay to ``end`` starts after a share ``hold`` of all
    steps.
    """
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
    """AdamW of one model, with fp32 master weights if the model is in half precision.

    Gradients are accumulated in fp32, the master weights are stepped, and the rounded result is
    written back into the model. Without them a learning rate of 1e-6 would change nothing, since
    bfloat16 keeps three digits.
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
        """Create the optimizer of the weights in ``trained``; by default, of all with gradients.

        One model may carry several LoRA adapters, each with its own optimizer.
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
        self.parameters = self._make_master_weights(model)
        """Tensors that AdamW steps (master weights if there are any); they hold the gradients."""
        self._adam = make_adam(
            settings.kind,
            _groups(self.parameters, settings.weight_decay),
            lr,
            (settings.beta1, settings.beta2),
            settings.eps,
        )
        self._host = CpuOffload() if offload else None
        self._offload()

    def _make_master_weights(self, model: nn.Module) -> list[Tensor]:
        self._rounded = any(x.dtype != torch.float32 for x in self.weights)
        if not self._rounded:
            return self.weights
        originals = [x.detach().float().requires_grad_() for x in self.weights]
        self._hooks = [
            weight.register_post_accumulate_grad_hook(_add_gradient_to(original))
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
        """Stop managing the weights, so that another optimizer can take them over."""
        for hook in self._hooks:
            hook.remove()

    def zero_grad(self) -> None:
        for x in (*self.weights, *self.parameters):
            x.grad = None

    def step(self, factor: float = 1.0) -> dict[str, float]:
        """Clip gradients and take a step; refuse the step if the gradient norm is not finite."""
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
                    f"such step was taken, so the weights are intact. Lower the learning rate "
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
        """Take one AdamW step and update the model's weights."""
        self._wait_on_device()
        self._adam.step()
        self._write_back()

    def _clip(self) -> Tensor:
        """Clip gradients to the maximum norm; return the norm before clipping."""
        return nn.utils.clip_grad_norm_(self.parameters, self.settings.max_grad_norm)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Keep the optimizer state on the device inside this context; offloaded otherwise.

        Both transfers overlap with computation.
        """
        if self._host is None:
            yield
            return
        self._host.load(self._offloadable())
        try:
            yield
        finally:
            self._offload()

    def _wait_on_device(self) -> None:
        if self._host is not None:
            self._host.wait_on_device()

    def _offload(self) -> None:
        if self._host is not None:
            self._host.offload(self._offloadable())

    @property
    def numbers(self) -> dict[str, int]:
        """Index of each weight in the state dict of AdamW."""
        kept = self._adam.state_dict()["param_groups"]
        stepped = [x for group in self._adam.param_groups for x in group["params"]]
        known = dict(
            zip(map(id, stepped), (n for group in kept for n in group["params"]), strict=True)
        )
        return {name: known[id(x)] for name, x in zip(self.names, self.parameters, strict=True)}

    def state(self) -> dict[str, object]:
        """Return the state for a checkpoint; if sharded, this rank's part."""
        if self._host is not None:
            self._host.synchronize()
        originals = [x.detach() for x in self.parameters] if self._rounded else None
        return {
            "adam": self._adam.state_dict(),
            "refused": self.refused,
            "originals": originals,
        }

    def load(self, state: dict[str, object]) -> None:
        with self.on_device():  # moments are loaded to where the master weights are: on the device
            self._wait_on_device()
            self._adam.load_state_dict(state["adam"])  # type: ignore[arg-type]
            originals = state.get("originals")
            if self._rounded and isinstance(originals, list):
                with torch.no_grad():
                    torch._foreach_copy_(self.parameters, originals)
                self._write_back()
        self.refused = int(state["refused"])  # type: ignore[call-overload]

    @torch.no_grad()
    def _write_back(self) -> None:
        """Round the master weights into the model's weights."""
        if self._rounded:
            torch._foreach_copy_(self.weights, self.parameters)

    def _offloadable(self) -> list[Tensor]:
        """Return tensors used only in a step: moments and, in half precision, master weights."""
        moments = [
            x
            for found in self._adam.state.values()
            for x in found.values()
            if isinstance(x, Tensor) and x.ndim
        ]
        return [*moments, *(self.parameters if self._rounded else ())]


def _add_gradient_to(original: Tensor):  # type: ignore[no-untyped-def]
    """Return a hook that adds a weight's finished gradient to its master weight's, in fp32."""

    def move(weight: Tensor) -> None:
        assert weight.grad is not None
        if original.grad is None:
            original.grad = weight.grad.float()
        else:
            original.grad.add_(weight.grad)
        weight.grad = None

    return move


def _groups(parameters: Iterable[Tensor], decay: float) -> list[dict[str, object]]:
    """Build parameter groups: weight decay for matrices, none for vectors (norms, biases)."""
    parameters = list(parameters)
    return [
        {"params": [x for x in parameters if x.ndim >= 2], "weight_decay": decay},
        {"params": [x for x in parameters if x.ndim < 2], "weight_decay": 0.0},
    ]


PART = 2**31
"""Maximum bytes of master weights and moments on the device at once."""


class StreamedOptimizer(Optimizer):
    """AdamW whose state stays in CPU memory and is streamed to the device part by part.

    During forward and backward passes the device holds only weights and gradients; in exchange the
    whole state crosses the bus in every step. Results are bit-identical to :class:`Optimizer`.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        lr: float,
        settings: OptimizerSettings,
        trained: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        super().__init__(name, model, lr, settings, offload=False, trained=trained)
        if not self._rounded:
            raise ValueError(
                "memory.offload_optimizer=stream needs weights in half precision, whose fp32 "
                "master weights stay in CPU memory. Set model.dtype=bfloat16, or "
                "offload_optimizer=true"
            )
        self._host = CpuOffload()
        for part in self._parts():
            self._offload_part(part)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Do nothing: parts are streamed during the step."""
        yield

    def _advance(self) -> None:
        """Step part by part; AdamW skips parameters without a gradient."""
        gradients = {id(x): x.grad for x in self.parameters}
        for x in self.parameters:
            x.grad = None
        for part in self._parts():
            originals = [self.parameters[i] for i in part]
            self._load_part(originals)
            for x in originals:
                x.grad = gradients.pop(id(x))
            self._adam.step()
            with torch.no_grad():
                torch._foreach_copy_([self.weights[i] for i in part], originals)
            for x in originals:
                x.grad = None
            self._offload_part(part)

    def _parts(self) -> Iterator[list[int]]:
        """Yield indices of parameters that fit on the device together."""
        part: list[int] = []
        size = 0
        for number, x in enumerate(self.parameters):
            needed = 12 * x.numel()  # the master weight and two moments
            if part and size + needed > PART:
                yield part
                part, size = [], 0
            part.append(number)
            size += needed
        if part:
            yield part

    def _moments(self, originals: list[Tensor]) -> list[Tensor]:
        return [
            x
            for original in originals
            for x in self._adam.state.get(original, {}).values()
            if isinstance(x, Tensor) and x.ndim
        ]

    def _load_part(self, originals: list[Tensor]) -> None:
        assert self._host is not None
        self._host.load([*originals, *self._moments(originals)])
        self._host.wait_on_device()

    def _offload_part(self, part: list[int]) -> None:
        """Offload a part; its master weights become placeholders that take no device memory.

        The placeholders stay on the device because gradients must be where their tensors are.
        """
        assert self._host is not None
        originals = [self.parameters[i] for i in part]
        devices = [x.device for x in originals]
        self._host.offload([*originals, *self._moments(originals)])
        for x, device in zip(originals, devices, strict=True):
            x.data = torch.zeros((), device=device).expand(x.shape)

    def state(self) -> dict[str, object]:
        """Return the state for a checkpoint, with the master weights from CPU memory."""
        assert self._host is not None
        return {**super().state(), "originals": [self._host.cpu_copy(x) for x in self.parameters]}

    def load(self, state: dict[str, object]) -> None:
        """Load the master weights part by part; AdamW loads its moments at once."""
        assert self._host is not None
        self._adam.load_state_dict(state["adam"])  # type: ignore[arg-type]
        originals = state["originals"]
        assert isinstance(originals, list)
        with torch.no_grad():
            for part in self._parts():
                for i in part:
                    x = self.parameters[i]
                    x.data = originals[i].to(device=x.device, dtype=x.dtype, copy=True)
                    self.weights[i].copy_(x)
                self._offload_part(part)
        self.refused = int(state["refused"])  # type: ignore[call-overload]


def make_optimizer(
    name: str,
    model: nn.Module,
    lr: float,
    settings: OptimizerSettings,
    offload: bool | Literal["stream"] = False,
    trained: Mapping[str, nn.Parameter] | None = None,
) -> Optimizer:
    """Create the optimizer that fits the model (whole or sharded) and the offload setting."""
    if offload == "stream":
        return StreamedOptimizer(name, model, lr, settings, trained)
    kind = ShardedOptimizer if is_sharded(model) else Optimizer
    return kind(name, model, lr, settings, offload, trained)


class ShardedOptimizer(Optimizer):
    """AdamW on this rank's shard of every weight (FSDP2).

    The sharded weights are the fp32 master weights, so only moments are added. With offloading,
    moments are kept in CPU memory; weights cannot be, since forward passes gather them.
    """

    @torch.no_grad()
    def _make_master_weights(self, model: nn.Module) -> list[Tensor]:
        """Return views of this rank's shards, rounded once to the dtype the model computes in."""
        computed = dict(without_data(model).named_parameters())
        types = [computed[name].dtype for name in self.names]
        self._rounded = any(x != torch.float32 for x in types)
        parts = [_local(x).detach() for x in self.weights]
        for part, kind in zip(parts, types, strict=True):
            part.copy_(part.to(kind))
        return [part.requires_grad_() for part in parts]

    def _clip(self) -> Tensor:
        """Clip by the norm over all ranks; every rank gets the same norm."""
        for weight, part in zip(self.weights, self.parameters, strict=True):
            part.grad = None if weight.grad is None else _local(weight.grad)
        gradients = [x.grad for x in self.parameters if x.grad is not None]
        squared = torch.zeros((), device=self.parameters[0].device)
        squared += nn.utils.get_total_norm(gradients).square()
        dist.all_reduce(squared)
        norm = squared.sqrt()
        nn.utils.clip_grads_with_norm_(self.parameters, self.settings.max_grad_norm, norm)
        return norm

    def _write_back(self) -> None:
        """Do nothing: the master weights are the weights."""

    def _offloadable(self) -> list[Tensor]:
        originals = {id(x) for x in self.parameters}
        return [x for x in super()._offloadable() if id(x) not in originals]

    def rows(self, name: str) -> tuple[int, int, tuple[int, ...]]:
        """Return the first row and number of rows of a weight on this rank, and its full shape."""
        weight = self.weights[self.names.index(name)]
        assert isinstance(weight, DTensor)
        before = _rows_before(weight)
        return before, len(_local(weight)), tuple(weight.shape)


def _local(x: Tensor) -> Tensor:
    assert isinstance(x, DTensor)
    return x._local_tensor


def _rows_before(x: DTensor) -> int:
    """Count the rows on lower ranks: FSDP2 gives each rank ceil(rows / ranks) until none remain."""
    mesh = x.device_mesh
    each = -(-x.shape[0] // mesh.size())
    return min(x.shape[0], each * mesh.get_local_rank())


_ORIGINAL = "original"


def save_part(optimizer: ShardedOptimizer, place: Path, rank: int, writers: int) -> dict[str, Any]:
    """Write this rank's shards to a file; return the unsharded state, equal on all ranks."""
    kept: Any = optimizer.state()
    numbers, state = optimizer.numbers, kept["adam"]["state"]
    parts: dict[str, Part] = {}
    whole: dict[str, dict[str, float]] = {}
    for i, name in enumerate(optimizer.names):
        before, _, shape = optimizer.rows(name)
        tensors = dict(state.get(numbers[name], {}))
        whole[name] = {key: float(x) for key, x in tensors.items() if not x.ndim}
        if kept["originals"] is not None:
            tensors[_ORIGINAL] = kept["originals"][i]
        for key, x in tensors.items():
            if x.ndim:
                parts[f"{name}/{key}"] = Part(x, before, shape)
    save_parts(place / file_name(_files(optimizer.name), rank, writers), parts)
    groups = [
        {key: x for key, x in group.items() if key != "params"}
        for group in kept["adam"]["param_groups"]
    ]
    return {"writers": writers, "refused": kept["refused"], "groups": groups, "whole": whole}


def load_moments(optimizer: Optimizer, kept: dict[str, Any], place: Path) -> None:
    """Load optimizer state from a checkpoint written by any number of ranks, for any number."""
    if "writers" not in kept and not isinstance(optimizer, ShardedOptimizer):
        optimizer.load(kept)
        return
    source = (
        _ShardedState(kept, optimizer, place) if "writers" in kept else _WholeState(kept, optimizer)
    )
    numbers, own = optimizer.numbers, optimizer.state()["adam"]
    assert isinstance(own, dict)
    state: dict[int, dict[str, Tensor]] = {}
    for name in optimizer.names:
        if found := source.moments(name):
            state[numbers[name]] = found
    groups = [now | then for now, then in zip(own["param_groups"], source.groups, strict=True)]
    optimizer.load(
        {
            "adam": {"state": state, "param_groups": groups},
            "refused": kept["refused"],
            "originals": source.originals(),
        }
    )


class _SavedState:
    """Saved optimizer state, from which each rank reads its own rows."""

    groups: list[dict[str, Any]]

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def rows(self, name: str) -> tuple[int, int]:
        if isinstance(self.optimizer, ShardedOptimizer):
            return self.optimizer.rows(name)[:2]
        return 0, len(self.optimizer.parameters[self.optimizer.names.index(name)])


class _ShardedState(_SavedState):
    def __init__(self, kept: dict[str, Any], optimizer: Optimizer, place: Path) -> None:
        super().__init__(optimizer)
        self.groups, self._whole = kept["groups"], kept["whole"]
        count = kept["writers"]
        names = (file_name(_files(optimizer.name), i, count) for i in range(count))
        self._parts = Parts(place / name for name in names)

    def moments(self, name: str) -> dict[str, Tensor]:
        whole = {key: torch.tensor(x) for key, x in self._whole[name].items()}
        keys = ("exp_avg", "exp_avg_sq")
        return whole | {key: self._read(name, key) for key in keys if whole}

    def originals(self) -> list[Tensor] | None:
        names = self.optimizer.names
        if f"{names[0]}/{_ORIGINAL}" not in self._parts:
            return None
        return [self._read(name, _ORIGINAL) for name in names]

    def _read(self, name: str, key: str) -> Tensor:
        return self._parts.read(f"{name}/{key}", *self.rows(name))


class _WholeState(_SavedState):
    def __init__(self, kept: dict[str, Any], optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._kept, self._numbers = kept, optimizer.numbers
        self.groups = [
            {key: x for key, x in group.items() if key != "params"}
            for group in kept["adam"]["param_groups"]
        ]

    def moments(self, name: str) -> dict[str, Tensor]:
        found = self._kept["adam"]["state"].get(self._numbers[name], {})
        return {key: self._own(name, x) if x.ndim else x for key, x in found.items()}

    def originals(self) -> list[Tensor] | None:
        whole = self._kept["originals"]
        if whole is None:
            return None
        return [self._own(name, x) for name, x in zip(self.optimizer.names, whole, strict=True)]

    def _own(self, name: str, x: Tensor) -> Tensor:
        before, count = self.rows(name)
        return x[before : before + count].clone()


def _files(name: str) -> str:
    return f"{name}-optimizer"


@runtime_checkable
class Learner(Protocol):
    """A model that gradient steps train."""

    name: ClassVar[str]
    optimizer: Optimizer

    def output(self, rollouts: Rollouts) -> Tensor:
        """Compute the model's output for each token, with gradients; shape (B, T)."""
        ...

    def backward(
        self, algorithm: Algorithm, micro: Batch
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Add the gradients of a micro-batch; return metrics, and log π if it was computed."""
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
            uses_entropy = getattr(algorithm, "uses_entropy", False)
            logp, entropy = self.policy.score(micro.rollouts, self.temperature, uses_entropy)
            loss = algorithm.loss(Outputs(logp, micro.rollouts.value, entropy), micro)
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
            logp_old = micro.rollouts.logp_old
            # the policy's loss is not used here, so neither is its entropy
            outputs = Outputs(logp_old, self.output(micro.rollouts), torch.zeros_like(logp_old))
            loss = algorithm.loss(outputs, micro)
            if loss.value is None:
                raise ValueError(
                    f"expected a value loss, to train the critic; got none from {algorithm!r}."
                )
            loss.value.backward()
        return {"value_loss": loss.metrics["value_loss"]}, None
