"""How rows are known again: by the wording of the question, by the pixels of the picture."""

import unicodedata
from dataclasses import dataclass
from hashlib import blake2b

from segcredit.data.formats import MARK
from segcredit.data.prepare.items import PICTURE, Item, LeftOut
from segcredit.images import PictureError, check_image, open_image

_COMPARED_BYTES = 2**23
"""Larger encoded pictures are compared by their bytes alone."""


@dataclass(frozen=True)
class Fingerprint:
    """Digests of one row."""

    question: bytes
    files: tuple[bytes, ...]
    """Of the encoded pictures."""
    pictures: tuple[bytes, ...]
    """Of their pixels, as a model sees them: the same drawing saved twice is the same."""

    @property
    def pairs(self) -> set[tuple[bytes, bytes]]:
        """The question with each of its pictures, or with none."""
        return {(self.question, picture) for picture in self.pictures or (b"",)}


class Fingerprints:
    """Takes fingerprints; a picture that occurs often is decoded once."""

    def __init__(self) -> None:
        self._pixels: dict[bytes, bytes] = {}

    def of(self, item: Item) -> Fingerprint:
        """The row's fingerprint; LeftOut if a picture of it cannot be decoded."""
        files, pictures = [], []
        for number, picture in enumerate(item.pictures, start=1):
            file = _digest(picture.content)
            if file not in self._pixels:
                try:
                    self._pixels[file] = _pixels(picture.content, file)
                except PictureError as error:
                    num = len(item.pictures)
                    which = f"picture {number} of {num}: " if num > 1 else ""
                    raise LeftOut(PICTURE, f"{which}{error}") from None
            files.append(file)
            pictures.append(self._pixels[file])
        question = _digest(normalised(_said(item)).encode())
        return Fingerprint(question, tuple(files), tuple(pictures))


def _said(item: Item) -> str:
    """The question, and what was said before it."""
    before = [said["content"] for said in item.messages[:-1] if said["role"] != "system"]
    return " ".join([*before, item.question])


def normalised(question: str) -> str:
    """Wording alone: no marks of pictures, no capitals, single spaces, one form of each sign."""
    text = unicodedata.normalize("NFC", question.replace(MARK, " "))
    return " ".join(text.casefold().split())


def _pixels(content: bytes, file: bytes) -> bytes:
    if len(content) > _COMPARED_BYTES:
        check_image(content)
        return file
    image = open_image(content)
    return _digest(repr(image.size).encode(), image.tobytes())


def _digest(*contents: bytes) -> bytes:
    digest = blake2b(digest_size=16)
    for content in contents:
        digest.update(content)
    return digest.digest()
