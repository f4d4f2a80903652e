"""What cannot be opened as a picture, in words: a file by its first bytes, an array or a tensor by its numbers.

    >>> describe(b"<svg xmlns='http://www.w3.org/2000/svg'>")
    'is an SVG drawing, which has no pixels: draw it to a PNG first'

It opens nothing, and knows no picture beyond that.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["LOOKED_AT", "as_array", "as_uint8", "describe"]

LOOKED_AT = 512
"""How many bytes say enough."""

# What Pillow would have opened, were it whole.
BEGINNINGS = {
    b"\xff\xd8\xff": "a JPEG",
    b"\x89PNG": "a PNG",
    b"GIF8": "a GIF",
    b"BM": "a BMP",
    b"II*\0": "a TIFF",
    b"MM\0*": "a TIFF",
}
# Brands of the container that telephones write: ISO/IEC 23008-12, annex B.
HEIF = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"}
CONVERT = "convert it to JPEG or PNG first"


def describe(head: bytes) -> str:
    """Say what begins with these bytes, and what to do, as the end of a sentence about it.

    >>> describe(b"")
    'is empty: it has 0 bytes'

    head: the first LOOKED_AT bytes of the file, or all where it has fewer.
    """
    if not head:
        return "is empty: it has 0 bytes"
    lower = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if lower.startswith((b"<!doctype html", b"<html")):
        return "is a web page (HTML), not a picture: a download that went wrong looks like this"
    if b"<svg" in lower:
        return "is an SVG drawing, which has no pixels: draw it to a PNG first"
    if head[4:8] == b"ftyp" and head[8:12] in HEIF:
        return f"is HEIC (HEIF), which Pillow does not read: {CONVERT}"
    if head.startswith((b"%PDF", b"%!PS")):
        return f"is {'a PDF' if head[1:4] == b'PDF' else 'PostScript'}, a page and not a picture: {CONVERT}"
    if _is_text(head):
        return "is text, not a picture"
    begun = _begun(head)
    if begun is not None:
        return f"begins as {begun} does, but it is broken or cut off: get it again"
    return f"is of a format that is not read here: {CONVERT}"


def as_uint8(array: NDArray[Any]) -> str:
    """How an array of another dtype becomes uint8, as the end of a sentence about it; as far as its numbers say.

    >>> import numpy as np
    >>> as_uint8(np.array([0, 255])), as_uint8(np.array([0.0, 0.5]))
    (': array.astype(np.uint8)', ': (array * 255).round().astype(np.uint8)')
    """
    kind = array.dtype.kind
    if kind == "b":
        return ": array.astype(np.uint8) * 255"
    if kind not in "iuf" or array.size == 0:
        return ""
    low, high = array.min(), array.max()
    if low >= 0 and high <= 255:
        scaled = "(array * 255).round()" if high <= 1 else "array.round()"
        return f": {scaled if kind == 'f' else 'array'}.astype(np.uint8)"
    if kind != "f" and 0 <= low <= high <= 65535:
        return f" up to {high}: 16 bits are (array >> 8).astype(np.uint8)"
    return f" from {low} to {high}, which does not say what is black and what is white"


def as_array(tensor: Tensor) -> str:
    """How a tensor becomes an array that is a picture, if it is one as torchvision has them: colours first.

    >>> as_array(torch.zeros(3, 5, 7, dtype=torch.uint8))
    'colours come last, tensor.permute(1, 2, 0).numpy()'
    """
    if tensor.ndim == 4:
        return "give pictures as a list; pixels that are prepared already go to the model itself, model(pixels=…)"
    bytes_of = "tensor" if tensor.dtype == torch.uint8 else "from 0 to 1, (tensor * 255).round().byte()"
    if tensor.ndim == 3 and tensor.shape[0] in (1, 3, 4):
        return f"colours come last, {bytes_of}.permute(1, 2, 0).numpy()"
    return f"{bytes_of}.numpy()"


def _begun(head: bytes) -> str | None:
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "a WebP"
    if head[4:12] == b"ftypavif":
        return "an AVIF"
    return next((name for start, name in BEGINNINGS.items() if head.startswith(start)), None)


def _is_text(head: bytes) -> bool:
    try:
        text = getincrementaldecoder("utf-8-sig")().decode(head)  # which minds no character that the end cuts in two
    except UnicodeDecodeError:
        return False
    return text != "" and all(letter.isprintable() or letter in "\t\r\n\f" for letter in text)
