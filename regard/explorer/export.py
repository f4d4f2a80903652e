"""A session as one HTML file that opens offline."""

from __future__ import annotations

import json
import os
import re
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from html import escape
from pathlib import Path

from regard.explorer.export_data import carried
from regard.files import atomic_file, check_target
from regard.locale import Lang
from regard.session.session import Session

IMPORT = re.compile(
    r"""^import\s+(?:(?P<what>[^"';]+?)\s+from\s+)?["'](?P<path>[^"']+)["'];?[ \t]*$""", re.MULTILINE | re.DOTALL
)
AGAIN = re.compile(r"""^export\s+(?P<what>\*|\{[^}]*\})\s+from\s+["'](?P<path>[^"']+)["'];?[ \t]*$""", re.MULTILINE)
LIST = re.compile(r"^export\s+\{(?P<names>[^}]*)\};?[ \t]*$", re.MULTILINE)
DECLARED = re.compile(
    r"^export\s+(?P<default>default\s+)?(?=(?:async\s+function|function|class|const)\b\s*\*?\s*(?P<name>[\w$]+))",
    re.MULTILINE,
)
DEFAULT = re.compile(r"^export\s+default\s+", re.MULTILINE)
LEFT = re.compile(r"^(?:import|export)\b[^\n]*|(?<![\w$.])import\s*\([^\n]*|\bimport\.meta\b", re.MULTILINE)
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)  # types are imported there; only looked for where LEFT is
WORD = r"[A-Za-z_$][\w$]*"


@dataclass(frozen=True)
class Module:
    """One JavaScript module.

    text: without its imports and exports.  needs: path → the patterns that name what is imported from it.
    gives: exported name → name inside.  passes_on: paths of which everything is exported again.
    """

    text: str
    needs: dict[str, list[str]]
    gives: dict[str, str]
    passes_on: list[str]


def bundle(modules: Mapping[str, str], entry: str) -> tuple[str, str]:
    """All modules that `entry` needs as one script.

    >>> script, name = bundle({"a.js": "export const two = 2;", "b.js": 'import { two } from "./a.js";'}, "b.js")
    >>> print(script)
    const module0 = (() => { // a.js
    const two = 2;
    return { two };
    })();
    const module1 = (() => { // b.js
    const { two } = module0;
    <BLANKLINE>
    return {  };
    })();
    >>> name
    'module1'

    Args:
        modules: file name → text, all of one folder.
        entry: the module to run, which comes last.

    Returns:
        The script, and the name in it that holds what `entry` exports.

    Raises:
        LookupError: for a missing module.
        ValueError: for a cycle, and for a form of import or export that is not supported.
    """
    order: dict[str, Module] = {}

    def visit(path: str, above: tuple[str, ...]) -> None:
        """Put a module into `order` after all that it needs."""
        if path in order:
            return
        if path in above:
            raise ValueError(f"modules import each other in a cycle: {' → '.join([*above[above.index(path) :], path])}")
        if path not in modules:
            importer = f", which {above[-1]} imports" if above else ""
            raise LookupError(f"there is no module {path!r}{importer}; there are {', '.join(sorted(modules))}")
        module = _parse(path, modules[path])
        for needed in [*module.needs, *module.passes_on]:
            visit(needed, (*above, path))
        order[path] = module

    visit(entry, ())
    names = {path: f"module{n}" for n, path in enumerate(order)}
    lines = []
    for path, module in order.items():
        needed = [f"const {what} = {names[other]};" for other, whats in module.needs.items() for what in whats]
        given = [f"...{names[other]}" for other in module.passes_on]
        given += [outside if outside == inside else f"{outside}: {inside}" for outside, inside in module.gives.items()]
        lines += [f"const {names[path]} = (() => {{ // {path}", *needed, module.text]
        lines += [f"return {{ {', '.join(given)} }};", "})();"]
    return "\n".join(lines), names[entry]


def scripted(script: str) -> str:
    r"""A script for a page's <script>, which would end at the first "</script", even in a string.

    >>> scripted('let end = "</script>";')
    'let end = "<\\/script>";'
    """
    return re.sub(r"<(?=!--)", r"<\\", re.sub(r"</(?=script)", r"<\\/", script, flags=re.IGNORECASE))


def _parse(path: str, text: str) -> Module:
    needs: dict[str, list[str]] = {}
    gives: dict[str, str] = {}
    passes_on: list[str] = []

    def neighbour(asked: str) -> str:
        if not re.fullmatch(r"\./[\w-]+\.js", asked):
            raise ValueError(f"{path} imports {asked!r}: only neighbours can be imported, as './name.js'")
        return asked[2:]

    def pairs(names: str) -> list[tuple[str, str]]:
        """`a, b as c` → (a, a), (b, c)."""
        listed = []
        for name in filter(None, (part.strip() for part in re.sub(r"//[^\n]*", "", names).split(","))):
            found = re.fullmatch(rf"({WORD})(?:\s+as\s+({WORD}))?", name)
            if found is None:
                raise ValueError(f"{path}: cannot read the name {name!r} of an import or export")
            listed.append((found[1], found[2] or found[1]))
        return listed

    def imported(found: re.Match[str]) -> str:
        patterns, what = needs.setdefault(neighbour(found["path"]), []), (found["what"] or "").strip()
        if whole := re.fullmatch(rf"\*\s+as\s+({WORD})", what):
            patterns.append(whole[1])
        elif what:
            parts = re.fullmatch(rf"(?:(?P<default>{WORD})\s*,?\s*)?(?:\{{(?P<names>[^}}]*)\}})?", what)
            if parts is None:
                raise ValueError(f"{path}: a form of import that cannot be bundled: {what!r}")
            names = [f"default: {parts['default']}"] if parts["default"] else []
            names += [f"{inside}: {own}" if inside != own else own for inside, own in pairs(parts["names"] or "")]
            patterns.append(f"{{ {', '.join(names)} }}")
        return ""

    def again(found: re.Match[str]) -> str:
        needed = neighbour(found["path"])
        if found["what"] == "*":
            passes_on.append(needed)
            return ""
        for inside, outside in pairs(found["what"].strip("{}")):
            own = f"again{len(gives)}"
            needs.setdefault(needed, []).append(f"{{ {inside}: {own} }}")
            gives[outside] = own
        return ""

    def listed(found: re.Match[str]) -> str:
        gives.update({outside: inside for inside, outside in pairs(found["names"])})
        return ""

    def declared(found: re.Match[str]) -> str:
        gives["default" if found["default"] else found["name"]] = found["name"]
        return ""

    def default(found: re.Match[str]) -> str:
        gives["default"] = "theDefault"
        return "const theDefault = "

    for form, change in ((IMPORT, imported), (AGAIN, again), (LIST, listed), (DECLARED, declared), (DEFAULT, default)):
        text = form.sub(change, text)
    if unknown := LEFT.search(COMMENT.sub("", text)):
        raise ValueError(f"{path}: a form of import or export that cannot be bundled: {unknown[0].strip()!r}")
    return Module(text, needs, gives, passes_on)


# ----------------------------------------------------------------------------------------------------------------- page

PAGE = Path(__file__).parent / "page"
STYLE = re.compile(r"""<link\b[^>]*\brel=["']stylesheet["'][^>]*>""")
SCRIPT = re.compile(r"""<script\b[^>]*\bsrc=["'](?P<path>[^"']+)["'][^>]*>\s*</script>""")
HREF = re.compile(r"""\bhref=["'](?P<path>[^"']+)["']""")
OUTSIDE = re.compile(r"""<[^>]*\b(?:src|href)=["'](?!data:|#)(?P<path>[^"']*)["']|@import\b|url\(\s*["']?(?!data:|#)""")
# Nothing is loaded from anywhere, and only the page's own script and style run, identified by their hashes.
POLICY = (
    "default-src 'none'; script-src {script}; style-src {style}; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)


def write_html(session: Session, path: str | os.PathLike[str], *, lang: Lang = "en") -> None:
    """Write one self-contained page of a session. The file is complete or not written at all.

    >>> import tempfile, torch, regard
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> with regard.watch(layer, keep="qk") as seen:
    ...     _ = layer(torch.zeros(1, 3, 8))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_html(Session("toy", seen, ("a", "b", "c")), f"{folder}/toy.html")
    ...     Path(folder, "toy.html").read_text(encoding="utf-8")[:15]
    '<!doctype html>'

    Args:
        session: what the page shows.
        path: used as it is; an existing file is replaced at the very end and keeps its permissions.
        lang: the page's first language, "en" or "ko".

    Raises:
        FileNotFoundError: if the folder does not exist.
        OSError: if the file cannot be written.
        ValueError: for an unknown language.
        LookupError: if the capture is empty, or a head has neither a map nor q and k.
    """
    check_target(path)  # before the work
    text = html(session, lang)
    with atomic_file(path, "the page") as file:
        file.write(text.encode())


def html(session: Session, lang: Lang = "en") -> str:
    """The page of a session as text; raises as `write_html` does.

    >>> import torch, regard
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> with regard.watch(layer, keep="qk") as seen:
    ...     _ = layer(torch.zeros(1, 3, 8))
    >>> '<script type="application/json" id="regard-data">' in html(Session("toy", seen, ("a", "b", "c")))
    True
    """
    # 1. The data. "<" may begin "</script>" or "<!--", which would end or change what the browser reads as data.
    text = json.dumps(carried(session, lang), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")  # half a character is \\udxxx in JSON as in Python
    data = f'<script type="application/json" id="regard-data">{text.replace("<", chr(92) + "u003c")}</script>\n'
    # 2. The page with its styles and modules inside.
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    style = f"\n{styles()}\n"
    (entry,) = SCRIPT.findall(page)  # one script, which imports the others
    script = f"\n{scripted(bundle(modules(), Path(entry).name)[0])}\n"
    hashes = [f"'sha256-{b64encode(sha256(part.encode()).digest()).decode()}'" for part in (script, style)]
    policy = POLICY.format(script=hashes[0], style=hashes[1])
    page = STYLE.sub("", page).replace("</head>", f"<style>{style}</style>\n</head>", 1)
    page = page.replace("<head>", f'<head>\n<meta http-equiv="Content-Security-Policy" content="{policy}">', 1)
    if outside := OUTSIDE.search(SCRIPT.sub("", page)):
        raise ValueError(f"the page would load something that is not in it: {outside[0]!r}")
    # 3. Title, language, data and script; the title and the data are the user's.
    title = escape(session.name).encode("utf-8", "replace").decode("utf-8")
    page = re.sub(r"<title>.*?</title>", lambda _: f"<title>{title} · regard</title>", page, count=1)
    page = re.sub(r"""(<html\b[^>]*\blang=)["']\w*["']""", rf'\1"{lang}"', page, count=1)
    return SCRIPT.sub(lambda _: f'{data}<script type="module">{script}</script>', page)


def modules() -> dict[str, str]:
    """The page's modules by file name.

    >>> "source.js" in modules()
    True
    """
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(PAGE.glob("*.js"))}


def styles() -> str:
    """The page's styles, in the order of its links.

    >>> "<style>" in styles()
    False
    """
    links = STYLE.findall((PAGE / "index.html").read_text(encoding="utf-8"))
    files = [Path(found["path"]).name for link in links if (found := HREF.search(link))]
    texts = [(PAGE / file).read_text(encoding="utf-8") for file in files]
    assert not any("</style" in text.lower() for text in texts), "a style would end its own <style>"
    return "\n".join(texts)
