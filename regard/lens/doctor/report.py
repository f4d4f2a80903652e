"""What the mask doctor says, printed: the findings, a table of the masks that were really used, and their bands.

It arranges; `doctor.py` finds, `findings.py` has the sentences, `facts.py` the masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from torch import Tensor

from regard import tables
from regard.lens.doctor.facts import Facts
from regard.lens.doctor.findings import SEVERITIES, Finding, check_lang, merge_paths
from regard.stages import Lang

__all__ = ["Diagnosis", "MaskUse", "draw"]

MOST_DRAWN = 6  # masks; the others are in the table

WORDS: dict[Lang, dict[str, str]] = {
    "en": {
        "title": "{calls} in {modules}: {found}",
        "unread": "calls that could not be read and are not judged: {unread}",
        "nothing": "nothing found",
        "headers": "where|kind|mask|future hidden|bias|queries × keys|calls",
        "findings": "|where|what|what to do",
        "bands": "{where}: {mask} ({batch}{nq} queries × {nk} keys)",
        "batch": "batch row {b}, head {h}; ",
        "legend": "■ visible  ▒ partly  · hidden",
        "more": "masks that are not drawn: {more}",
    },
    "ko": {
        "title": "{modules}의 {calls}: {found}",
        "unread": "읽을 수 없어 판단하지 않은 호출: {unread}개",
        "nothing": "이상 없음",
        "headers": "위치|종류|마스크|미래 가림|bias|쿼리 × 키|호출",
        "findings": "|위치|내용|할 일",
        "bands": "{where}: {mask} ({batch}쿼리 {nq}개 × 키 {nk}개)",
        "batch": "배치 {b}행, 헤드 {h}; ",
        "legend": "■ 보임  ▒ 일부  · 가려짐",
        "more": "그리지 않은 마스크: {more}가지",
    },
}
SAID: dict[Lang, dict[str, str]] = {  # what facts say, in words; what is not here is said as it is
    "en": {"flag": "by the flag", "in mask": "by the mask", "both": "by both"},
    "ko": {
        "self": "셀프",
        "cross": "크로스",
        "none": "없음",
        "all visible": "모두 보임",
        "all so far": "지금까지 모두",
        "no": "아니요",
        "flag": "플래그로",
        "in mask": "마스크로",
        "both": "둘 다",
        "one query": "쿼리 하나",
        "additive": "더함",
        "zero-one": "0과 1",
        "large negative": "큰 음수",
        "minus infinity": "−∞",
    },
}


@dataclass(frozen=True, eq=False)
class MaskUse:
    """One mask and the modules that used it.

    facts: of the first call with it.
    kind: "self" or "cross".
    paths: the modules, in call order.
    calls: how many calls.
    keys: the fewest and the most keys; steps of generation are taken together, and each sees one key more.
    """

    facts: Facts
    kind: str
    paths: tuple[str, ...]
    calls: int
    keys: tuple[int, int]

    def row(self, lang: Lang) -> list[str]:
        """Its line in the table."""
        said, facts = SAID[lang], self.facts
        low, high = self.keys
        sizes = f"{facts.sizes[2]} × {low if low == high else f'{low}–{high}'}"
        names = (self.kind, facts.mask, facts.causal, facts.bias_kind or "–")
        return [merge_paths(self.paths), *(said.get(name, name) for name in names), sizes, str(self.calls)]

    @property
    def drawable(self) -> bool:
        """Is there anything to see: more than one query, and something hidden?"""
        return self.facts.sizes[2] > 1 and bool((self.facts.bands < 255).any())

    def picture(self, lang: Lang) -> str:
        """Its bands under a caption; of several batch rows the first that has padding."""
        bands = self.facts.bands
        b = next((b for b, side in enumerate(self.facts.sides[: len(bands)]) if side is not None), 0)
        b = min(b, len(bands) - 1)
        batch = WORDS[lang]["batch"].format(b=b, h=0) if bands.shape[0] * bands.shape[1] > 1 else ""
        _, _, nq, nk = self.facts.sizes
        mask = SAID[lang].get(self.facts.mask, self.facts.mask)
        caption = WORDS[lang]["bands"].format(where=merge_paths(self.paths), mask=mask, batch=batch, nq=nq, nk=nk)
        return f"{caption}\n{draw(bands[b, 0])}"


@dataclass(frozen=True, eq=False, repr=False)
class Diagnosis:
    """What `examine` found. Prints as text, and as tables in a notebook; `text("ko")` is Korean.

    findings: the gravest first, then in call order.
    masks: the masks that were used, each once.
    calls, modules: how many calls were looked at, and of how many modules.
    unread: how many calls there were of which nothing is known.
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
        words = WORDS[check_lang(lang)]
        parts = [self._title(lang), *(_paragraph(finding, lang) for finding in self.findings)]
        if self.masks:
            parts.append(tables.text(*self._table(lang), right=[6]))
        parts += [use.picture(lang) for use in self._drawn()]
        if self._drawn():
            parts.append(words["legend"])
        return "\n\n".join(parts + self._left_out(lang))

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        parts = [f"<p>{escape(self._title('en'))}</p>"]
        if self.findings:
            rows = [[f.severity, f.where, f.text(), f.advice()] for f in self.findings]
            parts.append(tables.html(WORDS["en"]["findings"].split("|"), rows))
        if self.masks:
            parts.append(tables.html(*self._table("en"), right=[6]))
        parts += [f"<pre>{escape(use.picture('en'))}</pre>" for use in self._drawn()]
        if self._drawn():
            parts.append(f"<p>{escape(WORDS['en']['legend'])}</p>")
        return "\n".join(parts + [f"<p>{escape(line)}</p>" for line in self._left_out("en")])

    def _title(self, lang: Lang) -> str:
        words = WORDS[lang]
        found = {severity: sum(f.severity == severity for f in self.findings) for severity in SEVERITIES["en"]}
        counted = [_many(lang, severity, SEVERITIES["ko"][severity], n) for severity, n in found.items() if n]
        title = words["title"].format(
            calls=_many(lang, "attention call", "어텐션 호출", self.calls),
            modules=_many(lang, "module", "모듈", self.modules),
            found=", ".join(counted) or words["nothing"],
        )
        return f"{title}\n{words['unread'].format(unread=self.unread)}" if self.unread else title

    def _table(self, lang: Lang) -> tuple[list[str], list[list[str]]]:
        return WORDS[lang]["headers"].split("|"), [use.row(lang) for use in self.masks]

    def _drawn(self) -> Sequence[MaskUse]:
        return [use for use in self.masks if use.drawable][:MOST_DRAWN]

    def _left_out(self, lang: Lang) -> list[str]:
        more = sum(use.drawable for use in self.masks) - len(self._drawn())
        return [WORDS[lang]["more"].format(more=more)] if more else []


def draw(bands: Tensor) -> str:
    """Bands (R, C) as text: ■ all visible, ▒ partly, · hidden.

    >>> import torch
    >>> print(draw(torch.tensor([[255, 0], [255, 128]])))
    ■ ·
    ■ ▒
    """
    return "\n".join(" ".join("■" if n == 255 else "▒" if n else "·" for n in row) for row in bands.tolist())


def _many(lang: Lang, one: str, korean: str, n: int) -> str:
    return f"{korean} {n}개" if lang == "ko" else f"{n} {one if n == 1 else f'{one}s'}"


def _paragraph(finding: Finding, lang: Lang) -> str:
    word = SEVERITIES[lang][finding.severity]
    indent = " " * 9
    lines = (finding.where, finding.text(lang), f"→ {finding.advice(lang)}")
    return tables.pad(word, len(indent)) + f"\n{indent}".join(lines)
