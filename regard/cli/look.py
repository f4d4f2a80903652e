"""`regard look`: what attention looked at, in a text or image that a model reads, in a capture, or in q, k and v.

Arrays and captures are read and printed here; look_text.py has texts, look_image.py images.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard import tables
from regard.cli.captures import read_session
from regard.cli.commands import LookOptions
from regard.cli.files import (
    ARRAY_SUFFIXES,
    FIGURE_SUFFIXES,
    MOST_PIPED,
    as_text,
    check_output,
    is_file,
    is_image,
    read_arrays,
    read_one,
    read_stdin,
    write_figure,
)
from regard.cli.terminal import Terminal, print_json

if TYPE_CHECKING:
    from regard.lens.capture import Capture
    from regard.lens.view import View
    from regard.session.session import Session

LINKS = 8  # unless --top says otherwise
LARGEST = 2**34  # bytes, 16 GiB: what q, k and v may take
MOST_HEADS = 64  # lines of a table
TAKES = (
    f"look takes a text, q, k and v in {', '.join(ARRAY_SUFFIXES)}, an image, or a saved capture such as run.regard; "
    "--file reads a text from a file"
)
# Options that only some inputs have; none is accepted and then ignored.
OF_ARRAYS = ("causal", "mask", "scale")
OF_FILES = ("call", "batch", "row", "size")
OF_LOADING = ("model", "ignore", "device", "truncate")
OF_TOKENS = ("token", "measure", "all", "html", "save")
OF_IMAGES = ("at", "no_photo")


def look(options: LookOptions) -> None:
    """Print what attention looks at, and write the files that were asked for."""
    from regard.cli import look_image, look_text

    # 1. What is wrong with the options alone.
    check_output(options.figure, "--figure", FIGURE_SUFFIXES)
    check_output(options.save, "--save", (".regard",))
    check_output(options.html)
    for name in ("top", "size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    if options.size is not None and options.figure is None:
        raise ValueError("--size is for the map in the figure: give --figure as well")
    if options.no_photo and options.html is None and options.save is None and options.figure is None:
        raise ValueError("--no-photo is for written files: give --save, --html or --figure as well")

    # 2. An image, by name or on standard input.
    what, text_file = options.what, options.file
    piped = read_stdin(MOST_PIPED) if what == "-" and text_file is None else None
    source = what if piped is None else piped
    if text_file is None and source is not None and is_image(source):
        _refuse(options, OF_ARRAYS + OF_FILES, "for files; for an image there are --layer, --head, --token and --at")
        _refuse(options, ("all", "truncate"), "for texts; this is an image")
        look_image.read_place(options.at)
        look_image.show_image(look_image.read_image(source, options), options, source)
        return
    _refuse(options, ("text",), "for images; this is none")

    # 3. A text.
    if text_file is not None or what is None or not is_file(what, TAKES):
        _refuse(options, OF_IMAGES, "for images; this is none")
        _refuse(options, OF_ARRAYS + OF_FILES, "for files; for a text there are --layer, --head and --token")
        text = read_one(what, text_file) if piped is None else as_text(piped)
        session, length = look_text.read_text(text, options)
        look_text.show_text(session, options, length)
        return

    # 4. Arrays.
    file = Path(what)
    _refuse(options, OF_LOADING, "for a text; this is a file")
    if file.suffix.lower() in ARRAY_SUFFIXES:
        _refuse(options, OF_IMAGES, "for images; this is none")
        _refuse(options, ("layer", "call"), "for captures; q, k and v are one call")
        _refuse(options, OF_TOKENS, "for texts and captures; q, k and v have no words")
        _show_call(_call_of_arrays(file, options), options)
        return

    # 5. A capture: of an image, with tokens, of one module, or as a whole.
    _refuse(options, OF_ARRAYS, "for q, k and v; a capture has its own")
    session = read_session(file)
    if session.frames and _given(options, ("at", "token", "html", "save", "no_photo")):
        _refuse(options, OF_FILES, "for the tables of one call; leave out --at, --token and the like")
        look_image.show_image(session, options, None)
        return
    _refuse(options, OF_IMAGES, "for captures of an image; this one does not say where its tokens lie")
    if _given(options, OF_TOKENS):
        _refuse(options, OF_FILES, "for the tables of one call; leave out --token and the like")
        look_text.show_text(session, options)
    elif options.layer is None:
        if given := _given(options, ("head", "top", *OF_FILES)):
            verb = "needs" if len(given) == 1 else "need"
            raise ValueError(f"{', '.join(given)} {verb} --layer: which module of the capture")
        _show_capture(session, file, options)
    else:
        _show_call(_call_of_capture(file, session.capture, options.layer, options), options)


def _given(options: LookOptions, names: tuple[str, ...]) -> list[str]:
    """Which of these options were given, as they are typed."""
    return [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) not in (None, False, ())]


def _refuse(options: LookOptions, names: tuple[str, ...], why: str) -> None:
    if given := _given(options, names):
        raise ValueError(f"{', '.join(given)} {'is' if len(given) == 1 else 'are'} {why}")


# ------------------------------------------------------------------------------------------------ one call of attention


@dataclass(frozen=True)
class _AttentionCall:
    """One call of attention: where it comes from, its mask in words and its labels per batch row."""

    view: View
    title: str
    mask: str
    tokens: list[list[str]] | None = None


def _call_of_arrays(file: Path, options: LookOptions) -> _AttentionCall:
    from regard.cli.mask import read_mask
    from regard.lens.display import plain
    from regard.lens.look import look
    from regard.lens.measures.measures import MAP_SIZE, NAMES

    if options.causal and options.mask is not None:
        raise ValueError(f"--causal and --mask exclude each other; write --mask 'causal & ({options.mask})'")
    arrays = read_arrays(file, (("q", "k", "v"),), LARGEST)
    spec = "causal" if options.causal else options.mask
    mask = None if spec is None else read_mask(spec)
    size, top = options.size or MAP_SIZE, options.top or LINKS
    view = look(**arrays, mask=mask, scale=options.scale, measures=NAMES, size=size, top=top)
    return _AttentionCall(plain(view), str(file), "none" if mask is None else repr(mask))


def _call_of_capture(file: Path, capture: Capture, layer: str, options: LookOptions) -> _AttentionCall:
    """One module, by its number or its path; LookupError for a map of a size that cannot be made any more."""
    from regard.lens.display import plain

    path, names, call = layer, capture.names, options.call
    if layer not in capture and layer.isascii() and layer.isdigit():
        if not int(layer) < len(names):
            raise ValueError(f"--layer {layer} is out of range: the capture has {len(names)} modules, counted from 0")
        path = names[int(layer)]
    view = plain(capture[path] if call is None else capture[path, call])
    if options.size is not None:
        view = replace(view, size=options.size, held=view.held | {"map": view.map(options.size)})
    calls = capture.calls(path)
    used = calls if call is None else [calls[call]]
    masks = dict.fromkeys(record.facts.mask for record in used if record.facts is not None)
    number = "" if call is None else f"[{call}]"
    return _AttentionCall(view, f"{file}: {path or '(model)'}{number}", "; ".join(masks) or "–", capture.tokens)


def _show_call(call: _AttentionCall, options: LookOptions) -> None:
    said = {"title": call.title, "mask": call.mask} | describe_call(call.view, options, call.tokens)
    head = options.head or 0
    if options.figure is not None:
        from regard.lens.display import view_figure

        write_figure(view_figure(call.view, batch=options.batch or 0, head=head, tokens=said["tokens"]), options.figure)
    if options.json:
        print_json({**said, "figure": options.figure})
        return
    out = Terminal(options.lang)
    print_call(said, options, out)
    if options.figure is not None:
        out.print(out.say("Figure: {path}", path=options.figure), (out.say("   head {head}", head=head), "dim"))


def describe_call(view: View, options: LookOptions, tokens: list[list[str]] | None) -> dict[str, Any]:
    """What is said of a view, in values that JSON holds.

    >>> import torch
    >>> from regard.lens.look import look
    >>> x = torch.zeros(1, 2, 3, 4)
    >>> said = describe_call(look(x, x, x), LookOptions(head=1, row=0), None)
    >>> said["sizes"], [line["head"] for line in said["heads"]], len(said["row"]["weights"])
    ({'batch': 1, 'heads': 2, 'queries': 3, 'keys': 3}, [1], 1)

    Args:
        view: with axes (B, H, …), on torch.
        options: batch row, head, row and number of links.
        tokens: labels per batch row.

    Raises:
        IndexError: for a batch row, head or query that is not there.
        LookupError: for a row or links that need q and k where they were not kept.
    """
    from regard.lens.display import describe_heads, strongest_links

    batch, heads, nq, nk = view.sizes
    for name, index, count in (("--batch", options.batch, batch), ("--head", options.head, heads)):
        if index is not None and not 0 <= index < count:
            raise IndexError(f"{name} {index} is out of range: there are {count}, counted from 0")
    b = options.batch or 0
    lines = [line for n in (range(batch) if options.batch is None else [b]) for line in describe_heads(view, n)]
    words = None  # labels of the keys, where there are as many
    if tokens is not None and len(tokens) in (1, batch):
        labels = tokens[b if len(tokens) > 1 else 0]
        words = labels if len(labels) == nk else None
    # Where query 0 stands among the keys; unknown in cross-attention, and where it differs by batch row.
    offset, first_position = view.place.offset, None
    if view.kind != "cross" and (offset is None or isinstance(offset, int)):
        first_position = nk - nq if offset is None else offset
    links = None
    try:
        found = strongest_links(view, batch=b, head=options.head, count=options.top or LINKS)
        links = [link._asdict() for link in found]
    except LookupError:
        if options.top is not None:
            raise
    row = None
    if options.row is not None:
        weights = view.row(options.row)[b].tolist()  # (H, Nk)
        chosen = list(range(len(weights))) if options.head is None else [options.head]
        row = {"query": options.row % nq, "heads": chosen, "weights": [weights[h] for h in chosen]}
    return {
        "sizes": {"batch": batch, "heads": heads, "queries": nq, "keys": nk},
        "kind": view.kind,
        "first_position": first_position,
        "engine": view.engine,
        "exact": view.weights is not None,
        "pooled": list(view.pooled),
        "batch": b,
        "tokens": words,
        "heads": [asdict(line) for line in lines if options.head in (None, line.head)],
        "links": links,
        "row": row,
    }


def print_call(said: dict[str, Any], options: LookOptions, out: Terminal) -> None:
    """Print what `describe_call` said, under a title and a mask: a table of heads, the strongest links, a row.

    >>> import torch
    >>> from regard.lens.look import look
    >>> x, options = torch.eye(2).view(1, 1, 2, 2), LookOptions(top=1)
    >>> said = {"title": "eye.npy", "mask": "none"} | describe_call(look(x, x, x), options, None)
    >>> print_call(said, options, Terminal())
    eye.npy
    1 heads, 2 queries × 2 keys, mask: none
    <BLANKLINE>
    head  entropy  effective keys (1/Σw²)  most received  share  patterns
    ────  ───────  ──────────────────────  ─────────────  ─────  ───────────────────
       0    0.634                   1.793  0              0.500  uniform, own, first
    <BLANKLINE>
    Strongest links
    head  query  key  weight
    ────  ─────  ───  ──────
       0  0      0    0.6698
    """
    from regard.lens.doctor import SAID

    sizes, mask = said["sizes"], said["mask"]
    out.print((said["title"], "bold"))
    line = out.say(
        "{heads} heads, {queries:,} queries × {keys:,} keys, mask: {mask}",
        heads=sizes["heads"],
        queries=sizes["queries"],
        keys=sizes["keys"],
        mask=SAID["ko"].get(mask, mask) if out.lang == "ko" else mask,
    )
    out.print(f"{sizes['batch']} × {line}" if sizes["batch"] > 1 else line)
    if sizes["batch"] > 1:
        out.print(out.say("shown: batch row {batch}", batch=options.batch or 0))
    out.print()
    _print_heads([line for line in said["heads"] if line["batch"] == (options.batch or 0)], said["tokens"], out)
    out.print()
    _print_links(said, out)
    if said["row"] is None:
        return
    row, words = said["row"], said["tokens"]
    out.print()
    out.print((out.say("Query {query}, exact: its strongest keys", query=row["query"]), "bold"))
    rows = []
    for head, weights in zip(row["heads"], row["weights"], strict=True):
        best = sorted(range(len(weights)), key=lambda j: (-weights[j], j))[: options.top or LINKS]
        keys = [f"{_named(j, words)}: {tables.number(weights[j])}" for j in best if weights[j] > 0]
        rows.append([str(head), ", ".join(keys)])
    out.print(tables.text([out.say("head"), out.say("keys")], rows, right=[0]))


def _print_heads(lines: list[dict[str, Any]], words: list[str] | None, out: Terminal) -> None:
    from regard.lens.patterns import CALLED

    titles = ("head", "entropy", "effective keys (1/Σw²)", "most received", "share", "patterns")
    rows = []
    for line in lines[:MOST_HEADS]:
        entropy, effective, share = (
            "–" if line[name] is None else f"{line[name]:.3f}" for name in ("entropy", "effective", "share")
        )
        first, last = line["keys"] or (0, 0)
        keys = "–" if line["keys"] is None else f"{first}–{last}" if last > first else _named(first, words)
        labels = ", ".join(CALLED[out.lang][label] for label in line["labels"])
        if line["rest"] is not None:
            labels += out.say(" (rest: {pattern})", pattern=CALLED[out.lang][line["rest"]])
        rows.append([str(line["head"]), entropy, effective, keys, share, labels or "–"])
    out.print(tables.text([out.say(title) for title in titles], rows, right=[0, 1, 2, 4]))
    if len(lines) > MOST_HEADS:
        out.print((out.say("… {shown} / {heads} heads; --json has all", shown=MOST_HEADS, heads=len(lines)), "dim"))


def _print_links(said: dict[str, Any], out: Terminal) -> None:
    if said["links"] is None:
        out.print((out.say("Links need q and k: watch(model, keep='qk')"), "dim"))
        return
    out.print((out.say("Strongest links"), "bold"))
    words, start = said["tokens"], said["first_position"]
    rows = []
    for link in said["links"]:
        at = None if start is None or words is None else start + link["query"]
        word = f" {words[at]}" if at is not None and 0 <= at < len(words) else ""
        key = _named(link["key"], words)
        rows.append([str(link["head"]), f"{link['query']}{word}", key, tables.number(link["weight"])])
    titles = [out.say(title) for title in ("head", "query", "key", "weight")]
    out.print(tables.text(titles, rows, right=[0, 3]) if rows else out.say("none"))


def _named(place: int, words: list[str] | None) -> str:
    return str(place) if words is None or not 0 <= place < len(words) else f"{place} {words[place]}"


# ----------------------------------------------------------------------------------------------------- a whole capture


def _show_capture(session: Session, file: Path, options: LookOptions) -> None:
    from regard.cli.look_text import describe_text, print_sections

    capture = session.capture
    if not capture.names:
        capture.summary(options.lang)  # which raises, and says what is known about why
    if options.figure is not None:
        from regard.lens.display import atlas_figure

        write_figure(atlas_figure(capture), options.figure)
    if options.json:
        print_json({"title": file, **_describe_capture(capture), "figure": options.figure})
        return
    out = Terminal(options.lang)
    title, *rest = capture.summary(options.lang).split("\n")
    out.print((title, "bold"), (out.say("   written {written}", written=capture.origin["written"]), "dim"))
    out.print("\n".join(rest))
    out.print()
    bare = LookOptions(lang=options.lang)
    print_sections(describe_text(session, bare), bare, out)
    out.print()
    out.print((out.say("--layer N shows the heads of one module"), "dim"))
    if options.figure is not None:
        out.print(out.say("Figure: {path}", path=options.figure))


def _describe_capture(capture: Capture) -> dict[str, Any]:
    modules = []
    for number, name in enumerate(capture.names):
        calls = capture.calls(name)
        views = [record.view for record in calls if record.view is not None]
        modules.append(
            {
                "number": number,
                "path": name,
                "kind": calls[0].kind,
                "source": calls[0].source,
                "kernel": calls[0].kernel,
                "calls": len(calls),
                "heads": views[0].sizes[1],
                "queries": sum(view.sizes[2] for view in views),
                "keys": views[-1].sizes[3],
                "exact": all(view.weights is not None for view in views),
            }
        )
    origin = {name: capture.origin[name] for name in ("regard", "torch", "written")}
    return {"model": capture.model, **origin, "modules": modules, "unseen": capture.unseen, "tokens": capture.tokens}
