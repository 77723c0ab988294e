"""Batch prompts and responses into model inputs, padded or packed, and decode responses."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from segcredit.core.checks import sent
from segcredit.types import Encoded, Prompt, Response, Rollouts

THREADS = 8
"""Maximum number of prompts that are encoded at once."""


@dataclass(frozen=True)
class Inputs:
    """Padded batch for a model's forward pass.

    Rotary positions are always explicit. Without them, Qwen2.5-VL silently falls back to plain text
    positions when token types are missing, and continues from the previous batch's offsets after a
    generation.
    """

    tokens: Int[Tensor, "B L"]
    attended: Bool[Tensor, "B K"]
    """Attention mask over all tokens so far, K ≥ L: those in the cache come first."""
    positions: Int[Tensor, "R B L"]
    vision: dict[str, Tensor]
    token_types: dict[str, Int[Tensor, "B L"]] = field(default_factory=dict)

    @property
    def next_position(self) -> Int[Tensor, " B"]:
        """Rotary position of the next token."""
        return self.positions.amax(dim=(0, 2)) + 1

    def select(self, rows: Int[Tensor, " N"]) -> "Inputs":
        """Select rows, without images, which the model has read already."""
        return Inputs(self.tokens[rows], self.attended[rows], self.positions[:, rows], {})

    def arguments(self) -> dict[str, Tensor]:
        """Return keyword arguments for a transformers model."""
        single = len(self.positions) == 1
        return {
            "input_ids": self.tokens,
            "attention_mask": self.attended.long(),
            "position_ids": self.positions[0] if single else self.positions,
            **self.vision,
            **self.token_types,
        }


@dataclass(frozen=True)
class PackedInputs:
    """Sequences packed end to end into one row, for a model that separates them itself.

    Positions are 0 where a sequence begins. A vision model gets the plain positions as a further
    plane in front: without it, the model would silently attend across sequences.
    """

    tokens: Int[Tensor, "1 L"]
    positions: Int[Tensor, "R 1 L"]
    vision: dict[str, Tensor]
    before: Int[Tensor, " N"]
    """Index of the token before each response token on the mask."""

    def arguments(self) -> dict[str, Tensor]:
        """Return keyword arguments for a transformers model."""
        single = len(self.positions) == 1
        return {
            "input_ids": self.tokens,
            "position_ids": self.positions[0] if single else self.positions,
            **self.vision,
        }


def prompt_inputs(prompts: Sequence[Encoded], device: torch.device | str = "cpu") -> Inputs:
    """Batch prompts, padded on the left."""
    if len({len(x.positions) for x in prompts}) > 1:
        raise ValueError("prompts of a text model and of a vision model cannot share a batch.")
    left = {"batch_first": True, "padding_side": "left"}
    tokens = pad_sequence([x.tokens for x in prompts], **left)  # type: ignore[arg-type]
    length = torch.tensor([len(x.tokens) for x in prompts])
    attended = torch.arange(tokens.shape[1]) >= tokens.shape[1] - length[:, None]
    positions = pad_sequence([x.positions.T for x in prompts], **left)  # type: ignore[arg-type]
    return Inputs(
        tokens=sent(tokens, device),
        attended=sent(attended, device),
        positions=sent(positions.permute(2, 0, 1), device),
        vision=_images(prompts, device),
        token_types=_token_types(prompts, device),
    )


def response_inputs(asked: Inputs, tokens: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Inputs:
    """Batch responses, padded on the right, to be processed after their prompts' KV cache.

    A hole in the mask (a tool's output) is text that the policy has read, so tokens attend to it.
    Tokens after a response's last token are padding.
    """
    # True up to the last token of the response: some masked-in token lies here or later
    inside = mask.flip(1).cummax(dim=1).values.flip(1)
    step = torch.arange(tokens.shape[1], device=tokens.device)
    return Inputs(
        tokens=tokens.masked_fill(~inside, 0),
        attended=torch.cat([asked.attended, inside], dim=1),
        positions=(asked.next_position[:, None] + step).expand(len(asked.positions), -1, -1),
        vision={},
    )


def full_inputs(
    prompts: Sequence[Encoded], tokens: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Inputs:
    """Batch prompts with their responses."""
    asked = prompt_inputs(prompts, tokens.device)
    answered = response_inputs(asked, tokens, mask)
    return Inputs(
        tokens=torch.cat([asked.tokens, answered.tokens], dim=1),
        attended=answered.attended,
        positions=torch.cat([asked.positions, answered.positions], dim=2),
        vision=asked.vision,
        token_types={name: pad(x, (0, tokens.shape[1])) for name, x in asked.token_types.items()},
    )


def packed_inputs(
    prompts: Sequence[Encoded], tokens: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> PackedInputs:
    """Pack every prompt with its response into one row."""
    device = tokens.device
    tokens, mask = tokens.cpu(), mask.cpu()  # sizes depend on them: one synchronization, not many
    inside = mask.flip(1).cummax(dim=1).values.flip(1)
    count = torch.tensor([len(x.tokens) for x in prompts])
    asked = pad_sequence([x.tokens.cpu() for x in prompts], batch_first=True)
    planes = pad_sequence([x.positions.T for x in prompts], batch_first=True).permute(2, 0, 1)
    following = planes.amax(dim=(0, 2)) + 1
    step = torch.arange(tokens.shape[1])
    later = (following[:, None] + step[:-1]).expand(len(planes), -1, -1)
    planes = torch.cat([planes, later], dim=2)
    # no output is needed after a response's last token
    here = torch.cat([torch.arange(asked.shape[1]) < count[:, None], inside[:, 1:]], dim=1)
    if len(planes) > 1:
        planes = torch.cat([here.cumsum(dim=1)[None] - 1, planes])
    length = here.sum(dim=1)
    before = (length.cumsum(0) - length + count - 1)[:, None] + step
    return PackedInputs(
        tokens=sent(torch.cat([asked, tokens[:, :-1]], dim=1)[here][None], device),
        positions=sent(planes[:, here][:, None], device),
        vision=_images(prompts, device),
        before=sent(before[mask], device),
    )


def _images(prompts: Sequence[Encoded], device: torch.device | str) -> dict[str, Tensor]:
    joined = {}
    for name in sorted({name for x in prompts for name in x.vision}):
        parts = [x.vision[name] for x in prompts if name in x.vision]
        if len({x.device for x in parts}) > 1:  # some are cached on the device
            parts = [sent(x, device) for x in parts]
        joined[name] = sent(torch.cat(_equal_shapes(parts)), device)
    return joined


def _equal_shapes(parts: list[Tensor]) -> list[Tensor]:
    """Pad with zeros at the end of every axis but the first, as stock processors pad a batch."""
    shapes = {x.shape[1:] for x in parts}
    if len(shapes) == 1:
        return parts
    most = [max(sizes) for sizes in zip(*shapes, strict=True)]
    padding = [
        [
            n
            for longest, own in zip(most[::-1], x.shape[:0:-1], strict=True)
            for n in (0, longest - own)
        ]
        for x in parts
    ]
    return [pad(x, more) for x, more in zip(parts, padding, strict=True)]


def _token_types(prompts: Sequence[Encoded], device: torch.device | str) -> dict[str, Tensor]:
    """Batch the inputs that have one number per token, padded on the left."""
    return {
        name: sent(
            pad_sequence(
                [x.token_types.get(name, torch.zeros_like(x.tokens)) for x in prompts],
                batch_first=True,
                padding_side="left",
            ),
            device,
        )
        for name in sorted({name for x in prompts for name in x.token_types})
    }


def encode_all(encode: Callable[[Prompt], Encoded], prompts: Sequence[Prompt]) -> list[Encoded]:
    """Encode all prompts, in order; images are read and resized by several threads."""
    workers = min(THREADS, torch.get_num_threads(), len(prompts))
    if workers < 2 or not any(prompt.images for prompt in prompts):
        return [encode(prompt) for prompt in prompts]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(encode, prompts))


def distinct(prompts: Sequence[Encoded]) -> tuple[list[Encoded], Int[Tensor, " B"]]:
    """Return each distinct prompt object once, and for every row the index of its prompt."""
    number: dict[int, int] = {}
    which = [number.setdefault(id(x), len(number)) for x in prompts]
    return list({id(x): x for x in prompts}.values()), torch.tensor(which)


def as_responses(
    rollouts: Rollouts, decode: Callable[[list[int]], str], max_tokens: int
) -> list[Response]:
    """Decode the responses of rollouts, for reward functions."""
    assert rollouts.prompts is not None
    responses = []
    # copied to the CPU once: otherwise every row would synchronize with the device
    drawn, where, short = (x.cpu() for x in (rollouts.tokens, rollouts.mask, rollouts.truncated))
    for encoded, tokens, mask, cut in zip(
        rollouts.prompts, drawn, where, short.tolist(), strict=True
    ):
        written = tokens[mask].tolist()
        responses.append(Response(encoded.prompt, decode(written), len(written), cut, max_tokens))
    return responses
