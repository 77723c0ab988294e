"""The pictures of recorded prompts, small, as data that a page can hold."""

import base64
import io
from pathlib import Path

from PIL import Image

from segcredit.images import PictureError, open_image

SIDE = 360
"""Pixels, at most."""


def as_data_uri(run: Path, name: str) -> str | None:
    """The picture, drawn anew as PNG or JPEG; None if it is no picture of the run folder."""
    try:
        path = (run / name).resolve()
        if not path.is_relative_to(run.resolve()) or not path.is_file():
            return None
        picture = open_image(path)
    except (PictureError, OSError, ValueError, RuntimeError):
        return None  # no picture; or no name that a file can have, or links in a circle
    picture.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    few = picture.getcolors(512) is not None  # a drawing, mostly: PNG is smaller, and exact
    made = {kind: _saved(picture, kind) for kind in (("png", "jpeg") if few else ("jpeg",))}
    kind = min(made, key=lambda x: len(made[x]))
    return f"data:image/{kind};base64,{base64.b64encode(made[kind]).decode()}"


def _saved(picture: Image.Image, kind: str) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind)
    return file.getvalue()
