"""Check images when data is loaded, and open them as RGB when a model reads them."""

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.ExifTags import Base

from segcredit.printable import named, printable

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that are decoded. Others are refused: Pillow would run Ghostscript on an EPS file."""
MAX_PIXELS = 89_478_485
"""Pillow's own limit against decompression bombs."""
_DECODED_PIXELS = 4_000_000
"""Images up to this size are decoded when checked, which takes a few milliseconds."""
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
_JPEG = ("JPEG", "MPO")


class ImageError(ValueError):
    """The data is not an image, or the image is damaged or too large."""


def check_image(source: bytes | Path) -> None:
    """Raise ImageError unless this is a complete image of reasonable size.

    A small image is decoded, a large JPEG at an eighth of its size; of other large images only the
    checksums are verified.
    """
    with _opened(source) as image:
        if image.width * image.height <= _DECODED_PIXELS or image.format in _JPEG:
            image.draft("RGB", (image.width // 8, image.height // 8))
            image.load()
        else:
            image.verify()


def image_size(source: bytes | Path) -> tuple[int, int]:
    """Return width and height once rotated by its EXIF data; only the header is read."""
    with _opened(source) as image:
        turned = "exif" in image.info and image.getexif().get(Base.Orientation) in (5, 6, 7, 8)
        return (image.height, image.width) if turned else image.size


def open_image(source: bytes | Path) -> Image.Image:
    """Open an image as RGB: rotated by its EXIF data, transparency on white, the first frame."""
    with _opened(source) as image:
        image.load()
        return _rgb(_upright(image))


def to_png(image: Image.Image) -> bytes:
    """Encode an image as PNG, rotated by its EXIF data; only metadata is lost."""
    try:
        upright = _upright(image)
        written = BytesIO()
        (upright if upright.mode in _PNG_MODES else _rgb(upright)).save(written, "PNG")
    except (OSError, ValueError, SyntaxError) as error:
        raise ImageError(f"expected a PIL image that loads; got {_reason(error)}") from None
    return written.getvalue()


def blacken(
    source: bytes | Path, patch: int, probability: float, generator: torch.Generator
) -> bytes:
    """Return the image as PNG with random square patches black.

    Args:
        patch: Side of a patch in pixels; those at the right and bottom edge may be smaller.
        probability: Probability with which a patch is black.
    """
    image = open_image(source)
    columns, rows = -(-image.width // patch), -(-image.height // patch)
    black = torch.rand(rows * columns, generator=generator) < probability
    hidden = Image.frombytes("L", (columns, rows), bytes((255 * black.int()).tolist()))
    hidden = hidden.resize((columns * patch, rows * patch), Image.Resampling.NEAREST)
    image.paste("black", mask=hidden.crop((0, 0, *image.size)))
    return to_png(image)


@contextmanager
def _opened(source: bytes | Path) -> Iterator[Image.Image]:
    """Open an image and read its header; any error until it is closed becomes an ImageError."""
    name = f"{len(source)} bytes" if isinstance(source, bytes) else named(source)
    try:
        with Image.open(_readable(source), formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise Image.DecompressionBombError
            yield image
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ImageError(
            f"expected an image of at most {MAX_PIXELS:,} pixels; got a larger one in {name}"
        ) from None
    except UnidentifiedImageError:
        raise ImageError(
            f"expected an image ({', '.join(FORMATS)}); got {name}, beginning with "
            f"{_beginning(source)}"
        ) from None
    except Exception as error:  # decoders raise all kinds of errors on damaged files
        raise ImageError(
            f"expected an image that can be decoded; got {name}: {_reason(error)}"
        ) from None


def _readable(source: bytes | Path) -> BytesIO | Path:
    return BytesIO(source) if isinstance(source, bytes) else source


def _beginning(source: bytes | Path) -> str:
    if isinstance(source, bytes):
        return repr(source[:12])
    with source.open("rb") as file:
        return repr(file.read(12))


def _reason(error: Exception) -> str:
    return printable(str(error) or type(error).__name__, 120)


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # unreadable EXIF data is ignored
        return image


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits a pixel; convert() would clip at 255
        image = image.convert("I").point(lambda x: x * (1 / 257)).convert("L")
    if not image.has_transparency_data or _is_opaque(image):
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def _is_opaque(image: Image.Image) -> bool:
    """Whether the alpha channel is 255 everywhere: common, and faster to check than to blend."""
    return image.mode == "RGBA" and image.getchannel("A").getextrema() == (255, 255)
