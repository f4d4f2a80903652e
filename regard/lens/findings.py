"""`Finding`: one thing that the doctor found, in two languages; modules, calls and values of `Facts` in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from regard.lens.visibility import BiasKind
from regard.locale import Lang, check_lang, translate

Severity = Literal["error", "warning", "note"]
"""error: results are wrong; warning: they probably are; note: worth knowing."""

Value = str | int | tuple[int, ...]

FINDINGS: dict[str, tuple[str, str]] = {
    "empty rows": (
        "{tokens} of {total} rows (a row is one query in one head) see no key at all; the first is {example}",
        "let each query see at least its own position; what such a row gives depends on the kernel: 0 or NaN",
    ),
    "unhidden rows": (
        "{tokens} of {total} rows (a row is one query in one head) have every key hidden by a large negative number "
        "({start} and below), and so look at all of them alike, padding too; the first is {example}",
        "leave each query a key to see, or hide with −inf or with booleans",
    ),
    "zero-one mask": (
        "the mask is floats 0 and 1, and these are added to the scores: it hides nothing",
        "pass it as booleans (mask.bool()), or as 0 for visible and −inf for hidden",
    ),
    "left padding": (
        "an encoder with left padding, in {rows} of {batch} batch rows: the first real token does not stand at "
        "position 0",
        "pad on the right, unless the model numbers its positions by the mask",
    ),
    "right padding": (
        "a decoder with right padding that generates: the last position of {rows} of {batch} batch rows is padding, "
        "and the next token is taken from there",
        'pad on the left (tokenizer.padding_side = "left")',
    ),
    "right padding once": (
        "a decoder with right padding, in {rows} of {batch} batch rows: their last position is padding",
        "right for training; to continue the text, pad on the left or read each row at its last token",
    ),
    "upper left": (
        "causal from the upper left, with {nq} queries and {nk} keys: query 0 stands at position {offset} instead "
        "of {usual}, so that nobody sees the last keys ({unseen})",
        "torch's is_causal counts from the first key; behind a cache, pass a mask, or none for a single query",
    ),
    "mixed causality": (
        "layers of one stack differ: {causal} hide the future, {open} do not",
        "check the mask that the second ones are given",
    ),
    "decoder sees ahead": (
        "named a decoder, but every query sees the keys after it as well; mask: {mask}",
        "right for decoders that fill all places at once; a language model needs a causal mask",
    ),
    "causal twice": (
        "the future is hidden twice, by the causal flag and by the mask",
        "harmless where both agree; one of them is enough, and the flag alone is faster",
    ),
    "masks differ": (
        "layers of one stack have {count} different masks: {list}",
        "as it should be where full and windowed layers alternate",
    ),
    "nan arrived": (
        "NaN came in with {list}, here for the first time; later calls with some: {later}",
        "look at what runs before this module: its weights, its inputs, the layer before",
    ),
    "nan born": (
        "NaN was born here: {list} from inputs that have none; later calls with some: {later}",
        "",
    ),
    "infinity arrived": (
        "infinite numbers came in with {list}, here for the first time; later calls with some: {later}",
        "look at what runs before this module; float16 ends at 65504, bfloat16 does not",
    ),
    "infinity born": (
        "infinite numbers were born here: {list} from inputs that have none; later calls with some: {later}",
        "",
    ),
    "large logits": (
        "{count} of {total} heads have logits above 10,000; head (its largest logit): {list}",
        "softmax is one-hot at such logits (entropy collapse): gradients vanish, rounding can decide which key is "
        "taken, and float16 ends at 65504; check the scale, or bound q·k by QK-norm or a softcap",
    ),
    "sinks": (
        "{count} of {total} heads rest on one key, with 0.9 of their attention or more; per layer: {list}",
        "common; leave that key out of figures, where it would hide everything else",
    ),
    "dead heads": (
        "{count} of {total} heads look at all keys alike or say the same for every query; per layer: {list}",
        "such heads tell nothing apart; pruning them should change little",
    ),
    "edited weights": (
        "the weights were edited after the softmax, in {calls}: shown is what was multiplied with the values",
        "rows need not sum to 1: entropy is NaN in those that do not, and lse and the largest score are not known",
    ),
}
"""Code of a finding → what is wrong, and what to do; where the latter is empty, `WHY` has it."""

WHY = {
    "empty": "some rows see nothing, of which this kernel makes NaN: let each query see at least its own position",
    "overflow": "the scores or the sum overflow: compute in bfloat16 or float32, or look for very large q and k",
}

TERMS = {
    **{name: name for name in ("self", "cross", "none", "all visible", "all so far", "no", "one query")},
    **{kind: kind for kind in get_args(BiasKind)},
    "flag": "by the flag",
    "in mask": "by the mask",
    "both": "by both",
}
SAID: dict[Lang, dict[str, str]] = {
    lang: {code: translate(text, lang) for code, text in TERMS.items()} for lang in get_args(Lang)
}
"""Values of `Facts` in words, by language; other values are printed as they are."""


def format_ranges(numbers: Iterable[int], comma: str = ",") -> str:
    """Ascending numbers with ranges: 0–2,5."""
    ascending = sorted(set(numbers))
    starts = [n for n in ascending if n - 1 not in ascending]
    ends = [n for n in ascending if n + 1 not in ascending]
    return comma.join(str(a) if a == b else f"{a}–{b}" for a, b in zip(starts, ends, strict=True))


def format_calls(numbers: Sequence[int], lang: Lang = "en") -> str:
    """Some of the calls of a module: calls 0–2, 5."""
    calls = format_ranges(numbers, ", ")
    return translate("calls {calls}" if len(numbers) > 1 else "call {calls}", lang, calls=calls)


def stack_of(path: str) -> tuple[str, ...]:
    """The path with # for its numbers: equal for the layers of one stack."""
    return tuple("#" if part.isascii() and part.isdigit() else part for part in path.split("."))


def merge_paths(paths: Iterable[str]) -> str:
    """Paths that differ in numbers only as one, with ranges, in order of appearance. The model itself is (model).

    >>> merge_paths(["layers.0.attn", "layers.1.attn", "layers.3.attn", "head"])
    'layers.0–1,3.attn, head'
    """
    stacks: dict[tuple[str, ...], list[list[str]]] = {}
    for path in dict.fromkeys(paths):
        stacks.setdefault(stack_of(path), []).append((path or "(model)").split("."))
    merged = []
    for members in stacks.values():
        differing = [at for at, parts in enumerate(zip(*members, strict=True)) if len(set(parts)) > 1]
        if not differing:
            merged.append(".".join(members[0]))
            continue
        at, groups = differing[-1], dict[tuple[str, ...], list[int]]()
        for member in members:
            groups.setdefault((*member[:at], *member[at + 1 :]), []).append(int(member[at]))
        merged += [".".join([*rest[:at], format_ranges(n), *rest[at:]]) for rest, n in groups.items()]
    return ", ".join(merged)


@dataclass(frozen=True)
class Finding:
    """One thing that the doctor found, in one layer or in several alike.

    Attributes:
        severity: "error", "warning" or "note".
        code: a key of `FINDINGS`; stable, for programs.
        paths: the modules it was found in, in call order.
        values: the values of its sentences, by name.

    Example:
        >>> Finding("error", "zero-one mask", ("layers.0.attn", "layers.1.attn")).text()
        'the mask is floats 0 and 1, and these are added to the scores: it hides nothing'
    """

    severity: Severity
    code: str
    paths: tuple[str, ...]
    values: tuple[tuple[str, Value], ...] = ()

    @property
    def path(self) -> str:
        """The first module it was found in."""
        return self.paths[0]

    @property
    def where(self) -> str:
        """All its modules, merged."""
        return merge_paths(self.paths)

    def text(self, lang: Lang = "en") -> str:
        """What is wrong. lang: "en" or "ko"."""
        return self._sentence(FINDINGS[self.code][0], lang)

    def advice(self, lang: Lang = "en") -> str:
        """What to do about it. lang: "en" or "ko"."""
        return self._sentence(FINDINGS[self.code][1] or WHY[str(dict(self.values)["why"])], lang)

    def _sentence(self, template: str, lang: Lang) -> str:
        check_lang(lang)
        values: dict[str, object] = dict(self.values)
        if isinstance(example := values.get("example"), tuple):
            batch, head, query = example
            text = "batch row {batch}, head {head}, query {query}"
            values["example"] = translate(text, lang, batch=batch, head=head, query=query)
        if isinstance(calls := values.get("calls"), tuple):
            values["calls"] = format_calls(calls, lang)
        return translate(template, lang, **values)

    def __str__(self) -> str:
        return f"{self.severity}: {self.where}: {self.text()}. {self.advice()}"
