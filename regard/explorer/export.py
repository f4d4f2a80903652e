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

from regard.atomic_files import atomic_file, check_target
from regard.explorer.export_data import carried
from regard.session.session import Session
from regard.stages import Lang

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
    """One module, taken apart.

    text: without its imports and exports.  needs: path → the lines that name what is imported from it.
    gives: exported name → what it is called inside.  passes_on: paths of which everything is exported again.
    """

    text: str
    needs: dict[str, list[str]]
    gives: dict[str, str]
    passes_on: list[str]


def bundle(modules: Mapping[str, str], entry: str) -> tuple[str, str]:
    """All modules that `entry` needs as one script, and the name that holds what `entry` exports.

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

    modules: file name → text, all of one folder.  entry: the one that is run, and so comes last.

    Raises LookupError for a module that is not there; ValueError for a cycle, and for a form that is not known here.
    """
    order: dict[str, Module] = {}
    _visit(entry, modules, order, ())
    names = {path: f"module{n}" for n, path in enumerate(order)}
    return "\n".join(_scope(path, order[path], names) for path in order), names[entry]


def scripted(script: str) -> str:
    r"""A script as it may stand inside a page's <script>, which ends at the first "</script", even in a string.

    >>> scripted('let end = "</script>";')
    'let end = "<\\/script>";'
    """
    return re.sub(r"<(?=!--)", r"<\\", re.sub(r"</(?=script)", r"<\\/", script, flags=re.IGNORECASE))


def _visit(path: str, modules: Mapping[str, str], order: dict[str, Module], above: tuple[str, ...]) -> None:
    """Put a module into `order` after all that it needs."""
    if path in order:
        return
    if path in above:
        raise ValueError(f"modules import each other in a circle: {' → '.join([*above[above.index(path) :], path])}")
    if path not in modules:
        asked = f", which {above[-1]} imports" if above else ""
        raise LookupError(f"there is no module {path!r}{asked}; there are {', '.join(sorted(modules))}")
    module = _taken_apart(path, modules[path])
    for needed in [*module.needs, *module.passes_on]:
        _visit(needed, modules, order, (*above, path))
    order[path] = module


def _taken_apart(path: str, text: str) -> Module:
    needs: dict[str, list[str]] = {}
    gives: dict[str, str] = {}
    passes_on: list[str] = []

    def imported(found: re.Match[str]) -> str:
        needs.setdefault(_neighbour(path, found["path"]), []).extend(_named(path, found["what"]))
        return ""

    def again(found: re.Match[str]) -> str:
        needed = _neighbour(path, found["path"])
        if found["what"] == "*":
            passes_on.append(needed)
            return ""
        for inside, outside in _pairs(path, found["what"].strip("{}")):
            own = f"again{len(gives)}"
            needs.setdefault(needed, []).append(f"{{ {inside}: {own} }}")
            gives[outside] = own
        return ""

    def listed(found: re.Match[str]) -> str:
        gives.update({outside: inside for inside, outside in _pairs(path, found["names"])})
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


def _neighbour(path: str, asked: str) -> str:
    if not re.fullmatch(r"\./[\w-]+\.js", asked):
        raise ValueError(f"{path} imports {asked!r}: only neighbours can be imported, as './name.js'")
    return asked[2:]


def _named(path: str, what: str | None) -> list[str]:
    """What stands left of `= module` for `import what from`: patterns of names."""
    if what is None:
        return []
    if whole := re.fullmatch(rf"\*\s+as\s+({WORD})", what.strip()):
        return [whole[1]]
    found = re.fullmatch(rf"(?:(?P<default>{WORD})\s*,?\s*)?(?:\{{(?P<names>[^}}]*)\}})?", what.strip())
    if found is None:
        raise ValueError(f"{path}: a form of import that cannot be bundled: {what!r}")
    pairs = [f"{inside}: {own}" if inside != own else own for inside, own in _pairs(path, found["names"] or "")]
    first = [f"default: {found['default']}"] if found["default"] else []
    return [f"{{ {', '.join([*first, *pairs])} }}"]


def _pairs(path: str, names: str) -> list[tuple[str, str]]:
    """`a, b as c` → (a, a), (b, c)."""
    pairs = []
    for name in filter(None, (part.strip() for part in re.sub(r"//[^\n]*", "", names).split(","))):
        found = re.fullmatch(rf"({WORD})(?:\s+as\s+({WORD}))?", name)
        if found is None:
            raise ValueError(f"{path}: cannot read the name {name!r} of an import or export")
        pairs.append((found[1], found[2] or found[1]))
    return pairs


def _scope(path: str, module: Module, names: Mapping[str, str]) -> str:
    needed = [f"const {what} = {names[path]};" for path, whats in module.needs.items() for what in whats]
    given = [f"...{names[path]}" for path in module.passes_on]
    given += [outside if outside == inside else f"{outside}: {inside}" for outside, inside in module.gives.items()]
    lines = [f"const {names[path]} = (() => {{ // {path}", *needed, module.text, f"return {{ {', '.join(given)} }};"]
    return "\n".join([*lines, "})();"])


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
