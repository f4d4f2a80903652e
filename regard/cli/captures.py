"""Captures and single calls of attention: `regard diff`, `regard doctor`, and the tables of `regard look FILE`."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard import tables
from regard.cli.commands import DiffOptions, DoctorOptions, LookOptions
from regard.cli.inputs import QKV, read_arrays, reading
from regard.cli.outputs import LINKS, Terminal, print_json, write_figure

if TYPE_CHECKING:
    from regard.lens.capture import Capture
    from regard.lens.edit_records import CapturedEdit, Effect
    from regard.lens.view import View
    from regard.session.session import Session

LARGEST = 2**34  # bytes, 16 GiB: what q, k and v may take
MOST_HEADS = 64  # lines of a table


def read_capture(path: Path) -> Capture:
    """The capture that a file holds. An OSError names the path."""
    from regard.lens.capture import open

    with reading(path):
        return open(path)


def read_session(path: Path) -> Session:
    """The capture that a file of `regard look` holds, with its words and images."""
    from regard.lens.files.container import CaptureFileError
    from regard.session.session import session_of

    try:
        return session_of(read_capture(path), path.name)
    except CaptureFileError as error:
        hint = f"; if it is a text: --file {path}" if "not a regard capture" in str(error) else ""
        raise ValueError(f"{error}{hint}") from None


def edit_json(edit: CapturedEdit) -> dict[str, Any]:
    """An edit of a capture in values that JSON holds."""
    return {"edit": repr(edit), "function": edit.function, "values": edit.values, "calls": edit.calls}


def effect_json(effect: Effect) -> dict[str, Any]:
    """What was measured of an edit, in values that JSON holds."""
    names = ("before", "after", "weight", "controls", "control_weight", "p_value", "method")
    return {name: getattr(effect, name) for name in names} | {"effect": effect.value}


def diff(options: DiffOptions) -> int:
    """Compare two captures; 1 if they differ."""
    from regard.lens.comparison import compare

    paths = options.a, options.b
    captures = [read_capture(path) for path in paths]
    comparison = compare(*captures, tolerance=options.tolerance)
    if options.json:
        names = ("same", "tolerance", "modules", "compared", "only_a", "only_b")
        unlike = [{"what": u.what, "path": u.path, "call": u.n, "a": u.a, "b": u.b} for u in comparison.unlike]
        values = {"a": options.a, "b": options.b} | {name: getattr(comparison, name) for name in names}
        edits = {name: [edit_json(edit) for edit in edits] for name, edits in zip("ab", comparison.edits, strict=True)}
        heads = [{"path": h.path, "call": h.n, "head": h.head, "moved": h.moved} for h in comparison.heads]
        print_json(values | {"edits": edits, "unlike": unlike, "heads": heads, "rows": comparison.rows})
    else:
        out = Terminal(options.lang)
        for name, path, capture in zip("AB", paths, captures, strict=True):
            origin = out.say("{model}, written {written}", model=capture.model, written=capture.origin["written"])
            out.print((f"{name}  ", "bold"), str(path), (f"   {origin}", "dim"))
        out.print()
        out.print(comparison.text(options.lang))
    return 0 if comparison.same else 1


def doctor(options: DoctorOptions) -> int:
    """Print what is wrong with a run; 1 if there are errors."""
    diagnosis = read_capture(options.file).doctor()
    if options.json:
        findings = [
            {name: getattr(finding, name) for name in ("severity", "code", "paths")}
            | {"text": finding.text(options.lang), "advice": finding.advice(options.lang)}
            for finding in diagnosis.findings
        ]
        masks = [
            {
                "paths": use.paths,
                "kind": use.kind,
                "mask": use.facts.mask,
                "causal": use.facts.causal,
                "bias": use.facts.bias_kind,
                "queries": use.facts.sizes[2],
                "keys": use.keys,
                "calls": use.calls,
            }
            for use in diagnosis.masks
        ]
        values = {name: getattr(diagnosis, name) for name in ("ok", "calls", "modules", "unread")}
        print_json(values | {"findings": findings, "masks": masks})
    else:
        Terminal(options.lang).titled(diagnosis.text(options.lang))
    return 1 if any(finding.severity == "error" for finding in diagnosis.findings) else 0


def describe_capture(capture: Capture) -> dict[str, Any]:
    """The modules of a capture, its edits and effects, in values that JSON holds."""
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
    effects = [
        {
            "edit": " + ".join(map(repr, effect.edit)),
            "edits": [edit_json(edit) for edit in effect.edit],
            "metric": effect.metric,
            **effect_json(effect),
        }
        for effect in capture.effects
    ]
    return {
        "model": capture.model,
        **origin,
        "modules": modules,
        "unseen": capture.unseen,
        "tokens": capture.tokens,
        "edits": [edit_json(edit) for edit in capture.edits],
        "effects": effects,
    }


# ------------------------------------------------------------------------------------------------ one call of attention


def show_arrays(file: Path, options: LookOptions) -> None:
    """Print what attention does with the q, k and v of a file."""
    from regard.cli.mask import read_mask
    from regard.lens.look import look
    from regard.lens.measures.measures import MAP_SIZE, NAMES

    if options.causal and options.mask is not None:
        raise ValueError(f"--causal and --mask exclude each other; write --mask 'causal & ({options.mask})'")
    arrays = read_arrays(file, (QKV,), LARGEST)
    spec = "causal" if options.causal else options.mask
    mask = None if spec is None else read_mask(spec)
    size, top = options.size or MAP_SIZE, options.top or LINKS
    view = look(**arrays, mask=mask, scale=options.scale, measures=NAMES, size=size, top=top)
    _show_call(view.in_torch(), {"title": str(file), "mask": "none" if mask is None else repr(mask)}, None, options)


def show_module(file: Path, capture: Capture, layer: str, options: LookOptions) -> None:
    """Print one module of a capture, by its number or its path."""
    path, names, call = layer, capture.names, options.call
    if layer not in capture and layer.isascii() and layer.isdigit():
        if not int(layer) < len(names):
            raise ValueError(f"--layer {layer} is out of range: the capture has {len(names)} modules, counted from 0")
        path = names[int(layer)]
    view = (capture[path] if call is None else capture[path, call]).in_torch()
    if options.size is not None:
        view = replace(view, size=options.size, held=view.held | {"map": view.map(options.size)})
    calls = capture.calls(path)
    used = calls if call is None else [calls[call]]
    masks = dict.fromkeys(record.facts.mask for record in used if record.facts is not None)
    title = f"{file}: {path or '(model)'}" + ("" if call is None else f"[{call}]")
    _show_call(view, {"title": title, "mask": "; ".join(masks) or "–"}, capture.tokens, options)


def _show_call(view: View, origin: dict[str, str], tokens: list[list[str]] | None, options: LookOptions) -> None:
    description = origin | _describe_call(view, options, tokens)
    head = options.head or 0
    if options.figure is not None:
        from regard.lens.display import view_figure

        drawn = view_figure(view, batch=options.batch or 0, head=head, tokens=description["tokens"], lang=options.lang)
        write_figure(drawn, options.figure)
    if options.json:
        print_json({**description, "figure": options.figure})
        return
    out = Terminal(options.lang)
    _print_call(description, options, out)
    if options.figure is not None:
        out.print(out.say("Figure: {path}", path=options.figure), (out.say("   head {head}", head=head), "dim"))


def _describe_call(view: View, options: LookOptions, tokens: list[list[str]] | None) -> dict[str, Any]:
    """A view with axes (B, H, …) in values that JSON holds. tokens: labels per batch row."""
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
        ranked = strongest_links(view, batch=b, head=options.head, count=options.top or LINKS)
        links = [link._asdict() for link in ranked]
    except LookupError:  # q and k were not kept
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


def _print_call(description: dict[str, Any], options: LookOptions, out: Terminal) -> None:
    """Print what `_describe_call` returned: a table of heads, the strongest links, a row."""
    from regard.lens.doctor import SAID
    from regard.lens.patterns import CALLED

    sizes, mask, words = description["sizes"], description["mask"], description["tokens"]

    def named(place: int) -> str:
        return str(place) if words is None or not 0 <= place < len(words) else f"{place} {words[place]}"

    out.print((description["title"], "bold"))
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

    titles = ("head", "entropy", "effective keys (1/Σw²)", "most received", "share", "patterns")
    heads = [line for line in description["heads"] if line["batch"] == (options.batch or 0)]
    rows = []
    for line in heads[:MOST_HEADS]:
        entropy, effective, share = (
            "–" if line[name] is None else f"{line[name]:.3f}" for name in ("entropy", "effective", "share")
        )
        first, last = line["keys"] or (0, 0)
        keys = "–" if line["keys"] is None else f"{first}–{last}" if last > first else named(first)
        labels = ", ".join(CALLED[out.lang][label] for label in line["labels"])
        if line["rest"] is not None:
            labels += out.say(" (rest: {pattern})", pattern=CALLED[out.lang][line["rest"]])
        rows.append([str(line["head"]), entropy, effective, keys, share, labels or "–"])
    out.print(tables.text([out.say(title) for title in titles], rows, right=[0, 1, 2, 4]))
    if len(heads) > MOST_HEADS:
        out.print((out.say("… {shown} / {heads} heads; --json has all", shown=MOST_HEADS, heads=len(heads)), "dim"))
    out.print()

    if description["links"] is None:
        out.print((out.say("Links need q and k: watch(model, keep='qk')"), "dim"))
    else:
        out.print((out.say("Strongest links"), "bold"))
        start, rows = description["first_position"], []
        for link in description["links"]:
            at = None if start is None or words is None else start + link["query"]
            word = f" {words[at]}" if at is not None and 0 <= at < len(words) else ""
            key, weight = named(link["key"]), tables.number(link["weight"])
            rows.append([str(link["head"]), f"{link['query']}{word}", key, weight])
        headers = [out.say(title) for title in ("head", "query", "key", "weight")]
        out.print(tables.text(headers, rows, right=[0, 3]) if rows else out.say("none"))

    if description["row"] is not None:
        row, rows = description["row"], []
        out.print()
        out.print((out.say("Query {query}, exact: its strongest keys", query=row["query"]), "bold"))
        for head, weights in zip(row["heads"], row["weights"], strict=True):
            best = sorted(range(len(weights)), key=lambda j: (-weights[j], j))[: options.top or LINKS]
            exact = [f"{named(j)}: {tables.number(weights[j])}" for j in best if weights[j] > 0]
            rows.append([str(head), ", ".join(exact)])
        out.print(tables.text([out.say("head"), out.say("keys")], rows, right=[0]))
