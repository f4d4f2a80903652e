"""What `regard.verify` found, as values that print: a line for each comparison, and the certificate they make up.

>>> line = Line(TensorPlace("", 3, "attention weights"), 0.5, 1e-7, 4e-7, 0.4, 3e-16)
>>> line.verdict, str(line.place)
('bug', 'layer 3, attention weights')
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, Literal, NamedTuple

from regard.tables import number, text

__all__ = ["Certificate", "Lang", "Line", "TensorPlace", "Verdict"]

Verdict = Literal["same", "rounding", "bug"]
Lang = Literal["en", "ko"]

KOREAN = {
    "token ids": "토큰 id",
    "embedding": "임베딩",
    "attention weights": "어텐션 가중치",
    "cross-attention weights": "크로스 어텐션 가중치",
    "hidden states": "은닉 상태",
    "pooled": "풀링 벡터",
    "next sentence": "다음 문장",
    "last norm": "마지막 norm",
    "text vectors": "텍스트 벡터",
    "picture vectors": "이미지 벡터",
    "cosines": "코사인",
    "logits": "로짓",
    "greedy ids": "그리디 생성 id",
    "encoder": "인코더",
    "decoder": "디코더",
    "picture": "이미지",
    "text": "텍스트",
    "question": "질문",
    "answer": "답",
    "same": "같음",
    "rounding": "반올림",
    "bug": "버그",
}


class TensorPlace(NamedTuple):
    """Where in a model something was compared.

    part: "encoder" or "decoder" of a model that has both; "picture", "text", "question" or "answer" of one that has
      such; else "".
    layer: counted from 0, as blocks and checkpoints count; None outside the layers. Swin's are its stages.
    what: token ids, embedding, attention weights (of a stage, its last block's), cross-attention weights, hidden
      states (after the layer; the last layer's after the model's last norm, but for those that have "last norm" by
      itself), last norm, pooled, next sentence, text vectors, picture vectors, cosines, logits, greedy ids.
    """

    part: str
    layer: int | None
    what: str

    def __str__(self) -> str:
        return self.text("en")

    def text(self, lang: Lang) -> str:
        """In words.

        >>> TensorPlace("decoder", 0, "hidden states").text("ko")
        '디코더 레이어 0, 은닉 상태'
        """
        layer = "" if self.layer is None else _say(lang, f"layer {self.layer}", f"레이어 {self.layer}")
        where = " ".join(x for x in (_word(lang, self.part), layer) if x)
        return f"{where}, {_word(lang, self.what)}" if where else _word(lang, self.what)


@dataclass(frozen=True)
class Line:
    """One comparison: the largest error of ours and of the baseline against the truth.

    error, baseline, allowed: in the dtype of the certificate. For ids, how many differ, of which none may.
    wide, wide_allowed: the same in fp64, where something failed and all was run again; else None.
    """

    place: TensorPlace
    error: float
    baseline: float
    allowed: float
    wide: float | None = None
    wide_allowed: float | None = None

    @property
    def within(self) -> bool:
        """Does it obey the rule in the certificate's dtype?"""
        return isfinite(self.error) and self.error <= self.allowed

    @property
    def verdict(self) -> Verdict:
        """Same; rounding, where it fails but not in fp64; bug, where it fails in fp64."""
        if self.wide is None or self.wide_allowed is None:
            return "same" if self.within else "bug"
        if not (isfinite(self.wide) and self.wide <= self.wide_allowed):
            return "bug"
        return "same" if self.within else "rounding"

    @property
    def share(self) -> float:
        """How much of what is allowed the error takes; above 1 is too much."""
        return self.error / self.allowed if self.allowed else (inf if self.error else 0.0)


@dataclass(frozen=True, repr=False)
class Certificate:
    """Does regard compute what transformers computes with this checkpoint? True if so; prints as a verdict and a table.

    model: the checkpoint.  architecture: the class of transformers it was compared with.
    dtype, device, versions: in what, where and with which libraries.  texts, tokens: how many were compared.
    random_ids: there was no tokenizer, so ids were drawn.  new_tokens: how many were generated; None without words.
    narrow: transformers computes parts of this model in fp32 even when it is in fp64.
    lines: every comparison, in the order of the computation.
    pictures: how many were compared; their pixels are drawn, and the ids of texts beside them.
    not_compared: what this kind of model makes and no line is about.
    """

    model: str
    architecture: str
    dtype: str
    device: str
    versions: dict[str, str]
    texts: int
    tokens: int
    random_ids: bool
    new_tokens: int | None
    narrow: bool
    lines: tuple[Line, ...]
    pictures: int = 0
    not_compared: tuple[str, ...] = ()

    @property
    def result(self) -> Verdict:
        """The gravest verdict of the lines."""
        found = {line.verdict for line in self.lines}
        return "bug" if "bug" in found else "rounding" if "rounding" in found else "same"

    @property
    def passed(self) -> bool:
        """Do both compute the same function? Rounding beyond the rule is said, and is no other function."""
        return self.result != "bug"

    @property
    def first(self) -> Line | None:
        """The first line, in the order of the computation, that is what the result says; None if all is the same."""
        return next((line for line in self.lines if line.verdict == self.result != "same"), None)

    @property
    def verdict(self) -> str:
        """One line."""
        return self._verdict("en")

    def text(self, lang: Lang = "en") -> str:
        """Verdict, table and notes in a language: of each kind of comparison the line that takes most of its allowance.

        lang: "en" or "ko".
        """
        about = f"{self.model}, {self.architecture}, {self.dtype}, {self.device}"
        return "\n".join([self._verdict(lang), "", about, "", self._table(lang), *self._notes(lang)])

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, every line among them; an error that is not finite is one of "inf" and "nan"."""
        plain = {name: value for name, value in vars(self).items() if name != "lines"}
        plain["not_compared"] = list(self.not_compared)
        lines = [_plain(line) for line in self.lines]
        return {"verdict": self.verdict, "result": self.result, "passed": self.passed, **plain, "lines": lines}

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return str(self)

    # ------------------------------------------------------------------------------------------------------------ words

    def _verdict(self, lang: Lang) -> str:
        n, peer, first = len(self.lines), f"transformers {self.versions['transformers']}", self.first
        if first is None:
            return _say(
                lang,
                f"same: {n} comparisons with {peer} in {self.dtype}, all within the numeric rule",
                f"같음: {n}가지를 비교했고 모두 수치 규칙 안에 있습니다({peer}, {self.dtype})",
            )
        where = first.place.text(lang)
        if self.result == "rounding":
            return _say(
                lang,
                f"rounding: more than the rule allows in {self.dtype}, first in {where}; in fp64 the gap is gone",
                f"반올림: {self.dtype}에서 규칙보다 큰 차이가 있고(처음: {where}) fp64에서는 사라집니다",
            )
        return _say(lang, f"bug: first in {where}", f"버그: 처음 나타나는 곳은 {where}")

    def _table(self, lang: Lang) -> str:
        headers = _say(
            lang,
            "compared/where/our error/theirs/allowed",
            "비교 대상/위치/regard 오차/transformers 오차/허용 오차",
        )
        wide = any(line.wide is not None for line in self.lines)
        columns = headers.split("/")
        if wide:
            columns += _say(lang, "in fp64/allowed there", "fp64 오차/fp64 허용").split("/")
        columns.append(_say(lang, "verdict", "판정"))
        rows = [self._row(line, lang, wide) for line in self._shown()]
        return text(columns, rows, right=range(2, len(columns) - 1))

    def _row(self, line: Line, lang: Lang, wide: bool) -> list[str]:
        place = line.place
        layers = [other for other in self.lines if _kind(other) == _kind(line)]
        where = "" if place.layer is None else _say(lang, f"layer {place.layer}", f"레이어 {place.layer}")
        where += _say(lang, f" of {len(layers)}", f" / {len(layers)}") if where else ""
        what = " ".join(x for x in (_word(lang, place.part), _word(lang, place.what)) if x)
        numbers = [line.error, line.baseline, line.allowed, *([line.wide, line.wide_allowed] if wide else [])]
        said = ["–" if x is None else number(x) for x in numbers]
        return [what, where, *said, _word(lang, line.verdict)]

    def _shown(self) -> list[Line]:
        """Of each kind the first line with its gravest verdict; of those that are the same, the tightest."""
        grave = ("same", "rounding", "bug")
        shown: dict[tuple[str, str], Line] = {}
        for line in self.lines:
            best = shown.setdefault(_kind(line), line)
            rank, others = grave.index(line.verdict), grave.index(best.verdict)
            if rank > others or (rank == others == 0 and line.share > best.share):
                shown[_kind(line)] = line
        return list(shown.values())

    def _notes(self, lang: Lang) -> list[str]:
        counted = _say(
            lang,
            f"{self._counts(lang)}. Error: the largest difference from transformers in fp64; "
            "allowed: 2 · (theirs + one rounding step), 3 · where fp64 itself rounds as much.",
            f"{self._counts(lang)}. 오차: fp64 transformers와의 최대 차이. "
            "허용 오차: 2 · (transformers 오차 + 반올림 한 단위). fp64도 같은 크기로 반올림하면 3배.",
        )
        notes = ["", counted, *self._drawn(lang)]
        if self.not_compared:
            named = ", ".join(_word(lang, what) for what in self.not_compared)
            notes.append(_say(lang, f"Not compared: {named}.", f"비교하지 않은 것: {named}."))
        if self.new_tokens == 0:
            notes.append(
                _say(
                    lang,
                    "No room to generate: the texts take all positions.",
                    "남은 위치가 없어 생성은 비교하지 않았습니다.",
                )
            )
        if self.narrow:
            notes.append(
                _say(
                    lang,
                    "transformers computes parts of this model in fp32 even in fp64 (norms, softmax or angles): "
                    "there the difference can only fall to fp32's rounding step.",
                    "transformers는 fp64에서도 이 모델의 일부(norm, softmax, 각도)를 fp32로 계산합니다. "
                    "그래서 fp64의 차이는 fp32 반올림 크기까지만 줄어듭니다.",
                )
            )
        return notes

    def _counts(self, lang: Lang) -> str:
        """How many of what were compared."""
        said = []
        if self.pictures:
            said.append(_say(lang, f"{self.pictures} pictures", f"이미지 {self.pictures}개"))
        if self.texts:
            said.append(
                _say(lang, f"{self.texts} texts, {self.tokens} tokens", f"텍스트 {self.texts}개, 토큰 {self.tokens}개")
            )
        return ", ".join(said)

    def _drawn(self, lang: Lang) -> list[str]:
        """What was drawn rather than read."""
        if self.pictures and self.texts:
            return [_say(lang, "Pixels and ids were drawn.", "픽셀과 id를 무작위로 만들었습니다.")]
        if self.pictures:
            return [_say(lang, "Pixels were drawn.", "픽셀을 무작위로 만들었습니다.")]
        if not self.random_ids:
            return []
        if any(line.place.what == "token ids" for line in self.lines):
            return [_say(lang, "Ids were drawn.", "id를 무작위로 만들었습니다.")]
        return [_say(lang, "No tokenizer: ids were drawn.", "토크나이저가 없어 id를 무작위로 만들었습니다.")]


def _kind(line: Line) -> tuple[str, str]:
    return line.place.part, line.place.what


def _plain(line: Line) -> dict[str, Any]:
    numbers = {name: value for name, value in vars(line).items() if name != "place"}
    finite = {n: str(v) if isinstance(v, float) and not isfinite(v) else v for n, v in numbers.items()}
    return {**line.place._asdict(), **finite, "verdict": line.verdict}


def _say(lang: Lang, english: str, korean: str) -> str:
    return korean if lang == "ko" else english


def _word(lang: Lang, word: str) -> str:
    return KOREAN.get(word, word) if lang == "ko" else word
