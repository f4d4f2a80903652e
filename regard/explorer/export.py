"""A session as one HTML file that opens offline: the page, its data, and its modules as one script.

The data of the page is JSON:
    {"version": 1, "lang": "en", "sessions": {"1": {
        "overview": the overview,
        "labels": every token's label, a list in JSON as base64 of zlib, or null where the overview has them all,
        "ranked": the strongest links across all heads,
        "thumbnails": the small maps of all heads,
        "hover": whether every weight of every head is there, of which the page makes one token's row in all of them,
        "heads": {"layer.head": the head's answer}, "sentences": {language: {"layer.head": its sentence}},
        "arrays": {"layer.head": what its rows are made of},
        "steps": {"layer.head.token.key": the steps of a strong link, where the page cannot make them},
        "effects": {"token.key": what was measured of the link},
        "predictions": what the model predicts; null for a text of more than 1,024 tokens,
        "images": addresses that hold the bytes of each image: "data:image/jpeg;base64,…",
        "left_out": {language: what is not there, in words}, or null}}}

A head's arrays are every weight, the strongest links of each query (of weight 0 where it sees fewer keys), or nothing:
    {"weights": (Nq, Nk)}, of a layer in windows (queries of all of them, keys of one)
    {"top": {"keys": Nk, "index": (Nq, 12), "weight": (Nq, 12)}}
{"map", "received", "entropy"} in roots, where the heads' answers have null: together they would take over 2 MB;
and, where the capture is small, {"q": (Nq, D), "k": (Nk, D), "v": (Nk, Dv), "lse": (Nq), "scale": number}, of which the
page makes the steps of any query and key; "v" only where the model is at hand, "hidden" (Nq, Nk), 1 for masked keys,
only where some are. Elsewhere the steps of the 3 strongest links of each head are there, if queries and keys are.

An array is {"shape", "f32" | "u8" | "u16" | "u32": base64 of little-endian numbers}, with "deflate": true where zlib
made it smaller, and "unit" and "error" where weights were rounded: whole numbers of units, off by at most the error;
with "root": true the squares of whole numbers of units, off by at most 1/255 of the largest.

How much: every weight in fp32 up to 5 MB. Up to 288 tokens every weight, rounded to 1/65535 up to 5 MB, else to 1/200
of the head's largest, but for the head that the page opens on. Beyond that, heads in the order of their strongest
links: 5 MB of every weight, then 5 MB of each query's links, and of all the pooled map and some links. A pooled map is
null where the head's rounded weights are there: the page pools them.

Axis letters: N positions (Nq queries, Nk keys), D head size.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from html import escape
from pathlib import Path
from posixpath import dirname, join, normpath
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from regard.explorer import answers
from regard.files import atomic_file, check_target
from regard.locale import Lang, catalogue, check_lang, translate
from regard.masks.tiles import pool
from regard.session.effects import LONGEST
from regard.session.heads import BlockWeights, ComputedHead, HeadWeights, head_of
from regard.session.labels import sentence
from regard.session.protocol import Opening
from regard.session.session import Session

FROM = re.compile(
    r"""^(?P<kind>import|export)\s+\{(?P<names>[\w$\s,]*)\}\s+from\s+"""
    r"""["'](?P<path>\.{1,2}/(?:\.\./|[\w-]+/)*[\w-]+\.js)["'];?[ \t]*$""",
    re.M,
)
EXPORT = re.compile(r"^export\s+(?=(?:async\s+function|function|class|const)\b\s*\*?\s*(?P<name>[\w$]+))", re.M)
DEFAULT = re.compile(r"^export\s+default\s+", re.M)
LEFT = re.compile(r"^(?:import|export)\b[^\n]*|(?<![\w$.])import\s*\([^\n]*|\bimport\.meta\b", re.M)
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)  # types are imported there; only looked for where LEFT is
JSDOC = re.compile(r"^[ \t]*/\*\*(?:(?!\*/).)*\*/[ \t]*\n", re.MULTILINE | re.DOTALL)  # a quarter of the script

PAGE = Path(__file__).parent / "page"
CATALOGUES = '<script type="application/json" id="regard-catalogues">{}</script>'  # in index.html
STYLE = re.compile(r"""<link\b[^>]*\brel=["']stylesheet["'][^>]*>""")
SCRIPT = re.compile(r"""<script\b[^>]*\bsrc=["'](?P<path>[^"']+)["'][^>]*>\s*</script>""")
HREF = re.compile(r"""\bhref=["'](?P<path>[^"']+)["']""")
OUTSIDE = re.compile(r"""<[^>]*\b(?:src|href)=["'](?!data:|#)(?P<path>[^"']*)["']|@import\b|url\(\s*["']?(?!data:|#)""")
# Nothing is loaded from anywhere, and only the page's own script and style run, identified by their hashes.
POLICY = (
    "default-src 'none'; script-src {script}; style-src {style}; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)


def write_html(session: Session, path: str | os.PathLike[str], *, lang: Lang = "en", view: str = "") -> None:
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
        view: what it shows first, as its address says it ("layer=3&head=1&token=10"); default the session's opening.

    Raises:
        FileNotFoundError: if the folder does not exist.
        OSError: if the file cannot be written.
        ValueError: for an unknown language.
        LookupError: if the capture is empty, or a head has neither a map nor q and k.
    """
    check_target(path)  # before the work
    text = html(session, lang, view)
    with atomic_file(path, "the page") as file:
        file.write(text.encode())


def html(session: Session, lang: Lang = "en", view: str = "") -> str:
    """The page of a session as text; raises as `write_html` does."""
    # 1. The data, and the view that the page opens in.
    text = json.dumps(page_data(session, lang, view), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")  # half a character is \\udxxx in JSON as in Python
    data = f'<script type="application/json" id="regard-data">{data_text(text)}</script>\n'
    data += f'<script type="application/json" id="regard-view">{data_text(json.dumps(view))}</script>\n'
    # 2. The page with its styles and modules inside.
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    style = f"\n{styles()}\n"
    (entry,) = SCRIPT.findall(page)  # one script, which imports the others
    script = f"\n{scripted(bundle(modules(), entry.removeprefix('page/'))[0])}\n"
    hashes = [f"'sha256-{b64encode(sha256(part.encode()).digest()).decode()}'" for part in (script, style)]
    policy = POLICY.format(script=hashes[0], style=hashes[1])
    page = STYLE.sub("", page).replace("</head>", f"<style>{style}</style>\n</head>", 1)
    page = page.replace("<head>", f'<head>\n<meta http-equiv="Content-Security-Policy" content="{policy}">', 1)
    if outside := OUTSIDE.search(SCRIPT.sub("", page)):
        raise ValueError(f"the page would load something that is not in it: {outside[0]!r}")
    page = with_catalogues(page)
    # 3. Title, language, data and script; the title and the data are the user's.
    title = escape(session.name).encode("utf-8", "replace").decode("utf-8")
    page = re.sub(r"<title>.*?</title>", lambda _: f"<title>{title} · regard</title>", page, count=1)
    page = re.sub(r"""(<html\b[^>]*\blang=)["']\w*["']""", rf'\1"{lang}"', page, count=1)
    return SCRIPT.sub(lambda _: f'{data}<script type="module">{script}</script>', page)


def with_catalogues(page: str) -> str:
    """index.html with the texts of the page in every other language."""
    text = json.dumps(catalogues(), ensure_ascii=False, separators=(",", ":"))
    return page.replace(CATALOGUES, CATALOGUES.replace("{}", data_text(text)), 1)


def catalogues() -> dict[str, dict[str, str]]:
    """Language → English text → text, of the page."""
    return {lang: catalogue(lang, "page") for lang in get_args(Lang) if lang != "en"}


def data_text(text: str) -> str:
    """JSON for a page's <script>, which "</script" and "<!--" would end or change."""
    return text.replace("<", "\\u003c")


def modules() -> dict[str, str]:
    """The page's modules by path: "atlas/search.js"."""
    return {path.relative_to(PAGE).as_posix(): path.read_text(encoding="utf-8") for path in sorted(PAGE.rglob("*.js"))}


def styles() -> str:
    """The page's styles, in the order of its links."""
    links = STYLE.findall((PAGE / "index.html").read_text(encoding="utf-8"))
    files = [match["path"].removeprefix("page/") for link in links if (match := HREF.search(link))]
    texts = [(PAGE / file).read_text(encoding="utf-8") for file in files]
    assert not any("</style" in text.lower() for text in texts), "a style would end its own <style>"
    return "\n".join(texts)


# ----------------------------------------------------------------------------------------------------------------- data

ROOM = 5 * 2**20 * 3 // 4  # bytes of arrays of one kind, before base64 makes 5 MiB of them
SHORT = 288  # tokens up to which every weight is carried: 16 × 16 patches, cls and registers; 72 heads take 2 MB
LINKS = 12  # of a query, where not every weight is
WORK = 1 << 29  # weights that are computed for links alone: some seconds
AT_ONCE = 1 << 24  # weights that are held at once
LEVELS = 65535  # of a rounded weight from 0 to 1
FEW_LEVELS = 200  # of one from 0 to the head's largest
ROOTS = 255  # levels of the root of a pooled number
MAP_ROOM = 2 << 20  # bytes of all pooled maps in fp32; more are rounded
BARS = 256  # beside a map that is rounded
STEPS = 3  # links of a head whose steps are carried, where its vectors are not
STEP_BYTES = 4096  # that one of them takes, about
STEP_ROOM = 2**18  # bytes of all of them

Place = tuple[int, int]  # layer, head


def page_data(session: Session, lang: Lang = "en", view: str = "") -> dict[str, Any]:
    """The data of an exported page, as JSON values; raises as `write_html` does."""
    check_lang(lang)
    overview = answers.overview(session, lang)
    places = [(layer["index"], head) for layer in overview["layers"] for head in range(layer["heads"])]
    heads: dict[str, Any] = {_name(place): answers.head(session, *place, lang) for place in places}
    plan = _plan(session, sorted(places, key=lambda place: -strength(heads[_name(place)])))
    labels = [
        label
        for start in range(0, len(session.tokens), answers.MOST_LABELS)
        for label in answers.tokens(session, start)["labels"]
    ]
    packed_labels = b64encode(zlib.compress(json.dumps(labels).encode("ascii"))).decode("ascii")
    opening = _first_head(overview["opening"], view)
    arrays: dict[str, Any] = {}
    for place in sorted(plan.whole):  # layer by layer: the model runs once for the values of one
        weights = head_of(session.layers[place[0]], place[1])
        windows = _windows(session, place, weights)
        whole = torch.cat([part.tile(slice(None), slice(None)) for part in windows])  # (Nq, Nk), or (W·Nq, Nk)
        levels = LEVELS if plan.fine or opening == place else FEW_LEVELS
        arrays[_name(place)] = {"weights": packed_weights(whole, None if plan.exact else levels)}
        if not plan.exact and len(windows) == 1 and heads[_name(place)]["how"] == "pooled":
            heads[_name(place)]["map"] = None
        if plan.vectors:
            arrays[_name(place)] |= _vectors(session, place, weights)
    for place in plan.links:
        arrays[_name(place)] = {"top": _strongest(head_of(session.layers[place[0]], place[1]))}
    pooled = [
        _name(place) for place in places if place not in set(plan.whole) and heads[_name(place)]["how"] == "pooled"
    ]
    rounded = sum(len(heads[name][part]["f32"]) for name in pooled for part in _pooled_parts(heads[name])) > MAP_ROOM
    for name in pooled if rounded else ():
        arrays.setdefault(name, {}).update(_rounded_parts(heads[name]))
    steps = {
        f"{_name(place)}.{link['query']}.{link['key']}": answers.steps(session, *place, link["query"], link["key"])
        for place in ([] if plan.vectors else sorted(plan.stepped))
        for link in heads[_name(place)]["links"][:STEPS]
    }
    images = [answers.image(session, number) for number in range(len(session.images))]
    measured = sorted({*session.effects.heads, *(link[2:] for link in session.effects.links)})
    langs: tuple[Lang, ...] = get_args(Lang)
    return {
        "version": 1,
        "lang": lang,
        "sessions": {
            "1": {
                "overview": overview,
                "labels": packed_labels if len(labels) > len(overview["labels"]) else None,
                "ranked": answers.ranked(session),
                "thumbnails": answers.thumbnails(session),
                "hover": len(plan.whole) == plan.heads,
                "heads": heads,
                "sentences": {
                    one: {_name(p): sentence(session, *p, heads[_name(p)]["numbers"], one) for p in places}
                    for one in langs
                },
                "arrays": arrays,
                "steps": steps,
                "effects": {f"{token}.{key}": answers.effects(session, token, key) for token, key in measured},
                "predictions": answers.predictions(session) if len(session.tokens) <= LONGEST else None,
                "images": [f"data:{image['kind']};base64,{image['base64']}" for image in images],
                "left_out": None if plan.complete else {one: _left_out(plan, rounded, one) for one in langs},
            }
        },
    }


def _name(place: Place) -> str:
    return f"{place[0]}.{place[1]}"


def _first_head(opening: Opening | None, view: str) -> Place | None:
    match = re.fullmatch(r"(?:.*&)?layer=(\d{1,4})&head=(\d{1,4})(?:&.*)?", view)
    if match is not None:
        return int(match[1]), int(match[2])
    return None if opening is None else (opening["layer"], opening["head"])


def strength(answer: Any) -> float:
    """The strongest link of a head that leads neither to the first key, where heads rest, nor to the token itself."""
    return max((link["weight"] for link in answer["links"] if link["key"] not in (0, link["query"])), default=0.0)


@dataclass(frozen=True)
class _ExportPlan:
    """Which heads carry what.

    heads: how many there are.  whole: those with every weight, in `exact` fp32 or rounded, `fine` to 1/65535.
    links: those with each query's strongest links.
    stepped: those with the steps of some links, unless `vectors`, q and k of all heads, are there.
    kept: whether the capture has q and k of every head.
    """

    heads: int
    whole: tuple[Place, ...]
    links: tuple[Place, ...]
    stepped: tuple[Place, ...]
    exact: bool
    fine: bool
    vectors: bool
    kept: bool

    @property
    def complete(self) -> bool:
        """Whether the page can answer everything that a server can."""
        return len(self.whole) == self.heads and self.exact and self.vectors


def _plan(session: Session, places: list[Place]) -> _ExportPlan:
    """What fits. places: the heads, the most interesting first."""
    layers = session.layers
    known = {
        place: head_of(layers[place[0]], place[1]) for place in places if layers[place[0]].view.weights is not None
    }
    cells = {layer: layers[layer].sizes[0] * layers[layer].view.sizes[3] for layer, _ in known}
    longest = max((max(layers[layer].view.sizes[2:]) for layer in cells), default=0)
    first = {place: _windows(session, place, weights)[0] for place, weights in known.items()}
    computed = [place for place, weights in first.items() if isinstance(weights, ComputedHead)]
    stepped = tuple(computed[: STEP_ROOM // (STEPS * STEP_BYTES)])
    total, kept = sum(cells[layer] for layer, _ in known), len(known) == len(places)
    exact, fine = 4 * total <= ROOM, 2 * total <= ROOM
    if exact or longest <= SHORT:
        scored = [weights for weights in known.values() if isinstance(weights, ComputedHead)]
        size = 4 * sum(head.q.numel() + 2 * head.k.numel() for head in scored)  # with as many values as keys
        vectors = len(scored) == len(known) > 0 and size <= ROOM
        return _ExportPlan(len(places), tuple(known), (), stepped, exact, fine, vectors, kept)
    whole = _fitting(list(known), {layer: 2 * n for layer, n in cells.items()}, ROOM)
    rest = [place for place in known if place not in set(whole)]
    each = {layer: LINKS * 4 * layers[layer].sizes[0] for layer in cells}
    affordable = set(_fitting(rest, cells, WORK))
    links = tuple(place for place in _fitting(rest, each, ROOM) if place in affordable)
    return _ExportPlan(len(places), tuple(whole), links, stepped, exact=False, fine=True, vectors=False, kept=kept)


def _fitting(places: list[Place], each: dict[int, int], room: int) -> list[Place]:
    """The first heads that fit into the room together, each as large as its layer says."""
    fitting = []
    for place in places:
        room -= each[place[0]]
        if room < 0:
            break
        fitting.append(place)
    return fitting


def _windows(session: Session, place: Place, weights: HeadWeights) -> Sequence[HeadWeights]:
    cut = session.layers[place[0]].windows > 1
    return weights.parts if cut and isinstance(weights, BlockWeights) else [weights]


def _vectors(session: Session, place: Place, weights: HeadWeights) -> dict[str, Any]:
    """What the page computes the steps from."""
    assert isinstance(weights, ComputedHead)
    parts = {"q": weights.q, "k": weights.k, "lse": weights.lse}  # (Nq, D), (Nk, D), (Nq)
    values = session.head_values(*place)
    if values is not None:
        parts["v"] = values  # (Nk, Dv)
    arrays = {name: packed(_plain(part), "f32") for name, part in parts.items()}
    hidden = weights.masked(slice(None))  # (Nq, Nk)
    if bool(hidden.any()):
        arrays["hidden"] = packed(_plain(hidden), "u16")
    return arrays | {"scale": float(weights.call.scale)}


def _strongest(weights: HeadWeights) -> dict[str, Any]:
    nq, nk = weights.sizes
    at_once, k = max(1, AT_ONCE // max(1, nk)), min(LINKS, nk)
    parts = [
        weights.tile(slice(i, min(i + at_once, nq)), slice(None)).nan_to_num(0.0).topk(k, -1)
        for i in range(0, nq, at_once)
    ]
    index = np.concatenate([part.indices.cpu().numpy() for part in parts])  # (Nq, k)
    weight = torch.cat([part.values for part in parts])
    kind = "u16" if nk <= LEVELS + 1 else "u32"
    return {"keys": nk, "index": packed(index, kind), "weight": packed_weights(weight, LEVELS)}


def packed_weights(weights: Tensor, levels: int | None) -> dict[str, Any]:
    """Weights in fp32, or rounded with the error that makes; NaN has no level and stays fp32.

    levels: None for fp32; 65,535 from 0 to 1; 200 from 0 to the largest weight.
    """
    values = _plain(weights)
    if levels is None or not np.isfinite(values).all():
        return packed(values, "f32")
    unit = (1.0 if levels == LEVELS else float(values.max(initial=0.0)) or 1.0) / levels
    rounded = np.rint(values.clip(0, 1) / unit)
    return packed(rounded, "u16" if levels == LEVELS else "u8") | {"unit": unit, "error": unit / 2}


def packed(values: np.ndarray[Any, Any], kind: str) -> dict[str, Any]:
    """An array as the page reads it, compressed where that makes it a tenth smaller."""
    plain = values.astype({"f32": "<f4", "u8": "u1", "u16": "<u2", "u32": "<u4"}[kind]).tobytes()
    packing = zlib.compressobj(strategy=zlib.Z_RLE)  # as small as the default for weights, in a sixth of the time
    small = packing.compress(plain) + packing.flush()
    deflate = len(small) < 0.9 * len(plain)
    text = b64encode(small if deflate else plain).decode("ascii")
    return {"shape": list(values.shape), kind: text} | ({"deflate": True} if deflate else {})


def _plain(values: Tensor) -> np.ndarray[Any, Any]:
    return values.detach().to("cpu", torch.float32).numpy()


def _pooled_parts(answer: Any) -> list[str]:
    """What of a head's answer is pooled: the map, and what stands beside it."""
    return [part for part in ("map", "received", "entropy") if answer[part] is not None]


def _rounded_parts(answer: Any) -> dict[str, Any]:
    """The pooled parts of a head's answer as levels, taken out of it: a fifth of the bytes."""
    parts = {}
    for part in _pooled_parts(answer):
        array, answer[part] = answer[part], None
        values = torch.from_numpy(np.frombuffer(b64decode(array["f32"]), "<f4").reshape(array["shape"]).copy())
        if part == "received":
            values = answers.binned(values, BARS, "sum")
        elif part == "entropy":
            values = pool(values, BARS)
        parts[part] = packed_roots(_plain(values))
    return parts


def packed_roots(values: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Non-negative numbers by 255 levels of their roots, which keeps small ones apart; fp32 where there is a NaN."""
    if not np.isfinite(values).all():
        return packed(values, "f32")
    unit = float(f"{np.sqrt(values.max(initial=0.0)) / ROOTS:.8g}") or 1.0  # the digits of an fp32
    rounded = np.rint(np.sqrt(values.clip(0)) / unit)
    return packed(rounded.clip(0, ROOTS), "u8") | {"unit": unit, "root": True}


def _left_out(plan: _ExportPlan, rounded_maps: bool, lang: Lang) -> str:
    whole, links, none = len(plan.whole), len(plan.links), plan.heads - len(plan.whole) - len(plan.links)
    parts = []
    if whole and links + none:
        text = "This file holds every weight of {count} of {total} heads."
        parts.append(translate(text, lang, count=whole, total=plan.heads))
    if links:
        text = "Of {count} heads it holds the {links} strongest links of each token."
        parts.append(translate(text, lang, count=links, links=LINKS))
    if none:
        parts.append(translate("Of {count} heads it holds the map and the strongest links only.", lang, count=none))
    if whole + links and not plan.exact and plan.fine:
        parts.append(translate("Weights are rounded to 1/65535.", lang))
    elif whole and not plan.exact:
        parts.append(translate("Weights are rounded to 1/200 of the largest of their head.", lang))
    if rounded_maps:
        parts.append(translate("Maps are rounded by at most 1/255 of their largest cell.", lang))
    if not plan.vectors and plan.stepped:
        text = "It holds the steps of the {links} strongest links of {count} heads."
        parts.append(translate(text, lang, links=STEPS, count=len(plan.stepped)))
    elif not plan.vectors:
        parts.append(translate("The steps are not in it.", lang))
    if plan.kept:
        return " ".join([*parts, translate("`regard serve` shows everything.", lang)])
    text = "The capture was made without queries and keys."
    return " ".join([*parts, translate(text, lang)])


# --------------------------------------------------------------------------------------------------------------- bundle


def bundle(modules: Mapping[str, str], entry: str) -> tuple[str, str]:
    """All modules that `entry` needs as one script, and the name in it that holds what `entry` exports.

    >>> files = {"a.js": "export const two = 2;", "map/b.js": 'import { two } from "../a.js";'}
    >>> script, name = bundle(files, "map/b.js")
    >>> print(script)
    const module0 = (() => { // a.js
    const two = 2;
    return { two };
    })();
    const module1 = (() => { // map/b.js
    const { two } = module0;
    <BLANKLINE>
    return {  };
    })();

    modules: path → text, of one folder and those inside it.  entry: the module to run, which comes last.

    Supports what the page uses: names imported or exported from a relative path, exported declarations, and
    `export default` of a value.
    Raises LookupError for a missing module, ValueError for a cycle, a path outside the folder, or another form of
    import or export.
    """
    names: dict[str, str] = {}  # file → the constant that holds what it exports
    lines: list[str] = []

    def visit(path: str, above: tuple[str, ...]) -> None:
        if path in names:
            return
        if path in above:
            raise ValueError(f"modules import each other in a cycle: {' → '.join([*above[above.index(path) :], path])}")
        if path not in modules:
            importer = f", which {above[-1]} imports" if above else ""
            raise LookupError(f"there is no module {path!r}{importer}; there are {', '.join(sorted(modules))}")
        needs = [(match, normpath(join(dirname(path), match["path"]))) for match in FROM.finditer(modules[path])]
        text = JSDOC.sub("", FROM.sub("", modules[path]))
        exports = [match["name"] for match in EXPORT.finditer(text)]
        text, defaults = DEFAULT.subn("const theDefault = ", EXPORT.sub("", text))
        exports += ["default: theDefault"] * defaults
        if unknown := LEFT.search(COMMENT.sub("", text)):
            raise ValueError(
                f"{path}: a form of import or export that cannot be bundled: {unknown[0].strip()!r}; "
                "write import { name } from './name.js', or export a declaration"
            )
        for match, needed in needs:
            if needed.startswith("../"):
                raise ValueError(f"{path}: {match['path']!r} is outside the page; write './name.js' of a file inside")
            visit(needed, (*above, path))
        imports = []
        for match, needed in needs:
            module, listed = names[needed], filter(None, map(str.strip, match["names"].split(",")))
            pairs = [re.split(r"\s+as\s+", name) for name in listed]
            if match["kind"] == "import":
                imports.append(f"const {{ {', '.join(': '.join(pair) for pair in pairs)} }} = {module};")
            else:
                exports += [f"{pair[-1]}: {module}.{pair[0]}" for pair in pairs]
        names[path] = f"module{len(names)}"
        lines.append(f"const {names[path]} = (() => {{ // {path}")
        lines.extend([*imports, text, f"return {{ {', '.join(exports)} }};", "})();"])

    visit(entry, ())
    return "\n".join(lines), names[entry]


def scripted(script: str) -> str:
    """A script for a page's <script>, which would end at the first "</script", even in a string."""
    return re.sub(r"<(?=!--)", r"<\\", re.sub(r"</(?=script)", r"<\\/", script, flags=re.IGNORECASE))
