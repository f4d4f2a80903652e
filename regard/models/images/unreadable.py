"""What a file is that cannot be opened as a picture, in words, from its first bytes.

    >>> describe(b"<svg xmlns='http://www.w3.org/2000/svg'>")
    'is an SVG drawing, which has no pixels: draw it to a PNG first'

It opens nothing, and knows no picture beyond the bytes that it begins with.
"""

from __future__ import annotations

from codecs import getincrementaldecoder

__all__ = ["LOOKED_AT", "describe"]

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
