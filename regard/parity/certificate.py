"""What `regard.verify` found, as values that print: a line for each comparison, and the certificate they make up.

>>> line = Line(TensorPlace("", 3, "attention weights"), 0.5, 1e-7, 4e-7, 0.4, 3e-16)
>>> line.verdict, str(line.place)
('bug', 'layer 3, attention weights')
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, Literal, NamedTuple

from regard import tables
from regard.locale import Lang, catalogue, translate

Verdict = Literal["same", "rounding", "bug"]
GRAVITY = ("same", "rounding", "bug")


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
        """In words, such as "decoder layer 0, hidden states"."""
        layer = "" if self.layer is None else translate("layer {index}", lang, index=self.layer)
        where = " ".join(word for word in (_word(self.part, lang), layer) if word)
        return f"{where}, {_word(self.what, lang)}" if where else _word(self.what, lang)


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
        """Whether it obeys the rule in the certificate's dtype."""
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
        return max((line.verdict for line in self.lines), key=GRAVITY.index, default="same")

    @property
    def passed(self) -> bool:
        """Whether both compute the same function; rounding beyond the rule is no other function."""
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
        """Verdict, table and notes: of each kind of comparison the line that takes most of its allowance.

        Args:
            lang: "en" or "ko".
        """
        about = f"{self.model}, {self.architecture}, {self.dtype}, {self.device}"
        return "\n".join([self._verdict(lang), "", about, "", self._table(lang), "", *self._notes(lang)])

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, every line among them; an error that is not finite is one of "inf" and "nan"."""
        lines = []
        for line in self.lines:
            numbers = {name: value for name, value in vars(line).items() if name != "place"}
            finite = {n: str(v) if isinstance(v, float) and not isfinite(v) else v for n, v in numbers.items()}
            lines.append({**line.place._asdict(), **finite, "verdict": line.verdict})
        plain = {name: value for name, value in vars(self).items() if name != "lines"}
        plain["not_compared"] = list(self.not_compared)
        return {"verdict": self.verdict, "result": self.result, "passed": self.passed, **plain, "lines": lines}

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def _verdict(self, lang: Lang) -> str:
        if self.first is None:
            return translate(
                "same: {count} comparisons with transformers {version} in {dtype}, all within the numeric rule",
                lang,
                count=len(self.lines),
                version=self.versions["transformers"],
                dtype=self.dtype,
            )
        where = self.first.place.text(lang)
        if self.result == "bug":
            return translate("bug: first in {where}", lang, where=where)
        return translate(
            "rounding: more than the rule allows in {dtype}, first in {where}; in fp64 the gap is gone",
            lang,
            dtype=self.dtype,
            where=where,
        )

    def _table(self, lang: Lang) -> str:
        # 1. Of each kind the first line with its gravest verdict; of those that are the same, the tightest.
        kinds: dict[tuple[str, str], list[Line]] = {}
        for line in self.lines:
            kinds.setdefault((line.place.part, line.place.what), []).append(line)

        def rank(line: Line) -> tuple[int, float]:
            return GRAVITY.index(line.verdict), line.share if line.verdict == "same" else 0.0

        # 2. A row for each kind.
        wide = any(line.wide is not None for line in self.lines)
        headers = ["compared", "where", "our error", "theirs", "allowed"]
        headers += ["in fp64", "allowed there"] if wide else []
        rows = []
        for (part, what), lines in kinds.items():
            line = max(lines, key=rank)
            layer, where = line.place.layer, ""
            if layer is not None:
                where = translate("layer {index} of {layers}", lang, index=layer, layers=len(lines))
            name = " ".join(word for word in (_word(part, lang), _word(what, lang)) if word)
            numbers = [line.error, line.baseline, line.allowed, *([line.wide, line.wide_allowed] if wide else [])]
            texts = ["–" if value is None else tables.number(value) for value in numbers]
            rows.append([name, where, *texts, _word(line.verdict, lang)])
        columns = [translate(header, lang) for header in [*headers, "verdict"]]
        return tables.text(columns, rows, right=range(2, len(columns) - 1))

    def _notes(self, lang: Lang) -> list[str]:
        counts = []
        if self.pictures:
            counts.append(translate("{pictures} pictures", lang, pictures=self.pictures))
        if self.texts:
            counts.append(translate("{texts} texts, {tokens} tokens", lang, texts=self.texts, tokens=self.tokens))
        rule = translate(
            "Error: the largest difference from transformers in fp64; "
            "allowed: 2 · (theirs + one rounding step), 3 · where fp64 itself rounds as much.",
            lang,
        )
        notes = [f"{', '.join(counts)}. {rule}"]
        drawn = ""  # what was drawn rather than read
        if self.pictures:
            drawn = "Pixels and ids were drawn." if self.texts else "Pixels were drawn."
        elif self.random_ids:
            tokenized = any(line.place.what == "token ids" for line in self.lines)
            drawn = "Ids were drawn." if tokenized else "No tokenizer: ids were drawn."
        if drawn:
            notes.append(translate(drawn, lang))
        if self.not_compared:
            names = ", ".join(_word(what, lang) for what in self.not_compared)
            notes.append(translate("Not compared: {names}.", lang, names=names))
        if self.new_tokens == 0:
            notes.append(translate("No room to generate: the texts take all positions.", lang))
        if self.narrow:
            narrow = (
                "transformers computes parts of this model in fp32 even in fp64 (norms, softmax or angles): "
                "there the difference can only fall to fp32's rounding step."
            )
            notes.append(translate(narrow, lang))
        return notes


def _word(word: str, lang: Lang) -> str:
    return catalogue(lang).get(word, word)
