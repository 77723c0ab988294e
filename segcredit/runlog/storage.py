"""A manifest with the size and SHA-256 of every file tells whether a checkpoint is whole."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from segcredit.runlog.files import sync_folder

if TYPE_CHECKING:
    from torch import Tensor
import math
import struct
from collections import OrderedDict
from collections.abc import Callable

MANIFEST = "manifest.json"


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written, or must not be read."""


def seal(folder: Path) -> None:
    """Write the manifest and bring everything to the disk."""
    files = sorted(_files(folder))
    if not files:
        raise ValueError(f"a checkpoint must hold at least one file; {folder} is empty.")
    names = [file.relative_to(folder).as_posix() for file in files]
    mode = folder.stat().st_mode & 0o666  # the umask has determined the folder's mode

    def sealed(file: Path) -> dict[str, Any]:
        return _digest_and_sync(file, mode)

    with ThreadPoolExecutor(_threads()) as pool:
        entries = dict(zip(names, pool.map(sealed, files), strict=True))
    with (folder / MANIFEST).open("wb") as file:
        file.write(_rendered(entries))
        file.flush()
        os.fsync(file.fileno())
    for place, _, _ in os.walk(folder):
        sync_folder(Path(place))


def verify(folder: Path) -> None:
    """Raise CheckpointError naming the file that is missing, truncated or altered.

    If a file cannot be read (OSError: no permission, a failing disk), its content is unknown, so
    the error is raised unchanged.
    """
    checked_size(folder, hashes=True)


def checked_size(folder: Path, hashes: bool) -> int:
    """The size in bytes of a checkpoint that is whole; without hashes, a glance at the sizes."""
    entries = _manifest(folder)
    total = 0
    for name, entry in entries.items():
        try:
            size = (folder / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(f"{folder / name} is missing.") from None
        if size < entry["bytes"]:
            raise CheckpointError(
                f"{folder / name} is truncated: {size} of {entry['bytes']} bytes."
            )
        if size > entry["bytes"]:
            raise CheckpointError(
                f"{folder / name} was altered: {size} bytes instead of {entry['bytes']}."
            )
        total += size
    if hashes:
        with ThreadPoolExecutor(_threads()) as pool:
            digests = pool.map(_digest, (folder / name for name in entries))
            for name, digest in zip(entries, digests, strict=True):
                if digest != entries[name]["sha256"]:
                    raise CheckpointError(f"{folder / name} was altered: its SHA-256 differs.")
    return total


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path} is missing: not a whole checkpoint.") from None
    try:
        entries = json.loads(data)["files"]
        whole = _rendered(entries) == data and all(
            isinstance(entry["bytes"], int) and isinstance(entry["sha256"], str)
            for entry in entries.values()
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise CheckpointError(f"{path} is truncated or was altered.")
    return entries


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _digest_and_sync(file: Path, mode: int) -> dict[str, Any]:
    """Hash and sync a file, and set its mode.

    Some libraries write through temporary files that only their owner may read.
    """
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if os.fstat(opened.fileno()).st_mode & 0o777 != mode:
            with suppress(OSError):  # a file system without modes
                os.fchmod(opened.fileno(), mode)
        os.fsync(opened.fileno())
        return {"bytes": os.fstat(opened.fileno()).st_size, "sha256": digest}


def _files(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        for name in (*names, *folders):
            path = Path(place, name)
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                raise ValueError(
                    f"a checkpoint must hold plain files only; got {path}. Copy what it points to."
                )
            if name in names and path != folder / MANIFEST:
                yield path


def _rendered(entries: dict[str, Any]) -> bytes:
    """The manifest of these files: it carries its own digest, so no byte of it can change."""
    body = json.dumps(entries, indent=1, sort_keys=True)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f'{{"sha256_of_files": "{digest}",\n"files": {body}}}\n'.encode()


def _threads() -> int:
    return min(8, os.cpu_count() or 1)


_KEY = "rows"


@dataclass(frozen=True)
class Part:
    """Some rows of a tensor."""

    rows: "Tensor"
    before: int
    """Rows of the tensor that come before these."""
    shape: tuple[int, ...]
    """Of the whole tensor."""


def file_name(name: str, number: int, writers: int) -> str:
    """Of one writer's file."""
    return f"{name}-{number:05d}-of-{writers:05d}.safetensors"


def save_parts(file: Path, parts: dict[str, Part]) -> None:
    """Write this process's rows, and bring them to the disk."""
    from safetensors.torch import save_file

    some = {name: part for name, part in parts.items() if len(part.rows)}
    header = {name: [part.before, list(part.shape)] for name, part in some.items()}
    tensors = {name: part.rows.detach().cpu().contiguous() for name, part in some.items()}
    save_file(tensors, file, metadata={_KEY: json.dumps(header)})
    with file.open("rb") as written:  # whoever seals the checkpoint may be another machine
        os.fsync(written.fileno())


class Parts:
    """All rows that several writers left."""

    def __init__(self, files: Iterable[Path]) -> None:
        from safetensors import SafetensorError, safe_open

        self._open: dict[Path, Any] = {}
        self._found: dict[str, list[tuple[int, int, Path]]] = {}
        for path in files:
            try:
                file: Any = safe_open(path, framework="pt")
                self._open[path] = file
                for name, (before, _) in json.loads((file.metadata() or {})[_KEY]).items():
                    count = file.get_slice(name).get_shape()[0]
                    self._found.setdefault(name, []).append((int(before), int(count), path))
            except FileNotFoundError:
                raise CheckpointError(f"{path} is missing.") from None
            except (ValueError, KeyError, TypeError, SafetensorError) as error:
                raise CheckpointError(f"{path} is damaged or not a part of ours: {error}.") from (
                    error
                )

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def read(self, name: str, before: int, count: int) -> "Tensor":
        """``count`` rows of a tensor, behind the first ``before`` ones, whoever wrote them."""
        import torch

        found, place = [], before
        for first, length, path in sorted(self._found.get(name, [])):
            last = min(first + length, before + count)
            if first <= place < last:
                rows = self._open[path].get_slice(name)[place - first : last - first]
                found.append(rows.clone())
                place = last
        if place != before + count:
            raise CheckpointError(
                f"rows {place} to {before + count - 1} of {name!r} are in none of "
                f"{', '.join(x.name for x in self._open)}."
            )
        if found:
            return torch.cat(found)
        _, _, path = self._found[name][0]
        return self._open[path].get_slice(name)[:0].clone()


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
