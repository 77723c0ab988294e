"""Store checkpoints: a manifest of file hashes, rows of tensors in several files, and states."""

import hashlib
import json
import math
import os
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from segcredit.runlog.files import sync_folder

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST = "manifest.json"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or is damaged."""


def seal(folder: Path) -> None:
    """Write the manifest and sync all files to disk."""
    files = sorted(_files(folder))
    if not files:
        raise ValueError(f"a checkpoint must have at least one file; {folder} is empty.")
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


def recorded_files(folder: Path) -> list[str]:
    """Return the names of the files that a checkpoint's manifest lists."""
    return list(_manifest(folder))


def checked_size(folder: Path, hashes: bool) -> int:
    """Check a checkpoint and return its size in bytes; without hashes, only sizes are checked."""
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
        raise CheckpointError(f"{path} is missing: not a complete checkpoint.") from None
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
                    f"a checkpoint must contain plain files only; got a link or special file: "
                    f"{path}. Replace it with a copy of the file."
                )
            if name in names and path != folder / MANIFEST:
                yield path


def _rendered(entries: dict[str, Any]) -> bytes:
    """Return the manifest, which includes a digest of itself, so that any change is detected."""
    body = json.dumps(entries, indent=1, sort_keys=True)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f'{{"sha256_of_files": "{digest}",\n"files": {body}}}\n'.encode()


def _threads() -> int:
    return min(8, os.cpu_count() or 1)


_KEY = "rows"


@dataclass(frozen=True)
class Part:
    """Consecutive rows of a tensor."""

    rows: "Tensor"
    before: int
    """Number of rows of the tensor before these."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""


def file_name(name: str, number: int, writers: int) -> str:
    """Return the file name for one of several writers."""
    return f"{name}-{number:05d}-of-{writers:05d}.safetensors"


def save_parts(file: Path, parts: dict[str, Part]) -> None:
    """Write the rows of this process and sync them to disk."""
    from safetensors.torch import save_file

    some = {name: part for name, part in parts.items() if len(part.rows)}
    header = {name: [part.before, list(part.shape)] for name, part in some.items()}
    tensors = {name: part.rows.detach().cpu().contiguous() for name, part in some.items()}
    save_file(tensors, file, metadata={_KEY: json.dumps(header)})
    with file.open("rb") as written:  # the manifest may be written by another machine
        os.fsync(written.fileno())


class Parts:
    """Reads tensors whose rows are in the files of several writers."""

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
                raise CheckpointError(
                    f"{path} is damaged, or was not written by segcredit: {error}."
                ) from (error)

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def read(self, name: str, before: int, count: int) -> "Tensor":
        """Read ``count`` rows of a tensor, starting at row ``before``."""
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
                f"rows {place} to {before + count - 1} of {name!r} are not in any of "
                f"{', '.join(x.name for x in self._open)}."
            )
        if found:
            return torch.cat(found)
        _, _, path = self._found[name][0]
        return self._open[path].get_slice(name)[:0].clone()


_PLAIN_TYPES = frozenset(
    {
        *("float64", "float32", "float16", "bfloat16", "complex64"),
        *("int64", "int32", "int16", "int8", "uint8", "bool"),
    }
)
"""Types that every version of safetensors supports; others are stored as bytes."""
_DAMAGE = (
    *(ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError),
    struct.error,
)


def save_state(folder: Path, state: dict[Any, Any], name: str = "state") -> None:
    """Write nested dicts, lists and tuples of tensors, numbers, strings, booleans and None.

    Tensors go to NAME.safetensors, everything else to NAME.json. Dict keys keep their types (those
    of an optimizer are numbers), and tuples stay tuples. Tensors keep every bit, dtype and shape;
    they are loaded on the CPU, contiguous, without shared memory.
    """
    from safetensors.torch import save_file

    packer = _Packer()
    try:
        text = json.dumps(packer.pack(state, "state"), allow_nan=False)
    except RecursionError:
        raise ValueError("state is nested too deeply, or contains itself.") from None
    save_file(packer.tensors, folder / f"{name}.safetensors")
    (folder / f"{name}.json").write_bytes(text.encode("ascii"))


def load_state(folder: Path, name: str = "state") -> dict[Any, Any]:
    """Load what :func:`save_state` wrote."""
    from safetensors import SafetensorError, safe_open

    try:
        structure = json.loads((folder / f"{name}.json").read_bytes())
        with safe_open(folder / f"{name}.safetensors", framework="pt") as file:
            state = _unpack(structure, file.get_tensor)
        if not isinstance(state, dict):
            raise TypeError(f"a {type(state).__name__} instead of a dict")
    except FileNotFoundError as error:
        missing = error.filename or folder / f"{name}.safetensors"
        raise CheckpointError(f"{missing} is missing.") from None
    except (*_DAMAGE, SafetensorError) as error:
        raise CheckpointError(
            f"{folder / name}.json and .safetensors are damaged or not a saved state: {error}."
        ) from error
    return state


class _Packer:
    """Converts a state into JSON in which each tensor is replaced by its number in a list."""

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
            f"them; got a {type(x).__name__}. Convert it first, or remove it from the state."
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
                f"{x.dtype}. Convert it before saving."
            )
        plain = x.detach().resolve_conj().resolve_neg().cpu().contiguous()
        storage = plain.untyped_storage().data_ptr()
        if storage in self._storages:  # safetensors refuses tensors that share memory
            plain = plain.clone()
            storage = plain.untyped_storage().data_ptr()
        self._storages.add(storage)
        dtype = str(x.dtype).removeprefix("torch.")
        if dtype not in _PLAIN_TYPES:
            plain = plain.reshape(-1).view(torch.uint8)
        key = str(len(self.tensors))
        self.tensors[key] = plain
        return {"tensor": key, "dtype": dtype, "shape": list(x.shape)}


def _unpack(x: Any, tensor: Callable[[str], Any]) -> Any:
    import torch

    if isinstance(x, list):
        return [_unpack(item, tensor) for item in x]
    if not isinstance(x, dict):
        return x
    if "tensor" in x:
        dtype = getattr(torch, x["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{x['dtype']!r} is not a tensor type")
        read = tensor(x["tensor"]).clone()  # the mapped memory is closed with the file
        read = read if read.dtype == dtype else read.view(dtype)
        return read.reshape(x["shape"])
    if "tuple" in x:
        return tuple(_unpack(item, tensor) for item in x["tuple"])
    if "float" in x:
        return struct.unpack(">d", bytes.fromhex(x["float"]))[0]
    return {_unpack(key, tensor): _unpack(item, tensor) for key, item in x["dict"]}
