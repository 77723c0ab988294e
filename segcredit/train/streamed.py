"""AdamW whose state stays in main memory: a step brings it to the device a part at a time."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from segcredit.config import OptimizerSettings
from segcredit.train.offload import HostCopies
from segcredit.train.optimizer import Optimizer

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
