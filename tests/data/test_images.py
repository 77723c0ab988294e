"""Pictures: every way a row holds one, what they look like opened, and what is refused."""

import base64
import struct
import zlib
from io import BytesIO
from pathlib import Path

import pytest
from each import each
from PIL import Image

from segcredit.data import RowError, as_source
from segcredit.models.images import FORMATS, ImageError, check_image, open_image, to_png


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    written = BytesIO()
    image.save(written, kind, **options)
    return written.getvalue()


RED = encoded(Image.new("RGB", (5, 4), "red"))


def noise(size: tuple[int, int]) -> Image.Image:
    return Image.effect_noise(size, 80)


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims to be of this size, with hardly any data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    data = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 64)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + data


class TestAsSource:
    @each(
        "value",
        [
            RED,
            bytearray(RED),
            memoryview(RED),
            {"bytes": RED, "path": "not/there.png"},
            {"bytes": RED, "path": None},
            {"bytes": base64.b64encode(RED).decode(), "path": None},
            {"image": RED},
            {"url": "data:image/png;base64," + base64.b64encode(RED).decode()},
            "data:image/png;base64," + base64.b64encode(RED).decode(),
            "DATA:;BASE64,\n" + base64.encodebytes(RED).decode(),
        ],
    )
    def test_encoded_bytes_stay_as_they_are(self, value: object, tmp_path: Path) -> None:
        assert as_source(value, tmp_path) == RED

    @pytest.mark.parametrize("as_mapping", [False, True])
    def test_a_path_is_relative_to_the_folder_and_becomes_absolute(
        self, as_mapping: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "data" / "images").mkdir(parents=True)
        (tmp_path / "data" / "images" / "a.png").write_bytes(RED)
        monkeypatch.chdir(tmp_path)
        name = "images/a.png"
        value = {"bytes": None, "path": name} if as_mapping else name
        expected = tmp_path / "data" / "images" / "a.png"
        assert as_source(value, Path("data")) == expected
        assert as_source(str(expected), Path("elsewhere"), outside=True) == expected
        assert as_source(expected, Path("elsewhere"), outside=True) == expected

    def test_a_pil_image_keeps_its_pixels(self, tmp_path: Path) -> None:
        image = noise((7, 9)).convert("RGB")
        source = as_source(image, tmp_path)
        assert isinstance(source, bytes)
        assert open_image(source).tobytes() == image.tobytes()

    @each(
        ("value", "said"),
        [
            ("gone.png", "no such file"),
            (".", "a folder"),
            ("a\0b.png", "␀"),
            ("x" * 5000, "data:image/png;base64"),
            ("https://example.com/a.png", "Download it first"),
            ("data:image/png,abc", "expected data:image/…;base64"),
            ("data:image/png;base64", "expected data:image/…;base64"),
            ("data:image/png;base64,@@@@", "expected base64"),
            ("data:image/png;base64,abc", "expected base64"),
            ("data:image/png;base64,é", "expected base64"),
            ("data:image/png;base64,", "no bytes"),
            (b"", "no bytes"),
            ({"bytes": None, "path": None}, "expected an image under 'bytes' or 'path'"),
            ({"bytes": b"", "path": "a.png"}, "no bytes"),
            ({"image": {"image": {}}}, "expected an image under"),
            ({}, "an object without keys"),
            (7, "got 7"),
            (None, "nothing (null)"),
            ([[0, 0, 0]], "a list of 1"),
        ],
    )
    def test_refuses_the_rest_in_one_printable_line(
        self, value: object, said: str, tmp_path: Path
    ) -> None:
        with pytest.raises((RowError, ImageError)) as caught:
            as_source(value, tmp_path)
        assert said in str(caught.value)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 400

    def test_a_pil_image_of_a_truncated_file_is_refused(self, tmp_path: Path) -> None:
        with (
            Image.open(BytesIO(encoded(noise((64, 64)))[:900])) as image,
            pytest.raises((RowError, ImageError), match="expected a PIL image that loads"),
        ):
            as_source(image, tmp_path)


class TestOpenImage:
    @each("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
    def test_every_format_opens_from_bytes_and_from_a_file(self, kind: str, tmp_path: Path) -> None:
        content = encoded(Image.new("RGB", (16, 8), (250, 10, 20)), kind)
        path = tmp_path / "picture"
        path.write_bytes(content)
        for source in (content, path):
            check_image(source)
            image = open_image(source)
            assert (image.mode, image.size) == ("RGB", (16, 8))
            red, green, blue = image.getpixel((3, 3))
            assert max(abs(red - 250), abs(green - 10), abs(blue - 20)) < 8

    @each(
        ("mode", "color", "expected"),
        [
            ("1", 1, (255, 255, 255)),
            ("L", 100, (100, 100, 100)),
            ("LA", (100, 0), (255, 255, 255)),
            ("LA", (100, 255), (100, 100, 100)),
            ("RGBA", (0, 0, 0, 0), (255, 255, 255)),
            ("RGBA", (0, 0, 200, 255), (0, 0, 200)),
            ("RGBA", (0, 0, 0, 51), (204, 204, 204)),
            ("I;16", 128 * 257, (128, 128, 128)),
        ],
    )
    def test_modes(self, mode: str, color: object, expected: tuple[int, int, int]) -> None:
        image = Image.new(mode, (3, 3))
        image.paste(color, (0, 0, 3, 3))
        assert open_image(encoded(image)).getpixel((1, 1)) == expected

    def test_palette_with_and_without_transparency(self) -> None:
        image = Image.new("P", (2, 1))
        image.putpalette([200, 0, 0, 0, 200, 0])
        image.putpixel((1, 0), 1)
        opened = open_image(encoded(image))
        assert (opened.getpixel((0, 0)), opened.getpixel((1, 0))) == ((200, 0, 0), (0, 200, 0))
        for transparency in (1, b"\xff\x00"):
            opened = open_image(encoded(image, transparency=transparency))
            assert opened.getpixel((0, 0)) == (200, 0, 0)
            assert opened.getpixel((1, 0)) == (255, 255, 255)

    def test_cmyk(self) -> None:
        image = open_image(encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"))
        red, green, blue = image.getpixel((4, 4))
        assert image.mode == "RGB"
        assert red > 200
        assert max(green, blue) < 60

    @pytest.mark.parametrize("through_pil", [False, True])
    def test_exif_orientation_is_applied_once(self, through_pil: bool) -> None:
        image = Image.new("RGB", (40, 20), "white")
        image.paste("black", (0, 0, 20, 20))  # left half
        exif = Image.Exif()
        exif[0x0112] = 6  # the camera was turned: show it rotated clockwise
        content = encoded(image, "JPEG", exif=exif, quality=95)
        if through_pil:
            with Image.open(BytesIO(content)) as opened:
                content = to_png(opened)
        upright = open_image(content)
        assert upright.size == (20, 40)
        assert upright.getpixel((10, 5))[0] < 40  # the left half is now on top
        assert upright.getpixel((10, 35))[0] > 215

    @pytest.mark.filterwarnings("ignore:Corrupt EXIF")
    def test_exif_that_is_garbage_turns_nothing(self) -> None:
        content = encoded(Image.new("RGB", (40, 20)), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
        assert open_image(content).size == (40, 20)

    def test_the_first_frame_of_an_animation(self) -> None:
        frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
        content = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
        assert open_image(content).getpixel((0, 0)) == (255, 0, 0)

    def test_the_first_picture_of_a_telephone_s_jpeg(self) -> None:
        frames = [Image.new("RGB", (16, 16), color) for color in ("white", "black")]
        content = encoded(frames[0], "MPO", save_all=True, append_images=frames[1:])
        check_image(content)
        assert open_image(content).getpixel((0, 0)) == (255, 255, 255)

    def test_the_file_can_be_removed_afterwards(self, tmp_path: Path) -> None:
        path = tmp_path / "a.png"
        path.write_bytes(RED)
        image = open_image(path)
        path.unlink()
        assert image.getpixel((0, 0)) == (255, 0, 0)


class TestToPng:
    @each("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
    def test_modes_of_png_are_kept(self, mode: str) -> None:
        image = Image.new(mode, (3, 2))
        with Image.open(BytesIO(to_png(image))) as back:
            assert (back.format, back.mode, back.size) == ("PNG", mode, (3, 2))

    @each("mode", ["CMYK", "YCbCr", "HSV", "F", "I", "RGBa", "PA"])
    def test_others_become_rgb(self, mode: str) -> None:
        with Image.open(BytesIO(to_png(Image.new(mode, (3, 2))))) as back:
            assert (back.mode, back.size) == ("RGB", (3, 2))


class TestCheckImage:
    @each(
        ("content", "said"),
        [
            (b"not an image at all", "beginning with b'not an image'"),
            (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "expected an image (PNG"),
            (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "expected an image (PNG"),
            (encoded(noise((64, 64)))[:1500], "can be decoded"),
            (encoded(noise((64, 64)), "JPEG")[:900], "can be decoded"),
            (encoded(noise((64, 64)), "WEBP")[:900], "expected an image"),
            (encoded(noise((2100, 2000)), "JPEG", quality=20)[:-4000], "can be decoded"),
            (encoded(noise((2100, 2000)), compress_level=0)[:-4000], "can be decoded"),
            (png_header(10_000, 9_500), "at most 89,478,485 pixels"),
            (png_header(100_000, 100_000), "at most 89,478,485 pixels"),
            (png_header(0, 7), "expected an image"),
        ],
    )  # fmt: skip
    def test_refuses_what_would_fail_in_training(
        self, content: bytes, said: str, tmp_path: Path
    ) -> None:
        path = tmp_path / "bad\x1b.png"
        path.write_bytes(content)
        for source in (content, path):
            with pytest.raises((RowError, ImageError)) as caught:
                check_image(source)
            assert said in str(caught.value)
            assert str(caught.value).isprintable()

    @pytest.mark.parametrize("kind", ["PNG", "JPEG"])
    def test_accepts_a_large_one(self, kind: str) -> None:
        check_image(encoded(Image.new("L", (2100, 2000)), kind))

    @pytest.mark.parametrize("kind", FORMATS)
    def test_flipped_bytes_raise_nothing_but_row_errors(self, kind: str) -> None:
        content = encoded(noise((24, 24)), kind)
        refused = 0
        for place in range(0, len(content), max(1, len(content) // 60)):
            damaged = bytearray(content)
            damaged[place] ^= 0xFF
            for use in (check_image, open_image):
                try:
                    use(bytes(damaged))
                except ImageError:
                    refused += 1
        assert refused
