"""The page's own files, and no others: a name is looked up in a list of those that are there, never in the file system.

It does not know who asks, nor what is in the files.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["INDEX", "PAGE", "page_file"]

PAGE = Path(__file__).parent / "page"
INDEX = "index.html"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
}


def page_file(name: str, folder: Path = PAGE) -> tuple[bytes, str]:
    """The bytes and the media type of a file of the page.

    >>> page_file("../server.py")
    Traceback (most recent call last):
        ...
    LookupError: the page has no file '../server.py'

    name: its path in the folder, with slashes.  Raises LookupError for what is not there.
    """
    there = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if _ours(path)}
    if name not in there:
        raise LookupError(f"the page has no file {name[:80]!r}")
    path = there[name]
    return path.read_bytes(), KINDS[path.suffix]


def _ours(path: Path) -> bool:
    return path.suffix in KINDS and path.is_file() and not path.is_symlink()
