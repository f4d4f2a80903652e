"""The mask doctor: `examine` judges the masks and the numbers of a run by a list of checks and returns a `Diagnosis`
of findings, each a message in two languages.

A check is a function from an `Examination` to findings. It reads the `Facts` kept of each call and a few numbers per
head; nothing is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from math import inf
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from regard import tables
from regard.lens.visibility import BiasKind, Facts
from regard.locale import Lang, check_lang, translate

if TYPE_CHECKING:
    from regard.lens.view import Record

MOST_DRAWN = 6  # masks; the others are in the table
LEGEND = "■ visible  ▒ partly  · hidden"
SINK = 0.9  # of a head's attention on one key
EVEN = 0.98  # of the largest entropy
STILL = 1e-3  # of its size: how much a head's output differs from query to query
LARGE_LOGIT = 1e4  # beyond which a softmax is one-hot but for keys that are all but equal
NAMED = 8  # heads that a finding names
FEWEST_KEYS = 4  # with fewer keys, to rest on one of them says nothing
INPUTS = ("q", "k", "v", "bias", "scores")

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


# ------------------------------------------------------------------------------------------------------------- findings


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


# ----------------------------------------------------------------------------------------------------------- the doctor


@dataclass(frozen=True, eq=False)
class MaskUse:
    """One mask and the modules that used it."""

    facts: Facts  # of the first call with it
    kind: str  # "self" or "cross"
    paths: tuple[str, ...]  # in call order
    calls: int
    keys: tuple[int, int]  # fewest and most; steps of generation, each with one key more, count as one mask

    def row(self, lang: Lang) -> list[str]:
        """Its row in the table."""
        low, high = self.keys
        sizes = f"{self.facts.sizes[2]} × {low if low == high else f'{low}–{high}'}"
        names = (self.kind, self.facts.mask, self.facts.causal, self.facts.bias_kind or "–")
        return [merge_paths(self.paths), *(SAID[lang].get(name, name) for name in names), sizes, str(self.calls)]

    def drawing(self, lang: Lang) -> str:
        """Its bands under a caption; of several batch rows the first that has padding."""
        bands, (_, _, nq, nk) = self.facts.bands, self.facts.sizes
        b = next((b for b, side in enumerate(self.facts.sides[: len(bands)]) if side is not None), 0)
        caption = translate(
            "{where}: {mask} ({batch}{nq} queries × {nk} keys)",
            lang,
            where=merge_paths(self.paths),
            mask=SAID[lang].get(self.facts.mask, self.facts.mask),
            batch=translate("batch row {b}, head {h}; ", lang, b=b, h=0) if bands.shape[0] * bands.shape[1] > 1 else "",
            nq=nq,
            nk=nk,
        )
        return f"{caption}\n{draw(bands[b, 0])}"


@dataclass(frozen=True, eq=False, repr=False)
class Diagnosis:
    """The result of `examine`. Prints as text, and as tables in a notebook; `text("ko")` is Korean.

    Attributes:
        findings: the most severe first, then in call order.
        masks: the masks that were used, each once.
        calls: number of calls.
        modules: number of modules that made them.
        unread: number of calls that could not be read.
    """

    findings: tuple[Finding, ...]
    masks: tuple[MaskUse, ...]
    calls: int
    modules: int
    unread: int

    @property
    def ok(self) -> bool:
        """Whether nothing worse than a note was found."""
        return all(finding.severity == "note" for finding in self.findings)

    def text(self, lang: Lang = "en") -> str:
        """All of it as text. Raises ValueError for a language other than "en" and "ko"."""
        check_lang(lang)
        indent = " " * 9
        parts = [self._title(lang)]
        for finding in self.findings:
            lines = (finding.where, finding.text(lang), f"→ {finding.advice(lang)}")
            parts.append(tables.pad(translate(finding.severity, lang), len(indent)) + f"\n{indent}".join(lines))
        if self.masks:
            parts.append(tables.text(*self._table(lang), right=[6]))
        drawn, left_out = self._drawn(lang)
        return "\n\n".join([*parts, *drawn, *([translate(LEGEND, lang)] if drawn else []), *left_out])

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        parts = [f"<p>{escape(self._title('en'))}</p>"]
        if self.findings:
            rows = [[f.severity, f.where, f.text(), f.advice()] for f in self.findings]
            parts.append(tables.html(["", "where", "what", "what to do"], rows))
        if self.masks:
            parts.append(tables.html(*self._table("en"), right=[6]))
        drawn, left_out = self._drawn("en")
        parts += [f"<pre>{escape(text)}</pre>" for text in drawn]
        parts += [f"<p>{escape(line)}</p>" for line in ([LEGEND] if drawn else []) + left_out]
        return "\n".join(parts)

    def _title(self, lang: Lang) -> str:
        counts = [(name, sum(f.severity == name for f in self.findings)) for name in get_args(Severity)]
        title = translate(
            "{calls} in {modules}: {found}",
            lang,
            calls=_count("attention call", self.calls, lang),
            modules=_count("module", self.modules, lang),
            found=", ".join(_count(name, n, lang) for name, n in counts if n) or translate("nothing found", lang),
        )
        unread = translate("calls that could not be read and are not judged: {unread}", lang, unread=self.unread)
        return f"{title}\n{unread}" if self.unread else title

    def _table(self, lang: Lang) -> tuple[list[str], list[list[str]]]:
        headers = translate("where|kind|mask|future hidden|bias|queries × keys|calls", lang).split("|")
        return headers, [use.row(lang) for use in self.masks]

    def _drawn(self, lang: Lang) -> tuple[list[str], list[str]]:
        """Drawings of the first masks, and a line on how many are left out."""
        drawable = [use for use in self.masks if use.facts.sizes[2] > 1 and bool((use.facts.bands < 255).any())]
        more = len(drawable) - MOST_DRAWN
        left_out = [translate("masks that are not drawn: {more}", lang, more=more)] if more > 0 else []
        return [use.drawing(lang) for use in drawable[:MOST_DRAWN]], left_out


def draw(bands: Tensor) -> str:
    """Bands (R, C) as text: ■ all visible, ▒ partly, · hidden."""
    return "\n".join(" ".join("■" if n == 255 else "▒" if n else "·" for n in row) for row in bands.tolist())


def _count(noun: str, n: int, lang: Lang) -> str:
    return translate(f"{{n}} {noun}" if n == 1 else f"{{n}} {noun}s", lang, n=n)


@dataclass(frozen=True)
class Examination:
    """One run: its calls in order, and whether tokens were generated one after the other."""

    records: tuple[Record, ...]
    generates: bool

    @cached_property
    def read(self) -> list[tuple[Record, Facts]]:
        """Each record with its facts."""
        return [(record, record.facts) for record in self.records if record.facts is not None]

    @cached_property
    def of_self(self) -> list[tuple[Record, Facts]]:
        """Those of self-attention with several queries: whose mask has a shape."""
        return [(r, f) for r, f in self.read if r.kind == "self" and f.sizes[2] > 1]

    @cached_property
    def stacks(self) -> list[list[tuple[Record, Facts]]]:
        """Calls of self-attention by the layers of one stack, each layer's calls by their number."""
        stacks: dict[object, list[tuple[Record, Facts]]] = {}
        for record, facts in self.of_self:
            stacks.setdefault((stack_of(record.path), record.n), []).append((record, facts))
        return list(stacks.values())


Check = Callable[[Examination], Iterable[Finding]]


def examine(
    records: Sequence[Record], *, generates: bool | None = None, checks: Sequence[Check] | None = None
) -> Diagnosis:
    """Judge the calls of one run.

    Args:
        records: its calls in order; those without facts are counted and not judged.
        generates: whether tokens were generated one by one; default: if later calls have fewer queries than keys.
        checks: which checks to run, instead of `CHECKS`.
    """
    if generates is None:
        steps = [r.facts for r in records if r.facts is not None and r.kind == "self" and r.n > 0]
        generates = any(facts.sizes[2] < facts.sizes[3] for facts in steps)
    case = Examination(tuple(records), generates)
    # Findings that say the same of several layers become one.
    same: dict[tuple[Severity, str, tuple[tuple[str, Value], ...]], list[str]] = {}
    for check in CHECKS if checks is None else checks:
        for finding in check(case):
            same.setdefault((finding.severity, finding.code, finding.values), []).extend(finding.paths)
    findings = [Finding(sev, code, tuple(dict.fromkeys(paths)), values) for (sev, code, values), paths in same.items()]
    findings.sort(key=lambda finding: get_args(Severity).index(finding.severity))
    masks: dict[object, list[tuple[Record, Facts]]] = {}
    for record, facts in case.read:
        masks.setdefault((record.kind, _mask_key(facts)), []).append((record, facts))
    uses = []
    for group in masks.values():
        (first, facts), keys = group[0], [f.sizes[3] for _, f in group]
        paths = tuple(dict.fromkeys(record.path for record, _ in group))
        uses.append(MaskUse(facts, first.kind, paths, len(group), (min(keys), max(keys))))
    modules = len({record.path for record in records})
    return Diagnosis(tuple(findings), tuple(uses), len(records), modules, len(records) - len(case.read))


def empty_rows(case: Examination) -> Iterable[Finding]:
    """Queries that see nothing, or whose keys are all hidden by finite numbers; not padding and `masks.queries`."""
    for record, facts in case.read:
        batch, heads, nq, _ = facts.sizes
        for rows in (facts.empty_rows, facts.unhidden_rows):
            if not rows.tokens:
                continue
            assert rows.example is not None, "rows that were counted have a first"
            values: dict[str, Value] = {"tokens": rows.tokens, "total": batch * heads * nq, "example": rows.example}
            if rows is facts.empty_rows:
                yield _of("error", "empty rows", record, **values)
            else:
                start = tables.number(facts.bias_from or 0.0)
                yield _of("warning", "unhidden rows", record, **values, start=start)


def zero_one_masks(case: Examination) -> Iterable[Finding]:
    """Boolean masks that were cast to floats and are added to the scores."""
    return [_of("error", "zero-one mask", r) for r, facts in case.read if facts.bias_kind == "zero-one"]


def padding_sides(case: Examination) -> Iterable[Finding]:
    """Left padding where nothing else is hidden, as in an encoder; right padding where the future is."""
    for record, facts in case.of_self:
        left, right, batch = facts.sides.count("left"), facts.sides.count("right"), facts.sizes[0]
        if left and facts.unrestricted:
            yield _of("warning", "left padding", record, rows=left, batch=batch)
        elif right and facts.causal != "no" and case.generates:
            yield _of("warning", "right padding", record, rows=right, batch=batch)
        elif right and facts.causal != "no":
            yield _of("note", "right padding once", record, rows=right, batch=batch)


def upper_left(case: Examination) -> Iterable[Finding]:
    """A causal flag that counts from the first key, though the queries are the last."""
    for record, facts in case.read:
        _, _, nq, nk = facts.sizes
        if record.kind != "self" or facts.causal not in ("flag", "both") or facts.offset is None or nq >= nk:
            continue
        unseen = nk - nq - facts.offset
        if unseen > 0:
            # A first call may be filling a cache that has room for more; a later one, or one query, is not.
            severity: Severity = "warning" if record.n or nq == 1 else "note"
            values: dict[str, Value] = {"nq": nq, "nk": nk, "offset": facts.offset, "usual": nk - nq, "unseen": unseen}
            yield _of(severity, "upper left", record, **values)


def mixed_causality(case: Examination) -> Iterable[Finding]:
    """Layers of one stack of which some hide the future and some do not."""
    for stack in case.stacks:
        open_ = [record.path for record, facts in stack if facts.causal == "no"]
        causal = [record.path for record, facts in stack if facts.causal != "no"]
        if open_ and causal:
            values = (("causal", merge_paths(causal)), ("open", merge_paths(open_)))
            yield Finding("warning", "mixed causality", tuple(open_), values)


def decoder_sees_ahead(case: Examination) -> Iterable[Finding]:
    """A layer called a decoder that hides nothing but padding."""
    return [
        _of("note", "decoder sees ahead", record, mask=facts.mask)
        for record, facts in case.of_self
        if facts.unrestricted and "decoder" in record.path.lower()
    ]


def causal_twice(case: Examination) -> Iterable[Finding]:
    """The causal flag together with a mask that hides the future as well."""
    return [_of("note", "causal twice", record) for record, facts in case.read if facts.causal == "both"]


def masks_differ(case: Examination) -> Iterable[Finding]:
    """Layers of one stack with different masks; `mixed_causality` has those that differ in causality."""
    for stack in case.stacks:
        names: dict[object, list[Record]] = {}
        texts: dict[object, str] = {}
        for record, facts in stack:
            key = _mask_key(facts)
            names.setdefault(key, []).append(record)
            texts[key] = facts.mask if facts.bias_kind is None else f"{facts.mask} with a bias ({facts.bias_kind})"
        if len(names) > 1 and len({facts.causal == "no" for _, facts in stack}) == 1:
            listed = "; ".join(f"{texts[key]}: {merge_paths(r.path for r in group)}" for key, group in names.items())
            paths = tuple(record.path for record, _ in stack)
            yield Finding("note", "masks differ", paths, (("count", len(names)), ("list", listed)))


def bad_numbers(case: Examination) -> Iterable[Finding]:
    """The first call with NaN and the first with infinity, and whether its inputs had them already."""
    for which, name in enumerate(("nan", "infinity")):
        with_some = [(r, facts) for r, facts in case.read if any(counts[which] for counts in facts.bad.values())]
        if not with_some:
            continue
        record, facts = with_some[0]
        have = {tensor: counts[which] for tensor, counts in facts.bad.items() if counts[which]}
        inputs = {tensor: n for tensor, n in have.items() if tensor in INPUTS}
        listed = ", ".join(f"{tensor} ({n})" for tensor, n in (inputs or have).items())
        values: dict[str, Value] = {"list": listed, "later": len(with_some) - 1}
        if not inputs:
            values["why"] = "empty" if facts.empty_rows.count and name == "nan" else "overflow"
        yield _of("error", f"{name} {'arrived' if inputs else 'born'}", record, **values)


def large_logits(case: Examination) -> Iterable[Finding]:
    """Heads with logits above 10,000 in any call of their layer, the largest first."""
    largest: dict[str, torch.Tensor] = {}  # (H,) of each layer
    signs: dict[str, str] = {}
    for record, _ in case.read:
        for name, sign in (("largest logit", ""), ("logit at least", "≥ ")):
            if (per_row := record.heads.get(name)) is not None and len(per_row):
                logits = torch.as_tensor(per_row).cpu().double().amax(0)
                largest[record.path] = torch.maximum(largest.get(record.path, logits), logits)
                signs[record.path] = sign
    for path, logits in largest.items():
        order = logits.argsort(descending=True, stable=True).tolist()
        heads = [h for h in order if LARGE_LOGIT < float(logits[h]) < inf]  # NaN and infinity are findings of their own
        if heads:
            listed = ", ".join(f"{h} ({signs[path]}{tables.number(float(logits[h]))})" for h in heads[:NAMED])
            more = ", …" if len(heads) > NAMED else ""
            values = (("count", len(heads)), ("total", len(logits)), ("list", listed + more))
            yield Finding("warning", "large logits", (path,), values)


def sinks(case: Examination) -> Iterable[Finding]:
    """Heads that give nearly all their attention to one key."""
    return _heads(case, "sinks", {"first": lambda x: x >= SINK, "one key": lambda x: x >= SINK})


def dead_heads(case: Examination) -> Iterable[Finding]:
    """Heads that look at all keys alike, or whose output is the same for every query."""
    return _heads(case, "dead heads", {"uniform": lambda x: x >= EVEN, "spread": lambda x: x <= STILL})


def edited_weights(case: Examination) -> Iterable[Finding]:
    """Modules that changed their weights after the softmax, and in which of their calls."""
    calls: dict[str, list[int]] = {}
    for record, facts in case.read:
        if facts.edited:
            calls.setdefault(record.path, []).append(record.n)
    return [Finding("note", "edited weights", (path,), (("calls", tuple(n)),)) for path, n in calls.items()]


def _heads(case: Examination, code: str, tests: Mapping[str, Callable[[torch.Tensor], torch.Tensor]]) -> list[Finding]:
    """Count the heads, on the mean over the batch, for which one of the tests holds: in each module's first call."""
    counts: dict[str, tuple[int, int]] = {}
    for record, facts in case.read:
        known = [(test, record.heads[name]) for name, test in tests.items() if name in record.heads]
        if known and record.path not in counts and facts.sizes[3] >= FEWEST_KEYS:
            marks = [test(torch.as_tensor(values).cpu().double().mean(0)) for test, values in known]  # (H,) each
            some = torch.stack(marks).any(0)
            counts[record.path] = int(some.sum()), some.numel()
    marked = {path: n for path, (n, _) in counts.items() if n}
    if not marked:
        return []
    total = sum(size for _, size in counts.values())
    by_number: dict[int, list[str]] = {}
    for path, n in marked.items():
        by_number.setdefault(n, []).append(path)
    listed = "; ".join(f"{merge_paths(paths)}: {n}" for n, paths in by_number.items())
    values: tuple[tuple[str, Value], ...] = (("count", sum(marked.values())), ("total", total), ("list", listed))
    return [Finding("note", code, tuple(marked), values)]


CHECKS: tuple[Check, ...] = (
    empty_rows,
    zero_one_masks,
    bad_numbers,
    large_logits,
    padding_sides,
    upper_left,
    mixed_causality,
    decoder_sees_ahead,
    causal_twice,
    masks_differ,
    sinks,
    dead_heads,
    edited_weights,
)
"""The checks that `examine` runs by default."""


def _of(severity: Severity, code: str, record: Record, **values: Value) -> Finding:
    return Finding(severity, code, (record.path,), tuple(values.items()))


def _mask_key(facts: Facts) -> tuple[object, ...]:
    """Equal for calls with one and the same mask; steps of generation differ in their number of keys alone."""
    same = (facts.mask, facts.causal, facts.bias_kind, facts.sizes[2])
    if facts.sizes[2] == 1:
        return same
    padding = None if facts.padding is None else facts.padding.numpy().tobytes()
    return (*same, facts.sizes[3], facts.bands.numpy().tobytes(), padding)
