"""A capture as text: a line for each run of each module, with its sizes, kernel and the most telling numbers.

It does not know how anything is measured.
"""

from __future__ import annotations

from math import prod

import torch

from regard import tables
from regard.lens.capture import Capture, ModuleRun
from regard.lens.doctor.findings import check_lang, format_calls
from regard.lens.doctor.report import SAID
from regard.lens.head_values import per_head
from regard.lens.patterns import CALLED, label
from regard.lens.view import View
from regard.stages import Lang

__all__ = ["summary_of"]

LITTLE = 1 << 21  # weights of a run whose patterns are scored here, where they were not measured

WORDS: dict[Lang, dict[str, str]] = {
    "en": {
        "title": "{}: {} attention modules, {} calls",
        "headers": "|module|kind|heads|queries × keys|calls|entropy|patterns|seen by",
        "unseen": "not seen",
        "edited": "edited after softmax",
        "beams": "batch rows changed places, as in beam search: each is a beam of the last step; "
        "capture.returned(output) shows the sequences that were returned",
    },
    "ko": {
        "title": "{}: 어텐션 모듈 {}개, 호출 {}번",
        "headers": "|모듈|종류|헤드|쿼리 × 키|호출|엔트로피|패턴|찾은 곳",
        "unseen": "보지 못함",
        "edited": "소프트맥스 뒤에 수정됨",
        "beams": "빔 서치처럼 배치 행이 단계 사이에 자리를 바꿨습니다. 각 행은 마지막 단계의 빔입니다. "
        "반환된 시퀀스를 보려면 capture.returned(output)을 부르세요",
    },
}


def summarise(capture: Capture, lang: Lang = "en") -> str:
    """The table of a capture that is not empty, and what was not seen.

    >>> import torch, regard
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> with regard.watch(layer) as seen:
    ...     _ = layer(torch.zeros(1, 3, 8))
    >>> print(summary_of(seen).splitlines()[0])
    TransformerEncoderLayer: 1 attention modules, 1 calls

    Raises ValueError for a language that is not spoken here.
    """
    words = WORDS[check_lang(lang)]
    rows = [_line(i, run, lang) for i, run in enumerate(capture.runs())]
    lines = [words["title"].format(capture.model or "model", len(capture.names), len(capture.records)), ""]
    lines.append(tables.text(words["headers"].split("|"), rows, right=[0, 3, 5, 6]))
    notes = [
        f"{words['edited']}: {path or '(the model itself)'}: {format_calls(calls, lang)}"
        for path, calls in capture.edited.items()
    ]
    notes += [f"{words['unseen']}: {path or '(the model itself)'}: {why}" for path, why in capture.unseen.items()]
    links = [record.link for record in capture.records if record.link is not None]
    if any(link.rows is not None for link in links) and all(link.returned is None for link in links):
        notes.append(words["beams"])
    return "\n".join([*lines, "", *notes]).rstrip()


def _line(i: int, run: ModuleRun, lang: Lang) -> list[str]:
    """A line of the summary."""
    first, view = run.records[0], run.view
    _, heads, nq, nk = view.sizes
    entropy = "–"
    if "entropy" in view.held:
        entropy = f"{float(per_head(view, 'entropy').mean()):.2f}".replace("nan", "NaN")
    seen_by = first.source + (" (compiled)" if first.compiled else "")
    kind, calls = SAID[lang].get(first.kind, first.kind), len(run.records)
    name = run.name if run.path else f"(model){run.name}"
    return [str(i), name, kind, str(heads), f"{nq} × {nk}", str(calls), entropy, _commonest(view, lang), seen_by]


def _commonest(view: View, lang: Lang) -> str:
    """The pattern names of the first batch row's heads with how many bear each, the most common first."""
    measured = any(name.startswith("pattern ") for name in view.held)
    if not measured and (view.weights is None or prod(view.sizes) > LITTLE):
        return "–"
    shares = view.head_patterns().shares
    if not shares:
        return "–"
    broken = torch.stack([values[0] for values in shares.values()]).isnan().any(0)  # (H,)
    names = [names[0] for names, nan in zip(label(shares)[0], broken, strict=True) if names and not nan]
    counts = sorted(((names.count(n), n) for n in set(names)), reverse=True)
    none = SAID[lang].get("none", "none")
    said = [f"{count} {CALLED[lang][name]}" for count, name in counts[:3]]
    return ", ".join([*said, *([f"{int(broken.sum())} NaN"] if broken.any() else [])]) or none
