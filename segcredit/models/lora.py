"""LoRA: trained matrices of low rank beside frozen weights; several sets of them on one model.

The policy, the critic and, after a warm start, π_ref are each a set of such matrices (an adapter)
on the same frozen weights. One adapter is at work at a time; the policy's, unless somebody says
otherwise by ``with lora.using(…)``.
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

TOWER = "visual"
"""What the vision tower is called, wherever an architecture keeps it."""
LANGUAGE, ALL = "language", "all-linear"

Targets = str | Sequence[str]
"""``language``, ``all-linear``, or names such as ``q_proj`` or ``layers.0.mlp.up_proj``."""


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """All that could have them. The head could not: it is read as a plain matrix."""
    head = model.get_output_embeddings()
    return {
        name: part
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear) and part is not head
    }


def choose_layers(names: Iterable[str], targets: Targets, vision: bool = True) -> list[str]:
    """The layers that are meant; ``vision=False`` leaves the vision tower out in any case."""
    open_ones = [name for name in names if vision or not in_tower(name)]
    if targets == ALL:
        return open_ones
    if targets == LANGUAGE:
        return [name for name in open_ones if not in_tower(name)]
    wanted = [targets] if isinstance(targets, str) else list(targets)
    unknown = [one for one in wanted if not any(_is_meant(name, one) for name in open_ones)]
    if unknown or not wanted:
        ends = dict.fromkeys(name.rpartition(".")[2] for name in open_ones)
        what = f"no linear layer is called {', '.join(map(repr, unknown))}" if unknown else "none"
        raise ValueError(
            f"model.lora.targets: expected {LANGUAGE}, {ALL}, or names of linear layers below the "
            f"head; {what}. This model has {', '.join(list(ends)[:12])}."
        )
    return [name for name in open_ones if any(_is_meant(name, one) for one in wanted)]


def in_tower(name: str) -> bool:
    """Whether a layer belongs to the vision tower."""
    return TOWER in name.split(".")


def _is_meant(name: str, wanted: str) -> bool:
    """By the end of its path, whole words."""
    return f".{name}".endswith(f".{wanted}")


POLICY, CRITIC, REFERENCE = "policy", "critic", "reference"
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
"""What PEFT's files put before every name."""
INSIDE = ".base_layer."
"""Where peft keeps the layer beside which an adapter stands."""
VARIANTS = 32
"""How many forms a compiled layer may have: adapters, times what has gradients. However many layers
there are, those are more than the 8 after which torch gives up."""
_SAMPLED = 64
"""Numbers of each frozen weight that its fingerprint looks at."""


def require_peft() -> None:
    """Say what to type if it is not there."""
    if find_spec("peft") is None:
        raise ValueError(
            "model.lora: LoRA needs the package peft, which is not installed. "
            "Type: pip install 'segcredit[lora]'"
        )


class Lora:
    """A model's adapters: which there are, which is at work, and their files."""

    def __init__(
        self,
        model: PreTrainedModel,
        rank: int,
        alpha: float,
        targets: Targets = LANGUAGE,
        vision: bool = True,
        seed: int = 0,
    ) -> None:
        """Put the policy's adapter into the model, and freeze everything else.

        It begins as nothing, B A = 0, so the model says what it said before.
        """
        require_peft()
        from peft import LoraConfig

        chosen = choose_layers(linear_layers(model), targets, vision)
        self.model = model
        self.names: list[str] = []
        self.working: str | None = POLICY
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
        """A new adapter that begins as the policy's is now."""
        if name not in self.names:
            with torch.random.fork_rng(devices=[]):
                self._inject(name)
        self._switch(self.working)
        with torch.no_grad():
            for new, old in zip(self.parameters(name), self.parameters(POLICY), strict=True):
                new.copy_(old)

    def parameters(self, name: str) -> list[nn.Parameter]:
        """One adapter's matrices, always in the same order."""
        return [x for pair in self._pairs(name) for x in pair[1:]]

    def is_nothing(self, name: str) -> bool:
        """Whether the model with this adapter is the model without: B = 0 everywhere."""
        return not any(bool(b.any()) for _, _, b in self._pairs(name))

    def _pairs(self, name: str) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        for path, layer in self._layers.items():
            yield path, layer.lora_A[name].weight, layer.lora_B[name].weight

    def using(self, name: str | None) -> "Using":
        """The model with this adapter (None: without any) as long as the context lasts."""
        return Using(self, name)

    def recomputing(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Contexts of a layer's forward pass, and of the same pass again in the backward pass.

        What is computed again must be what was computed, whoever is at work by then.
        """
        return nullcontext(), self.using(self.working)

    def _switch(self, name: str | None) -> None:
        """Put another adapter to work; all but π_ref's may have gradients all along.

        peft freezes those that rest, and a backward pass after that drops their gradients
        without a word.
        """
        for layer in self._layers.values():
            layer.set_adapter([] if name is None else [name])
        for own in self.names:
            for x in self.parameters(own):
                x.requires_grad_(own != REFERENCE)
        self.working = name

    def save(self, name: str, folder: Path) -> None:
        """As PEFT's own files, which PeftModel.from_pretrained reads."""
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
        """What :meth:`save` wrote; the adapter is made if there is none of that name."""
        found = load_file(folder / WEIGHTS)
        if name not in self.names:
            self.add_copy(name)
        own = self.named(name)
        theirs = {key: tuple(x.shape) for key, x in found.items()}
        if theirs != {key: tuple(x.shape) for key, x in own.items()}:
            then = json.loads((folder / CONFIG).read_text())
            raise ValueError(
                f"{folder} holds matrices of rank {then.get('r')} for "
                f"{len(theirs) // 2} layers; model.lora asks for rank {self._config.r} and "
                f"{len(own) // 2} layers. Set model.lora as it was when they were trained."
            )
        for key, x in own.items():
            x.copy_(found[key])

    def named(self, name: str) -> dict[str, nn.Parameter]:
        """One adapter's matrices, as PEFT's files name them."""
        found: dict[str, nn.Parameter] = {}
        for path, a, b in self._pairs(name):
            found[f"{PREFIX}{path}.lora_A.weight"] = a
            found[f"{PREFIX}{path}.lora_B.weight"] = b
        return found

    def fingerprint(self) -> str:
        """Of the frozen weights: adapters belong to the weights they were trained on."""
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
class Using:
    """A context in which one adapter is at work; it may be entered again."""

    lora: Lora
    name: str | None
    _before: list[str | None] = field(default_factory=list)

    def __enter__(self) -> None:
        self._before.append(self.lora.working)
        if self.lora.working != self.name:
            self.lora._switch(self.name)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        before = self._before.pop()
        if self.lora.working != before:
            self.lora._switch(before)


def plain_name(name: str) -> str:
    """A parameter's name in the model without adapters."""
    return name.replace(INSIDE, ".")


def is_adapter(name: str) -> bool:
    """Whether a parameter is one of an adapter's."""
    return ".lora_A." in name or ".lora_B." in name


def merged(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """These weights as they would be without adapters: W + (alpha / rank) B A, by their old names.

    One at a time, and the model stays as it is. Weights of a model without adapters pass through.
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
    """W + (alpha / rank) B A, added in float32 and rounded as the weight is."""
    a, b = layer.lora_A[POLICY].weight, layer.lora_B[POLICY].weight
    product = b.float() @ a.float()
    return (weight.float() + layer.scaling[POLICY] * product).to(weight.dtype)
