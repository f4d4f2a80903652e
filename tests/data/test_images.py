"""Opening pictures: every mode against transformers' load_image, and every bad file against its message."""

import io
import re
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.image_utils import load_image

from regard.data.images import FORMATS, MOST_PIXELS, MOST_SIDE, OpenedImage, open_image, peek_image

WHITE = (255, 255, 255)


def noise(*shape: int, dtype: type = np.uint8) -> np.ndarray:
    return np.random.default_rng(0).integers(0, np.iinfo(dtype).max + 1, shape, dtype=dtype)


def colours() -> Image.Image:
    return Image.fromarray(noise(11, 7, 3))


def bytes_of(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def pixels(picture: OpenedImage) -> np.ndarray:
    """(H, W, 3)."""
    return np.asarray(picture.image)


def png(width: int, height: int, depth: int, colour: int, rows: bytes = b"", *more: tuple[bytes, bytes]) -> bytes:
    """A PNG by hand, for what Pillow does not write. rows: uncompressed, each after its filter byte."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    parts = [(b"IHDR", header), *more, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    chunks = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


# ------------------------------------------------------------------------------------------------ equal to transformers

MODES = {
    "1 PNG": lambda: bytes_of(colours().convert("1"), "PNG"),
    "L PNG": lambda: bytes_of(colours().convert("L"), "PNG"),
    "L JPEG": lambda: bytes_of(colours().convert("L"), "JPEG"),
    "L PNG with a transparent grey": lambda: bytes_of(colours().convert("L"), "PNG", transparency=100),
    "LA PNG": lambda: bytes_of(Image.fromarray(noise(11, 7, 2)), "PNG"),
    "RGB PNG": lambda: bytes_of(colours(), "PNG"),
    "RGB JPEG": lambda: bytes_of(colours(), "JPEG"),
    "RGB WEBP": lambda: bytes_of(colours(), "WEBP"),
    "RGB BMP": lambda: bytes_of(colours(), "BMP"),
    "RGB PPM": lambda: bytes_of(colours(), "PPM"),
    "RGB TIFF": lambda: bytes_of(colours(), "TIFF"),
    "RGBA PNG": lambda: bytes_of(Image.fromarray(noise(11, 7, 4)), "PNG"),
    "RGBA WEBP": lambda: bytes_of(Image.fromarray(noise(11, 7, 4)), "WEBP"),
    "P PNG": lambda: bytes_of(colours().quantize(13), "PNG"),
    "P GIF": lambda: bytes_of(colours().quantize(13), "GIF"),
    "P PNG with one transparent colour": lambda: bytes_of(colours().quantize(13), "PNG", transparency=3),
    "P GIF with one transparent colour": lambda: bytes_of(colours().quantize(13), "GIF", transparency=3),
    "CMYK JPEG": lambda: bytes_of(Image.frombytes("CMYK", (7, 11), noise(11, 7, 4).tobytes()), "JPEG"),
    "CMYK TIFF": lambda: bytes_of(Image.frombytes("CMYK", (7, 11), noise(11, 7, 4).tobytes()), "TIFF"),
    "LAB TIFF": lambda: bytes_of(Image.frombytes("LAB", (7, 11), noise(11, 7, 3).tobytes()), "TIFF"),
    "16-bit RGB PNG": lambda: png(7, 2, 16, 2, b"".join(b"\0" + bytes(noise(42)) for _ in range(2))),
}


@pytest.mark.parametrize("mode", MODES)
def test_picture_has_the_pixels_of_load_image(mode, tmp_path):
    path = tmp_path / "picture"
    path.write_bytes(MODES[mode]())
    with Image.open(path) as image:  # given the path, it would leave a GIF open, which warns
        reference = load_image(image)
    picture = open_image(path)
    assert picture.image.mode == "RGB"
    assert np.array_equal(pixels(picture), np.asarray(reference))


@pytest.mark.parametrize("mode", ["PA", "RGBX", "RGBa", "CMYK", "YCbCr", "HSV", "LAB"])
def test_image_in_memory_has_the_pixels_of_load_image(mode):
    bands = len(Image.new(mode, (1, 1)).getbands())
    image = Image.frombytes(mode, (7, 11), noise(11, 7, bands).tobytes())
    assert np.array_equal(pixels(open_image(image)), np.asarray(load_image(image)))


def test_photograph_has_the_pixels_of_load_image(data):
    photographs = [path for path in (data / "sample_photos").iterdir() if path.suffix in (".png", ".jpg")]
    assert len(photographs) > 9
    for path in photographs:
        assert np.array_equal(pixels(open_image(path)), np.asarray(load_image(str(path)))), path


def test_palette_with_many_alphas_opens_without_pillows_warning():
    """load_image warns here, which is an error in these tests; the colours are those of the palette."""
    image = colours().quantize(13)
    opened = open_image(bytes_of(image, "PNG", transparency=bytes(range(13))))
    assert np.array_equal(pixels(opened), np.asarray(image.convert("RGB")))


TURNS = {  # what EXIF says of the stored rows → how to turn them upright
    1: lambda a: a,
    2: np.fliplr,
    3: lambda a: np.rot90(a, 2),
    4: np.flipud,
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: np.rot90(a, 2).swapaxes(0, 1),
    8: np.rot90,
}


@pytest.mark.parametrize("orientation", TURNS)
def test_picture_is_turned_upright_as_exif_says(orientation, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "turned.png"
    path.write_bytes(bytes_of(colours(), "PNG", exif=exif))
    upright = TURNS[orientation](noise(11, 7, 3))
    for source in (path, Image.open(path), path.read_bytes()):
        picture = open_image(source)
        assert np.array_equal(pixels(picture), upright)
        assert picture.size == upright.shape[:2]
    assert np.array_equal(upright, np.asarray(load_image(str(path))))


# ------------------------------------------------------------------------------------------------------ our own answers


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_of_grey_keep_their_upper_byte(kind):
    """Where Pillow alone would cut at 255, and nearly all of it be white."""
    grey = noise(11, 7, dtype=np.uint16)
    stored = bytes_of(Image.fromarray(grey), kind)
    assert Image.open(io.BytesIO(stored)).mode == "I;16"
    assert np.array_equal(pixels(open_image(stored)), (grey // 256)[:, :, None].repeat(3, 2))


def test_sixteen_bits_of_grey_and_of_colour_agree():
    values = noise(2, 7, dtype=np.uint16).astype(">u2")
    grey = png(7, 2, 16, 0, b"".join(b"\0" + row.tobytes() for row in values))
    colour = png(7, 2, 16, 2, b"".join(b"\0" + row.repeat(3).tobytes() for row in values))
    assert np.array_equal(pixels(open_image(grey)), pixels(open_image(colour)))


def test_whole_numbers_that_fit_16_bits_are_16_bits():
    """A PGM of 10 bits: Pillow stretches it to 65535, in mode I."""
    stored = b"P5 3 1 1023\n" + np.array([0, 512, 1023], ">u2").tobytes()
    assert Image.open(io.BytesIO(stored)).mode == "I"
    assert pixels(open_image(stored))[0, :, 0].tolist() == [0, 128, 255]


@pytest.mark.parametrize("dtype", [np.int32, np.uint16])
def test_grey_of_8_bits_in_a_wider_type_is_as_it_is(dtype):
    """The upper byte would be black all over; load_image takes them as they are, too."""
    grey = noise(11, 7).astype(dtype)
    grey[0, 0] = 255
    image = Image.fromarray(grey)
    assert image.mode == {np.int32: "I", np.uint16: "I;16"}[dtype]
    for source in (image, bytes_of(image, "TIFF")):
        assert np.array_equal(pixels(open_image(source)), grey[:, :, None].repeat(3, 2))
    assert np.array_equal(pixels(open_image(image)), np.asarray(load_image(image)))
    grey[0, 0] = 256
    assert pixels(open_image(Image.fromarray(grey))).max() == 1


@pytest.mark.parametrize(("low", "high"), [(-1, 5), (0, 65536)])
def test_whole_numbers_beyond_16_bits_are_refused(low, high):
    image = Image.fromarray(np.array([[low, high]], np.int32))
    said = rf"{low}.*{high}"
    with pytest.raises(ValueError, match=said):
        open_image(image)


def test_floats_are_refused():
    with pytest.raises(ValueError, match="uint8"):
        open_image(bytes_of(Image.fromarray(np.ones((3, 5), np.float32)), "TIFF"))


def test_transparency_is_dropped_unless_a_background_is_given():
    """Alpha 0 shows the background, 255 the picture, 128 about half of each."""
    array = np.array([[[10, 20, 30, 0], [10, 20, 30, 255], [10, 20, 30, 128]]], np.uint8)
    assert pixels(open_image(array)).tolist() == [[[10, 20, 30]] * 3]
    clear, opaque, half = pixels(open_image(array, background=(200, 100, 0)))[0]
    assert clear.tolist() == [200, 100, 0]
    assert opaque.tolist() == [10, 20, 30]
    assert np.abs(half - np.array([104.6, 59.8, 15.1])).max() <= 1


CLEAR = {
    "LA": lambda: bytes_of(Image.fromarray(np.array([[[9, 0], [9, 255]]], np.uint8)), "PNG"),
    "one grey": lambda: bytes_of(Image.fromarray(np.array([[8, 9]], np.uint8)), "PNG", transparency=8),
    "one colour": lambda: bytes_of(Image.new("RGB", (2, 1), (8, 8, 8)), "PNG", transparency=(8, 8, 8)),
    "one of 65536 greys": lambda: png(2, 1, 16, 0, b"\0\x09\x01\x09\x02", (b"tRNS", b"\x09\x01")),
    "an index": lambda: bytes_of(Image.fromarray(np.array([[0, 9]], np.uint8)).convert("P"), "PNG", transparency=0),
    "alphas of a palette": lambda: bytes_of(
        Image.fromarray(np.array([[0, 9]], np.uint8)).convert("P"), "PNG", transparency=bytes([0]) + b"\xff" * 255
    ),
}


@pytest.mark.parametrize("way", CLEAR)
def test_background_shows_however_transparency_is_stored(way):
    seen = pixels(open_image(CLEAR[way](), background=(1, 2, 3)))[0]
    assert seen[0].tolist() == [1, 2, 3]
    assert seen[1].tolist() == ([1, 2, 3] if way == "one colour" else [9, 9, 9])


def test_opened_picture_carries_no_leftovers_of_its_file():
    """transformers 5.22 paints a colour that `info` calls transparent white."""
    stored = bytes_of(Image.new("RGB", (2, 1)), "PNG", transparency=(0, 0, 0))
    assert load_image(Image.open(io.BytesIO(stored))).info != {}
    assert open_image(stored).image.info == {}


@pytest.mark.parametrize("shape", [(11, 7), (11, 7, 1), (11, 7, 3), (11, 7, 4), (1, 1), (3, 7, 3)])
def test_array_is_a_picture(shape):
    array = noise(*shape)
    expected = array[:, :, :3] if len(shape) == 3 else array[:, :, None]
    picture = open_image(array)
    assert picture.size == shape[:2]
    assert np.array_equal(pixels(picture), np.broadcast_to(expected, (*shape[:2], 3)))


def test_bytearray_and_open_file_are_pictures(tmp_path):
    path = tmp_path / "photo.png"
    Image.fromarray(noise(5, 7, 3)).save(path)
    assert open_image(bytearray(path.read_bytes())).name == "bytes"
    with path.open("rb") as file:
        found = open_image(file)
        assert (found.name, np.array_equal(np.asarray(found.image), noise(5, 7, 3))) == ("photo.png", True)
        assert not file.closed
    assert repr(open_image(io.BytesIO(path.read_bytes()))) == "OpenedImage(file, 5 high, 7 wide)"
    with pytest.raises(ValueError, match=r"the file.*JPEG"):
        open_image(io.BytesIO())
    with pytest.raises(TypeError, match=r"bytes.*str.*'rb'"):
        open_image(io.StringIO("a"))


def test_open_file_that_was_read_already_is_not_called_empty(tmp_path):
    file = io.BytesIO(bytes_of(colours(), "PNG"))
    open_image(file)
    with pytest.raises(ValueError, match=r"file\.seek"):
        open_image(file)
    file.seek(0)
    assert open_image(file).size == (11, 7)

    class Pipe(io.RawIOBase):
        """Says nothing of where it stands."""

        def readable(self):
            return True

        def readinto(self, buffer):
            return 0

    with pytest.raises(ValueError, match=r"the file.*JPEG"):
        open_image(Pipe())


# ------------------------------------------------------------------------------------------------- before it is decoded


@pytest.mark.parametrize("mode", MODES)
def test_glance_tells_the_size_of_every_kind(mode, tmp_path):
    stored = MODES[mode]()
    path = tmp_path / "picture"
    path.write_bytes(stored)
    for source in (stored, bytearray(stored), path, str(path), io.BytesIO(stored), Image.open(io.BytesIO(stored))):
        later, size = peek_image(source)
        opened = open_image(later)
        assert opened.size == size
        assert np.array_equal(pixels(opened), pixels(open_image(stored)))
    assert peek_image(opened) == (opened, opened.size)
    array = noise(5, 3, 4)
    assert peek_image(array)[1] == (5, 3)


@pytest.mark.parametrize("orientation", TURNS)
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_glance_tells_the_size_upright(kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = bytes_of(colours(), kind, exif=exif)
    assert peek_image(stored)[1] == open_image(stored).size


def test_glance_decodes_nothing(monkeypatch):
    stored = [bytes_of(colours(), kind) for kind in ("PNG", "JPEG", "WEBP", "TIFF")]

    def load(image):
        raise AssertionError("decoded")

    for kind in ("PngImagePlugin.PngImageFile", "ImageFile.ImageFile"):
        monkeypatch.setattr(f"PIL.{kind}.load", load)
    assert [peek_image(one)[1] for one in stored] == [(11, 7)] * 4


def test_glance_keeps_what_an_open_file_held_and_its_name(tmp_path):
    path = tmp_path / "cat.png"
    path.write_bytes(bytes_of(colours(), "PNG"))
    with path.open("rb") as file:
        later, _ = peek_image(file)
    assert repr(open_image(later)) == "OpenedImage(cat.png, 11 high, 7 wide)"


def test_glance_refuses_what_the_header_tells(tmp_path):
    animated = io.BytesIO()
    colours().save(animated, "GIF", save_all=True, append_images=[Image.new("RGB", (7, 11))])
    floats = Image.fromarray(np.ones((3, 5), np.float32))
    refused = [
        (b"words", ValueError, r"the data.*JPEG"),
        (animated.getvalue(), ValueError, r"2.*frame"),
        (floats, ValueError, "floats"),
        (np.zeros((3, 5)), ValueError, r"pixels.*uint8"),
        (tmp_path / "none.png", FileNotFoundError, "none.png"),
        (tmp_path, IsADirectoryError, re.escape(str(tmp_path))),
        (5, TypeError, "int"),
    ]
    for source, error, message in refused:
        with pytest.raises(error, match=message):
            peek_image(source)


def test_strided_array_is_a_picture_of_what_it_shows():
    array = noise(11, 7, 3)[::2, ::-1]
    assert np.array_equal(pixels(open_image(array)), array)


def test_picture_does_not_change_with_what_it_was_made_of():
    array, image = noise(11, 7, 3), colours()
    from_array, from_image = open_image(array), open_image(image)
    array[:], _ = 0, image.paste((0, 0, 0), (0, 0, 7, 11))
    assert np.array_equal(pixels(from_array), noise(11, 7, 3))
    assert np.array_equal(pixels(from_image), noise(11, 7, 3))


def test_picture_says_its_name_and_its_size(tmp_path):
    path = tmp_path / "cat.png"
    colours().save(path)
    assert repr(open_image(path)) == "OpenedImage(cat.png, 11 high, 7 wide)"
    assert open_image(str(path)).name == "cat.png"
    assert open_image(Image.open(path)).name == "cat.png"
    assert open_image(path.read_bytes()).name == "bytes"
    assert open_image(colours()).name == "image"
    assert open_image(noise(2, 3)).name == "array"


def test_picture_that_is_open_stays_as_it_is():
    picture = open_image(colours())
    assert open_image(picture) is picture
    assert open_image(picture, frame=0) is picture


# ---------------------------------------------------------------------------------------------------------- many frames


def several(kind: str, **options: object) -> bytes:
    """Three pictures of one colour each: 10, 110, 210."""
    first, *rest = [Image.new("RGB", (5, 3), (level, level, level)) for level in (10, 110, 210)]
    return bytes_of(first, kind, save_all=True, append_images=rest, **options)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_animation_is_refused_until_a_frame_is_named(kind):
    stored = several(kind, **({"lossless": True} if kind == "WEBP" else {}))
    with pytest.raises(ValueError, match=r"3.*open_image\(…, frame=0\).*frame=2"):
        open_image(stored)
    assert [int(pixels(open_image(stored, frame=n))[0, 0, 0]) for n in (0, 1, 2)] == [10, 110, 210]
    with pytest.raises(ValueError, match=r"0.*2.*frame=3"):
        open_image(stored, frame=3)
    with pytest.raises(ValueError, match=r"0.*2.*frame=-1"):
        open_image(stored, frame=-1)


def test_image_that_is_given_stays_at_its_own_frame():
    image = Image.open(io.BytesIO(several("GIF")))
    image.seek(1)
    assert pixels(open_image(image, frame=2))[0, 0, 0] == 210
    assert image.tell() == 1


def test_jpeg_of_a_camera_that_carries_more_pictures_is_its_first():
    stored = several("MPO")
    assert Image.open(io.BytesIO(stored)).n_frames == 3
    assert pixels(open_image(stored))[0, 0, 0] == 10
    assert pixels(open_image(stored, frame=2))[0, 0, 0] == 210


@pytest.mark.parametrize("source", [noise(2, 3), colours(), open_image(colours())])
def test_second_frame_of_a_still_picture_is_refused(source):
    with pytest.raises(ValueError, match=r"frame.*0.*frame=1"):
        open_image(source, frame=1)


# ------------------------------------------------------------------------------------------------------------ bad input

JPEG = bytes_of(Image.fromarray(noise(101, 103, 3)), "JPEG")
PNG = bytes_of(Image.fromarray(noise(101, 103, 3)), "PNG")


NO_IMAGES = {
    "nothing": b"",
    "text": "고양이 사진".encode() * 100,
    "a web page": b"\n<!DOCTYPE html><html><svg>",
    "SVG": b"\xef\xbb\xbf<?xml version='1.0'?>\n<svg/>",
    "HEIC": b"\0\0\0\x18ftypheic\0\0\0\0",
    "PDF": b"%PDF-1.7\n",
    "EPS, for which Pillow would start Ghostscript": b"%!PS-Adobe-3.0 EPSF-3.0\n",
    "bytes": b"\x00\x01\x02\x03" * 9,
    "the start of a JPEG": JPEG[:3],
    "the start of a PNG": PNG[:8],
}


@pytest.mark.parametrize("stored", NO_IMAGES.values(), ids=NO_IMAGES)
def test_file_that_is_no_image_is_refused_with_the_formats_that_are_read(stored, tmp_path):
    path = tmp_path / "photo.jpg"
    path.write_bytes(stored)
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))}.*JPEG.*PNG.*GIF"):
        open_image(path)
    with pytest.raises(ValueError, match=r"JPEG.*PNG.*GIF"):
        open_image(stored)


@pytest.mark.parametrize(
    "stored", [JPEG, PNG, bytes_of(colours(), "WEBP"), bytes_of(colours(), "TIFF"), several("GIF")]
)
def test_file_that_is_cut_off_is_refused(stored):
    for kept in (len(stored) * 3 // 4, 25):
        with pytest.raises(ValueError, match="broken"):
            open_image(stored[:kept], frame=0)


def test_flipped_bytes_raise_nothing_but_value_error():
    """Whatever Pillow's decoders raise; some files decode all the same."""
    random = np.random.default_rng(0)
    refused = 0
    for kind in FORMATS:
        stored = np.frombuffer(bytes_of(colours(), kind), np.uint8)
        for _ in range(20):
            broken = stored.copy()
            broken[random.integers(0, len(stored), 3)] = random.integers(0, 256, 3)
            try:
                open_image(broken.tobytes())
            except ValueError:
                refused += 1
    assert refused > 50


@pytest.fixture
def undecodable(monkeypatch):
    """Any attempt to decode fails the test."""

    def load(image: object) -> None:
        pytest.fail("decoded before its size was checked")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)


@pytest.mark.usefixtures("undecodable")
def test_picture_of_too_many_pixels_is_refused_before_it_is_decoded():
    """More than ours, less than Pillow's own bound, which it warns of; and more than both."""
    said = rf"11000.*13000.*{MOST_PIXELS:,}.*{MOST_SIDE:,}"
    with pytest.raises(ValueError, match=said):
        open_image(png(13000, 11000, 8, 2))
    with pytest.raises(ValueError, match=r"Image.*600000000"):
        open_image(png(20000, 30000, 8, 2))


@pytest.mark.usefixtures("undecodable")
@pytest.mark.parametrize("size", [(1, 2**27), (2**27, 1), (1, MOST_SIDE + 1), (8000, 8000)])
def test_image_bomb_is_refused_by_its_header_wherever_it_is_opened(size, tmp_path):
    """67 bytes of 1 × 2²⁷ pixels took 4.5 GB: Pillow keeps a pointer and a piece of memory for each row."""
    bomb = png(*size, 1, 0)
    (tmp_path / "bomb.png").write_bytes(bomb)
    for open_it in (open_image, peek_image):
        for source in (bomb, io.BytesIO(bomb), tmp_path / "bomb.png"):
            with pytest.raises(ValueError, match=rf"{size[1]}.*{size[0]}.*{MOST_SIDE:,}|{size[0] * size[1]}"):
                open_it(source)


@pytest.mark.usefixtures("undecodable")
@pytest.mark.parametrize(("kind", "most"), [("PNG", 60_000_000), ("WEBP", 40_000_000), ("JPEG2000", 24_000_000)])
def test_formats_that_take_more_memory_have_fewer_pixels(kind, most, monkeypatch):
    stored = bytes_of(Image.new("RGB", (5, 7)), kind)
    monkeypatch.setattr("regard.data.images.MOST_BYTES", 480_000_000 * 34 // most)
    with pytest.raises(ValueError, match=r"7.*5.*34"):
        peek_image(stored)


def test_decoding_takes_no_third_copy(monkeypatch):
    """One copy as it was decoded, one in RGB: the memory that the limit is made for."""
    copied = []
    monkeypatch.setattr(Image.Image, "copy", lambda self: copied.append(self) or self._new(self.im.copy()))
    assert open_image(bytes_of(Image.new("RGB", (5, 7)), "JPEG")).size == (7, 5)
    assert len(copied) == 1


def test_png_whose_pixels_were_changed_is_refused():
    """Pillow decodes it: the checksums of the pixels' chunks are not looked at."""
    good = bytearray(png(2, 1, 8, 0, b"\0\1\2"))
    at = good.index(b"IDAT") + 4
    good[at : at + 11] = zlib.compress(b"\0\1\3")[:11]
    with pytest.raises(ValueError, match="decoded"):
        open_image(bytes(good))


def test_picture_that_pillow_only_warns_of_is_read_without_the_warning(monkeypatch):
    """Cut off, so that nothing needs to be decoded to see that it went past the bound."""
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 10_000_000)
    with pytest.raises(ValueError, match="decoded"):
        open_image(png(3000, 5000, 1, 0))


def test_large_page_of_a_small_tiff_is_refused(monkeypatch):
    monkeypatch.setattr("regard.data.images.MOST_BYTES", 20 * 8)
    pages = bytes_of(Image.new("L", (5, 3)), "TIFF", save_all=True, append_images=[Image.new("L", (7, 3))])
    assert open_image(pages, frame=0).size == (3, 5)
    with pytest.raises(ValueError, match=r"3.*7.*20"):
        open_image(pages, frame=1)


@pytest.mark.parametrize("shape", [(1, 1), (20000, 10), (10, 20000)])
def test_picture_of_an_odd_shape_opens(shape):
    stored = bytes_of(Image.fromarray(np.zeros(shape, np.uint8)), "PNG")
    assert open_image(stored).size == shape


def test_path_without_a_file_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape(repr(str(tmp_path / "no.png")))):
        open_image(tmp_path / "no.png")
    with pytest.raises(IsADirectoryError, match=re.escape(str(tmp_path))):
        open_image(tmp_path)
    with pytest.raises(FileNotFoundError, match="'aaaa"):
        open_image("a" * 100_000)  # longer than any path may be


@pytest.mark.parametrize(
    "address", ["https://example.org/cat.jpg", "FILE:///tmp/cat.jpg", "data:image/png;base64,iVBO"]
)
def test_address_is_refused(address):
    with pytest.raises(ValueError, match=re.escape(address[:9])):
        open_image(address)


@pytest.mark.parametrize("source", [None, 3, [noise(2, 3)], {"a.jpg"}])
def test_what_is_no_source_is_refused(source):
    said = r"bytes.*Pillow.*uint8.*NumPy"
    with pytest.raises(TypeError, match=rf"{said}.*{type(source).__name__}"):
        open_image(source)


def test_tensor_is_refused_with_what_makes_an_array_of_it():
    tensor = torch.zeros(3, 5, 7, dtype=torch.uint8)
    with pytest.raises(TypeError, match=r"Tensor.*tensor\.permute\(1, 2, 0\)\.numpy\(\)"):
        open_image(tensor)
    assert open_image(tensor.permute(1, 2, 0).numpy()).size == (5, 7)


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.array([[0, 65535]], np.uint16), r"uint8.*0.*255.*uint16"),
        (np.array([[0.0, 1.0]]), r"uint8.*0.*255.*float64.*\(array \* 255\)"),
        (np.array([["a"]]), r"pixels.*uint8.*0.*255.*<U1"),
        (noise(2, 5, 7, 3), r"shape.*\(2, 5, 7, 3\).*list\(array\)"),
        (noise(5), r"1.*3.*4.*shape.*\(5,\)"),
        (noise(5, 7, 2), r"1.*3.*4.*shape.*\(5, 7, 2\)"),
        (noise(3, 5, 7), r"shape.*\(3, 5, 7\).*array\.transpose\(1, 2, 0\)"),
        (noise(0, 3), r"shape.*\(0, 3\)"),
    ],
)
def test_array_that_is_no_picture_is_refused(array, said):
    with pytest.raises(ValueError, match=said):
        open_image(array)


@pytest.mark.parametrize("background", [(1, 2), (0, 0, 256), (0, 0, -1), "white", (0.5, 0.5, 0.5)])
def test_background_that_is_no_colour_is_refused(background):
    said = rf"background.*0.*255.*{re.escape(repr(background))}"
    with pytest.raises(ValueError, match=said):
        open_image(noise(2, 3), background=background)


def test_mode_that_pillow_cannot_make_rgb_is_refused():
    with pytest.raises(ValueError, match=r"La.*Pillow.*RGB"):
        open_image(Image.new("La", (2, 3)))


def test_memory_that_is_not_there_is_not_called_a_broken_file(monkeypatch):
    def load(image: object) -> None:
        raise MemoryError

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    with pytest.raises(MemoryError):
        open_image(PNG)


def test_missing_pillow_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"Pillow.*'regard\[models\]'"):
        open_image(Path("cat.png"))
