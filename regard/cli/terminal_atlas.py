"""The atlas of a model's heads in the terminal: a row per layer, a cell per head, and the patterns that name heads.

A cell is a digit, the measure in tenths of its range, and a letter, the head's strongest pattern; colours say the digit
again. It does not know where the numbers come from.
"""

from __future__ import annotations

from collections import Counter
from math import isfinite, isnan, nan
from typing import Any

from regard.cli.language import Lang, speaker
from regard.cli.terminal import Part, Terminal
from regard.cli.terminal_shades import fit, shade
from regard.tables import pad, width

__all__ = ["LETTERS", "print_atlas"]

LETTERS = {
    "own": "o",
    "previous": "p",
    "next": "n",
    "first": "f",
    "neighbours": "b",
    "uniform": "u",
    "delimiter": "d",
    "same token": "s",
    "induction": "i",
}
MEASURES: dict[Lang, dict[str, str]] = {
    "en": {"effective": "effective keys (1/Σw²)"},
    "ko": {"entropy": "엔트로피", "effective": "유효 키 수(1/Σw²)", "received_max": "가장 많이 받은 키의 비율"},
}
PIPE = 100  # cells on a line where there is no terminal
CELL = 3
NOISE = 1e-5  # differences below it are rounding


def print_atlas(said: dict[str, Any], lang: Lang, out: Terminal) -> None:
    """Print the atlas and what its letters mean.

    >>> layers = [{"index": 0}]
    >>> said = {"measure": "entropy", "layers": layers, "atlas": [[0.5, 2.5]], "patterns": [[["first"], []]]}
    >>> print_atlas(said | {"rest": [["previous", None]]}, "en", Terminal())
    Heads by entropy: 0 is 0.5, 9 is 2.5
    head       0  1
    layer 0   0f 9·
    <BLANKLINE>
    f first ×1   rests on the first token, such as [CLS]; what goes elsewhere: previous ×1
    · no single pattern ×1
    A letter is the pattern that gets half of a head's attention or more; u: 90% of the largest entropy.

    A head whose weights are NaN is marked !!.

    said: "measure", "layers", "atlas" (layers, heads) with None where nothing is known, "patterns" names per head,
        "rest" the pattern beside the first token per head, or None.
    """
    say = speaker(lang)
    low, high = _range(said)
    scale = say(f": 0 is {low:.3g}, 9 is {high:.3g}", f": 0은 {low:.3g}, 9는 {high:.3g}")
    if isnan(low):
        scale = say(": no numbers", ": 값 없음")
    elif low == high:
        scale = say(f": {low:.3g} in every head", f": 모든 헤드에서 {low:.3g}")
    measure = _called(said["measure"], lang)
    out.print((say(f"Heads by {measure}", f"헤드별 {measure}"), "bold"), scale)
    names = [say(f"layer {layer['index']}", f"레이어 {layer['index']}") for layer in said["layers"]]
    label = max(width(name) for name in [*names, say("head", "헤드")]) + 2
    heads = max(map(len, said["atlas"]), default=0)
    block = max(1, ((out.room or PIPE) - label) // CELL)
    for first in range(0, heads, block):
        shown = range(first, min(first + block, heads))
        head = pad(say("head", "헤드"), label) + "".join(f"{h:>{CELL}}" for h in shown)
        out.print((head, "dim"))
        for name, values, patterns in zip(names, said["atlas"], said["patterns"], strict=True):
            parts: list[Part] = [(pad(name, label), "dim")]
            for h in shown:
                parts += _cell(values[h] if h < len(values) else None, patterns, h, (low, high), out)
            out.print(*parts)
    out.print()
    sound = [
        [names for names, value in zip(patterns, values, strict=False) if value is None or not isnan(value)]
        for patterns, values in zip(said["patterns"], said["atlas"], strict=True)
    ]
    broken = sum(value is not None and isnan(value) for values in said["atlas"] for value in values)
    if broken:
        told = say("!! weights are NaN: see regard doctor", "!! 가중치가 NaN입니다. regard doctor로 확인하세요.")
        out.print((f"{told} ×{broken}", "bold red"))
    _print_patterns(sound, Counter(name for row in said["rest"] for name in row if name), lang, out)


def _called(measure: str, lang: Lang) -> str:
    """As the columns of the tables are called, and the patterns in them."""
    from regard.lens.diagnosing.patterns import CALLED

    return MEASURES[lang].get(measure) or CALLED[lang].get(measure, measure)


def _range(said: dict[str, Any]) -> tuple[float, float]:
    """From 0 to 1 for a pattern, which has that scale; else from the least to the most there is, NaN if nothing is."""
    if said["measure"] in LETTERS or said["measure"] == "received_max":
        return 0.0, 1.0
    known = [v for row in said["atlas"] for v in row if v is not None and isfinite(v)]
    low, high = (min(known), max(known)) if known else (nan, nan)
    return (low, low) if f"{low:.3g}" == f"{high:.3g}" or high - low < NOISE else (low, high)


def _cell(
    value: float | None, patterns: list[list[str]], head: int, ends: tuple[float, float], out: Terminal
) -> list[Part]:
    if head >= len(patterns):
        return [" " * CELL]
    letter = LETTERS[patterns[head][0]] if patterns[head] else "·"
    if value is not None and isnan(value):
        return [" ", ("!!", "bold red")]
    if value is None or not isfinite(value):
        return [f" –{letter}"]
    low, high = ends
    place = (value - low) / (high - low) if high > low else 0.0
    digit = min(9, int(10 * max(0.0, place)))
    style = shade(max(place, 1e-6)) if out.coloured else ""
    return [" ", (f"{digit}{letter}", style)]


def _print_patterns(patterns: list[list[list[str]]], rests: Counter[str], lang: Lang, out: Terminal) -> None:
    """A line for each pattern that names a head, with how many it names first.

    rests: how often each pattern gets half of what heads do not give to the first token.
    """
    from regard.lens.diagnosing.patterns import CALLED, MEANING

    say = speaker(lang)
    meanings = dict(MEANING[lang])
    if rests:
        named = ", ".join(f"{CALLED[lang][name]} ×{rests[name]}" for name in LETTERS if rests[name])
        meanings["first"] += say(f"; what goes elsewhere: {named}", f". 그 밖으로 가는 곳: {named}")
    count = Counter(names[0] if names else "" for row in patterns for names in row)
    known = [(name, letter) for name, letter in LETTERS.items() if count[name]]
    heading = {name: f"{letter} {CALLED[lang][name]} ×{count[name]}" for name, letter in known}
    wide = max(map(width, heading.values()), default=0)
    for name, _ in known:
        meaning = fit([[(word, "")] for word in meanings[name].split()], max(16, (out.room or PIPE) - wide - 3))
        for n, line in enumerate(meaning):
            out.print((pad("" if n else heading[name], wide) + "   ", "bold"), *line)
    if count[""]:
        out.print((say(f"· no single pattern ×{count['']}", f"· 뚜렷한 패턴 없음 ×{count['']}"), "dim"))
    how = say(
        "A letter is the pattern that gets half of a head's attention or more; u: 90% of the largest entropy.",
        "글자는 헤드 어텐션의 절반 이상을 받는 패턴입니다. u는 최대 엔트로피의 90% 이상입니다.",
    )
    if known:
        out.print((how, "dim"))
