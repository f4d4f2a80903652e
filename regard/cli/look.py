"""`regard look`: what attention looked at, in a text or image that a model reads, in a capture, or in q, k and v.

Texts and whole captures are shown here; look_image.py shows images, captures.py one call of attention.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.cli import look_image
from regard.cli.captures import describe_capture, read_session, show_arrays, show_module
from regard.cli.commands import EffectOptions, Lang, LookOptions
from regard.cli.inputs import (
    ARRAY_SUFFIXES,
    MOST_PIPED,
    as_text,
    chosen_layer,
    find_token,
    is_file,
    is_image,
    load_model,
    read_one,
    read_stdin,
    refuse,
    require_texts,
    typed_options,
)
from regard.cli.outputs import (
    FIGURE_SUFFIXES,
    LINKS,
    PIPE,
    Part,
    Terminal,
    bar,
    check_output,
    describe_atlas,
    fit,
    print_atlas,
    print_json,
    shade,
    write_figure,
    write_session,
)
from regard.locale import translate, translate_error
from regard.session.default_models import korean_note
from regard.session.labels import is_word, shown, token_name
from regard.tables import pad, width

if TYPE_CHECKING:
    from regard.session.heads import Layer
    from regard.session.protocol import Opening
    from regard.session.session import Session

VERSION = 1
MOST_TOKENS = 160  # in the list
MOST_UNKNOWN = 8  # unknown words that are named
WINDOW = 320  # words of a row that are drawn
BAR = 30  # cells of a weight of 1
NARROWEST = 40  # columns that have room for the effects of links
FAINT = 0.02  # of the largest weight: below it, a word has no colour
TAKES = (
    f"look takes a text, q, k and v in {', '.join(ARRAY_SUFFIXES)}, an image, or a saved capture such as run.regard; "
    "--file reads a text from a file"
)
# Options that only some inputs have; none is accepted and then ignored.
OF_ARRAYS = ("causal", "mask", "scale")
OF_FILES = ("call", "batch", "row", "size")
OF_LOADING = ("model", "ignore", "device", "truncate", "why")
OF_TOKENS = ("token", "measure", "all", "html", "save")
OF_IMAGES = ("at", "no_photo")


def look(options: LookOptions) -> None:
    """Print what attention looks at, and write the files that were asked for."""
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
    if text_file is None and what is not None and os.path.isdir(what):  # Path.is_dir raises for a long text
        what = newest_alarm(Path(what))
    piped = read_stdin(MOST_PIPED) if what == "-" and text_file is None else None
    source = what if piped is None else piped
    if text_file is None and source is not None and is_image(source):
        refuse(options, OF_ARRAYS + OF_FILES, "for files; for an image there are --layer, --head, --token and --at")
        refuse(options, ("why",), "for texts; regard.effect measures what a patch of an image does, in Python")
        refuse(options, ("all", "truncate"), "for texts; this is an image")
        look_image.read_place(options.at)
        look_image.show_image(look_image.read_image(source, options), options, source)
        return
    refuse(options, ("text",), "for images; this is none")

    # 3. A text.
    if text_file is not None or what is None or not is_file(what, TAKES):
        refuse(options, OF_IMAGES, "for images; this is none")
        refuse(options, OF_ARRAYS + OF_FILES, "for files; for a text there are --layer, --head and --token")
        text = read_one(what, text_file) if piped is None else as_text(piped)
        session, length = read_text(text, options)
        show_text(session, options, length)
        return

    # 4. Arrays.
    file = Path(what)
    if file.suffix.lower() not in (*ARRAY_SUFFIXES, ".regard") and typed_options(options, OF_LOADING):
        raise ValueError(f"{what!r} is no image that can be opened: {TAKES}")
    refuse(options, OF_LOADING, "for a text; this is a file")
    if file.suffix.lower() in ARRAY_SUFFIXES:
        refuse(options, OF_IMAGES, "for images; this is none")
        refuse(options, ("layer", "call"), "for captures; q, k and v are one call")
        refuse(options, OF_TOKENS, "for texts and captures; q, k and v have no words")
        show_arrays(file, options)
        return

    # 5. A capture: of an image, with tokens, of one module, or as a whole.
    refuse(options, OF_ARRAYS, "for q, k and v; a capture has its own")
    session = read_session(file)
    if session.frames and typed_options(options, ("at", "token", "html", "save", "no_photo")):
        refuse(options, OF_FILES, "for the tables of one call; leave out --at, --token and the like")
        look_image.show_image(session, options, None)
        return
    refuse(options, OF_IMAGES, "for captures of an image; this one does not say where its tokens lie")
    if typed_options(options, OF_TOKENS):
        refuse(options, OF_FILES, "for the tables of one call; leave out --token and the like")
        show_text(session, options)
    elif options.layer is None:
        if names := typed_options(options, ("head", "top", *OF_FILES)):
            verb = "needs" if len(names) == 1 else "need"
            raise ValueError(f"{', '.join(names)} {verb} --layer: which module of the capture")
        _show_capture(session, file, options)
    else:
        show_module(file, session.capture, options.layer, options)


def newest_alarm(run: Path) -> str:
    """The capture of the last alarm in a directory of `regard train` or `regard.monitor`."""
    alarms = sorted(run.glob("alarm-step-*.regard"))
    if not alarms:
        raise ValueError(f"{str(run)!r} is a folder without the capture of an alarm, alarm-step-….regard")
    return str(alarms[-1])


# ------------------------------------------------------------------------------------------------------------- reading


def read_text(text: str, options: LookOptions | EffectOptions) -> tuple[Session, int]:
    """Let a model read a text: the session, and the number of tokens of the text before it was cut."""
    from regard.models.text import TextModel
    from regard.session.default_models import default_model
    from regard.session.session import look_at

    if not text.strip():
        raise ValueError("there is nothing to look at: the text is empty")
    name = str(default_model(text)) if options.model is None else options.model
    model = load_model(name, options.device, options.ignore)
    require_texts(model, text, f"regard look photo.jpg --model {name}")
    length = int(model.tokenizer.batch([text]).input_ids.shape[1])
    limit = model.max_positions if isinstance(model, TextModel) else None
    if limit is not None and length > limit and not options.truncate:
        raise ValueError(
            f"the text has {length:,} tokens, and {model.family.title} takes at most {limit:,} here: "
            "shorten it, or cut it with --truncate"
        )
    return look_at(text, model, truncate=options.truncate), length


def _focus(session: Session, options: LookOptions) -> tuple[list[Layer], list[int] | None]:
    """The layers of --layer, and the tokens of --token: a number, or a word, which may occur several times."""
    layer = chosen_layer(session, options)
    layers = list(session.layers) if layer is None else [layer]
    if options.token is None:
        return layers, None
    return layers, [place for run in find_token(session.tokens, options.token, "--token") for place in run]


# -------------------------------------------------------------------------------------------------------------- values


def describe_text(session: Session, options: LookOptions) -> dict[str, Any]:
    """The tokens, links, rows and heads of a session, in values that JSON holds."""
    from regard.explorer.answers import head as head_answer
    from regard.session.effects import LinkEffects, measure_links
    from regard.session.labels import WARNING
    from regard.session.ranking import obstacle, strongest

    (layers, tokens), head, words = _focus(session, options), options.head, session.tokens
    why = obstacle(layers, tokens)
    links: list[dict[str, Any]] | None = None
    effects = LinkEffects("links", [])
    if why is None:
        count = options.top or LINKS
        ranked = strongest(session, layers, count=count, head=head, queries=tokens, every=options.all)
        with bar(session.name) as tick:
            effects = measure_links(session, ranked, options.why, tick)
        links = [
            {**link._asdict(), "words": [words[link.query], words[link.key]], "effect": effect}
            for link, effect in zip(ranked, effects.values, strict=True)
        ]
    card = None
    if head is not None:
        answer = head_answer(session, layers[0].index, head, options.lang)
        numbers, patterns = dict(answer["numbers"]), dict(answer["patterns"])
        card = {"sentence": answer["sentence"], "numbers": numbers, "patterns": patterns}
    return {
        "version": VERSION,
        "name": session.name,
        "text": session.text,
        "tokens": list(words),
        "chosen": tokens,
        **describe_atlas(session, layers, options.measure),
        "ranking": "weight" if options.all else "far",
        "links": links,
        "obstacle": why,
        "why": effects.why,
        "why_not": effects.reason or None,
        "row": None if tokens is None else _exact_row(layers, head, tokens[0], links or []),
        "head": card,
        "warning": translate(WARNING, options.lang),
    }


def _exact_row(layers: list[Layer], head: int | None, token: int, links: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The exact row of a token in the chosen head, or of the first link in its head."""
    layer = layers[0]
    if head is None:
        if not links:
            return None
        layer = next(layer for layer in layers if layer.index == links[0]["layer"])
        head, token = links[0]["head"], links[0]["query"]
    if layer.start is None or not 0 <= token - layer.start < layer.view.sizes[2]:
        raise LookupError(f"token {token} is no query in layer {layer.index}: its queries are not tokens of this text")
    weights = layer.view.row(token - layer.start)[0, head]  # (Nk,); LookupError without q and k
    return {"layer": layer.index, "head": head, "token": token, "weights": weights.tolist()}


# ------------------------------------------------------------------------------------------------------------ printing


def show_text(session: Session, options: LookOptions, length: int | None = None) -> None:
    """Print a session of a text, or its JSON, and write the files; `length`: tokens of the text before it was cut."""
    description = describe_text(session, options)
    if options.figure is not None:
        from regard.lens.display import atlas_figure, view_figure

        # The title: model, layer and head, and the text.
        place = ""
        if options.layer is not None:
            values = {"layer": description["layers"][0]["index"], "head": options.head}
            text = "layer {layer}" if options.head is None else "layer {layer}, head {head}"
            place = f", {options.say(text, **values)}"
        read = " ".join((session.text or "").split())
        subject = f"{session.model_name}{place}{': ' * bool(read)}{read}"
        if options.layer is None:
            figure = atlas_figure(session.capture, description["measure"], subject=subject, lang=options.lang)
        else:
            layer, words = session.layers[description["layers"][0]["index"]], list(session.tokens)
            labels = words if any(words) and layer.view.sizes[3] == len(words) else None
            query = None if description["chosen"] is None else description["chosen"][0] - (layer.start or 0)
            figure = view_figure(
                layer.view, head=options.head, tokens=labels, subject=subject, query=query, lang=options.lang
            )
        write_figure(figure, options.figure)
    kept = session if options.html is None else replace(session, opening=_opening(session, options, description))
    written = write_session(kept, options)
    tokens, layers = len(session.tokens), description["layers"]
    cut = length is not None and length > tokens
    if options.json:
        print_json({**description, "cut_from": length if cut else None, **written})
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
    if options.model is None and (note := korean_note(session, options.lang)):
        out.print((note, "yellow"))
    out.print()
    print_sections(description, options, out)
    out.name_files(**written)


def _opening(session: Session, options: LookOptions, description: dict[str, Any]) -> Opening | None:
    """Where the page opens: on the exact row or the first link that is printed; None for the page's own choice."""
    from regard.session.ranking import obstacle, strongest

    (layers, tokens), row, links = _focus(session, options), description["row"], description["links"] or []
    link = links[0] if links else None
    if row is not None:
        at = {"layer": row["layer"], "head": row["head"], "query": row["token"]}
        link = next((link for link in links if at.items() <= link.items()), at | {"key": None})
    elif link is None and tokens is not None and obstacle(layers, tokens) is None:
        # The token is no word: its strongest link of all tokens.
        every = strongest(session, layers, count=1, head=options.head, queries=tokens, every=True)
        link = every[0]._asdict() if every else None
    if link is not None:
        start = next(layer.start for layer in layers if layer.index == link["layer"])
        return {"layer": link["layer"], "head": link["head"], "token": link["query"] - (start or 0), "key": link["key"]}
    if options.layer is None:
        return None
    return {"layer": layers[0].index, "head": options.head or 0, "token": None, "key": None}


def _show_capture(session: Session, file: Path, options: LookOptions) -> None:
    capture = session.capture
    if not capture.names:
        capture.summary(options.lang)  # which raises, and says what is known about why
    if options.figure is not None:
        from regard.lens.display import atlas_figure

        write_figure(atlas_figure(capture, lang=options.lang), options.figure)
    if options.json:
        print_json({"title": file, **describe_capture(session.capture), "figure": options.figure})
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
    out.name_files(figure=options.figure)


def unknown_words(session: Session, lang: Lang) -> str | None:
    """How many tokens of a session's text are unknown to its model, and which; None for none, or without a model."""
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


def print_sections(description: dict[str, Any], options: LookOptions, out: Terminal) -> None:
    """Print what `describe_text` returned: the tokens, the links, a row, and the atlas unless one head is looked at."""
    labels = description["tokens"]
    _print_tokens(labels, description["chosen"] or [], out)
    out.print()
    if description["row"] is None or options.head is None:
        if description["links"] is None:
            why = {
                "weights": "Links need q and k of the tokens: watch(model, keep='qk', tokens=…)",
                "length": "The text is too long to rank all links: name a token or a layer (--token, --layer)",
            }[description["obstacle"]]
            out.print((out.say(why), "dim"))
        else:
            title = "Strongest links of all tokens" if options.all else "Strongest links of words"
            order = ", by weight" if options.all else ", far before near (see --help)"
            out.print((out.say(title), "bold"), (out.say(order), "dim"))
            _print_links(description["links"], labels, out)
            _print_why(description, out)
        out.print()
    if description["row"] is not None:
        _print_row(description["row"], labels, options.top or LINKS, out)
        out.print()
    if description["head"] is not None:
        out.print(description["head"]["sentence"])
    else:
        print_atlas(description, out)
    out.print()
    out.print((description["warning"], "italic"))


def _print_tokens(labels: list[str], chosen: list[int], out: Terminal) -> None:
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


def _print_links(links: list[dict[str, Any]], labels: list[str], out: Terminal) -> None:
    """Links, one a line: `it → animal  0.68  moves 10.0 %  (layer 3, head 1)  0 → 1`."""
    if not links:
        out.print("  ", out.say("none"))
        return
    pairs = [f"{token_name(labels, link['query'])} → {token_name(labels, link['key'])}" for link in links]
    heads = [out.say("(layer {layer}, head {head})", layer=link["layer"], head=link["head"]) for link in links]
    shares = ["–" if link["effect"] is None else f"{100 * link['effect']:.1f} %" for link in links]
    shares = [pad(share, max(map(width, shares)), right=True) for share in shares]
    moves = [out.say("moves {share}", share=share) + "  " for share in shares]
    if all(link["effect"] is None for link in links) or (out.room or PIPE) < NARROWEST:
        shares = moves = [""] * len(links)
    wide, wide_head = max(map(width, pairs)), max(map(width, heads))
    if narrow := out.room is not None and 2 + wide + 2 + 4 + 2 + width(moves[0]) + wide_head + 10 > out.room:
        heads = [f"L{link['layer']} H{link['head']}" for link in links]
        moves = [f"{share.replace(' %', '%')}  " if share else "" for share in shares]
        wide = max(0, min(wide, out.room - 18 - width(moves[0])))
    for n, (pair, move, head, link) in enumerate(zip(pairs, moves, heads, links, strict=True)):
        weight = (f"{link['weight']:.2f}", shade(link["weight"]) if out.coloured else "")
        parts: list[Part] = ["  ", (pad(pair, wide), "" if n else "bold"), "  ", weight, "  ", move]
        parts += [head] if narrow else [pad(head, wide_head), (f"  {link['query']} → {link['key']}", "dim")]
        out.print(*parts)


def _print_why(description: dict[str, Any], out: Terminal) -> None:
    if description["why"] == "measured" and (out.room or PIPE) >= NARROWEST:
        text = "moves: how far the final vector of the word that looks goes without this link, as a share of its length"
        out.print("  ", (out.say(text), "dim"))
    elif description["why"] == "cost":
        runs, tokens = len(description["links"]) + 1, len(description["tokens"])
        text = "What the links do was not measured: {runs} runs of this model on {tokens:,} tokens; --why measures it"
        out.print("  ", (out.say(text, runs=runs, tokens=tokens), "dim"))
    elif description["why"] == "model":
        reason = translate_error(description["why_not"], out.lang)
        out.print("  ", (out.say("What the links do cannot be measured: {reason}", reason=reason), "dim"))


def _print_row(row: dict[str, Any], labels: list[str], count: int, out: Terminal) -> None:
    """What one token looks at in one head, exactly: every word with its weight as its shade, then the largest."""
    token, weights = row["token"], row["weights"]
    values = {"token": f"{token} {shown(labels[token])}".rstrip(), "layer": row["layer"], "head": row["head"]}
    out.print((out.say("Exact row of {token} (layer {layer}, head {head})", **values), "bold"))
    start = max(0, min(token - WINDOW // 2, len(weights) - WINDOW))
    seen = range(start, min(len(weights), start + WINDOW))
    high = max(weights, default=0.0) or 1.0

    def word(n: int) -> list[tuple[str, str]]:
        text, weight, own = shown(labels[n]) or str(n), weights[n], n == token
        if out.coloured:
            warm = shade(weight / high) if weight / high >= FAINT else ""
            return [(text, f"bold underline {warm}".strip() if own else warm)]
        amount = f"({weight:.2f})".replace("0.", ".") if weight >= 0.01 else ""
        return [((f"›{text}‹" if own else text) + amount, "")]

    for line in fit([word(n) for n in seen], out.room or PIPE, "  "):
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
