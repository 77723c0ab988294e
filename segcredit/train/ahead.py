"""Sample the next batch in the background, while the policy is updated (``rollout.ahead``).

A copy of the policy has the weights from before the update. It samples the responses of the next
step in a thread, and scores them after the update. So log π_old, entropies and segments of that
batch are those of the policy that sampled it, which is one update older than the policy that trains
on it.

The thread runs nothing but :meth:`Sampler.sample`. All other work, and every collective operation,
stays on the main thread, and no thread runs between two steps.
"""

import copy
import ctypes
import hashlib
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from segcredit.models import Policy
from segcredit.models.inputs import distinct, encode_all
from segcredit.registry import names_code
from segcredit.train.collect import Context, complete, sampler_of
from segcredit.train.metrics import Metrics, RolloutBatch
from segcredit.train.models import device_of, fuse_on_gpu, rollout_engine
from segcredit.train.source import PromptList, next_prompts
from segcredit.train.state import State
from segcredit.types import (
    Encoded,
    Response,
    Reward,
    RolloutEngine,
    Rollouts,
    Sampling,
)

Made = TypeVar("Made")
STOP_SECONDS = 10.0
"""Seconds to wait for a thread to end after a failed step; it ends at its next line of Python."""


@dataclass(frozen=True)
class PendingBatch:
    """A complete batch on which the next step trains, one update after it was sampled."""

    sampled: RolloutBatch
    metrics: dict[str, float]
    """Metrics of the batch's sampling, such as those of dynamic sampling."""
    step: int
    """Number of steps done when the batch is trained on."""
    position: int
    """Prompts taken from the training source before this batch."""


class RemotePolicy(Policy):
    """A policy on another device than the rollouts that it scores."""

    def score(
        self, rollouts: Rollouts, temperature: float, with_entropy: bool = False
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"] | None]:
        """Score on the policy's device; return the results on that of the rollouts."""
        device = rollouts.mask.device
        moved = rollouts.map(lambda x: x.to(self.device))
        logp, entropy = super().score(moved, temperature, with_entropy)
        return logp.to(device), None if entropy is None else entropy.to(device)


@dataclass(frozen=True)
class ReturningEngine:
    """The copy's engine; its rollouts are returned on the device that trains."""

    inner: RolloutEngine
    device: torch.device

    def sample(
        self, prompts: Sequence[Encoded], sampling: Sampling, generator: torch.Generator
    ) -> Rollouts:
        return self._returned(self.inner.sample(prompts, sampling, generator))

    def continue_from(
        self,
        prompts: Sequence[Encoded],
        prefixes: Sequence[Int[Tensor, "_"]],
        sampling: Sampling,
        generator: torch.Generator,
    ) -> Rollouts:
        return self._returned(self.inner.continue_from(prompts, prefixes, sampling, generator))

    def load_weights(self, policy: torch.nn.Module) -> None:
        self.inner.load_weights(policy)

    def close(self) -> None:
        self.inner.close()

    def _returned(self, rollouts: Rollouts) -> Rollouts:
        return rollouts.map(self._moved)

    def _moved(self, x: Tensor) -> Tensor:
        x = x.to(self.device)
        if x.is_cuda:  # made on the thread's stream: the main stream reads it before it is reused
            x.record_stream(torch.cuda.default_stream(self.device))
        return x


class Lookahead:
    """A copy of the policy with an engine of its own, which samples one update early."""

    def __init__(self, state: State) -> None:
        """Copy the whole policy, also with LoRA, since adapters are switched during training."""
        training, name = state.policy.device, state.recipe.rollout.device
        device = training if name is None else device_of(name)
        model, lora = copy.deepcopy((state.policy.model, state.policy.lora))
        kind = Policy if device == training else RemotePolicy
        self.policy = kind(model.to(device), state.policy.codec, lora)
        trained, own = state.policy.trained(), self.policy.trained()
        self._weights = [(own[key], x) for key, x in trained.items()]
        # weights keep requires_grad, by which torch.matmul chooses how to multiply: the copy must
        # round as the policy does
        fuse_on_gpu(model)  # the same kernels as the policy; a copy is not compiled
        self.engine = ReturningEngine(
            rollout_engine(state.recipe, state.requirements, self.policy), training
        )
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @torch.no_grad()
    def copy_weights(self) -> None:
        """Take the policy's current weights."""
        for own, x in self._weights:
            own.copy_(x)
        self.engine.load_weights(self.policy.model)

    def view(self, state: State) -> State:
        """Return the state of the next step with this copy as its policy.

        Everything else is shared: critic, reference model, tracked values, curriculum.
        """
        view = copy.copy(state)
        view.policy, view.engine = self.policy, self.engine
        view.step, view.stage_step = state.step + 1, state.stage_step + 1
        return view

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Return a context in which a GPU uses a stream parallel to the main thread's.

        It waits for what the main thread began before, and its work is complete at its end.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.default_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def close(self) -> None:
        """Release the engine's processes and memory."""
        self.engine.close()


class StopSampling(BaseException):
    """Ends a thread whose result is no longer needed."""


class Background(Generic[Made]):
    """Work in a thread; its result or its error goes to the caller of :meth:`result`."""

    def __init__(self, work: Callable[[], Made]) -> None:
        self._work = work
        self._made: list[Made] = []
        self._error: BaseException | None = None
        self.seconds = 0.0
        # new threads would begin with torch's last setting, which may be that of a decoding step
        self._cpu_threads = torch.get_num_threads()
        # a daemon: an engine that does not return must not keep a stopped run alive
        self._thread = threading.Thread(target=self._run, name="rollout.ahead", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        begin = time.perf_counter()
        try:
            torch.set_num_threads(self._cpu_threads)
            self._made.append(self._work())
        except BaseException as error:
            self._error = error
        self.seconds = time.perf_counter() - begin

    def result(self) -> Made:
        """Wait for the work; return its result, or raise its error, which is not kept."""
        self._thread.join()
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            return self._made[0]
        finally:
            del error  # its traceback refers to this frame: a cycle would keep the thread's tensors

    def stop(self) -> None:
        """End the thread at its next line of Python, and wait for that."""
        if self._thread.is_alive() and self._thread.ident is not None:
            number, error = ctypes.c_ulong(self._thread.ident), ctypes.py_object(StopSampling)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(number, error)
            self._thread.join(STOP_SECONDS)


class AheadSampling:
    """Context in which the next step's responses are sampled; an error stops the sampling."""

    def __init__(self, state: State, log: Metrics) -> None:
        """Copy the current weights and choose the prompts."""
        with log.time("sample"):
            if state.lookahead is None:
                state.lookahead = Lookahead(state)
            else:
                state.lookahead.copy_weights()
            self._state, self._log, self._sampled = state, log, Metrics()
            self._lookahead, self._position = state.lookahead, state.position
            view = self._lookahead.view(state)
            self._prompts = next_prompts(view)
            state.position = view.position
            self._sampler = sampler_of(view, state.columns)
            self._context = self._context_of(view)

    def __enter__(self) -> "AheadSampling":
        """Begin to sample in the background."""
        self._work = Background(self._sample)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._work.stop()

    def _context_of(self, view: State) -> Context:
        return Context(view, self._sampled, ("optimize", view.step))

    def _sample(self) -> Any:
        with self._lookahead.on_stream():
            return self._sampler.sample(self._context, self._prompts)

    def _drawn(self) -> Any:
        """Wait for the responses; sample them now if both did not fit into memory together."""
        try:
            return self._work.result()
        except torch.OutOfMemoryError:
            warnings.warn(
                "rollout.ahead: there was too little memory to sample during the update, so this "
                "batch was sampled after the update; results do not change. Set a smaller "
                "rollout.rows or update.tokens_per_micro, or rollout.ahead=0.",
                stacklevel=2,
            )
        torch.cuda.empty_cache()
        return self._sample()

    def finish(self) -> PendingBatch:
        """Wait for the responses, grade them and fill their columns.

        Times are part of the current step; other metrics belong to the step that trains on the
        batch.
        """
        state, log = self._state, self._log
        with log.time("sample"):
            drawn = self._drawn()
        log.add({"ahead/sample_seconds": self._work.seconds})
        view = self._lookahead.view(state)  # again: micro-batches may have been halved
        context = self._context_of(view)  # its metrics include those of the thread
        more = partial(next_prompts, view) if state.recipe.rollout.refills else None
        sampled = complete(context, self._sampler, drawn, state.columns, more)
        state.position = view.position
        log.take_times(context.log)
        return PendingBatch(
            # in memory as after a resume: sums of strided tensors may round differently
            sampled.map(lambda x: x.contiguous()),
            context.log.result(),
            view.step,
            self._position,
        )


# ── Checkpoints ──────────────────────────────────────────────────────────────────────────────────


def as_saved(state: State) -> dict[str, Any]:
    """Return the part of the pending batch that a checkpoint stores, if there is one.

    Prompts are kept by their ids: their tokens and images are made again from the data.
    """
    pending = state.pending
    if pending is None:
        return {}
    encoded = _encoded(pending.sampled)
    number = {id(x): n for n, x in enumerate(encoded)}
    kept = {
        "settings": _settings(state),
        "code": state.code,
        "step": pending.step,
        "position": pending.position,
        "metrics": dict(pending.metrics),
        "prompts": [[x.prompt.id, _digest(x)] for x in encoded],
        "sampled": _packed(pending.sampled, number),
    }
    return {"pending": kept}


def restored(state: State, kept: Mapping[str, Any] | None) -> PendingBatch | None:
    """Return a checkpoint's pending batch; None if there is none, or if it no longer fits.

    If settings, data or a file with the user's code have changed, the next step samples responses
    to the same prompts from the current policy, and grades them with the current reward.
    """
    if kept is None or kept["step"] != state.step:
        return None
    encoded = None
    same_code = kept.get("code", state.code) == state.code  # earlier versions kept no hashes
    if same_code and kept["settings"] == _settings(state):
        encoded = _encoded_again(state, kept)
    if encoded is None:
        state.position = kept["position"]
        return None
    sampled = _unpacked(kept["sampled"], encoded, state.policy.device)
    return PendingBatch(sampled, dict(kept["metrics"]), kept["step"], kept["position"])


def _settings(state: State) -> dict[str, Any]:
    """Return the settings that determine what a pending batch contains."""
    recipe = state.recipe.as_dict()
    # an object without a name of its own is named by its address, which is new in every process
    method = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(state.algorithm))
    found = {"method": method, "reward": recipe["reward"], **recipe["rollout"]}
    return {key: _without_folder(x) for key, x in found.items()}


def _without_folder(setting: Any) -> Any:
    """Shorten the paths of code files to their names, since a run's folder may be moved."""
    if isinstance(setting, dict):
        return {key: _without_folder(x) for key, x in setting.items()}
    if isinstance(setting, list):
        return [_without_folder(x) for x in setting]
    return Path(setting).name if isinstance(setting, str) and names_code(setting) else setting


def _batches(batch: RolloutBatch) -> Iterator[RolloutBatch]:
    """Yield a batch, and the batches that dynamic sampling added to it."""
    yield batch
    for x in (batch.unfiltered, *batch.refills):
        if x is not None:
            yield from _batches(x)


def _encoded(batch: RolloutBatch) -> list[Encoded]:
    """Return the distinct prompt objects of a batch."""
    return distinct([x for part in _batches(batch) for x in part.rollouts.prompts or ()])[0]


def _digest(encoded: Encoded) -> str:
    """Hash what the responses to a prompt depend on."""
    prompt = encoded.prompt
    images = [
        x.name if isinstance(x, Path) else hashlib.sha256(x).hexdigest() for x in prompt.images
    ]
    content = (prompt.id, encoded.tokens.tolist(), prompt.answer, images)
    return hashlib.sha256(repr(content).encode()).hexdigest()


def _encoded_again(state: State, kept: Mapping[str, Any]) -> list[Encoded] | None:
    """Find the prompts in the training data and encode them; None if the data has changed."""
    train = state.train
    count = state.position - kept["position"]
    some = train.prompts if isinstance(train, PromptList) else train.take(kept["position"], count)
    known = {x.id: x for x in some}
    if not all(name in known for name, _ in kept["prompts"]):
        return None
    found = encode_all(state.policy.encode, [known[name] for name, _ in kept["prompts"]])
    same = all(_digest(x) == was for x, (_, was) in zip(found, kept["prompts"], strict=True))
    return found if same else None


def _packed(batch: RolloutBatch, number: Mapping[int, int]) -> dict[str, Any]:
    """Convert a batch to tensors and plain data; ``number`` maps prompt objects to indices."""
    rollouts = batch.rollouts
    columns = {f.name: getattr(rollouts, f.name) for f in fields(rollouts)}
    prompts = columns.pop("prompts")
    if columns["pieces"] is not None:
        columns["pieces"] = [list(x) for x in columns["pieces"]]
    return {
        "columns": columns | {"extra": dict(rollouts.extra)},
        "prompts": [number[id(x)] for x in prompts],
        "responses": [[x.text, x.num_tokens, x.truncated, x.max_tokens] for x in batch.responses],
        "rewards": [_packed_reward(x) for x in batch.rewards],
        "weight": batch.weight,
        "unfiltered": None if batch.unfiltered is None else _packed(batch.unfiltered, number),
        "refills": [_packed(x, number) for x in batch.refills],
    }


def _unpacked(
    kept: Mapping[str, Any], encoded: Sequence[Encoded], device: torch.device
) -> RolloutBatch:
    """Restore the batch from what :func:`_packed` returned."""
    prompts = [encoded[n] for n in kept["prompts"]]
    rollouts = Rollouts(**kept["columns"], prompts=prompts).map(lambda x: x.to(device))
    unfiltered = kept["unfiltered"]
    return RolloutBatch(
        rollouts,
        [Response(x.prompt, *y) for x, y in zip(prompts, kept["responses"], strict=True)],
        [_unpacked_reward(x) for x in kept["rewards"]],
        kept["weight"],
        None if unfiltered is None else _unpacked(unfiltered, encoded, device),
        tuple(_unpacked(x, encoded, device) for x in kept["refills"]),
    )


def _packed_reward(reward: Reward) -> dict[str, Any]:
    """Convert a reward to plain data; a grader may have returned numbers of numpy or torch."""
    switches = {name: getattr(reward, name) for name in ("correct", "answered", "verdict")}
    return {
        "reason": reward.reason,
        **{name: None if x is None else bool(x) for name, x in switches.items()},
        "value": float(reward.value),
        "parts": {name: float(x) for name, x in reward.parts.items()},
        "each": {name: _packed_reward(x) for name, x in reward.each.items()},
    }


def _unpacked_reward(kept: Mapping[str, Any]) -> Reward:
    each = {name: _unpacked_reward(x) for name, x in kept["each"].items()}
    return Reward(**{**kept, "each": each})
