"""Nested state of training (optimizers, generators, counters) in two files, without pickle."""

import json
import math
import struct
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from segcredit.runlog.manifest import CheckpointError

_STORED_AS_THEY_ARE = frozenset(
    {
        *("float64", "float32", "float16", "bfloat16", "complex64"),
        *("int64", "int32", "int16", "int8", "uint8", "bool"),
    }
)
"""Types every safetensors knows; others are stored as their bytes."""
_DAMAGE = (
    *(ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError),
    struct.error,
)


def save_state(folder: Path, state: dict[Any, Any], name: str = "state") -> None:
    """Write nested dicts, lists and tuples of tensors, numbers, strings, booleans and None.

    Tensors go to NAME.safetensors, everything around them to NAME.json. Dict keys keep their types
    (an optimizer's are numbers), tuples stay tuples; tensors keep every bit, their dtype and shape,
    and come back on the CPU, contiguous, each with memory of its own.
    """
    from safetensors.torch import save_file

    packer = _Packer()
    try:
        text = json.dumps(packer.pack(state, "state"), allow_nan=False)
    except RecursionError:
        raise ValueError("state is nested too deeply, or holds itself.") from None
    save_file(packer.tensors, folder / f"{name}.safetensors")
    (folder / f"{name}.json").write_bytes(text.encode("ascii"))


def load_state(folder: Path, name: str = "state") -> dict[Any, Any]:
    """What :func:`save_state` wrote there."""
    from safetensors import SafetensorError, safe_open

    try:
        structure = json.loads((folder / f"{name}.json").read_bytes())
        with safe_open(folder / f"{name}.safetensors", framework="pt") as file:
            state = _unpacked(structure, file.get_tensor)
        if not isinstance(state, dict):
            raise TypeError(f"a {type(state).__name__} instead of a dict")
    except FileNotFoundError as error:
        missing = error.filename or folder / f"{name}.safetensors"
        raise CheckpointError(f"{missing} is missing.") from None
    except (*_DAMAGE, SafetensorError) as error:
        raise CheckpointError(
            f"{folder / name}.json and .safetensors are damaged or not a state of ours: {error}."
        ) from error
    return state


class _Packer:
    """Turns a state into JSON with numbered tensors."""

    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}
        self._storages: set[int] = set()

    def pack(self, x: Any, where: str) -> Any:
        import torch

        if x is None or isinstance(x, bool):
            return x
        if isinstance(x, str):
            return str.__str__(x)
        if isinstance(x, int):
            return int(x)
        if isinstance(x, float):
            return float(x) if math.isfinite(x) else {"float": struct.pack(">d", x).hex()}
        if type(x) is list:
            return [self.pack(item, f"{where}[{i}]") for i, item in enumerate(x)]
        if type(x) in (tuple, torch.Size):
            return {"tuple": [self.pack(item, f"{where}[{i}]") for i, item in enumerate(x)]}
        if type(x) in (dict, OrderedDict):
            return {
                "dict": [
                    [self.pack(key, f"a key of {where}"), self.pack(item, f"{where}[{key!r}]")]
                    for key, item in x.items()
                ]
            }
        if isinstance(x, torch.Tensor):
            return self._pack_tensor(x, where)
        raise ValueError(
            f"{where} must be a tensor, number, string, boolean, None, or a list, tuple or dict of "
            f"them; got a {type(x).__name__}. Convert it first, or leave it out of the state."
        )

    def _pack_tensor(self, x: Any, where: str) -> dict[str, Any]:
        import torch

        if type(x) not in (torch.Tensor, torch.nn.Parameter):
            raise ValueError(
                f"{where} must be a plain tensor; got a {type(x).__name__}. Gather it first: "
                f"x.full_tensor()."
            )
        if x.layout != torch.strided or x.is_quantized or x.device.type == "meta":
            raise ValueError(
                f"{where} must be a dense tensor with data; got {x.layout} on {x.device}, "
                f"{x.dtype}. Make it one before saving."
            )
        plain = x.detach().resolve_conj().resolve_neg().cpu().contiguous()
        storage = plain.untyped_storage().data_ptr()
        if storage in self._storages:  # safetensors refuses tensors that share memory
            plain = plain.clone()
            storage = plain.untyped_storage().data_ptr()
        self._storages.add(storage)
        dtype = str(x.dtype).removeprefix("torch.")
        if dtype not in _STORED_AS_THEY_ARE:
            plain = plain.reshape(-1).view(torch.uint8)
        key = str(len(self.tensors))
        self.tensors[key] = plain
        return {"tensor": key, "dtype": dtype, "shape": list(x.shape)}


def _unpacked(x: Any, tensor: Callable[[str], Any]) -> Any:
    import torch

    if isinstance(x, list):
        return [_unpacked(item, tensor) for item in x]
    if not isinstance(x, dict):
        return x
    if "tensor" in x:
        dtype = getattr(torch, x["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{x['dtype']!r} is no type of tensor")
        read = tensor(x["tensor"]).clone()  # the file's own memory ends with the checkpoint
        read = read if read.dtype == dtype else read.view(dtype)
        return read.reshape(x["shape"])
    if "tuple" in x:
        return tuple(_unpacked(item, tensor) for item in x["tuple"])
    if "float" in x:
        return struct.unpack(">d", bytes.fromhex(x["float"]))[0]
    return {_unpacked(key, tensor): _unpacked(item, tensor) for key, item in x["dict"]}
