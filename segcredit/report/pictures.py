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
    file = io.BytesIO()
    few = picture.getcolors(512) is not None  # a drawing: PNG is smaller, and exact
    picture.save(file, "PNG" if few else "JPEG")
    kind = "png" if few else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
