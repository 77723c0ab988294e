"""images/3f2a….png: the pictures of recorded prompts, named by their content and kept once."""

import hashlib
from pathlib import Path

from segcredit.runlog.atomic import write_bytes_atomically

_KINDS = {
    b"\x89PNG": "png",
    b"\xff\xd8\xff": "jpg",
    b"GIF8": "gif",
    b"BM": "bmp",
    b"II*\0": "tif",
    b"MM\0*": "tif",
    b"RIFF": "webp",
}
"""How a picture's bytes begin, and what its file is called."""


def keep_picture(folder: Path, picture: bytes | Path) -> str:
    """Its path in the run folder; a file that is no longer there leaves an empty one."""
    try:
        data = picture if isinstance(picture, bytes) else picture.read_bytes()
    except OSError:
        return ""
    kind = next((kind for begins, kind in _KINDS.items() if data.startswith(begins)), "bin")
    path = folder / f"{hashlib.sha256(data).hexdigest()[:24]}.{kind}"
    if not path.exists():
        write_bytes_atomically(path, data)
    return f"{folder.name}/{path.name}"
