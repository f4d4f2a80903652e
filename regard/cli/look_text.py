"""`regard look` for a text: tokens, ranked links, rows in the terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.cli import files
from regard.cli.files import finite, output_to, require_reading
from regard.cli.models import bar, unknown_words
from regard.cli.options import Lang, Say, speaker
from regard.cli.terminal import Part, Terminal, fit, shade
from regard.session.labels import is_word, shown, spelled, word_numbers
from regard.tables import pad, width

if TYPE_CHECKING:
    from regard.session.protocol import Opening
    from regard.session.ranking import Layer, RankedLink
    from regard.session.session import Session


def write_session(session: Session, html: Path | None, save: Path | None, lang: Lang) -> dict[str, str | None]:
    """Write the page and the capture where they were asked for; folders that are missing on the way are made.

    The pictures of the session are inside both.

    >>> from regard.session.session import Session
    >>> from regard.lens.capture import Capture
    >>> write_session(Session("toy", Capture(), ()), None, None, "en")
    {'html': None, 'saved': None}

    Raises OSError as `output_to`; else as `write_html` does.
    """
    if save is not None:
        with output_to(save):
            session.capture.save(save, photos=bool(session.images))
    if html is not None:
        from regard.explorer.export import write_html

        with output_to(html):
            write_html(session, html, lang=lang)
    return {"html": None if html is None else str(html), "saved": None if save is None else str(save)}


def print_written(written: dict[str, str | None], lang: Lang, out: Terminal) -> None:
    """Print which files were written.

    >>> print_written({"html": "page.html", "saved": None, "figure": None}, "en", Terminal())
    Page: page.html
    """
    say = speaker(lang)
    titles = {"html": say("Page", "페이지"), "saved": say("Capture", "캡처"), "figure": say("Figure", "그림")}
    for name, path in written.items():
        if path is not None:
            out.print(f"{titles[name]}: ", path)


PIPE = 100  # cells on a line where there is no terminal
MOST_TOKENS = 160  # in the list
WINDOW = 320  # words of a row that are drawn
BAR = 30  # cells of a weight of 1
FAINT = 0.02  # of the largest weight: below it, a word has no colour


def named(labels: list[str], place: int) -> str:
    """A token as it is called in a link: its word, and in brackets the piece of it where it is not the whole.

    >>> labels = ["the", "token", "##ization"]
    >>> named(labels, 0), named(labels, 2), named(["", ""], 1)
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


def print_tokens(labels: list[str], chosen: list[int], lang: Lang, out: Terminal) -> None:
    """Print the tokens with their numbers; those that are chosen stand out, those that are no words stand back.

    >>> print_tokens(["[CLS]", "it", "was"], [1], "en", Terminal())
    Tokens
      0 [CLS]  1 ›it‹  2 was
    """
    say, items = speaker(lang), []
    for n, label in enumerate(labels[:MOST_TOKENS]):
        style = "bold reverse" if n in chosen else "" if is_word(label) else "dim"
        text = f"›{shown(label)}‹" if n in chosen and not out.coloured else shown(label)
        items.append([(f"{n}", "dim"), (f" {text}" if text else "", style)])
    out.print((say("Tokens", "토큰"), "bold"))
    for line in fit(items, out.room or PIPE, "  ", "  "):
        out.print(*line)
    if len(labels) > MOST_TOKENS:
        more = len(labels) - MOST_TOKENS
        out.print((say(f"  … and {more:,} more; --json has all", f"  … 외 {more:,}개, 전체는 --json"), "dim"))


def print_links(links: list[dict[str, Any]], labels: list[str], lang: Lang, out: Terminal) -> None:
    """Print links, one a line: who looks at whom, how much, and in which head.

    >>> link = {"layer": 3, "head": 1, "query": 0, "key": 1, "weight": 0.683}
    >>> print_links([link], ["it", "animal"], "en", Terminal())
      it → animal  0.68  (layer 3, head 1)  0 → 1
    """
    say = speaker(lang)
    if not links:
        out.print("  ", say("none", "없음"))
        return
    pairs = [f"{named(labels, link['query'])} → {named(labels, link['key'])}" for link in links]
    heads = [_place(link, say) for link in links]
    wide, wide_head = max(map(width, pairs)), max(map(width, heads))
    if narrow := out.room is not None and 2 + wide + 2 + 4 + 2 + wide_head + 10 > out.room:
        heads = [f"L{link['layer']} H{link['head']}" for link in links]
        wide = max(0, min(wide, out.room - 18))
    for pair, head, link in zip(pairs, heads, links, strict=True):
        style = shade(link["weight"]) if out.coloured else ""
        parts: list[Part] = [
            "  ",
            (pad(pair, wide), "bold" if link is links[0] else ""),
            "  ",
            (f"{link['weight']:.2f}", style),
            "  ",
        ]
        out.print(
            *parts, *([head] if narrow else [pad(head, wide_head), (f"  {link['query']} → {link['key']}", "dim")])
        )


def _place(link: dict[str, Any], say: Say) -> str:
    layer, head = link["layer"], link["head"]
    return say(f"(layer {layer}, head {head})", f"(레이어 {layer}, 헤드 {head})")


def print_row(row: dict[str, Any], labels: list[str], count: int, lang: Lang, out: Terminal) -> None:
    """Print what one token looks at in one head, exactly: every word with its weight as its shade, then the largest.

    >>> row = {"layer": 3, "head": 1, "token": 0, "weights": [0.25, 0.75]}
    >>> print_row(row, ["it", "animal"], 1, "en", Terminal())
    Exact row of 0 it (layer 3, head 1)
      ›it‹(.25) animal(.75)
    <BLANKLINE>
      1 animal  0.750  ██████████████████████▌
    """
    say, token, weights = speaker(lang), row["token"], row["weights"]
    title = f"{token} {shown(labels[token])}".rstrip()
    out.print((say(f"Exact row of {title} ", f"{title}의 정확한 행 ") + _place(row, say), "bold"))
    start = max(0, min(token - WINDOW // 2, len(weights) - WINDOW))
    seen = range(start, min(len(weights), start + WINDOW))
    high = max(weights, default=0.0) or 1.0
    for line in fit([_warm(labels, n, weights[n], high, n == token, out) for n in seen], out.room or PIPE, "  "):
        out.print(*line)
    if len(seen) < len(weights):
        part = f"{seen.start}–{seen.stop - 1}"
        out.print((say(f"  tokens {part} of {len(weights):,}", f"  토큰 {len(weights):,}개 중 {part}"), "dim"))
    out.print()
    best = sorted(range(len(weights)), key=lambda n: (-weights[n], n))[:count]
    _print_bars([n for n in best if weights[n] > 0], weights, labels, out)


def _warm(labels: list[str], n: int, weight: float, high: float, own: bool, out: Terminal) -> list[tuple[str, str]]:
    text = shown(labels[n]) or str(n)
    if out.coloured:
        warm = shade(weight / high) if weight / high >= FAINT else ""
        return [(text, f"bold underline {warm}".strip() if own else warm)]
    amount = f"({weight:.2f})".replace("0.", ".") if weight >= 0.01 else ""
    return [((f"›{text}‹" if own else text) + amount, "")]


def _print_bars(places: list[int], weights: list[float], labels: list[str], out: Terminal) -> None:
    names = [f"{n} {shown(labels[n])}".rstrip() for n in places]
    digits = max((len(str(n)) for n in places), default=0)
    names = [" " * (digits - len(str(n))) + name for n, name in zip(places, names, strict=True)]
    wide = max(map(width, names), default=0)
    for n, name in zip(places, names, strict=True):
        out.print(f"  {pad(name, wide)}  {weights[n]:.3f}  ", (_bar(weights[n]), "cyan"))


def _bar(weight: float) -> str:
    """A bar in eighths of a cell, so that small weights differ too."""
    eighths = round(8 * BAR * min(weight, 1.0))
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


VERSION = 1
DEMO = "all-MiniLM-L6-v2"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What of a session is wanted, and where it goes; None where nothing was said.

    layer: a number or a module's path.  token: a position or a word.  every: rank all tokens, by weight alone.
    photo: of a picture, whether it may be inside what is written.
    """

    layer: str | None = None
    head: int | None = None
    token: str | None = None
    measure: str = "entropy"
    top: int = 8
    every: bool = False
    html: Path | None = None
    save: Path | None = None
    figure: Path | None = None
    photo: bool = True


@dataclass(frozen=True)
class _Focus:
    """Where to look: some of the layers, one head or all, some tokens or all."""

    layers: list[Layer]
    head: int | None
    tokens: list[int] | None


# ------------------------------------------------------------------------------------------------------------- reading


def read_text(
    text: str, model: str | None, *, device: str = "cpu", truncate: bool = False, ignore: Sequence[str] = ()
) -> tuple[Session, int]:
    """Let a model read a text while a bar shows how far it is loaded: the session, and how many tokens the text has.

    >>> session, length = read_text("The cat sat.", None)                                     # doctest: +SKIP
    >>> length                                                                                # doctest: +SKIP
    6

    model: a directory or a hub id; None is the demo's MiniLM.  ignore: keys of its files to go on without.
    Raises ValueError for a text that is empty, or longer than the model takes and not to be cut, and for a device that
    is none; ImportError without MiniLM; else as `regard.load`.
    """
    from regard.models.loading import load
    from regard.models.text import TextModel
    from regard.session.session import default_model, look_at

    if not text.strip():
        raise ValueError("there is nothing to look at: the text is empty")
    check_device(device)
    name = str(default_model()) if model is None else model
    with bar("/".join(Path(name).parts[-2:])) as tick:
        loaded = load(name, device=device, ignore=ignore, progress=tick)
    require_reading(loaded, text, f"regard look photo.jpg --model {name}")
    length = int(loaded.tokenizer.batch([text]).ids.shape[1])
    most = loaded.max_positions if isinstance(loaded, TextModel) else None
    if most is not None and length > most and not truncate:
        raise ValueError(
            f"the text has {length:,} tokens, and {loaded.family.title} takes at most {most:,} here: "
            "shorten it, or cut it with --truncate"
        )
    session = look_at(text, loaded, truncate=truncate)
    return session if model is not None else replace(session, name=DEMO), length


def check_device(device: str) -> None:
    """Raise ValueError for a device that cannot be used here."""
    import torch

    try:
        torch.zeros((), device=device)
    # By RuntimeError torch says that a name is unknown, by AssertionError that it was built without CUDA.
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device!r} cannot be used here: {str(error).splitlines()[0]}") from None


def _focus(session: Session, asked: Asked) -> _Focus:
    """Read --layer, --head and --token. Raises ValueError or IndexError with what there is."""
    from regard.session.ranking import layers_of

    layers = layers_of(session)
    if not layers:
        session.capture.summary()  # which raises, and says what is known about why
    if asked.head is not None and asked.layer is None:
        raise ValueError(f"--head {asked.head} needs --layer: each layer has heads of its own")
    if asked.layer is not None:
        layers = [find_layer(layers, asked.layer)]
        heads = layers[0].view.sizes[1]
        if asked.head is not None and not 0 <= asked.head < heads:
            raise IndexError(f"--head {asked.head} is out of range: there are {heads}, counted from 0")
    tokens = None if asked.token is None else _tokens(session.tokens, asked.token)
    return _Focus(layers, asked.head, tokens)


def find_layer(layers: list[Layer], wanted: str) -> Layer:
    """The layer that --layer names, by its number or its module's path. Raises ValueError with what there is."""
    found = [layer for layer in layers if layer.path == wanted]
    if len(found) > 1:
        numbers = ", ".join(str(layer.index) for layer in found)
        raise ValueError(f"--layer {wanted!r} ran {len(found)} times: say which by its number, one of {numbers}")
    if found:
        return found[0]
    if not (wanted.isascii() and wanted.isdigit()):
        raise ValueError(f"--layer {wanted!r} is neither a number nor a module; there are {_some(layers)}")
    if int(wanted) >= len(layers):
        raise ValueError(f"--layer {wanted} is out of range: there are {len(layers)} layers, counted from 0")
    return layers[int(wanted)]


def _some(layers: list[Layer]) -> str:
    names = [layer.path or "(model)" for layer in layers]
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def _tokens(labels: Sequence[str], wanted: str) -> list[int]:
    """The positions of a token: a number, or a word that may stand at several and be made of several."""
    from regard.session.labels import find_word

    if wanted.isascii() and wanted.isdigit():
        if int(wanted) >= len(labels):
            raise IndexError(f"--token {wanted} is out of range: there are {len(labels):,} tokens, counted from 0")
        return [int(wanted)]
    found = [place for run in find_word(labels, wanted) for place in run]
    if not found:
        raise ValueError(f"--token {wanted!r} is not in the text; without --token its tokens are listed with numbers")
    return found


# --------------------------------------------------------------------------------------------------------- plain values


def as_plain(session: Session, asked: Asked, lang: Lang) -> dict[str, Any]:
    """What is said of a session, in values that JSON holds.

    >>> import torch, regard
    >>> from regard.session.session import Session
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> with regard.watch(layer, keep="qk") as seen:
    ...     _ = layer(torch.zeros(1, 3, 8))
    >>> said = as_plain(Session("toy", seen, ("a", "b", "c")), Asked(token="c", layer="0", head=1), "en")
    >>> said["chosen"], [round(weight, 2) for weight in said["row"]["weights"]]
    ([2], [0.33, 0.33, 0.33])

    Raises ValueError, IndexError or LookupError for a layer, head, token or measure that is not there, and for a
    token's row where queries and keys were not kept.
    """
    from regard.locale import translate
    from regard.session.ranking import obstacle, strongest
    from regard.session.sentences import WARNING

    focus = _focus(session, asked)
    why = obstacle(focus.layers, focus.tokens)
    links: list[RankedLink] | None = None
    if why is None:
        links = strongest(
            session, focus.layers, count=asked.top, head=focus.head, queries=focus.tokens, every=asked.every
        )
    row = None if focus.tokens is None else _row(session, focus, links or [])
    return {
        "version": VERSION,
        "name": session.name,
        "text": session.text,
        "tokens": list(session.tokens),
        "chosen": focus.tokens,
        "layers": [plain_layer(layer) for layer in focus.layers],
        "measure": asked.measure,
        "atlas": atlas(session, focus.layers, asked.measure),
        "patterns": [[list(names) for names in session.numbers[layer.index].names] for layer in focus.layers],
        "rest": [list(session.numbers[layer.index].rest) for layer in focus.layers],
        "ranking": "weight" if asked.every else "far",
        "links": None if links is None else [_of_link(session, link) for link in links],
        "obstacle": why,
        "row": row,
        "head": _card(session, focus, lang),
        "warning": translate(WARNING, lang),
    }


def plain_layer(layer: Layer) -> dict[str, Any]:
    """A layer in values that JSON holds."""
    _, heads, nq, nk = layer.view.sizes
    return {
        "index": layer.index, "path": layer.path, "kind": layer.view.kind, "heads": heads, "queries": nq, "keys": nk
    }  # fmt: skip


def _of_link(session: Session, link: RankedLink) -> dict[str, Any]:
    return {**link._asdict(), "words": [session.tokens[link.query], session.tokens[link.key]]}


def atlas(session: Session, layers: list[Layer], measure: str) -> list[list[float | None]]:
    """(layers, heads), None where a layer does not know the measure. Raises ValueError for one that none knows."""
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
    return rows


def _row(session: Session, focus: _Focus, links: list[RankedLink]) -> dict[str, Any] | None:
    """The exact row of the first of the tokens in the chosen head, or in the head of their first link."""
    assert focus.tokens is not None
    if focus.head is not None:
        layer, head, token = focus.layers[0], focus.head, focus.tokens[0]
    elif links:
        layer = next(layer for layer in focus.layers if layer.index == links[0].layer)
        head, token = links[0].head, links[0].query
    else:
        return None
    if layer.start is None or not 0 <= token - layer.start < layer.view.sizes[2]:
        raise LookupError(f"token {token} asks nothing in layer {layer.index}: its queries are not tokens of this text")
    weights = layer.view.row(token - layer.start)[0, head]  # (Nk,); LookupError without q and k
    return {"layer": layer.index, "head": head, "token": token, "weights": weights.tolist()}


def _card(session: Session, focus: _Focus, lang: Lang) -> dict[str, Any] | None:
    if focus.head is None:
        return None
    from regard.explorer.answers import head

    answer = head(session, focus.layers[0].index, focus.head, lang)
    return {"sentence": answer["sentence"], "numbers": dict(answer["numbers"]), "patterns": dict(answer["patterns"])}


# ------------------------------------------------------------------------------------------------------------- showing


def show(session: Session, asked: Asked, *, json_: bool, lang: Lang, length: int | None = None) -> None:
    """Print a session, or what JSON holds of it, and write the files that were asked for.

    length: tokens of the text before it was cut; None where nothing was cut.
    """
    said = as_plain(session, asked, lang)
    written = _write_files(session, asked, said, lang)
    kept = len(session.tokens)
    if json_:
        full = length if length is not None and length > kept else None
        print(json.dumps(finite({**said, "cut_from": full, **written}), ensure_ascii=False, allow_nan=False))
        return
    say, out = speaker(lang), Terminal()
    out.print(*_title(session, said, say))
    if length is not None and length > kept:
        cut = say(f"cut: the first {kept:,} of {length:,} tokens", f"잘림: 토큰 {length:,}개 중 처음 {kept:,}개")
        out.print((cut, "yellow"))
    if unknown := unknown_words(session, lang):
        out.print((unknown, "yellow"))
    out.print()
    print_sections(said, asked, lang, out)
    print_written(written, lang, out)


def _title(session: Session, said: dict[str, Any], say: Say) -> list[Any]:
    heads = sum(layer["heads"] for layer in said["layers"])
    layers, tokens = len(said["layers"]), len(said["tokens"])
    size = say(
        f"   {tokens:,} tokens, {layers} {'layers' if layers != 1 else 'layer'}, {heads} heads",
        f"   토큰 {tokens:,}개, 레이어 {layers}개, 헤드 {heads}개",
    )
    family = "" if session.model is None else f" ({session.model.family.title})"
    return [(session.name + family, "bold"), (size, "dim")]


def print_sections(said: dict[str, Any], asked: Asked, lang: Lang, out: Terminal, tokens: bool = True) -> None:
    """Print what `as_plain` said: the tokens, the links, a row, and the atlas unless a single head is looked at."""
    from regard.cli.terminal import print_atlas

    labels = said["tokens"]
    if tokens:
        print_tokens(labels, said["chosen"] or [], lang, out)
        out.print()
    if said["row"] is None or asked.head is None:
        _print_links(said, asked, lang, out)
        out.print()
    if said["row"] is not None:
        print_row(said["row"], labels, asked.top, lang, out)
        out.print()
    if said["head"] is not None:
        out.print(said["head"]["sentence"])
    else:
        print_atlas(said, lang, out)
    out.print()
    out.print((said["warning"], "italic"))


def _print_links(said: dict[str, Any], asked: Asked, lang: Lang, out: Terminal) -> None:

    say = speaker(lang)
    if said["links"] is None:
        why = {
            "weights": say(
                "Links need q and k of the tokens: watch(model, keep='qk', tokens=…)",
                "연결을 보려면 토큰의 q와 k가 필요합니다: watch(model, keep='qk', tokens=…)",
            ),
            "length": say(
                "So long a text has too many links to rank: name a token or a layer (--token, --layer)",
                "텍스트가 길어 모든 연결을 비교하지 않습니다: --token이나 --layer를 지정하세요",
            ),
        }
        out.print((why[said["obstacle"]], "dim"))
        return
    title = (
        say("Strongest links of all tokens", "모든 토큰의 가장 강한 연결")
        if asked.every
        else say("Strongest links of words", "단어 사이의 강한 연결")
    )
    how = (
        say(", by weight", ", 가중치순")
        if asked.every
        else say(", rather far than near (--help says how)", ", 먼 것 우선 (순위 기준은 --help)")
    )
    out.print((title, "bold"), (how, "dim"))
    print_links(said["links"], said["tokens"], lang, out)


# --------------------------------------------------------------------------------------------------------------- files


def _write_files(session: Session, asked: Asked, said: dict[str, Any], lang: Lang) -> dict[str, str | None]:
    if asked.figure is not None:
        files.write(_picture(session, asked, said), asked.figure)
    named = None if asked.figure is None else str(asked.figure)
    shown = session if asked.html is None else replace(session, opening=_opening(session, asked, said))
    return write_session(shown, asked.html, asked.save, lang) | {"figure": named}


def _opening(session: Session, asked: Asked, said: dict[str, Any]) -> Opening | None:
    """Where the page opens: on the exact row or the first link that is printed; None for the page's own choice."""
    from regard.session.ranking import obstacle, strongest

    focus, row, links = _focus(session, asked), said["row"], said["links"] or []
    if row is not None:
        at = {"layer": row["layer"], "head": row["head"], "query": row["token"]}
        found = next((link for link in links if at.items() <= link.items()), at | {"key": None})
    elif links:
        found = links[0]
    elif obstacle(focus.layers, focus.tokens) is None and focus.tokens is not None:  # of what is no word, all links
        every = strongest(session, focus.layers, count=1, head=focus.head, queries=focus.tokens, every=True)
        found = every[0]._asdict() if every else None
    else:
        found = None
    if found is not None:
        start = next(layer.start for layer in focus.layers if layer.index == found["layer"])
        return {
            "layer": found["layer"],
            "head": found["head"],
            "token": found["query"] - (start or 0),
            "key": found["key"],
        }
    if asked.layer is None:
        return None
    return {"layer": focus.layers[0].index, "head": focus.head or 0, "token": None, "key": None}


def _picture(session: Session, asked: Asked, said: dict[str, Any]) -> Any:
    """The map of one head, or the atlas of all."""
    from regard.lens.display import atlas_figure, view_figure

    if asked.layer is None:
        return atlas_figure(session.capture, asked.measure)
    layer = session.layers[said["layers"][0]["index"]]
    labels = list(session.tokens) if any(session.tokens) and layer.view.sizes[3] == len(session.tokens) else None
    return view_figure(layer.view, batch=0, head=asked.head, tokens=labels)
