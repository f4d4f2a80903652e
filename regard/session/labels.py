r"""Token labels as people read them: which make a word, and where it stands; and what a head does, in a sentence.

A label is what a tokenizer calls a token: "##ing", " cat", "[CLS]", "\xec" for a byte.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Literal
from unicodedata import lookup, name, normalize

from regard.lens.overlays import ImagePatches, name_kind
from regard.lens.patterns import KEYS, REST
from regard.locale import Lang, translate

if TYPE_CHECKING:
    from regard.session.heads import Sink
    from regard.session.protocol import NumbersJSON
    from regard.session.session import Session

SPECIAL = re.compile(r"\[[A-Z]+\d*\]|<(?!0x)\|?[^<>\s]+\|?>")
JAMO = ("HANGUL CHOSEONG ", "HANGUL JUNGSEONG ", "HANGUL JONGSEONG ")
LONGEST = 40  # characters: a token may have a million
SPACES = {"\n": "↵", "\t": "⇥"}
BYTES = re.compile(r" ?((?:\\x[0-9a-f]{2})+|(?:<0x[0-9A-F]{2}>)+)")  # a part of a character


def is_word(label: str) -> bool:
    """Whether a token is neither special nor punctuation. An unknown label, "", counts as a word."""
    bare = label.strip()
    return not label or (not SPECIAL.fullmatch(bare) and any(letter.isalnum() for letter in bare))


def shown(label: str) -> str:
    r"""A label for a line of text: no space around it, nothing that moves a cursor, single jamo as letters, cut at 40.

    >>> shown(" cat"), shown(" "), shown("a\x1b[2J"), shown("##\u1161")
    ('cat', '␣', 'a\\x1b[2J', '##ㅏ')
    """
    bare = normalize("NFC", label).strip(" ")
    if not bare:
        return "␣" if label else ""
    signs = "".join(_sign(letter) for letter in bare[: LONGEST + 1])
    return signs if len(signs) <= LONGEST else signs[: LONGEST - 1] + "…"


def _sign(letter: str) -> str:
    """One character that is safe to print and takes a cell of its own: a vowel without its consonant has none."""
    title = name(letter, "")
    for kind in JAMO:
        if title.startswith(kind):
            try:
                return lookup("HANGUL LETTER " + title.removeprefix(kind))
            except KeyError:  # an old letter that stands nowhere alone
                return letter
    if letter in SPACES:
        return SPACES[letter]
    return letter if letter.isprintable() else letter.encode("unicode_escape").decode()


def word_numbers(labels: Sequence[str]) -> list[int]:
    r"""For each token the number of the word it belongs to: pieces of one word, or bytes of one character, share it.

    >>> word_numbers(["[CLS]", "token", "##ization", "."]), word_numbers(["The", " c", "at", "."])
    ([0, 1, 1, 2], [0, 1, 1, 2])
    >>> word_numbers(["so", r" \xf0\x9f", r"\x98\x80", "!"])
    [0, 1, 1, 2]
    """
    by_space = any(len(label) > 1 and label[0] == " " for label in labels)  # else ## marks a piece that goes on
    numbers: list[int] = []
    for n, label in enumerate(labels):
        joined = label.startswith("##") and len(label) > 2
        if by_space and n:
            joined = is_word(label) and is_word(labels[n - 1]) and not label.startswith(" ") and bool(label)
            joined = joined and bool(labels[n - 1].strip())
        if n and _bytes(labels[n - 1]) and _bytes(label):
            joined = joined or 0x80 <= _bytes(label)[0] < 0xC0  # a byte that continues a character
        numbers.append((numbers[-1] if joined else numbers[-1] + 1) if numbers else 0)
    return numbers


def _bytes(label: str) -> bytes:
    """The bytes that a label names; none if it is text."""
    return bytes.fromhex(re.sub(r"[^0-9a-f]|0x", "", label.lower())) if BYTES.fullmatch(label) else b""


def spelled(labels: Sequence[str]) -> str:
    """The word that pieces make: "tokenization" of "token" and "##ization"; bytes become characters."""
    pieces = [label.removeprefix("##") for label in labels]
    word = "".join(pieces)
    if any(map(_bytes, labels)):
        with suppress(UnicodeDecodeError):
            word = b"".join(_bytes(piece) or piece.encode() for piece in pieces).decode()
    return normalize("NFC", word).strip()


def token_name(labels: Sequence[str], place: int) -> str:
    r"""A token as it is called in a link: its word, and in brackets the piece of it where it is not the whole.

    >>> labels = ["the", "token", "##ization"]
    >>> token_name(labels, 0), token_name(labels, 2), token_name(["", ""], 1)
    ('the', 'tokenization[##ization]', '1')
    >>> token_name([r"\xe2\x98", r"\x83"], 1)
    '☃'
    """
    piece = shown(labels[place])
    if not piece:
        return str(place)
    near = range(max(0, place - 32), min(len(labels), place + 33))  # a word has not more pieces than that
    numbers = word_numbers([labels[n] for n in near])
    own = numbers[place - near.start]
    pieces = [labels[n] for n, number in zip(near, numbers, strict=True) if number == own]
    if len(pieces) == 1:
        return piece
    word = shown(spelled(pieces))
    return word if all(map(_bytes, pieces)) else f"{word}[{piece}]"


def find_word(labels: Sequence[str], wanted: str) -> list[range]:
    """The runs of tokens that spell a word, ignoring case."""

    def folded(pieces: Sequence[str]) -> str:  # jamo that a tokenizer took apart are the beginning of their syllable
        return normalize("NFD", spelled(pieces).casefold())

    target = folded([wanted])
    runs = []
    for start in range(len(labels) if target else 0):
        text = ""
        for stop in range(start + 1, len(labels) + 1):
            text = folded(labels[start:stop])
            if not text or len(text) >= len(target) or not target.startswith(text):
                break
        if text == target:
            runs.append(range(start, stop))
    return runs


# ------------------------------------------------------------------------------------------------------------ sentences

WARNING = (
    "Weights say where a head reads from, not why the model answers as it does: a large weight need not change the "
    "output."
)
MOSTLY = 0.75  # of what both neighbours get: then the previous or next token alone is named
STANDS_OUT = 0.1  # score of a link (weight beyond its key's mean) from which on it is mentioned


def sentence(session: Session, layer: int, head: int, numbers: NumbersJSON, lang: Lang) -> str:
    """A head in words: its pattern, over how many keys it spreads, and which key receives most; or that it has NaN."""
    measured, where = session.numbers[layer], {"layer": layer, "head": head}
    if measured.nan(head):
        return translate(
            "Head {head} of layer {layer} has weights that are NaN, so nothing else can be said of it. "
            "capture.doctor(), or regard doctor, says where NaN came first.",
            lang,
            **where,
        )
    parts = _pattern(session, layer, head, lang)
    if numbers["effective"] is not None:
        count = f"{numbers['effective']:.1f}"
        parts.append(translate("A query spreads over {count} effective keys (1/Σw²) on average.", lang, count=count))
    share, first, last = numbers["received_max"], numbers["received_key"], numbers["received_last"]
    sink = session.sinks(layer)[head]
    named_key = sink.key if sink is not None else None if measured.names[head] else _first_key(session, layer)
    if share is None or first is None or last is None or (first == last == named_key and share >= REST):
        return " ".join(parts)
    amount, word = _percent(share), token_label(session, layer, first)
    key = f"{first} “{word[:64]}”" if word else str(first)
    if first != last:
        most = "Tokens {first} to {last} receive most: {share} of all attention each."
        parts.append(translate(most, lang, first=first, last=last, share=amount))
    elif session.layers[layer].windows == 1:
        parts.append(translate("Token {key} receives most: {share} of all attention.", lang, key=key, share=amount))
    else:
        most = "Token {key} receives most: {share} of the attention in its window."
        parts.append(translate(most, lang, key=key, share=amount))
    return " ".join(parts)


def _pattern(session: Session, layer: int, head: int, lang: Lang) -> list[str]:
    """The pattern with at least half of the head's attention, and what the rest does; or that there is none."""
    measured, where = session.numbers[layer], {"layer": layer, "head": head}
    shares = {name: float(values[head]) for name, values in measured.shares.items()}
    if not shares:
        return [translate("Head {head} of layer {layer}: its patterns were not measured.", lang, **where)]
    keys, first = dict(KEYS[lang]), _first_key(session, layer)
    if first is not None and (word := shown(token_label(session, layer, first))):
        keys["first"] = translate("the first token (“{word}”)", lang, word=word)
    if (sink := session.sinks(layer)[head]) is not None:
        return _resting(session, layer, head, sink, keys, lang)
    if not measured.names[head]:  # what the first token gets, and the pattern that comes nearest
        order = sorted((name for name in shares if name != "uniform"), key=lambda name: -shares[name])
        nearest = [name for name in order if name != "first"][:1]
        named = [n for n in order if n in nearest or (n == "first" and (shares[n] >= REST or not nearest))]
        one, *two = ((_percent(min(shares[name], 0.494)), keys[name]) for name in named)  # not "50%" for 0.497
        fields = where | {"share": one[0], "keys": one[1]}
        if two:
            none = (
                "Head {head} of layer {layer} follows no single pattern: {share} of its attention goes to {keys} and "
                "{share2} to {keys2}."
            )
            text = translate(none, lang, **fields, share2=two[0][0], keys2=two[0][1])
        else:
            none = "Head {head} of layer {layer} follows no single pattern: {share} of its attention goes to {keys}."
            text = translate(none, lang, **fields)
        return [text, *_link(session, layer, head, lang)]
    name = measured.names[head][0]
    fields = where | {"share": _percent(shares[name])}
    if name == "uniform":
        uniform = (
            "Head {head} of layer {layer} spreads about evenly over all that it sees: its entropy is {share} of the "
            "largest possible."
        )
        return [translate(uniform, lang, **fields)]
    looks = "Head {head} of layer {layer} looks at {keys}: {share} of its attention goes there."
    return [translate(looks, lang, **fields, keys=keys[name])]


def _resting(session: Session, layer: int, head: int, sink: Sink, keys: dict[str, str], lang: Lang) -> list[str]:
    """Where a head rests, and what gets most of its other attention."""
    if sink.pattern is not None:
        place = keys[sink.pattern]
    else:
        assert sink.key is not None
        word = shown(token_label(session, layer, sink.key))
        place = translate("token {key} (“{word}”)", lang, key=sink.key, word=word or "?")
    fields = {"layer": layer, "head": head, "share": _percent(sink.share), "keys": place}
    rests = "Head {head} of layer {layer} rests on {keys}: {share} of its attention goes there."
    parts, rest = [translate(rests, lang, **fields)], 1 - sink.share
    if rest < REST or not sink.rest:
        return parts
    near, both = max(sink.rest.get("previous", 0), sink.rest.get("next", 0)), sink.rest.get("neighbours", 0)
    single = near >= 0.5 or (both < 0.5 and near >= MOSTLY * both)
    names = [name for name in sink.rest if name != "neighbours" or not single]
    best = max(names, key=lambda name: sink.rest[name])
    values = {"rest": _percent(rest), "share": _percent(sink.rest[best]), "keys": keys[best]}
    if sink.rest[best] >= 0.5:
        return [*parts, translate("Of the other {rest}, {share} goes to {keys}.", lang, **values)]
    values["share"] = _percent(min(sink.rest[best], 0.494))  # not "50%" for 0.497
    none = "The other {rest} follows no single pattern; the largest part, {share} of it, goes to {keys}."
    return [*parts, translate(none, lang, **values), *_link(session, layer, head, lang)]


def _link(session: Session, layer: int, head: int, lang: Lang) -> list[str]:
    score, link = session.ranked.get((layer, head), (0.0, None))
    if link is None or score < STANDS_OUT:
        return []
    query, key = (f"“{shown(word)}”" if (word := session.tokens[at]) else str(at) for at in (link.query, link.key))
    stands_out = "Among words, {query} → {key} stands out with {weight}."
    return [translate(stands_out, lang, query=query, key=key, weight=f"{link.weight:.2f}")]


def _first_key(session: Session, layer: int) -> int | None:
    """The first key that is not padding; None if each window has its own."""
    seen = session.layers[layer]
    padding = seen.view.place.padding
    real = (~padding[0]).nonzero() if padding is not None else None
    if seen.windows > 1 or (real is not None and len(real) == 0):
        return None
    return 0 if real is None else int(real[0])


def _percent(share: float) -> str:
    """Two digits that count: 52%, 0.52%, 0.0052%."""
    return f"{share:.0%}" if share >= 0.1 else f"{100 * share:.2g}%"


def token_label(session: Session, layer: int, token: int, side: Literal["queries", "keys"] = "keys") -> str:
    """A query or key of a layer: its token, a patch's row and column, or what kind it is; "" if unknown."""
    seen = session.layers[layer]
    if seen.sides is None:
        start, count = ((seen.start or 0), seen.sizes[0]) if side == "queries" else (0, seen.sizes[1])
        fits = seen.start is not None or count == len(session.tokens)  # else they are another sequence's words
        return session.tokens[start + token] if fits and start + token < len(session.tokens) else ""
    layout = getattr(seen.sides, side)
    window, index = divmod(token, layout.shape[1])
    kind, image = str(layout.kind[window, index]), int(layout.image[window, index])
    if kind == "text":
        return session.tokens[index] if layout.kind.size == len(session.tokens) else ""
    if kind == "patch":
        patches = ImagePatches(layout, seen.sides.frames[image], image)
        number = patches.number((window, index))
        assert number is not None
        row, column = patches.cells[number].tolist()
        return f"({row}, {column})"
    return name_kind(layout, (window, index))
