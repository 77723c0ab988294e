"""Find images that two datasets share: equal pixels, or the same drawing saved in another way."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from segcredit.models.images import open_image

ALIKE = 0.92
"""Images look alike if their edges overlap at least this much (Dice coefficient).

Measured on Geometry3K, 601 test images against 2,101 training images. Of copies saved as JPEG
(quality 50 and 90), scaled (by 0.5, 0.7 and 1.5), darkened, cropped by 2 pixels or padded by 4,
98 % or more are found, each kind by itself. Of the 301 test images without an equal in the training
data, 8 are found: the same drawings with another margin. The next pairs overlap by less than 0.9;
they are triangles of one shape with other numbers.
"""
_GRID = 16
_EDGE = 6
"""Difference of neighboring cells, of 255, from which it is an edge; less can be JPEG noise."""
_CONTENT = 32
"""Difference to the corner pixel, of 255, from which a pixel is not margin."""
_BLOCK = 2**24
"""Number of pairs that are compared at once, to bound the memory."""

Edges = NDArray[np.bool_]


@dataclass(frozen=True)
class ImageDigests:
    """The digests of an image that are compared."""

    pixels: bytes
    """Digest of the size and the RGB values; the same if an image was saved twice."""
    edges: bytes
    """Difference hash of the image, and of the image without its margin; 64 bytes."""


def image_digests(source: bytes | Path) -> ImageDigests:
    """Decode an image and compute what is compared; raise ImageError if it cannot be decoded."""
    image = open_image(source)
    gray = image.convert("L")
    edges = np.concatenate([_edges(gray), _edges(_without_margin(gray))])
    size_and_pixels = digest(repr(image.size).encode(), image.tobytes())
    return ImageDigests(size_and_pixels, np.packbits(edges).tobytes())


def digest(*contents: bytes) -> bytes:
    """Return a digest of 16 bytes."""
    made = blake2b(digest_size=16)
    for content in contents:
        made.update(content)
    return made.digest()


def look_alike(edges: Sequence[bytes], others: Sequence[bytes]) -> list[bool]:
    """Return for each image whether it looks like one of the others; ``edges`` as in ImageDigests.

    Blank images have no edges and look like no other image.
    """
    if not edges or not others:
        return [False] * len(edges)
    ours, theirs = _unpacked(edges), _unpacked(sorted(set(others)))
    found = np.zeros(len(edges), dtype=bool)
    step = max(1, _BLOCK // len(theirs[0]))
    for hashed, reference in zip(ours, theirs, strict=True):
        total = reference.sum(axis=1)
        for start in range(0, len(edges), step):
            block = hashed[start : start + step]
            common = 2 * (block @ reference.T)
            size = np.maximum(block.sum(axis=1)[:, None] + total[None], 1)
            found[start : start + step] |= (common >= ALIKE * size).any(axis=1)
    return [bool(x) for x in found]


def _unpacked(edges: Sequence[bytes]) -> list[NDArray[np.float32]]:
    """Return the two hashes of all images, one row of zeros and ones per image."""
    packed = np.frombuffer(b"".join(edges), dtype=np.uint8).reshape(len(edges), -1)
    return np.split(np.unpackbits(packed, axis=1).astype(np.float32), 2, axis=1)


def _edges(gray: Image.Image) -> Edges:
    """Difference hash: where a cell of a 16 × 16 grid is brighter than its left neighbor."""
    cells = np.asarray(gray.resize((_GRID + 1, _GRID), Image.Resampling.BOX), dtype=np.int16)
    return (np.diff(cells, axis=1) > _EDGE).ravel()


def _without_margin(gray: Image.Image) -> Image.Image:
    corner = int(np.asarray(gray)[0, 0])
    content = [255 * (abs(level - corner) > _CONTENT) for level in range(256)]
    return gray.crop(gray.point(content).getbbox())
