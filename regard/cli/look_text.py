"""`regard look` for a text: tokens, ranked links and exact rows in the terminal, the page and the capture as files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.cli.commands import Lang, LookOptions
from regard.cli.files import output_to, write_figure
from regard.cli.models import check_device, require_texts
from regard.cli.terminal import PIPE, Part, Terminal, bar, fit, print_atlas, print_json, shade
from regard.locale import translate
from regard.session.labels import is_word, shown, spelled, word_numbers
from regard.tables import pad, width

if TYPE_CHECKING:
    from regard.session.heads import Layer, RankedLink
    from regard.session.protocol import Opening
    from regard.session.session import Session

VERSION = 1
DEMO = "all-MiniLM-L6-v2"
LINKS = 8  # unless --top says otherwise
MOST_TOKENS = 160  # in the list
MOST_UNKNOWN = 8  # unknown words that are named
WINDOW = 320  # words of a row that are drawn
BAR = 30  # cells of a weight of 1
FAINT = 0.02  # of the largest weight: below it, a word has no colour


# ------------------------------------------------------------------------------------------------------------- reading


def read_text(text: str, options: LookOptions) -> tuple[Session, int]:
    """Let a model read a text: the session, and the number of tokens of the text before it was cut.

    >>> session, length = read_text("The cat sat.", LookOptions())                            # doctest: +SKIP
    >>> length                                                                                # doctest: +SKIP
    6

    Raises:
        ValueError: for an empty text, one that is too long, an unknown device, and a model that needs an image.
        ImportError: without --model, if the demo model is not installed.
    """
    from regard.models.loading import load
    from regard.models.text import TextModel
    from regard.session.session import default_model, look_at

    if not text.strip():
        raise ValueError("there is nothing to look at: the text is empty")
    device = options.device or "cpu"
    check_device(device)
    name = str(default_model()) if options.model is None else options.model
    with bar("/".join(Path(name).parts[-2:])) as tick:
        model = load(name, device=device, ignore=options.ignore, progress=tick)
    require_texts(model, text, f"regard look photo.jpg --model {name}")
    length = int(model.tokenizer.batch([text]).input_ids.shape[1])
    limit = model.max_positions if isinstance(model, TextModel) else None
    if limit is not None and length > limit and not options.truncate:
        raise ValueError(
            f"the text has {length:,} tokens, and {model.family.title} takes at most {limit:,} here: "
            "shorten it, or cut it with --truncate"
        )
    session = look_at(text, model, truncate=options.truncate)
    return session if options.model is not None else replace(session, name=DEMO), length


@dataclass(frozen=True)
class _Focus:
    """Where to look: some of the layers, one head or all, some tokens or all."""

    layers: list[Layer]
    head: int | None
    tokens: list[int] | None


def _focus(session: Session, options: LookOptions) -> _Focus:
    """--layer, --head and --token of a session. Raises ValueError or IndexError with what there is."""
    layers = list(session.layers)
    if not layers:
        session.capture.summary()  # which raises, and says what is known about why
    if options.head is not None and options.layer is None:
        raise ValueError(f"--head {options.head} needs --layer: each layer has heads of its own")
    if options.layer is not None:
        layers = [find_layer(layers, options.layer)]
        check_head(options.head, layers[0].view.sizes[1])
    tokens = None if options.token is None else _find_tokens(session.tokens, options.token)
    return _Focus(layers, options.head, tokens)


def check_head(head: int | None, heads: int) -> None:
    """Raise IndexError for a head that a layer does not have."""
    if head is not None and not 0 <= head < heads:
        raise IndexError(f"--head {head} is out of range: there are {heads}, counted from 0")


def find_layer(layers: list[Layer], wanted: str) -> Layer:
    """The layer that --layer names, by its number or its module's path. Raises ValueError with what there is."""
    found = [layer for layer in layers if layer.path == wanted]
    if len(found) > 1:
        numbers = ", ".join(str(layer.index) for layer in found)
        raise ValueError(f"--layer {wanted!r} ran {len(found)} times: say which by its number, one of {numbers}")
    if found:
        return found[0]
    if not (wanted.isascii() and wanted.isdigit()):
        names = [layer.path or "(model)" for layer in layers]
        some = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        raise ValueError(f"--layer {wanted!r} is neither a number nor a module; there are {some}")
    if int(wanted) >= len(layers):
        raise ValueError(f"--layer {wanted} is out of range: there are {len(layers)} layers, counted from 0")
    return layers[int(wanted)]


def _find_tokens(labels: Sequence[str], wanted: str) -> list[int]:
    """The positions of a token: a number, or a word, which may occur several times and have several tokens."""
    from regard.session.labels import find_word

    if wanted.isascii() and wanted.isdigit():
        if int(wanted) >= len(labels):
            raise IndexError(f"--token {wanted} is out of range: there are {len(labels):,} tokens, counted from 0")
        return [int(wanted)]
    found = [place for run in find_word(labels, wanted) for place in run]
    if not found:
        raise ValueError(f"--token {wanted!r} is not in the text; without --token its tokens are listed with numbers")
    return found


# -------------------------------------------------------------------------------------------------------------- values


def describe_text(session: Session, options: LookOptions) -> dict[str, Any]:
    """What is said of a session, in values that JSON holds.

    >>> import torch, regard
    >>> from regard.session.session import Session
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> with regard.watch(layer, keep="qk") as seen:
    ...     _ = layer(torch.zeros(1, 3, 8))
    >>> said = describe_text(Session("toy", seen, ("a", "b", "c")), LookOptions(token="c", layer="0", head=1))
    >>> said["chosen"], [round(weight, 2) for weight in said["row"]["weights"]]
    ([2], [0.33, 0.33, 0.33])

    Raises:
        ValueError, IndexError, LookupError: for a layer, head, token or measure that is not there, and for a token's
            row where queries and keys were not kept.
    """
    from regard.explorer.answers import head as head_answer
    from regard.session.heads import obstacle, strongest
    from regard.session.sentences import WARNING

    focus = _focus(session, options)
    why = obstacle(focus.layers, focus.tokens)
    links: list[RankedLink] | None = None
    if why is None:
        count = options.top or LINKS
        links = strongest(session, focus.layers, count=count, head=focus.head, queries=focus.tokens, every=options.all)
    row = None if focus.tokens is None else _row(focus, focus.tokens, links or [])
    card = None
    if focus.head is not None:
        answer = head_answer(session, focus.layers[0].index, focus.head, options.lang)
        numbers, patterns = dict(answer["numbers"]), dict(answer["patterns"])
        card = {"sentence": answer["sentence"], "numbers": numbers, "patterns": patterns}
    return {
        "version": VERSION,
        "name": session.name,
        "text": session.text,
        "tokens": list(session.tokens),
        "chosen": focus.tokens,
        **describe_heads(session, focus.layers, options),
        "ranking": "weight" if options.all else "far",
        "links": None
        if links is None
        else [{**link._asdict(), "words": [session.tokens[link.query], session.tokens[link.key]]} for link in links],
        "obstacle": why,
        "row": row,
        "head": card,
        "warning": translate(WARNING, options.lang),
    }


def describe_heads(session: Session, layers: list[Layer], options: LookOptions) -> dict[str, Any]:
    """The layers, the chosen measure of their heads, and the patterns of these, in values that JSON holds.

    Raises:
        ValueError: for a measure that no layer knows.
    """
    measure = options.measure or "entropy"
    rows: list[list[float | None]] = []
    known: dict[str, None] = {}
    for layer in layers:
        numbers = session.numbers[layer.index]
        named = {"entropy": numbers.entropy, "effective": numbers.effective, "received_max": numbers.share}
        there = {name: values for name, values in named.items() if values is not None} | numbers.patterns
        known |= dict.fromkeys(there)
        values = there.get(measure)
        rows.append([None] * layer.view.sizes[1] if values is None else values.tolist())
    if measure not in known:
        raise ValueError(f"--measure {measure!r} is not known here; there are {', '.join(known)}")
    return {
        "layers": [
            {
                "index": layer.index,
                "path": layer.path,
                "kind": layer.view.kind,
                "heads": layer.view.sizes[1],
                "queries": layer.view.sizes[2],
                "keys": layer.view.sizes[3],
            }
            for layer in layers
        ],
        "measure": measure,
        "atlas": rows,
        "patterns": [[list(names) for names in session.numbers[layer.index].names] for layer in layers],
        "rest": [list(session.numbers[layer.index].rest) for layer in layers],
    }


def _row(focus: _Focus, tokens: list[int], links: list[RankedLink]) -> dict[str, Any] | None:
    """The exact row of the first of the tokens in the chosen head, or in the head of their first link."""
    if focus.head is not None:
        layer, head, token = focus.layers[0], focus.head, tokens[0]
    elif links:
        layer = next(layer for layer in focus.layers if layer.index == links[0].layer)
        head, token = links[0].head, links[0].query
    else:
        return None
    if layer.start is None or not 0 <= token - layer.start < layer.view.sizes[2]:
        raise LookupError(f"token {token} is no query in layer {layer.index}: its queries are not tokens of this text")
    weights = layer.view.row(token - layer.start)[0, head]  # (Nk,); LookupError without q and k
    return {"layer": layer.index, "head": head, "token": token, "weights": weights.tolist()}


# ------------------------------------------------------------------------------------------------------------ printing


def show_text(session: Session, options: LookOptions, length: int | None = None) -> None:
    """Print a session, or its JSON, and write the files that were asked for.

    Args:
        session: of a text.
        options: of the command.
        length: tokens of the text before it was cut.
    """
    said = describe_text(session, options)
    if options.figure is not None:
        _write_figure(session, options, said)
    kept = session if options.html is None else replace(session, opening=_opening(session, options, said))
    written = write_session(kept, options)
    tokens, layers = len(session.tokens), said["layers"]
    cut = length is not None and length > tokens
    if options.json:
        print_json({**said, "cut_from": length if cut else None, **written})
        return
    out = Terminal(options.lang)
    sizes = {"tokens": tokens, "layers": len(layers), "heads": sum(layer["heads"] for layer in layers)}
    size = (
        out.say("   {tokens:,} tokens, {layers} layer, {heads} heads", **sizes)
        if len(layers) == 1
        else out.say("   {tokens:,} tokens, {layers} layers, {heads} heads", **sizes)
    )
    family = "" if session.model is None else f" ({session.model.family.title})"
    out.print((session.name + family, "bold"), (size, "dim"))
    if cut:
        out.print((out.say("cut: the first {kept:,} of {length:,} tokens", kept=tokens, length=length), "yellow"))
    if unknown := unknown_words(session, options.lang):
        out.print((unknown, "yellow"))
    out.print()
    print_sections(said, options, out)
    print_written(written, out)


def unknown_words(session: Session, lang: Lang) -> str | None:
    """How many tokens of a session's text are unknown to its model, and which; None for none, or without a model.

    >>> unknown_words(look_at("나는 고양이를 보았다."), "en")                      # doctest: +SKIP
    '2 of 10 tokens are unknown to this model ([UNK]): 고양이를, 보았다'
    """
    from regard.locale import translate

    if session.model is None or session.text is None:
        return None
    tokenizer = session.model.tokenizer
    if (unk := tokenizer.ids_of.unk) is None:
        return None
    (sign,), read = tokenizer.tokens([unk]), tokenizer.encode(session.text)
    spans = [span for number, span in zip(read.ids, read.offsets, strict=True) if number == unk and span is not None]
    words = [word for start, end in spans if (word := session.text[start:end]) != sign]  # [UNK] as typed is known
    if not words:
        return None
    some = ", ".join(words[:MOST_UNKNOWN]) + (" …" if len(words) > MOST_UNKNOWN else "")
    values: dict[str, object] = {"count": len(words), "tokens": len(read.ids), "sign": sign, "words": some}
    if len(words) == 1:
        return translate("{count:,} of {tokens:,} tokens is unknown to this model ({sign}): {words}", lang, **values)
    return translate("{count:,} of {tokens:,} tokens are unknown to this model ({sign}): {words}", lang, **values)


def print_sections(said: dict[str, Any], options: LookOptions, out: Terminal) -> None:
    """Print what `describe_text` said: the tokens, the links, a row, and the atlas unless one head is looked at."""
    labels = said["tokens"]
    print_tokens(labels, said["chosen"] or [], out)
    out.print()
    if said["row"] is None or options.head is None:
        if said["links"] is None:
            why = {
                "weights": "Links need q and k of the tokens: watch(model, keep='qk', tokens=…)",
                "length": "The text is too long to rank all links: name a token or a layer (--token, --layer)",
            }[said["obstacle"]]
            out.print((out.say(why), "dim"))
        else:
            title = "Strongest links of all tokens" if options.all else "Strongest links of words"
            order = ", by weight" if options.all else ", far before near (see --help)"
            out.print((out.say(title), "bold"), (out.say(order), "dim"))
            print_links(said["links"], labels, out)
        out.print()
    if said["row"] is not None:
        print_row(said["row"], labels, options.top or LINKS, out)
        out.print()
    if said["head"] is not None:
        out.print(said["head"]["sentence"])
    else:
        print_atlas(said, out)
    out.print()
    out.print((said["warning"], "italic"))


def token_name(labels: list[str], place: int) -> str:
    """A token as it is called in a link: its word, and in brackets the piece of it where it is not the whole.

    >>> labels = ["the", "token", "##ization"]
    >>> token_name(labels, 0), token_name(labels, 2), token_name(["", ""], 1)
    ('the', 'tokenization[##ization]', '1')
    """
    piece = shown(labels[place])
    if not piece:
        return str(place)
    near = range(max(0, place - 32), min(len(labels), place + 33))  # a word has not more pieces than that
    numbers = word_numbers([labels[n] for n in near])
    own = numbers[place - near.start]
    pieces = [labels[n] for n, number in zip(near, numbers, strict=True) if number == own]
    return piece if len(pieces) == 1 else f"{shown(spelled(pieces))}[{piece}]"


def print_tokens(labels: list[str], chosen: list[int], out: Terminal) -> None:
    """Print the tokens with their numbers, the chosen ones marked, those that are no words dimmed.

    >>> print_tokens(["[CLS]", "it", "was"], [1], Terminal())
    Tokens
      0 [CLS]  1 ›it‹  2 was
    """
    items = []
    for n, label in enumerate(labels[:MOST_TOKENS]):
        style = "bold reverse" if n in chosen else "" if is_word(label) else "dim"
        text = f"›{shown(label)}‹" if n in chosen and not out.coloured else shown(label)
        items.append([(f"{n}", "dim"), (f" {text}" if text else "", style)])
    out.print((out.say("Tokens"), "bold"))
    for line in fit(items, out.room or PIPE, "  ", "  "):
        out.print(*line)
    if (more := len(labels) - MOST_TOKENS) > 0:
        out.print((out.say("  … and {more:,} more; --json has all", more=more), "dim"))


def print_links(links: list[dict[str, Any]], labels: list[str], out: Terminal) -> None:
    """Print links, one a line: who looks at whom, how much, and in which head.

    >>> link = {"layer": 3, "head": 1, "query": 0, "key": 1, "weight": 0.683}
    >>> print_links([link], ["it", "animal"], Terminal())
      it → animal  0.68  (layer 3, head 1)  0 → 1
    """
    if not links:
        out.print("  ", out.say("none"))
        return
    pairs = [f"{token_name(labels, link['query'])} → {token_name(labels, link['key'])}" for link in links]
    heads = [out.say("(layer {layer}, head {head})", layer=link["layer"], head=link["head"]) for link in links]
    wide, wide_head = max(map(width, pairs)), max(map(width, heads))
    if narrow := out.room is not None and 2 + wide + 2 + 4 + 2 + wide_head + 10 > out.room:
        heads = [f"L{link['layer']} H{link['head']}" for link in links]
        wide = max(0, min(wide, out.room - 18))
    for n, (pair, head, link) in enumerate(zip(pairs, heads, links, strict=True)):
        weight = (f"{link['weight']:.2f}", shade(link["weight"]) if out.coloured else "")
        parts: list[Part] = ["  ", (pad(pair, wide), "" if n else "bold"), "  ", weight, "  "]
        parts += [head] if narrow else [pad(head, wide_head), (f"  {link['query']} → {link['key']}", "dim")]
        out.print(*parts)


def print_row(row: dict[str, Any], labels: list[str], count: int, out: Terminal) -> None:
    """Print what one token looks at in one head, exactly: every word with its weight as its shade, then the largest.

    >>> row = {"layer": 3, "head": 1, "token": 0, "weights": [0.25, 0.75]}
    >>> print_row(row, ["it", "animal"], 1, Terminal())
    Exact row of 0 it (layer 3, head 1)
      ›it‹(.25) animal(.75)
    <BLANKLINE>
      1 animal  0.750  ██████████████████████▌
    """
    token, weights = row["token"], row["weights"]
    values = {"token": f"{token} {shown(labels[token])}".rstrip(), "layer": row["layer"], "head": row["head"]}
    out.print((out.say("Exact row of {token} (layer {layer}, head {head})", **values), "bold"))
    start = max(0, min(token - WINDOW // 2, len(weights) - WINDOW))
    seen = range(start, min(len(weights), start + WINDOW))
    high = max(weights, default=0.0) or 1.0
    for line in fit([_warm(labels, n, weights[n], high, n == token, out) for n in seen], out.room or PIPE, "  "):
        out.print(*line)
    if len(seen) < len(weights):
        part = f"{seen.start}–{seen.stop - 1}"
        out.print((out.say("  tokens {part} of {count:,}", part=part, count=len(weights)), "dim"))
    out.print()
    best = sorted(range(len(weights)), key=lambda n: (-weights[n], n))[:count]
    best = [n for n in best if weights[n] > 0]
    digits = max((len(str(n)) for n in best), default=0)
    names = [f"{n:>{digits}} {shown(labels[n])}".rstrip() for n in best]
    wide = max(map(width, names), default=0)
    for n, name in zip(best, names, strict=True):
        eighths = round(8 * BAR * min(weights[n], 1.0))  # so that small weights differ too
        drawn = "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
        out.print(f"  {pad(name, wide)}  {weights[n]:.3f}  ", (drawn, "cyan"))


def _warm(labels: list[str], n: int, weight: float, high: float, own: bool, out: Terminal) -> list[tuple[str, str]]:
    text = shown(labels[n]) or str(n)
    if out.coloured:
        warm = shade(weight / high) if weight / high >= FAINT else ""
        return [(text, f"bold underline {warm}".strip() if own else warm)]
    amount = f"({weight:.2f})".replace("0.", ".") if weight >= 0.01 else ""
    return [((f"›{text}‹" if own else text) + amount, "")]


# --------------------------------------------------------------------------------------------------------------- files


def write_session(session: Session, options: LookOptions) -> dict[str, Path | None]:
    """Write the page and the capture that were asked for, with the session's images inside; missing folders are made.

    >>> from regard.session.session import Session
    >>> from regard.lens.capture import Capture
    >>> write_session(Session("toy", Capture(), ()), LookOptions())
    {'html': None, 'saved': None, 'figure': None}

    Returns:
        The written files by kind, with the figure, which is written elsewhere.
    """
    if options.save is not None:
        with output_to(options.save):
            session.capture.save(options.save, photos=bool(session.images))
    if options.html is not None:
        from regard.explorer.export import write_html

        with output_to(options.html):
            write_html(session, options.html, lang=options.lang)
    return {"html": options.html, "saved": options.save, "figure": options.figure}


def print_written(written: dict[str, Path | None], out: Terminal) -> None:
    """Print which files were written.

    >>> print_written({"html": Path("page.html"), "saved": None, "figure": None}, Terminal())
    Page: page.html
    """
    titles = {"html": "Page: {path}", "saved": "Capture: {path}", "figure": "Figure: {path}"}
    for name, path in written.items():
        if path is not None:
            out.print(out.say(titles[name], path=path))


def _opening(session: Session, options: LookOptions, said: dict[str, Any]) -> Opening | None:
    """Where the page opens: on the exact row or the first link that is printed; None for the page's own choice."""
    from regard.session.heads import obstacle, strongest

    focus, row, links = _focus(session, options), said["row"], said["links"] or []
    link = links[0] if links else None
    if row is not None:
        at = {"layer": row["layer"], "head": row["head"], "query": row["token"]}
        link = next((link for link in links if at.items() <= link.items()), at | {"key": None})
    elif link is None and focus.tokens is not None and obstacle(focus.layers, focus.tokens) is None:
        # The token is no word: its strongest link of all tokens.
        every = strongest(session, focus.layers, count=1, head=focus.head, queries=focus.tokens, every=True)
        link = every[0]._asdict() if every else None
    if link is not None:
        start = next(layer.start for layer in focus.layers if layer.index == link["layer"])
        return {"layer": link["layer"], "head": link["head"], "token": link["query"] - (start or 0), "key": link["key"]}
    if options.layer is None:
        return None
    return {"layer": focus.layers[0].index, "head": focus.head or 0, "token": None, "key": None}


def _write_figure(session: Session, options: LookOptions, said: dict[str, Any]) -> None:
    """Draw the map of one head, or the atlas of all."""
    from regard.lens.display import atlas_figure, view_figure

    assert options.figure is not None
    if options.layer is None:
        write_figure(atlas_figure(session.capture, said["measure"]), options.figure)
        return
    layer = session.layers[said["layers"][0]["index"]]
    labels = list(session.tokens) if any(session.tokens) and layer.view.sizes[3] == len(session.tokens) else None
    write_figure(view_figure(layer.view, batch=0, head=options.head, tokens=labels), options.figure)
