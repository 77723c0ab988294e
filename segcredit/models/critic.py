"""The critic: a copy of the policy's trunk with a value head, for text and vision models."""

import copy
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from segcredit.models.families import Family, find_family
from segcredit.models.layers import trained_weights
from segcredit.models.loading import (
    CONFIG,
    ModelError,
    check_file,
    check_weight_files,
    train_padding_token,
    without_progress_bars,
)
from segcredit.models.lora import CRITIC, Lora
from segcredit.models.policy import Policy, response_outputs, spread
from segcredit.printable import named, printable
from segcredit.types import Rollouts

HEAD_FILE = "value_head.safetensors"


class Critic(nn.Module):
    """Estimates V of the prefix before each response token.

    transformers has no token classifier for Qwen-VL. A value model class that is loaded by
    ``from_pretrained`` from a Qwen2.5-VL checkpoint gets a *random* language model, because the
    checkpoint uses older parameter names. So the trunk is copied from a loaded policy, and every
    tensor of the copy is compared. With LoRA there is no copy: the critic is the policy's own trunk
    with another adapter.
    """

    def __init__(
        self, trunk: PreTrainedModel, lora: Lora | None = None, family: Family | None = None
    ) -> None:
        super().__init__()
        self.trunk = trunk
        self.lora = lora
        self.family = find_family(trunk.config) if family is None else family
        hidden = trunk.config.get_text_config().hidden_size
        # V = 0 at the start; always in float32, since the value loss is a regression
        self.head = nn.Linear(hidden, 1, dtype=torch.float32, device=trunk.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @classmethod
    def from_policy(cls, policy: Policy) -> "Critic":
        """Make a critic that starts with the policy's weights."""
        original, family = policy.family.trunk(policy.model), policy.family
        if original is policy.model:
            raise ValueError(
                f"{type(policy.model).__name__} has no trunk below its head to copy for a critic. "
                f"Write a model family with a method trunk() (docs/extending.md), or use a method "
                f"without a critic (grpo)."
            )
        if policy.lora is not None:
            policy.lora.add_copy(CRITIC)
            return cls(original, policy.lora, family)
        critic = cls(copy.deepcopy(original).eval(), family=family)
        verify_equal(original, critic.trunk)
        return critic

    @classmethod
    def from_saved(
        cls, folder: Path, dtype: torch.dtype = torch.float32, family: Family | None = None
    ) -> "Critic":
        """Load a critic that :meth:`save` wrote; ``family`` None: by the model's type."""
        trunk, found = AutoModel.from_pretrained(folder, dtype=dtype, output_loading_info=True)
        for name in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if found.get(name):
                raise ValueError(
                    f"{folder} is not a saved critic: {name.replace('_', ' ')} "
                    f"{sorted(map(str, found[name]))[:3]}. Use Critic.from_policy(policy)."
                )
        train_padding_token(trunk)
        critic = cls(trunk.eval(), family=family)
        if not (folder / HEAD_FILE).is_file():
            raise ValueError(
                f"{folder} is not a saved critic: it has no {HEAD_FILE}. "
                f"Use Critic.from_policy(policy)."
            )
        critic.head.load_state_dict(load_file(folder / HEAD_FILE))
        return critic

    def load_adapter(self, folder: Path) -> None:
        """Load the adapter and head of a critic with LoRA, as :meth:`save` wrote them."""
        assert self.lora is not None
        self.lora.load(CRITIC, folder)
        self.head.load_state_dict(load_file(folder / HEAD_FILE))

    def save(self, folder: Path) -> None:
        """Save the trunk as a Hugging Face folder, or its adapter as PEFT does, and the head."""
        if self.lora is None:
            with without_progress_bars():
                self.trunk.save_pretrained(folder)
        else:
            self.lora.save(CRITIC, folder)
        save_file(
            {name: x.contiguous() for name, x in self.head.state_dict().items()}, folder / HEAD_FILE
        )

    def active(self) -> AbstractContextManager[None]:
        """Return a context in which the trunk uses the critic's adapter; no effect without LoRA."""
        return nullcontext() if self.lora is None else self.lora.use(CRITIC)

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters, by names that do not change between runs."""
        if self.lora is None:
            return trained_weights(self)
        head = {f"head.{name}": x for name, x in self.head.named_parameters()}
        return self.lora.named(CRITIC) | head

    def forward(self, rollouts: Rollouts) -> Float[Tensor, "B T"]:
        """Compute V before each response token."""
        with self.active():
            hidden = response_outputs(self.trunk, rollouts, head=False, family=self.family)
        return spread(self.head(hidden.float()).squeeze(-1), rollouts)


def check_saved(folder: Path, config: PreTrainedConfig) -> None:
    """Raise ModelError unless the folder holds a complete critic for the policy's vocabulary."""
    files = [CONFIG, HEAD_FILE]
    lacking = [name for name in files if not (folder / name).is_file()]
    if lacking:
        raise ModelError(
            f"expected a folder that a critic was saved to, with {' and '.join(files)}; "
            f"{named(folder)} has no {lacking[0]}. A run saves its critic in "
            f"RUN/checkpoints/step-…/critic."
        )
    check_weight_files(folder)
    check_file(folder / HEAD_FILE)
    try:
        own = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        reason = printable(" ".join(str(error).split()), 120)
        raise ModelError(f"{named(folder / CONFIG)} cannot be read: {reason}") from None
    for what in ("model_type", "vocab_size"):
        theirs, ours = (getattr(x.get_text_config(), what, None) for x in (config, own))
        if theirs != ours:
            raise ModelError(
                f"{named(folder)} is a critic for another policy: its {what} is {ours}, the "
                f"policy's {theirs}."
            )


def verify_equal(original: nn.Module, copied: nn.Module) -> None:
    """Raise ValueError if any parameter or buffer of the copied trunk differs from the policy's."""
    theirs, ours = _tensors(original), _tensors(copied)
    if names := sorted(theirs.keys() ^ ours.keys()):
        raise ValueError(
            f"the critic's trunk is not the policy's: only one of them has {names[:3]}."
        )
    if (_memory(theirs) & _memory(ours)) - {0}:
        raise ValueError("the critic's trunk shares memory with the policy's; it must be a copy.")
    different = [name for name, x in theirs.items() if not torch.equal(x, ours[name])]
    if different:
        raise ValueError(
            f"the critic's trunk is not the policy's: {len(different)} of {len(theirs)} tensors "
            f"differ, first {different[0]!r}."
        )


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and all buffers, also those that are never saved (rotary frequencies)."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _memory(tensors: dict[str, Tensor]) -> set[int]:
    """Return the addresses of the tensors' storages; views of one storage have the same."""
    return {x.untyped_storage().data_ptr() for x in tensors.values()}
