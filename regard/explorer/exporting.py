"""A session as one HTML file that opens without a server and without a network: page, styles, scripts and data in it.

    >>> from regard.explorer.sessions import look_at
    >>> write_html(look_at("The animal didn't cross the street."), "animal.html")             # doctest: +SKIP

The page is the one that `regard serve` shows, its modules put together by `bundling.py`. What it carries instead of a
server is said in `carrying.py`: JSON inside <script type="application/json" id="regard-data">.

It does not know what the page draws.
"""

from __future__ import annotations

import json
import os
import re
from base64 import b64encode
from hashlib import sha256
from html import escape
from pathlib import Path

from regard.atomic_files import atomic_file, check_target
from regard.explorer.bundling import bundle, scripted
from regard.explorer.carrying import carried
from regard.explorer.sessions import Session
from regard.stages import Lang

__all__ = ["PAGE", "html", "modules", "styles", "write_html"]

PAGE = Path(__file__).parent / "page"
STYLE = re.compile(r"""<link\b[^>]*\brel=["']stylesheet["'][^>]*>""")
SCRIPT = re.compile(r"""<script\b[^>]*\bsrc=["'](?P<path>[^"']+)["'][^>]*>\s*</script>""")
HREF = re.compile(r"""\bhref=["'](?P<path>[^"']+)["']""")
OUTSIDE = re.compile(r"""<[^>]*\b(?:src|href)=["'](?!data:|#)(?P<path>[^"']*)["']|@import\b|url\(\s*["']?(?!data:|#)""")
# Nothing is loaded from anywhere, and no script or style but the page's own is run, known by their hashes.
POLICY = (
    "default-src 'none'; script-src {script}; style-src {style}; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)


def write_html(session: Session, path: str | os.PathLike[str], *, lang: Lang = "en") -> None:
    """Write one self-contained page of a session: whole, or not at all.

    >>> import tempfile, torch, regard
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> with regard.watch(layer, keep="qk") as seen:
    ...     _ = layer(torch.zeros(1, 3, 8))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_html(Session("toy", seen, ("a", "b", "c")), f"{folder}/toy.html")
    ...     Path(folder, "toy.html").read_text(encoding="utf-8")[:15]
    '<!doctype html>'

    path: used as it is; a file that is there is replaced at the very end, and keeps its permissions.  lang: what the
    page speaks at first.
    Raises FileNotFoundError where the folder is missing, OSError where no file can be written, and as `html` does.
    """
    check_target(path)  # before the work
    text = html(session, lang)
    with atomic_file(path, "the page") as file:
        file.write(text.encode())


def html(session: Session, lang: Lang = "en") -> str:
    """The page of a session as text.

    >>> import torch, regard
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> with regard.watch(layer, keep="qk") as seen:
    ...     _ = layer(torch.zeros(1, 3, 8))
    >>> '<script type="application/json" id="regard-data">' in html(Session("toy", seen, ("a", "b", "c")))
    True

    Raises ValueError for a language that is not spoken here, LookupError where nothing was seen, or where neither a map
    nor q and k of a head were kept.
    """
    text = json.dumps(carried(session, lang), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    data = text.encode("utf-8", "backslashreplace").decode("utf-8")  # half a character is \udxxx in JSON as in Python
    title = escape(session.name).encode("utf-8", "replace").decode("utf-8")
    page = _alone((PAGE / "index.html").read_text(encoding="utf-8"))
    page = re.sub(r"<title>.*?</title>", lambda _: f"<title>{title} · regard</title>", page, count=1)
    page = re.sub(r"""(<html\b[^>]*\blang=)["']\w*["']""", rf'\1"{lang}"', page, count=1)
    # "<" may begin "</script>" or "<!--", which would end or change what the browser reads as data
    held = f'<script type="application/json" id="regard-data">{data.replace("<", chr(92) + "u003c")}</script>\n'
    at = page.index(SCRIPT_HERE)
    return page[:at] + held + page[at:].replace(SCRIPT_HERE, "", 1)


def modules() -> dict[str, str]:
    """The page's modules by file name.

    >>> "source.js" in modules()
    True
    """
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(PAGE.glob("*.js"))}


def styles() -> str:
    """The page's styles, in the order in which it names them.

    >>> "<style>" in styles()
    False
    """
    found = STYLE.findall((PAGE / "index.html").read_text(encoding="utf-8"))
    return "\n".join(_style(link) for link in found)


SCRIPT_HERE = "<!-- the script of the page -->"


def _alone(page: str) -> str:
    """The page with its styles and its modules in the text, and a mark where its data goes."""
    style = f"\n{styles()}\n"
    page = STYLE.sub("", page).replace("</head>", f"<style>{style}</style>\n</head>", 1)
    found = SCRIPT.findall(page)
    assert len(found) == 1, f"the page has one script, which imports the others: {found}"
    script = f"\n{scripted(bundle(modules(), Path(found[0]).name)[0])}\n"
    policy = POLICY.format(script=_hash(script), style=_hash(style))
    page = page.replace("<head>", f'<head>\n<meta http-equiv="Content-Security-Policy" content="{policy}">', 1)
    if outside := OUTSIDE.search(SCRIPT.sub("", page)):
        raise ValueError(f"the page would load something that is not in it: {outside[0]!r}")
    return SCRIPT.sub(lambda _: f'{SCRIPT_HERE}<script type="module">{script}</script>', page)


def _hash(inline: str) -> str:
    """A script or style of the page, as its content security policy names it."""
    return f"'sha256-{b64encode(sha256(inline.encode()).digest()).decode()}'"


def _style(link: str) -> str:
    named = HREF.search(link)
    assert named is not None, f"a style without its file: {link}"
    text = (PAGE / Path(named["path"]).name).read_text(encoding="utf-8")
    assert "</style" not in text.lower(), f"{named['path']} would end its own <style>"
    return text
