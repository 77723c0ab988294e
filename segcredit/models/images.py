"""Pictures: checked when data loads, opened as RGB when a model reads them."""

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

from segcredit.printable import named, printable

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Decoded here; others are refused: Pillow would run Ghostscript on an EPS."""
MAX_PIXELS = 89_478_485
"""Pillow's own bound on what is no decompression bomb."""
_LOADED_PIXELS = 4_000_000
"""Up to here a picture is decoded while checking: a few milliseconds."""
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
_JPEG = ("JPEG", "MPO")


class PictureError(ValueError):
    """No picture, a damaged one, or too large a one."""


def check_image(source: bytes | Path) -> None:
    """Raise PictureError unless this is a picture, whole and of reasonable size.

    A small one is decoded; a large JPEG too, at an eighth of its size; of other large ones the
    checksums are read.
    """
    with _opened(source) as image:
        if image.width * image.height <= _LOADED_PIXELS or image.format in _JPEG:
            image.draft("RGB", (image.width // 8, image.height // 8))
            image.load()
        else:
            image.verify()


def image_size(source: bytes | Path) -> tuple[int, int]:
    """Return width and height as stored; only the header is read."""
    with _opened(source) as image:
        return image.size


def open_image(source: bytes | Path) -> Image.Image:
    """The picture in RGB: upright (EXIF), transparency on white, the first frame."""
    with _opened(source) as image:
        image.load()
        return _rgb(_upright(image))


def to_png(image: Image.Image) -> bytes:
    """The picture as PNG, upright: nothing is lost but metadata."""
    try:
        upright = _upright(image)
        written = BytesIO()
        (upright if upright.mode in _PNG_MODES else _rgb(upright)).save(written, "PNG")
    except (OSError, ValueError, SyntaxError) as error:
        raise PictureError(f"expected a PIL image that loads; got {_reason(error)}") from None
    return written.getvalue()


@contextmanager
def _opened(source: bytes | Path) -> Iterator[Image.Image]:
    """The picture, header read; whatever goes wrong until it is closed becomes a PictureError."""
    name = f"{len(source)} bytes" if isinstance(source, bytes) else named(source)
    try:
        with Image.open(_readable(source), formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise Image.DecompressionBombError
            yield image
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise PictureError(
            f"expected a picture of at most {MAX_PIXELS:,} pixels; got a larger one in {name}"
        ) from None
    except UnidentifiedImageError:
        raise PictureError(
            f"expected a picture ({', '.join(FORMATS)}); got {name}, beginning with "
            f"{_beginning(source)}"
        ) from None
    except Exception as error:  # damaged files make decoders raise anything
        raise PictureError(
            f"expected a picture that can be decoded; got {name}: {_reason(error)}"
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
    except Exception:  # EXIF that cannot be read turns nothing
        return image


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits a pixel; convert() would clip at 255
        image = image.convert("I").point(lambda x: x * (1 / 257)).convert("L")
    if not image.has_transparency_data or _is_opaque(image):
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def _is_opaque(image: Image.Image) -> bool:
    """Whether an alpha channel is there but hides nothing: common, and quicker to see than mix."""
    return image.mode == "RGBA" and image.getchannel("A").getextrema() == (255, 255)
