"""LoRA: low-rank adapters on frozen weights, several of them on one model.

The policy, the critic and, after a warm start, π_ref are adapters on the same base model. One
adapter is active at a time: the policy's, unless ``with lora.use(…)`` selects another.
"""

import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from segcredit.installing import install_command
from segcredit.models.families import Family

LANGUAGE, ALL = "language", "all-linear"

Targets = str | Sequence[str]
"""``language``, ``all-linear``, or names such as ``q_proj`` or ``layers.0.mlp.up_proj``."""


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Find layers that can have an adapter: linear layers used as plain matrices, not the head."""
    head = model.get_output_embeddings()
    return {
        name: part
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear) and part is not head
    }


def choose_layers(
    names: Iterable[str], targets: Targets, family: Family, vision: bool = True
) -> list[str]:
    """Select the layers that get an adapter; ``vision=False`` excludes the vision tower."""
    candidates = [name for name in names if vision or not family.in_vision_tower(name)]
    if targets == ALL:
        return candidates
    if targets == LANGUAGE:
        return [name for name in candidates if not family.in_vision_tower(name)]
    wanted = [targets] if isinstance(targets, str) else list(targets)
    unknown = [one for one in wanted if not any(_matches(name, one) for name in candidates)]
    if unknown or not wanted:
        ends = dict.fromkeys(name.rpartition(".")[2] for name in candidates)
        what = f"no linear layer is called {', '.join(map(repr, unknown))}" if unknown else "none"
        raise ValueError(
            f"model.lora.targets: expected {LANGUAGE}, {ALL}, or names of linear layers below the "
            f"head; {what}. This model has {', '.join(list(ends)[:12])}."
        )
    return [name for name in candidates if any(_matches(name, one) for one in wanted)]


def _matches(name: str, wanted: str) -> bool:
    """Whether a layer's path ends with the wanted name, in whole words."""
    return f".{name}".endswith(f".{wanted}")


POLICY, CRITIC, REFERENCE = "policy", "critic", "reference"
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
"""Prefix of every name in PEFT's files."""
INSIDE = ".base_layer."
"""Name under which peft keeps the original layer."""
VARIANTS = 32
"""Maximum number of compiled variants of a layer, one per adapter and set of gradients. torch's
default limit of 8 is too small for them."""
_SAMPLED = 64
"""How many numbers of each frozen weight enter the fingerprint."""


def require_peft() -> None:
    """Raise ValueError if peft is not installed."""
    if find_spec("peft") is None:
        raise ValueError(
            "model.lora: LoRA needs the package peft, which is not installed. "
            f"Type: {install_command('lora')}"
        )


class Lora:
    """The adapters of a model: creation, selection, saving and loading."""

    def __init__(
        self,
        model: PreTrainedModel,
        family: Family,
        rank: int,
        alpha: float,
        targets: Targets = LANGUAGE,
        vision: bool = True,
        seed: int = 0,
    ) -> None:
        """Add the policy's adapter to the model and freeze everything else.

        The adapter starts at B A = 0, so the model's outputs do not change.
        """
        require_peft()
        from peft import LoraConfig

        chosen = choose_layers(linear_layers(model), targets, family, vision)
        self.model = model
        self.names: list[str] = []
        self.selected: str | None = POLICY
        self._config = LoraConfig(
            r=rank,
            lora_alpha=alpha,
            target_modules=chosen,
            base_model_name_or_path=getattr(model, "name_or_path", None) or None,
        )
        with torch.random.fork_rng(devices=[]):  # peft draws on the CPU
            torch.manual_seed(seed)
            self._inject(POLICY)
        self._layers = {name: model.get_submodule(name) for name in chosen}
        self._switch(POLICY)

    def _inject(self, name: str) -> None:
        from peft import inject_adapter_in_model

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")
            inject_adapter_in_model(self._config, self.model, name)
        self.names.append(name)

    def add_copy(self, name: str) -> None:
        """Add an adapter that starts as a copy of the policy's."""
        if name not in self.names:
            with torch.random.fork_rng(devices=[]):
                self._inject(name)
        self._switch(self.selected)
        with torch.no_grad():
            for new, old in zip(self.parameters(name), self.parameters(POLICY), strict=True):
                new.copy_(old)

    def parameters(self, name: str) -> list[nn.Parameter]:
        """Return the matrices of an adapter, always in the same order."""
        return [x for pair in self._pairs(name) for x in pair[1:]]

    def is_zero(self, name: str) -> bool:
        """Whether the adapter does not change the model: B = 0 everywhere."""
        return not any(bool(b.any()) for _, _, b in self._pairs(name))

    def _pairs(self, name: str) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        for path, layer in self._layers.items():
            yield path, layer.lora_A[name].weight, layer.lora_B[name].weight

    def use(self, name: str | None) -> "AdapterContext":
        """Return a context in which this adapter is active (None: the base model)."""
        return AdapterContext(self, name)

    def recomputing(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return contexts for a layer's forward pass and for its recomputation.

        The recomputation must use the adapter of the forward pass, even if another is active then.
        """
        return nullcontext(), self.use(self.selected)

    def _switch(self, name: str | None) -> None:
        """Activate another adapter; all but π_ref's keep requiring gradients.

        peft freezes inactive adapters, and a later backward pass would silently drop their
        gradients.
        """
        for layer in self._layers.values():
            layer.set_adapter([] if name is None else [name])
        for own in self.names:
            for x in self.parameters(own):
                x.requires_grad_(own != REFERENCE)
        self.selected = name

    def save(self, name: str, folder: Path) -> None:
        """Save an adapter in PEFT's format, which PeftModel.from_pretrained reads."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {key: x.detach().cpu().contiguous() for key, x in self.named(name).items()}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        config = {
            key: sorted(x) if isinstance(x, set) else x for key, x in self._config.to_dict().items()
        }
        text = json.dumps(config | {"inference_mode": True}, indent=2, sort_keys=True, default=str)
        (folder / CONFIG).write_text(text + "\n")

    @torch.no_grad()
    def load(self, name: str, folder: Path) -> None:
        """Load what :meth:`save` wrote; an adapter that does not exist yet is added."""
        saved = load_file(folder / WEIGHTS)
        if name not in self.names:
            self.add_copy(name)
        own = self.named(name)
        theirs = {key: tuple(x.shape) for key, x in saved.items()}
        if theirs != {key: tuple(x.shape) for key, x in own.items()}:
            then = json.loads((folder / CONFIG).read_text())
            raise ValueError(
                f"{folder} holds matrices of rank {then.get('r')} for "
                f"{len(theirs) // 2} layers; model.lora sets rank {self._config.r} and "
                f"{len(own) // 2} layers. Set model.lora as it was when they were trained."
            )
        for key, x in own.items():
            x.copy_(saved[key])

    def named(self, name: str) -> dict[str, nn.Parameter]:
        """Map names in PEFT's files to the matrices of an adapter."""
        found: dict[str, nn.Parameter] = {}
        for path, a, b in self._pairs(name):
            found[f"{PREFIX}{path}.lora_A.weight"] = a
            found[f"{PREFIX}{path}.lora_B.weight"] = b
        return found

    def fingerprint(self) -> str:
        """Hash the frozen weights: an adapter fits only the weights it was trained on."""
        digest = hashlib.sha256()
        for name, x in self.model.named_parameters():
            if is_adapter(name):
                continue
            flat = x.detach().flatten()
            some = flat[:: max(1, len(flat) // _SAMPLED)].float().cpu()
            digest.update(f"{plain_name(name)} {tuple(x.shape)} {x.dtype}".encode())
            digest.update(some.numpy().tobytes())
        return digest.hexdigest()


@dataclass
class AdapterContext:
    """Context in which one adapter is active; it may be entered several times."""

    lora: Lora
    name: str | None
    _before: list[str | None] = field(default_factory=list)

    def __enter__(self) -> None:
        self._before.append(self.lora.selected)
        if self.lora.selected != self.name:
            self.lora._switch(self.name)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        before = self._before.pop()
        if self.lora.selected != before:
            self.lora._switch(before)


def plain_name(name: str) -> str:
    """Return a parameter's name in the model without adapters."""
    return name.replace(INSIDE, ".")


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def merge_adapter(
    model: nn.Module, weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights with the policy's adapter added, W + (alpha / rank) B A, by plain names.

    Weights are yielded one at a time; the model does not change. Without adapters, they are the
    model's own.
    """
    layers: dict[str, Any] = {
        name: part for name, part in model.named_modules() if hasattr(part, "lora_A")
    }
    for name, x in weights:
        if is_adapter(name):
            continue
        path, _, rest = name.partition(INSIDE)
        yield plain_name(name), _plus(x, layers[path]) if rest == "weight" else x


@torch.no_grad()
def _plus(weight: Tensor, layer: Any) -> Tensor:
    """Merge an adapter: W + (alpha / rank) B A in float32, rounded to the weight's dtype."""
    a, b = layer.lora_A[POLICY].weight, layer.lora_B[POLICY].weight
    product = b.float() @ a.float()
    return (weight.float() + layer.scaling[POLICY] * product).to(weight.dtype)
