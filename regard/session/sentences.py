"""What a head does, in a sentence, in English and Korean."""

from __future__ import annotations

from regard.layouts import Layout
from regard.lens.patterns import KEYS, REST
from regard.lens.placement import ImagePatches, name_kind
from regard.session.labels import shown
from regard.session.protocol import NumbersJSON
from regard.session.ranking import SeenLayer
from regard.session.session import Session
from regard.stages import Lang


def key_label(session: Session, layer: int, key: int) -> str:
    """The label of a key of a layer, "" where nobody knows one.

    >>> from regard.lens.capture import Capture
    >>> key_label(Session("toy", Capture(), ("a", "b")), 0, 1)
    'b'
    """
    seen = session.layers[layer] if layer < len(session.layers) else None
    if seen is None or seen.sides is None:
        fits = seen is None or seen.sizes[1] == len(session.tokens)  # else they are another sequence's words
        return session.tokens[key] if fits and key < len(session.tokens) else ""
    return _placed(session, seen, seen.sides.keys, key)


def query_label(session: Session, layer: int, query: int) -> str:
    """The label of a query of a layer of which it is known what its tokens are; "" for one that has no label."""
    seen = session.layers[layer]
    return "" if seen.sides is None else _placed(session, seen, seen.sides.queries, query)


def _placed(session: Session, seen: SeenLayer, layout: Layout, number: int) -> str:
    assert seen.sides is not None
    window, index = divmod(number, layout.shape[1])
    kind, picture = str(layout.kind[window, index]), int(layout.picture[window, index])
    if kind == "text":
        return session.tokens[index] if layout.kind.size == len(session.tokens) else ""
    if kind == "patch":
        patches = ImagePatches(layout, seen.sides.frames[picture], picture)
        own = patches.number((window, index))
        assert own is not None
        row, column = patches.cells[own].tolist()
        return f"({row}, {column})"
    return name_kind(layout, (window, index))


STANDS_OUT = 0.1  # weight of a link beyond what its key gets on the mean, from which on it is told

WARNING: dict[Lang, str] = {
    "en": "Weights say where a head reads from, not why the model answers as it does: "
    "a large weight need not change the output.",
    "ko": "가중치는 헤드가 어디를 읽었는지를 보여 줄 뿐, 모델이 그렇게 답한 이유가 아닙니다. "
    "가중치가 커도 출력은 달라지지 않을 수 있습니다.",
}

WORDS: dict[Lang, dict[str, str]] = {
    "en": {
        "nan": "Head {1} of layer {0} has weights that are NaN, so nothing else can be said of it. "
        "capture.doctor(), or regard doctor, says where NaN came first.",
        "unmeasured": "Head {1} of layer {0}: its patterns were not measured.",
        "uniform": "Head {1} of layer {0} spreads about evenly over all that it sees: "
        "its entropy is {2} of the largest possible.",
        "first": "Head {1} of layer {0} rests on {3}: {2} of its attention goes there.",
        "named": "Head {1} of layer {0} looks at {3}: {2} of its attention goes there.",
        "none": "Head {1} of layer {0} follows no single pattern: {2}.",
        "part": "{0} of its attention goes to {1}",
        "parts": "{0} of its attention goes to {1} and {2} to {3}",
        "first token": "the first token (“{}”)",
        "rest": "Of the other {}, {} goes to {}.",
        "rest none": "The other {} follows no single pattern.",
        "link": "Among words, {} → {} stands out with {:.2f}.",
        "spreads": "A query spreads over {:.1f} effective keys (1/Σw²) on average.",
        "most": "Token {} receives most: {} of all attention.",
        "most of window": "Token {} receives most: {} of the attention in its window.",
        "most of bin": "Tokens {} to {} receive most: {} of all attention each.",
    },
    "ko": {
        "nan": "레이어 {0}의 헤드 {1}: 가중치에 NaN이 있어 다른 것은 말할 수 없습니다. "
        "NaN이 처음 나타난 곳은 capture.doctor() 또는 regard doctor가 알려 줍니다.",
        "unmeasured": "레이어 {0}의 헤드 {1}: 패턴을 측정하지 않았습니다.",
        "uniform": "레이어 {0}의 헤드 {1}: 보이는 것을 거의 고르게 봅니다. 엔트로피가 가능한 최댓값의 {2}입니다.",
        "first": "레이어 {0}의 헤드 {1}: {3}에 머뭅니다. 어텐션의 {2}가 그곳으로 갑니다.",
        "named": "레이어 {0}의 헤드 {1}: 어텐션의 {2}를 {3}에 줍니다.",
        "none": "레이어 {0}의 헤드 {1}: 뚜렷한 패턴이 없습니다. 어텐션이 가는 곳: {2}.",
        "part": "{1} {0}",
        "parts": "{1} {0}, {3} {2}",
        "first token": "첫 토큰(“{}”)",
        "rest": "나머지 {} 가운데 {}는 {}에 줍니다.",
        "rest none": "나머지 {}에는 뚜렷한 패턴이 없습니다.",
        "link": "단어 사이에서는 {} → {} 연결({:.2f})이 두드러집니다.",
        "spreads": "쿼리 하나가 퍼지는 유효 키 수(1/Σw²)는 평균 {:.1f}개입니다.",
        "most": "가장 많이 받는 토큰은 {}: 전체 어텐션의 {}입니다.",
        "most of window": "가장 많이 받는 토큰은 {}: 그 윈도 안 어텐션의 {}입니다.",
        "most of bin": "가장 많이 받는 토큰은 {}~{}: 하나에 전체 어텐션의 {}씩입니다.",
    },
}


def sentence(session: Session, layer: int, head: int, numbers: NumbersJSON, lang: Lang) -> str:
    """A head in plain words: its pattern, over how many keys it spreads, and which key receives most; or NaN, if any.

    >>> import torch, regard
    >>> from regard.explorer.answers import head
    >>> model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> with regard.watch(model) as seen:
    ...     _ = model(torch.zeros(1, 3, 8))
    >>> toy = Session("toy", seen, ("a", "b", "c"))
    >>> sentence(toy, 0, 1, head(toy, 0, 1)["numbers"], "en").partition(". ")[0]
    'Head 1 of layer 0 spreads about evenly over all that it sees: its entropy is 100% of the largest possible'
    """
    words, found = WORDS[lang], session.numbers[layer]
    if found.nan(head):
        return words["nan"].format(layer, head)
    said = _pattern(session, layer, head, lang)
    if numbers["effective"] is not None:
        said.append(words["spreads"].format(numbers["effective"]))
    share, first, last = numbers["received_max"], numbers["received_key"], numbers["received_last"]
    resting = found.names[head][:1] in ((), ("first",)) and first == last == _first_key(session, layer)
    if share is not None and first is not None and last is not None and not (resting and share >= REST):
        most = words["most" if session.layers[layer].windows == 1 else "most of window"]
        key = most.format(_key(session, layer, first), _percent(share)) if first == last else None
        said.append(key or words["most of bin"].format(first, last, _percent(share)))
    return " ".join(said)


def _pattern(session: Session, layer: int, head: int, lang: Lang) -> list[str]:
    """What gets half of the head's attention or more, and what the rest does; or that nothing gets so much."""
    words, found = WORDS[lang], session.numbers[layer]
    shares = {name: float(values[head]) for name, values in found.shares.items()}
    if not shares:
        return [words["unmeasured"].format(layer, head)]
    keys, first = dict(KEYS[lang]), _first_key(session, layer)
    if first is not None and (word := shown(key_label(session, layer, first))):
        keys["first"] = words["first token"].format(word)
    name = found.names[head][0] if found.names[head] else None
    if name is None:
        return [words["none"].format(layer, head, _parts(shares, keys, words)), *_link(session, layer, head, words)]
    kind = name if name in ("uniform", "first") else "named"
    said = [words[kind].format(layer, head, _percent(shares[name]), keys.get(name))]
    if name != "first" or (rest := 1 - shares["first"]) < REST:
        return said
    if (second := found.rest[head]) is not None:
        part = _percent(float(found.beside[second][head]) / rest)
        return [*said, words["rest"].format(_percent(rest), part, keys[second])]
    return [*said, words["rest none"].format(_percent(rest)), *_link(session, layer, head, words)]


def _parts(shares: dict[str, float], keys: dict[str, str], words: dict[str, str]) -> str:
    """What the first token gets of a head without a pattern, and what the pattern gets that comes nearest to one."""
    order = sorted((name for name in shares if name != "uniform"), key=lambda name: -shares[name])
    nearest = [name for name in order if name != "first"][:1]
    parts = [name for name in order if name in nearest or (name == "first" and (shares[name] >= REST or not nearest))]
    told = [text for name in parts for text in (_percent(min(shares[name], 0.494)), keys[name])]  # not "50%" for 0.497
    return words["part" if len(parts) == 1 else "parts"].format(*told)


def _link(session: Session, layer: int, head: int, words: dict[str, str]) -> list[str]:
    """The link that ranks first among those of the head, if it stands out."""
    score, link = session.ranked.get((layer, head), (0.0, None))
    if link is None or score < STANDS_OUT:
        return []
    names = [f"“{shown(session.tokens[at])}”" if session.tokens[at] else str(at) for at in (link.query, link.key)]
    return [words["link"].format(*names, link.weight)]


def _first_key(session: Session, layer: int) -> int | None:
    """The key that "first" is of; None where each window has its own."""
    seen = session.layers[layer]
    padding = seen.view.place.padding
    real = (~padding[0]).nonzero() if padding is not None else None
    if seen.windows > 1 or (real is not None and len(real) == 0):
        return None
    return 0 if real is None else int(real[0])


def _key(session: Session, layer: int, key: int) -> str:
    word = key_label(session, layer, key)
    return f"{key} “{word[:64]}”" if word else str(key)


def _percent(share: float) -> str:
    """Two digits that count: 52%, 0.52%, 0.0052%."""
    return f"{share:.0%}" if share >= 0.1 else f"{100 * share:.2g}%"
