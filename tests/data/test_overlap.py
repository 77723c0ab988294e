"""Copies of a drawing are found however they were saved, and other drawings are not."""

import json
import random
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image, ImageDraw, ImageOps

from segcredit.data.overlap import image_digests, look_alike
from segcredit.models.images import ImageError

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"


def drawing(seed: int, size: tuple[int, int] = (400, 300)) -> Image.Image:
    """Lines of random places on white, with a margin."""
    chance = random.Random(seed)
    image = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(image)
    for _ in range(6):
        ends = [chance.randrange(20, edge - 20) for edge in (*size, *size)]
        pen.line(ends, fill=(0, 90, 160), width=4)
    return image


def saved(image: Image.Image, kind: str = "PNG", **options: int) -> bytes:
    written = BytesIO()
    image.save(written, kind, **options)
    return written.getvalue()


def scaled(image: Image.Image, factor: float) -> Image.Image:
    size = (round(image.width * factor), round(image.height * factor))
    return image.resize(size, Image.Resampling.BICUBIC)


COPIES: dict[str, Callable[[Image.Image], bytes]] = {
    "jpeg": lambda x: saved(x, "JPEG", quality=75),
    "half": lambda x: saved(scaled(x, 0.5)),
    "larger": lambda x: saved(scaled(x, 1.5)),
    "margin": lambda x: saved(ImageOps.expand(x, 30, "white")),
    "gray": lambda x: saved(x.convert("L")),
}


def edges(*sources: bytes) -> list[bytes]:
    return [image_digests(source).edges for source in sources]


@pytest.mark.slow
@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_looks_like_its_original(kind: str) -> None:
    originals = [drawing(seed) for seed in range(20)]
    copies = [COPIES[kind](x) for x in originals]
    assert all(look_alike(edges(*copies), edges(*map(saved, originals))))
    strangers = [saved(drawing(seed)) for seed in range(100, 150)]
    assert not any(look_alike(edges(*copies), edges(*strangers)))


def test_pixels_are_the_same_however_they_are_stored() -> None:
    image = drawing(1)
    png, slow, bmp = saved(image), saved(image, compress_level=0), saved(image, "BMP")
    assert len({png, slow, bmp}) == 3
    assert len({image_digests(x).pixels for x in (png, slow, bmp)}) == 1
    assert image_digests(png).pixels != image_digests(saved(image, "JPEG")).pixels


def test_the_size_is_part_of_the_pixels() -> None:
    tall, wide = Image.new("RGB", (2, 8), "red"), Image.new("RGB", (8, 2), "red")
    assert image_digests(saved(tall)).pixels != image_digests(saved(wide)).pixels


def test_blank_images_look_like_no_other() -> None:
    white, black = saved(Image.new("RGB", (9, 9), "white")), saved(Image.new("L", (1, 1), 0))
    assert look_alike(edges(white, black), edges(white, black)) == [False, False]


def test_many_are_compared_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    originals = edges(*(saved(drawing(seed)) for seed in range(12)))
    others = originals[::3]
    whole = look_alike(originals, others)
    monkeypatch.setattr("segcredit.data.overlap._BLOCK", 5)
    assert look_alike(originals, others) == whole == [x % 3 == 0 for x in range(12)]


def test_nothing_to_compare() -> None:
    assert look_alike([], edges(saved(drawing(1)))) == []
    assert look_alike(edges(saved(drawing(1))), []) == [False]


def test_a_broken_image_is_refused() -> None:
    with pytest.raises(ImageError, match="that can be decoded"):
        image_digests(saved(drawing(1))[:200])


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="needs the data beside the checkout")
def test_what_is_alike_in_geometry3k() -> None:
    """Eight more test drawings than by pixels, and no image of other benchmarks."""
    folder = DATA / "geometry3k"

    def images(split: str) -> list[Path]:
        rows = (folder / f"{split}.jsonl").read_text().splitlines()
        return [folder / json.loads(row)["image"] for row in rows]

    train = [image_digests(x) for x in images("train")]
    test = [image_digests(x) for x in images("test")]
    known = {x.pixels for x in train}
    found = look_alike([x.edges for x in test], [x.edges for x in train])
    assert sum(x.pixels in known for x in test) == 300
    assert sum(found) == 308
    new = [
        image.stem
        for image, x, yes in zip(images("test"), test, found, strict=True)
        if yes and x.pixels not in known
    ]
    assert new == ["2521", "2584", "2636", "2754", "2764", "2910", "2918", "2955"]
    other = sorted((DATA / "bench" / "logicvista" / "data" / "images").iterdir())
    assert not any(look_alike([image_digests(x).edges for x in other], [x.edges for x in train]))
