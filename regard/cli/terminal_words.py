"""Words and their links in the terminal: numbered tokens, the strongest links, and one token's row as heat and as bars.

It does not know where the numbers come from.
"""

from __future__ import annotations

from typing import Any

from regard.cli.language import Lang, Say, speaker
from regard.cli.terminal import Part, Terminal
from regard.cli.terminal_shades import fit, shade
from regard.explorer.token_words import is_word, shown, spelled, word_numbers
from regard.tables import pad, width

__all__ = ["named", "print_links", "print_row", "print_tokens"]

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
