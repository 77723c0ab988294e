"""Read images in the forms that data files use: bytes, paths, data URIs, or PIL images."""

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path

from PIL import Image

from segcredit.data.formats import RowError
from segcredit.models.images import to_png
from segcredit.printable import named, printable, shown

ALLOW = "data.allow_outside=true (for prepare and evaluate --data: --allow-outside)"
_KEYS = ("bytes", "path", "image", "url")


def as_source(value: object, folder: Path, outside: bool = False) -> bytes | Path:
    """Return the encoded image, or the absolute path of its file.

    A row could name any file on this machine, and images are copied into runs and reports.
    Therefore the resolved path must be inside ``folder``, unless ``outside`` is set.

    Args:
        value: A PIL image, bytes, a data URI, a path relative to ``folder``, or
            ``{"bytes": …, "path": …}`` as Hugging Face stores images (base64 in a JSON file).
        folder: Directory of the data file.
        outside: Whether paths may lead out of ``folder``.
    """
    match value:
        case bytes() | bytearray() | memoryview():
            if not len(value):
                raise RowError("expected an encoded image; got no bytes")
            return bytes(value)
        case Path():
            return _file(str(value), folder, outside)
        case str() if value[:5].lower() == "data:":
            return _data_uri(value)
        case str():
            return _file(value, folder, outside)
        case Image.Image():
            return to_png(value)
        case Mapping():
            return _from_mapping(value, folder, outside)
    raise RowError(
        f"expected an image: bytes, a path, a data URI, {{'bytes', 'path'}} or a PIL image; "
        f"got {shown(value)}"
    )


def _from_mapping(value: Mapping[str, object], folder: Path, outside: bool) -> bytes | Path:
    for key in _KEYS:
        inside = value.get(key)
        if inside is None or isinstance(inside, Mapping):
            continue
        if key == "bytes" and isinstance(inside, str):
            return _base64(inside)
        return as_source(inside, folder, outside)
    raise RowError(f"expected an image under 'bytes' or 'path'; got {shown(dict(value))}")


def _file(name: str, folder: Path, outside: bool) -> Path:
    if "://" in name[:12]:
        raise RowError(f"expected an image on this machine; got {shown(name)}. Download it first")
    path = (folder / name).absolute()
    try:
        if not outside and not path.resolve().is_relative_to(folder.resolve()):
            raise RowError(
                f"expected an image in the folder of the data, {named(folder)}; got {shown(name)}, "
                f"which leads out of it. If you trust these rows, set {ALLOW}"
            )
        found = path.is_file()
    except RowError:
        raise
    except (OSError, ValueError, RuntimeError):  # name too long or with a NUL, or a symlink loop
        raise RowError(
            f"expected a path; got {len(name)} characters, {shown(name)}. For base64 write "
            f"data:image/png;base64,…"
        ) from None
    if not found:
        what = "a folder" if path.is_dir() else "no such file"
        raise RowError(f"expected an image in {shown(name)}; got {what} in {named(folder)}")
    return path


def _data_uri(uri: str) -> bytes:
    head, comma, data = uri.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise RowError(f"expected data:image/…;base64,…; got {shown(uri)}")
    return _base64(data)


def _base64(text: str) -> bytes:
    try:
        decoded = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RowError(
            f"expected base64; got {shown(text)} ({printable(str(error), 120)})"
        ) from None
    if not decoded:
        raise RowError("expected an encoded image; got no bytes")
    return decoded
