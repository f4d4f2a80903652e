"""The page's ES modules as one script, without a build tool: one scope per module, what it imports before it.

    const module0 = (() => { …; return { a, b }; })();            // state.js
    const module1 = (() => { const { a } = module0; …; return { c }; })();

A browser refuses to load a module's neighbours from file://, and a notebook takes one string: both get this script.

It knows the few forms of `import` and `export` that the page uses, each at the beginning of a line, and refuses others:
dynamic imports, cycles, and exported variables that may change later, for a copy of a value does not follow them.
It does not know what the modules do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["bundle", "scripted"]

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
