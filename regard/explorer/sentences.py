"""What is said of a head in a sentence, in English and Korean, and the warning that goes with every picture.

It does not know how anything is measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from regard.explorer.answer_types import Numbers
from regard.explorer.sessions import Session
from regard.explorer.token_labels import key_label
from regard.lens.diagnosing.patterns import MEANING
from regard.stages import Lang

__all__ = ["WARNING", "sentence"]

WARNING: dict[Lang, str] = {
    "en": "Weights say where a head reads from, not why the model answers as it does: "
    "a large weight need not change the output.",
    "ko": "가중치는 헤드가 어디를 읽었는지를 보여 줄 뿐, 모델이 그렇게 답한 이유가 아닙니다. "
    "가중치가 커도 출력은 달라지지 않을 수 있습니다.",
}


def sentence(session: Session, layer: int, head: int, numbers: Numbers, names: Sequence[str], lang: Lang) -> str:
    """A head in plain words: its pattern, over how many keys it spreads, and which key receives most; or NaN, if any.

    >>> from regard.lens.capture import Capture
    >>> numbers = Numbers(
    ...     entropy=0.5, effective=1.6, max_weight=0.9, received_max=0.25, received_key=0, received_last=0
    ... )
    >>> sentence(Session("toy", Capture(), ("[CLS]", "cat")), 3, 1, numbers, ["first"], "en")
    'Head 1 of layer 3 looks at the first token, where heads often rest that have nothing to find. A query spreads \
over 1.6 keys on average. Token 0 “[CLS]” receives most: 25% of all attention.'
    """
    if layer < len(session.layers) and session.numbers[layer].nan(head):
        return IS_NAN[lang].format(layer, head)
    said = [_pattern(layer, head, names, lang)]
    if numbers["effective"] is not None:
        said.append(SPREADS[lang].format(numbers["effective"]))
    share, first, last = numbers["received_max"], numbers["received_key"], numbers["received_last"]
    if share is not None and first is not None and last is not None:
        windows = session.layers[layer].windows if layer < len(session.layers) else 1
        most = MOST if windows == 1 else MOST_OF_WINDOW
        key = most[lang].format(_key(session, layer, first), _percent(share)) if first == last else None
        said.append(key or MOST_OF_BIN[lang].format(first, last, _percent(share)))
    return " ".join(said)


PATTERN: dict[Lang, str] = {"en": "Head {1} of layer {0} {2}.", "ko": "레이어 {0}의 헤드 {1}: {2}."}
NO_PATTERN: dict[Lang, str] = {"en": "follows none of the known patterns", "ko": "알려진 패턴에 해당하지 않음"}
IS_NAN: dict[Lang, str] = {
    "en": "Head {1} of layer {0} has weights that are NaN, so nothing else can be said of it. "
    "capture.doctor(), or regard doctor, says where NaN came first.",
    "ko": "레이어 {0}의 헤드 {1}: 가중치에 NaN이 있어 다른 것은 말할 수 없습니다. "
    "NaN이 처음 나타난 곳은 capture.doctor() 또는 regard doctor가 알려 줍니다.",
}
SPREADS: dict[Lang, str] = {
    "en": "A query spreads over {:.1f} keys on average.",
    "ko": "쿼리 하나가 평균 {:.1f}개의 키에 퍼집니다.",
}
MOST: dict[Lang, str] = {
    "en": "Token {} receives most: {} of all attention.",
    "ko": "가장 많이 받는 토큰은 {}: 전체 어텐션의 {}입니다.",
}
MOST_OF_WINDOW: dict[Lang, str] = {
    "en": "Token {} receives most: {} of the attention in its window.",
    "ko": "가장 많이 받는 토큰은 {}: 그 윈도 안 어텐션의 {}입니다.",
}
MOST_OF_BIN: dict[Lang, str] = {
    "en": "Tokens {} to {} receive most: {} of all attention each.",
    "ko": "가장 많이 받는 토큰은 {}~{}: 하나에 전체 어텐션의 {}씩입니다.",
}


def _pattern(layer: int, head: int, names: Sequence[str], lang: Lang) -> str:
    meaning = MEANING[lang][names[0]].rstrip(".") if names else NO_PATTERN[lang]
    return PATTERN[lang].format(layer, head, meaning)


def _key(session: Session, layer: int, key: int) -> str:
    word = key_label(session, layer, key)
    return f"{key} “{word[:64]}”" if word else str(key)


def _percent(share: float) -> str:
    """Two digits that count: 52%, 0.52%, 0.0052%."""
    return f"{share:.0%}" if share >= 0.1 else f"{100 * share:.2g}%"
