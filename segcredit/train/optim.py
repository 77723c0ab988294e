"""The step itself: torch's AdamW, or bitsandbytes' with moments of eight bits."""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from segcredit.config import OptimizerSettings
from segcredit.models.weights import is_sharded, trained_weights, without_data
from segcredit.runlog.storage import Part, Parts, file_name, save_parts
from segcredit.train.offload import HostCopies

LIBRARY = "bitsandbytes"
Kind = Literal["adamw", "adamw_8bit"]


def why_not(kind: Kind) -> str | None:
    """What is missing for it; None: nothing."""
    if kind == "adamw_8bit" and find_spec(LIBRARY) is None:
        return f"{kind} needs {LIBRARY}. Type: pip install 'segcredit[8bit]'"
    return None


def make_adam(
    kind: Kind, groups: Sequence[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    """AdamW over the groups, each with its own decay.

    With eight bits, moments are kept as codes in blocks of 256 with a scale each, those of tensors
    under 4096 numbers as they are; all are plain tensors, so that they rest and are saved as ever.
    """
    if kind == "adamw":
        held: list[Tensor] = [x for group in groups for x in group["params"]]
        fused = True if all(x.is_cuda for x in held) else None
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=fused)
    if problem := why_not(kind):
        raise ValueError(f"optimizer.kind: {problem}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit, which it still uses
        from bitsandbytes.optim import AdamW8bit
    return AdamW8bit(groups, lr=lr, betas=betas, eps=eps)


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


PART = 2**31
"""Bytes of originals and moments on the device at once."""


class StreamedOptimizer(Optimizer):
    """What rests comes back for its own part of a step alone.

    During the passes the device holds weights and gradients and nothing else; in exchange all of
    the state crosses the bus in every step. Results are the same, bit for bit.
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
                "memory.offload_optimizer=stream is for weights in half precision, whose float32 "
                "originals rest in main memory. Set model.dtype=bfloat16, or offload_optimizer=true"
            )
        self._host = HostCopies()
        for part in self._parts():
            self._put_away(part)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Nothing comes as a whole."""
        yield

    def _advance(self) -> None:
        """Part by part: to AdamW, what has no gradient is not there."""
        gradients = {id(x): x.grad for x in self.parameters}
        for x in self.parameters:
            x.grad = None
        for part in self._parts():
            originals = [self.parameters[i] for i in part]
            self._bring(originals)
            for x in originals:
                x.grad = gradients.pop(id(x))
            self._adam.step()
            with torch.no_grad():
                torch._foreach_copy_([self.weights[i] for i in part], originals)
            for x in originals:
                x.grad = None
            self._put_away(part)

    def _parts(self) -> Iterator[list[int]]:
        """Numbers of parameters, as many as fit at once."""
        part: list[int] = []
        size = 0
        for number, x in enumerate(self.parameters):
            needed = 12 * x.numel()  # the original and two moments
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

    def _bring(self, originals: list[Tensor]) -> None:
        assert self._host is not None
        self._host.bring([*originals, *self._moments(originals)])
        self._host.arrived()

    def _put_away(self, part: list[int]) -> None:
        """To main memory; in the originals' places stay tensors without memory of their own.

        A gradient lies where its tensor lies, and gradients are on the device.
        """
        assert self._host is not None
        originals = [self.parameters[i] for i in part]
        devices = [x.device for x in originals]
        self._host.send([*originals, *self._moments(originals)])
        for x, device in zip(originals, devices, strict=True):
            x.data = torch.zeros((), device=device).expand(x.shape)

    def state(self) -> dict[str, object]:
        """With the originals as they lie in main memory."""
        assert self._host is not None
        return {**super().state(), "originals": [self._host.kept(x) for x in self.parameters]}

    def load(self, state: dict[str, object]) -> None:
        """Part by part, too, as far as AdamW lets us."""
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
                self._put_away(part)
        self.refused = int(state["refused"])  # type: ignore[call-overload]


def make_optimizer(
    name: str,
    model: nn.Module,
    lr: float,
    settings: OptimizerSettings,
    offload: bool | Literal["stream"] = False,
    trained: Mapping[str, nn.Parameter] | None = None,
) -> Optimizer:
    """As the model is: whole or divided."""
    if offload == "stream":
        return StreamedOptimizer(name, model, lr, settings, trained)
    kind = ShardedOptimizer if is_sharded(model) else Optimizer
    return kind(name, model, lr, settings, offload, trained)


class ShardedOptimizer(Optimizer):
    """The divided weights are the float32 originals, so it holds moments alone.

    Offloaded, those rest in main memory; the weights cannot, since passes gather them.
    """

    @torch.no_grad()
    def _originals(self, model: nn.Module) -> list[Tensor]:
        """Views of the parts that lie here.

        They begin as what the model computes with, rounded, as any other optimizer's do.
        """
        computed = dict(without_data(model).named_parameters())
        types = [computed[name].dtype for name in self.names]
        self._rounded = any(x != torch.float32 for x in types)
        parts = [_local(x).detach() for x in self.weights]
        for part, kind in zip(parts, types, strict=True):
            part.copy_(part.to(kind))
        return [part.requires_grad_() for part in parts]

    def _clip(self) -> Tensor:
        """By the norm of all parts together, the same on every process."""
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
        """The originals are the weights."""

    def _resting(self) -> list[Tensor]:
        originals = {id(x) for x in self.parameters}
        return [x for x in super()._resting() if id(x) not in originals]

    def rows(self, name: str) -> tuple[int, int, tuple[int, ...]]:
        """Which rows of a weight lie here, first and number, and the whole weight's shape."""
        weight = self.weights[self.names.index(name)]
        assert isinstance(weight, DTensor)
        before = _rows_before(weight)
        return before, len(_local(weight)), tuple(weight.shape)


def _local(x: Tensor) -> Tensor:
    assert isinstance(x, DTensor)
    return x._local_tensor


def _rows_before(x: DTensor) -> int:
    """Rows are dealt out evenly, rounded up, until there are none left."""
    mesh = x.device_mesh
    each = -(-x.shape[0] // mesh.size())
    return min(x.shape[0], each * mesh.get_local_rank())


_ORIGINAL = "original"


def save_part(optimizer: ShardedOptimizer, place: Path, rank: int, writers: int) -> dict[str, Any]:
    """Write this process's rows; what is not divided is returned, the same on all."""
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
    """Go on from what a checkpoint has: of one process or many, for one process or many."""
    if "writers" not in kept and not isinstance(optimizer, ShardedOptimizer):
        optimizer.load(kept)
        return
    source = _Divided(kept, optimizer, place) if "writers" in kept else _Whole(kept, optimizer)
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


class _Source:
    """A saved state, from which an optimizer reads its own rows."""

    groups: list[dict[str, Any]]

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def rows(self, name: str) -> tuple[int, int]:
        if isinstance(self.optimizer, ShardedOptimizer):
            return self.optimizer.rows(name)[:2]
        return 0, len(self.optimizer.parameters[self.optimizer.names.index(name)])


class _Divided(_Source):
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


class _Whole(_Source):
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
