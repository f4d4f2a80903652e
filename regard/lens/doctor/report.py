"""What the mask doctor says, printed: the findings, a table of the masks that were really used, and their bands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from torch import Tensor

from regard import tables
from regard.lens.doctor.facts import Facts
from regard.stages import Lang


def merge_paths(paths: Iterable[str]) -> str:
    """Paths that differ in numbers only as one, with ranges; in the order in which they first come.

    >>> places(["layers.0.attn", "layers.1.attn", "layers.3.attn", "head"])
    'layers.0–1,3.attn, head'

    The model itself, whose path is "", is written (model).
    """
    stacks: dict[tuple[str, ...], list[list[str]]] = {}
    for path in dict.fromkeys(paths):
        stacks.setdefault(stack_of(path), []).append((path or "(model)").split("."))
    return ", ".join(text for members in stacks.values() for text in _merged(members))


def stack_of(path: str) -> tuple[str, ...]:
    """The path without its numbers: equal for the layers of one stack.

    >>> stack_of("encoder.layer.7.attention")
    ('encoder', 'layer', '#', 'attention')
    """
    return tuple("#" if _is_number(part) else part for part in path.split("."))


def _merged(members: list[list[str]]) -> list[str]:
    """Paths of one stack, merged along the last number that differs."""
    differing = [at for at, parts in enumerate(zip(*members, strict=True)) if len(set(parts)) > 1]
    if not differing:
        return [".".join(members[0])]
    at, groups = differing[-1], dict[tuple[str, ...], list[list[str]]]()
    for member in members:
        groups.setdefault((*member[:at], *member[at + 1 :]), []).append(member)
    ranges = (_ranges([int(member[at]) for member in group]) for group in groups.values())
    return [".".join([*rest[:at], range_, *rest[at:]]) for rest, range_ in zip(groups, ranges, strict=True)]


def _ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 → 0–2,5."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdigit()


Severity = Literal["error", "warning", "note"]
"""error: results are wrong; warning: they probably are; note: worth knowing."""

SEVERITIES: dict[Lang, dict[Severity, str]] = {
    "en": {"error": "error", "warning": "warning", "note": "note"},
    "ko": {"error": "오류", "warning": "경고", "note": "참고"},
}

WORDS_findings: dict[Lang, dict[str, tuple[str, str]]] = {
    "en": {
        "empty rows": (
            "{tokens} of {total} rows (a row is one query in one head) see no key at all; the first is {example}",
            "let each query see at least its own position; what such a row gives depends on the kernel: 0 or NaN",
        ),
        "unhidden rows": (
            "{tokens} of {total} rows (a row is one query in one head) have every key hidden by a large negative "
            "number ({start} and below), and so look at all of them alike, padding too; the first is {example}",
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
            "a decoder with right padding that generates: the last position of {rows} of {batch} batch rows is "
            "padding, and the next token is taken from there",
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
            "{why}",
        ),
        "infinity arrived": (
            "infinite numbers came in with {list}, here for the first time; later calls with some: {later}",
            "look at what runs before this module; float16 ends at 65504, bfloat16 does not",
        ),
        "infinity born": (
            "infinite numbers were born here: {list} from inputs that have none; later calls with some: {later}",
            "{why}",
        ),
        "large logits": (
            "{count} of {total} heads have logits above 10,000; head (its largest logit): {list}",
            "softmax is one-hot at such logits (entropy collapse): gradients vanish, rounding can decide which key is "
            "taken, and float16 ends at 65504; check the scale, or bound q·k by QK-norm or a softcap",
        ),
        "sinks": (
            "{count} of {total} heads rest on one key, with 0.9 of their attention or more; per layer: {list}",
            "common; leave that key out of pictures, where it would hide everything else",
        ),
        "dead heads": (
            "{count} of {total} heads look at all keys alike or say the same for every query; per layer: {list}",
            "such heads tell nothing apart; pruning them should change little",
        ),
        "edited weights": (
            "the weights were edited after the softmax, in {calls}: shown is what was multiplied with the values",
            "rows need not sum to 1: entropy is NaN in those that do not, and lse and the largest score are not known",
        ),
    },
    "ko": {
        "empty rows": (
            "{total}행 가운데 {tokens}행(헤드마다 쿼리 하나가 한 행)이 키를 하나도 보지 못함. 첫 번째는 {example}",
            "쿼리마다 적어도 자기 위치는 보게 하세요. 이런 행의 결과는 커널에 따라 0이거나 NaN입니다",
        ),
        "unhidden rows": (
            "{total}행 가운데 {tokens}행(헤드마다 쿼리 하나가 한 행)은 모든 키가 큰 음수({start} 이하)로 가려져, "
            "오히려 패딩까지 모두 고르게 봄. 첫 번째는 {example}",
            "쿼리마다 볼 수 있는 키를 남기거나, −inf 또는 불리언으로 가리세요",
        ),
        "zero-one mask": (
            "마스크가 실수 0과 1이고 점수에 더해짐: 아무것도 가리지 않음",
            "불리언으로 주거나(mask.bool()), 보이는 곳은 0, 가릴 곳은 −inf로 주세요",
        ),
        "left padding": (
            "인코더인데 배치 {batch}행 가운데 {rows}행에 왼쪽 패딩: 첫 실제 토큰이 위치 0에 있지 않음",
            "모델이 마스크로 위치를 세지 않는다면 오른쪽에 패딩하세요",
        ),
        "right padding": (
            "생성하는 디코더인데 오른쪽 패딩: 배치 {batch}행 가운데 {rows}행의 마지막 위치가 패딩이고, 다음 토큰을 "
            "거기서 읽음",
            '왼쪽에 패딩하세요(tokenizer.padding_side = "left")',
        ),
        "right padding once": (
            "디코더에 오른쪽 패딩: 배치 {batch}행 가운데 {rows}행의 마지막 위치가 패딩",
            "학습에는 맞습니다. 이어서 생성하려면 왼쪽에 패딩하거나 행마다 마지막 토큰에서 읽으세요",
        ),
        "upper left": (
            "쿼리 {nq}개, 키 {nk}개인데 왼쪽 위에서 시작하는 causal: 쿼리 0이 위치 {usual}이 아니라 {offset}에 있어, "
            "마지막 키 {unseen}개를 아무도 보지 못함",
            "torch의 is_causal은 첫 키부터 셉니다. 캐시가 있으면 마스크를 주고, 쿼리가 하나면 주지 마세요",
        ),
        "mixed causality": (
            "한 스택의 레이어가 서로 다름: {causal}은(는) 미래를 가리고, {open}은(는) 가리지 않음",
            "뒤의 레이어에 주어진 마스크를 확인하세요",
        ),
        "decoder sees ahead": (
            "이름은 디코더인데 쿼리가 뒤의 키를 봄. 마스크: {mask}",
            "모든 자리를 한 번에 채우는 디코더라면 맞습니다. 언어 모델에는 causal 마스크가 필요합니다",
        ),
        "causal twice": (
            "미래가 두 번 가려짐: causal 플래그와 마스크 둘 다",
            "둘이 같으면 해가 없습니다. 하나면 충분하고, 플래그만 쓰는 편이 빠릅니다",
        ),
        "masks differ": (
            "한 스택의 레이어에 서로 다른 마스크 {count}가지: {list}",
            "전체 레이어와 윈도 레이어가 번갈아 나오는 모델이라면 정상입니다",
        ),
        "nan arrived": (
            "NaN이 {list}와 함께 들어옴. 여기가 처음이며, 이것이 있는 이후 호출: {later}개",
            "이 모듈 앞에서 실행되는 것을 보세요: 가중치, 입력, 앞 레이어",
        ),
        "nan born": (
            "NaN이 여기서 생김: 입력에는 없는데 {list}에 있음. 이것이 있는 이후 호출: {later}개",
            "{why}",
        ),
        "infinity arrived": (
            "무한대가 {list}와 함께 들어옴. 여기가 처음이며, 이것이 있는 이후 호출: {later}개",
            "이 모듈 앞에서 실행되는 것을 보세요. float16은 65504까지이고, bfloat16은 그렇지 않습니다",
        ),
        "infinity born": (
            "무한대가 여기서 생김: 입력에는 없는데 {list}에 있음. 이것이 있는 이후 호출: {later}개",
            "{why}",
        ),
        "large logits": (
            "헤드 {total}개 가운데 {count}개의 로짓이 10,000을 넘음. 헤드(최대 로짓): {list}",
            "로짓이 이 정도면 소프트맥스가 거의 원-핫이 됩니다(엔트로피 붕괴). 기울기가 사라지고, 반올림 오차만으로 "
            "다른 키를 고를 수 있으며, float16은 65504까지입니다. scale을 확인하거나 QK-norm이나 softcap으로 q·k를 "
            "제한하세요",
        ),
        "sinks": (
            "헤드 {total}개 가운데 {count}개가 어텐션의 0.9 이상을 한 키에 둠. 레이어마다: {list}",
            "흔한 일입니다. 그림에서는 그 키를 빼세요. 다른 것이 모두 가려집니다",
        ),
        "dead heads": (
            "헤드 {total}개 가운데 {count}개가 모든 키를 고르게 보거나 쿼리가 달라도 늘 같은 가중치를 냄. "
            "레이어마다: {list}",
            "이런 헤드는 아무것도 구별하지 않습니다. 없애도 거의 달라지지 않을 것입니다",
        ),
        "edited weights": (
            "소프트맥스 뒤에 가중치가 수정됨({calls}): 실제로 밸류에 곱해진 가중치를 보여 줌",
            "행의 합이 1이 아닐 수 있습니다. 그런 행의 엔트로피는 NaN이고, lse와 최대 점수는 알 수 없습니다",
        ),
    },
}

WHY: dict[Lang, dict[str, str]] = {
    "en": {
        "empty": "some rows see nothing, of which this kernel makes NaN: let each query see at least its own position",
        "overflow": "the scores or the sum overflow: compute in bfloat16 or float32, or look for very large q and k",
    },
    "ko": {
        "empty": "아무것도 보지 못하는 행에서 이 커널은 NaN을 냅니다: 쿼리마다 적어도 자기 위치는 보게 하세요",
        "overflow": "점수나 합이 넘칩니다: bfloat16이나 float32로 계산하거나, 아주 큰 q와 k가 있는지 보세요",
    },
}

CALLS: dict[Lang, tuple[str, str]] = {"en": ("call {}", "calls {}"), "ko": ("호출 {}", "호출 {}")}


def format_calls(numbers: Sequence[int], lang: Lang = "en") -> str:
    """Some of the calls of a module.

    >>> format_calls([0, 1, 2, 5]), format_calls([3], "ko")
    ('calls 0–2, 5', '호출 3')
    """
    spans: list[list[int]] = []
    for n in numbers:
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    listed = ", ".join(f"{a}" if a == b else f"{a}–{b}" for a, b in spans)
    return CALLS[lang][len(numbers) > 1].format(listed)


EXAMPLE: dict[Lang, str] = {
    "en": "batch row {0}, head {1}, query {2}",
    "ko": "배치 {0}행, 헤드 {1}, 쿼리 {2}",
}


def check_lang(lang: Lang) -> Lang:
    """A language that there are sentences in. Raises ValueError for another.

    >>> spoken("ko")
    'ko'
    """
    if lang not in WORDS_findings:
        raise ValueError(f"lang must be 'en' or 'ko', got {lang!r}")
    return lang


Value = str | int | tuple[int, ...]


@dataclass(frozen=True)
class Finding:
    """One thing that the doctor found, in one layer or in several alike.

    >>> Finding("error", "zero-one mask", ("layers.0.attn", "layers.1.attn")).text()
    'the mask is floats 0 and 1, and these are added to the scores: it hides nothing'

    severity: "error", "warning" or "note".
    code: which of `WORDS` it is; stable, for programs.
    paths: the modules it was found in, in call order.
    values: what its sentences tell besides, by name.
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
        """All its modules, in few words."""
        return merge_paths(self.paths)

    def text(self, lang: Lang = "en") -> str:
        """What is wrong. lang: "en" or "ko"."""
        return WORDS_findings[check_lang(lang)][self.code][0].format(**self._said(lang))

    def advice(self, lang: Lang = "en") -> str:
        """What to do about it. lang: "en" or "ko"."""
        return WORDS_findings[check_lang(lang)][self.code][1].format(**self._said(lang))

    def _said(self, lang: Lang) -> dict[str, object]:
        said: dict[str, object] = dict(self.values)
        if isinstance(example := said.get("example"), tuple):
            said["example"] = EXAMPLE[lang].format(*example)
        if isinstance(calls := said.get("calls"), tuple):
            said["calls"] = format_calls(calls, lang)
        if isinstance(why := said.get("why"), str):
            said["why"] = WHY[lang][why]
        return said

    def __str__(self) -> str:
        return f"{self.severity}: {self.where}: {self.text()}. {self.advice()}"


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
