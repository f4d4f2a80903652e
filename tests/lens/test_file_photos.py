"""Photographs in capture files: they come back byte by byte; what is no image, or too large to decode, is refused."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import regard
from regard.layouts import Frame, Sides
from regard.lens.capture import Capture
from regard.lens.files import saving
from regard.lens.files.container import CaptureFileError, Incoming, Outgoing, read, write
from regard.lens.files.saving import HEADER, Photo, pack_photos, unpack_photos
from regard.session.session import show_image

HIGH, WIDE = 31, 47
SIDES = Sides.patches(Frame.whole(HIGH, WIDE).resized(20, 30), patch=10)  # of 1 cls and 2 × 3 patches
KNOWN = HEADER.keys() | {"layouts", "photos"}


class Attend(nn.Module):
    def forward(self, x):
        return regard.attention(x, x, x)


def encoded(kind: str, high: int = HIGH, wide: int = WIDE, **options: object) -> bytes:
    out = io.BytesIO()
    noise = np.random.default_rng(3).integers(0, 256, (high, wide, 3), np.uint8)
    Image.fromarray(noise).save(out, kind, **options)
    return out.getvalue()


PNG, JPEG = encoded("PNG"), encoded("JPEG")


def captured(*photos: Photo) -> Capture:
    model = Attend()
    with regard.watch(model, keep="qk", layouts=SIDES) as seen:
        model(torch.randn(2, 3, 7, 5))
    seen.photos = photos
    return seen


def photo(data: bytes = PNG, kind: str = "image/png", name: str = "고양이.png") -> Photo:
    return Photo(name, (HIGH, WIDE), kind, data)


# ------------------------------------------------------------------------------------------------------- they come back


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (PNG, "image/png"),
        (JPEG, "image/jpeg"),
        (encoded("JPEG", progressive=True, comment="x" * 300), "image/jpeg"),
    ],
    ids=["PNG", "JPEG", "progressive JPEG with a long comment"],
)
def test_photo_comes_back_byte_by_byte(tmp_path, data, kind):
    captured(photo(data, kind)).save(tmp_path / "run.regard")
    (back,) = regard.open(tmp_path / "run.regard").photos
    assert (back.name, back.size, back.kind, back.data) == ("고양이.png", (HIGH, WIDE), kind, data)
    assert repr(back) == f"Photo(고양이.png, 31 high, 47 wide, {len(data):,} bytes)"


def test_capture_that_was_opened_is_saved_with_its_photo_and_without_if_asked(tmp_path):
    captured(photo()).save(tmp_path / "a.regard", overview=True)
    again = regard.open(tmp_path / "a.regard")
    again.save(tmp_path / "b.regard")
    assert [one.data for one in regard.open(tmp_path / "b.regard").photos] == [PNG]
    again.save(tmp_path / "c.regard", photos=False)
    assert regard.open(tmp_path / "c.regard").photos == ()
    assert PNG[:64] not in (tmp_path / "c.regard").read_bytes()
    assert "고양이".encode() not in (tmp_path / "c.regard").read_bytes()


def test_file_without_photos_does_not_speak_of_them_so_that_every_regard_reads_it(tmp_path):
    captured().save(tmp_path / "run.regard")
    header, _ = read(tmp_path / "run.regard")
    assert "photos" not in header
    assert regard.open(tmp_path / "run.regard").photos == ()


def test_largest_copy_of_an_image_fits(tmp_path):
    noise = np.random.default_rng(5).integers(0, 256, (1601, 1607, 3), np.uint8)
    shown = show_image(noise)
    out = Outgoing()
    packed = pack_photos([shown], out)
    (back,) = unpack_photos(packed, Incoming(out.tensors))
    assert (back.size, back.data) == ((1601, 1607), shown.data)


def test_copy_says_nothing_of_where_and_when_the_photo_was_taken(tmp_path):
    told = Image.Exif()
    told[0x010F] = "the maker of the camera"
    Image.fromarray(np.zeros((300, 400, 3), np.uint8)).save(tmp_path / "a.jpg", exif=told)
    assert b"camera" in (tmp_path / "a.jpg").read_bytes()
    assert b"camera" not in show_image(tmp_path / "a.jpg").data


def test_name_that_a_terminal_would_obey_is_written_without_what_it_obeys():
    (packed,) = pack_photos([photo(name="a\x1b[31m\nb\udcff" + "c" * 300)], Outgoing())
    assert packed[0] == "a[31mb" + "c" * 249


# ----------------------------------------------------------------------------------------------------- what is refused


def test_photo_of_another_image_is_not_saved(tmp_path):
    other = Photo("a.png", (HIGH, WIDE + 1), "image/png", PNG)
    words = r"\[\(31, 48\)\].*\[\(31, 47\)\]"
    with pytest.raises(ValueError, match=words):
        captured(other).save(tmp_path / "run.regard")
    with pytest.raises(ValueError, match=r"\[\(31, 47\), \(31, 47\)\]"):
        captured(photo(), photo()).save(tmp_path / "run.regard")
    assert list(tmp_path.iterdir()) == []


def claiming(high: int, wide: int) -> bytes:
    """A PNG that says to be of another size."""
    return PNG[:16] + wide.to_bytes(4, "big") + high.to_bytes(4, "big") + PNG[24:]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", r"0.*JPEG.*PNG"),
        (b"<svg onload='x'/>", r"0.*JPEG.*PNG"),
        (PNG[:20], r"0.*JPEG.*PNG"),
        (JPEG[:30], r"0.*JPEG.*PNG"),
        (JPEG[:4] + b"\0" * 500, r"0.*JPEG.*PNG"),
        (claiming(50_000, 40_000), r"0.*50000.*40000.*4,096"),
        (claiming(0, 5), r"0.*5"),
    ],
    ids=["nothing", "SVG", "cut PNG", "cut JPEG", "JPEG of zeros", "bomb", "no height"],
)
def test_bytes_that_are_no_bounded_image_are_refused(data, words):
    out = Outgoing()
    packed = pack_photos([photo(data)], out)
    with pytest.raises(CaptureFileError, match=words):
        unpack_photos(packed, Incoming(out.tensors))


def test_photo_of_too_many_bytes_is_refused(monkeypatch):
    out = Outgoing()
    packed = pack_photos([photo()], out)
    monkeypatch.setattr(saving, "MOST_BYTES", len(PNG) - 1)
    with pytest.raises(CaptureFileError, match=rf"0.*{len(PNG):,}.*bytes.*{len(PNG) - 1:,}"):
        unpack_photos(packed, Incoming(out.tensors))


@pytest.mark.parametrize(
    "item",
    [
        "photos/0",
        ["a.png", HIGH, WIDE],
        [7, HIGH, WIDE, "photos/0"],
        ["a.png", float(HIGH), WIDE, "photos/0"],
        ["a.png", True, WIDE, "photos/0"],
        ["a.png", 0, WIDE, "photos/0"],
        ["a.png", 2**15, 2**14, "photos/0"],
        ["a\x1b[31m.png", HIGH, WIDE, "photos/0"],
        ["a" * 256, HIGH, WIDE, "photos/0"],
    ],
    ids=str,
)
def test_what_is_said_of_a_photo_is_checked(item):
    out = Outgoing()
    pack_photos([photo()], out)
    with pytest.raises(CaptureFileError, match=r"photo.*0"):
        unpack_photos([item], Incoming(out.tensors))


def test_photos_are_a_list_of_bytes():
    with pytest.raises(CaptureFileError, match=r"photos.*dict"):
        unpack_photos({}, Incoming({}))
    floats = Incoming({"photos/0": torch.zeros(7)})
    with pytest.raises(CaptureFileError, match=r"'photos/0'.*0.*torch.float32.*bytes"):
        unpack_photos([["a.png", HIGH, WIDE, "photos/0"]], floats)


def forged(path: Path, data: bytes, **header: object) -> Path:
    """The file of a capture with another photo, sealed anew."""
    captured(photo()).save(path)
    was, tensors = read(path)
    tensors["photos/0"] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    write(path, was | json.loads(json.dumps(header)), tensors)
    return path


def test_file_with_a_forged_photo_is_refused_whole(tmp_path):
    with pytest.raises(CaptureFileError, match=r"run\.regard'.*0.*60000"):
        regard.open(forged(tmp_path / "run.regard", claiming(60_000, 60_000)))
    photos = [["a.png", HIGH, WIDE + 2, "photos/0"]]
    with pytest.raises(CaptureFileError, match=r"photos.*\[\(31, 49\)\]"):
        regard.open(forged(tmp_path / "run.regard", PNG, photos=photos))


def test_byte_that_changed_in_a_photo_is_noticed(tmp_path):
    captured(photo()).save(tmp_path / "run.regard")
    whole = bytearray((tmp_path / "run.regard").read_bytes())
    whole[whole.index(PNG[:40]) + 60] ^= 1
    (tmp_path / "run.regard").write_bytes(whole)
    with pytest.raises(CaptureFileError, match="checksum"):
        regard.open(tmp_path / "run.regard")
