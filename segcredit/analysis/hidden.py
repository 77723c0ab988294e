"""Last hidden states of a run's saved policy before every token of recorded responses."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

from segcredit.analysis.result import CannotAnalyseError
from segcredit.runlog import Run
from segcredit.runlog.untrusted import FLAG, require_trust

if TYPE_CHECKING:
    from segcredit.models import Policy
    from segcredit.types import Encoded, Prompt

TOKENS_AT_ONCE = 16_384
_PARTS = ("model", "data")
OLDER = (
    "its rollouts hold no messages: it was written by an older version, which did not keep what a "
    "prompt is made of."
)


def last_whole_checkpoint(run: Run) -> Path:
    """Whose policy the probe reads."""
    path = run.last_whole_checkpoint()
    if path is None:
        raise CannotAnalyseError("it has no whole checkpoint yet.")
    return path


def load_policy(run: Run, checkpoint: Path, trust_run: bool = False) -> "Policy":
    """Load a checkpoint's policy as config.yaml defines it; run its code only if trusted."""
    import torch
    from safetensors import SafetensorError

    from segcredit.models import Policy

    settings, data = (x if isinstance(x, dict) else {} for x in map(run.config.get, _PARTS))
    if not trust_run:
        command = f"segcredit analyze {shlex.quote(str(run.path))} --probe {FLAG}"
        try:
            require_trust({"model": settings}, run.path, command)
        except ValueError as error:
            raise CannotAnalyseError(str(error)) from None
    dtype = torch.bfloat16 if settings.get("dtype") == "bfloat16" else torch.float32
    try:
        trusted = settings.get("trust_remote_code") is True
        template = data.get("template")
        policy = Policy.from_pretrained(checkpoint / "policy", dtype, trusted, template)
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        first = " ".join(str(error).split())[:300]
        raise CannotAnalyseError(
            f"its checkpoint {checkpoint.name} does not load: {first}"
        ) from None
    if torch.cuda.is_available():
        policy.model.to("cuda")
    return policy


def prompt_of(row: Mapping[str, Any], folder: Path) -> "Prompt":
    """The prompt of a recorded response, its pictures read from the run folder."""
    from segcredit.types import Prompt

    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise CannotAnalyseError(OLDER)
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise CannotAnalyseError("a recorded message is no object with role and content.")
    images = []
    listed = row.get("images")
    for name in listed if isinstance(listed, list) else ():
        try:
            path = (folder / str(name)).resolve()
            inside = path.is_relative_to(folder.resolve()) and path.is_file()
        except (OSError, ValueError, RuntimeError):  # not a valid file name
            inside = False
        if not inside:
            raise CannotAnalyseError(f"the picture {str(name)[:80]!r} is not in the run folder.")
        images.append(path)
    made = tuple({"role": str(x.get("role", "user")), "content": x["content"]} for x in messages)
    return Prompt(str(row.get("prompt_id", "")), made, tuple(images))


def hidden_states(
    policy: "Policy",
    prompts: "Sequence[Encoded]",
    responses: Sequence[Int[np.ndarray, "_"]],
) -> Iterator[Float[np.ndarray, "_ F"]]:
    """Of each response, what the trunk says before each of its tokens; a few at a time."""
    import torch

    from segcredit.models.forward import response_outputs
    from segcredit.types import Rollouts

    width = policy.model.get_input_embeddings().weight.shape[0]
    trunk = policy.model.base_model
    for part in _parts([len(x.tokens) for x in prompts], [len(x) for x in responses]):
        lengths = [len(x) for x in responses[part]]
        tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
        for row, ids in enumerate(responses[part]):
            tokens[row, : len(ids)] = torch.from_numpy(ids.clip(0, width - 1))
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        nothing = torch.zeros(len(lengths), device=policy.device)
        rollouts = Rollouts(
            tokens=tokens.to(policy.device),
            mask=mask.to(policy.device),
            logp_old=torch.zeros(mask.shape, device=policy.device),
            reward=nothing,
            group=nothing.long(),
            truncated=nothing.bool(),
            prompts=prompts[part],
        )
        with torch.inference_mode():
            found = response_outputs(trunk, rollouts, head=False).float().cpu().numpy()
        yield from np.split(found, np.cumsum(lengths)[:-1])


def _parts(prompts: Sequence[int], responses: Sequence[int]) -> Iterator[slice]:
    """Neighbours that together, padded, are not too many tokens."""
    first, longest = 0, [0, 0]
    for number, lengths in enumerate(zip(prompts, responses, strict=True)):
        wider = [max(pair) for pair in zip(longest, lengths, strict=True)]
        if number > first and sum(wider) * (number + 1 - first) > TOKENS_AT_ONCE:
            yield slice(first, number)
            first, wider = number, list(lengths)
        longest = wider
    if first < len(prompts):
        yield slice(first, len(prompts))
