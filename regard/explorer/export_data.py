"""What an exported page carries: the answers of a session that need no server, and arrays from which it makes the rest.

    {"version": 1, "lang": "en", "sessions": {"1": {
        "overview": the overview,
        "labels": every token's label, or null where the overview has them all,
        "heads": {"layer.head": the head's answer}, "sentences": {language: {"layer.head": its sentence}},
        "arrays": {"layer.head": what its rows are made of},
        "steps": {"layer.head.token.key": the steps of a strong link, where the page cannot make them},
        "pictures": addresses that hold the bytes of each picture: "data:image/jpeg;base64,…",
        "left_out": {language: what is not there, in words}, or null}}}

A head's arrays are every weight, the strongest links of each query (of weight 0 where it sees fewer keys), or nothing:
    {"weights": (Nq, Nk)}, of a layer in windows (queries of all of them, keys of one)
    {"top": {"keys": Nk, "index": (Nq, 12), "weight": (Nq, 12)}}
and, where the capture is small, {"q": (Nq, D), "k": (Nk, D), "v": (Nk, Dv), "lse": (Nq), "scale": number}, of which the
page makes the steps of any query and key; "v" only where the model is at hand, "hidden" (Nq, Nk), 1 for masked keys,
only where some are. Elsewhere the steps of the 3 strongest links of each head are there, if queries and keys are.

An array is {"shape", "f32" | "u16" | "u32": base64 of little-endian numbers}, with "deflate": true where zlib made it
smaller, and "error" where weights were rounded: then they are u16, 65,535 times as large, and off by at most that.

How much: every weight in fp32 up to 5 MB; every weight, rounded, up to 288 tokens. Beyond that, heads in the order of
their strongest links: 5 MB of every weight, then 5 MB of each query's links, and of all the pooled map and some links.

It does not know the page. Axis letters: H heads, N positions (Nq queries, Nk keys), D head size.
"""

from __future__ import annotations

import zlib
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from regard.explorer import answers
from regard.explorer.answers import image
from regard.session.head_weights import HeadWeights, Scored, WindowedWeights, head_of, spoken
from regard.session.sentences import sentence
from regard.session.session import Session
from regard.stages import Lang

__all__ = ["carried"]

ROOM = 5 * 2**20 * 3 // 4  # bytes of arrays of one kind, before base64 makes 5 MiB of them
SHORT = 288  # tokens up to which every weight is carried: 16 × 16 patches, cls and registers; 144 heads take 32 MB
LINKS = 12  # of a query, where not every weight is
WORK = 1 << 29  # weights that are computed for links alone: some seconds
AT_ONCE = 1 << 24  # weights that are held at once
LEVELS = 65535  # of a rounded weight
STEPS = 3  # links of a head whose steps are carried, where its vectors are not
STEP_BYTES = 4096  # that one of them takes, about


def carried(session: Session, lang: Lang = "en") -> dict[str, Any]:
    """What a page of this session carries, in values that JSON knows.

    >>> import regard
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> with regard.watch(layer, keep="qk") as seen:
    ...     _ = layer(torch.zeros(1, 3, 8))
    >>> data = carried(Session("toy", seen, ("a", "b", "c")))
    >>> sorted(data["sessions"]["1"]["arrays"]["0.1"])
    ['k', 'lse', 'q', 'scale', 'weights']

    lang: what the page speaks at first. Raises ValueError for a language that is not spoken here, LookupError where
    nothing was seen, or where neither a map nor q and k of a head were kept.
    """
    lang = spoken(lang)
    overview = answers.overview(session, lang)
    places = [(layer["index"], head) for layer in overview["layers"] for head in range(layer["heads"])]
    heads = {_name(place): answers.head(session, *place, lang) for place in places}
    plan = _planned(session, sorted(places, key=lambda place: -_strength(heads[_name(place)])))
    labels = [label for start in range(0, len(session.tokens), 1 << 16) for label in _labels(session, start)]
    return {
        "version": 1,
        "lang": lang,
        "sessions": {
            "1": {
                "overview": overview,
                "labels": labels if len(labels) > len(overview["labels"]) else None,
                "heads": heads,
                "sentences": {lang: {_name(p): _sentence(session, p, heads, lang) for p in places} for lang in _LANGS},
                "arrays": {_name(place): arrays for place, arrays in _arrays(session, plan)},
                "steps": {} if plan.vectors else _steps(session, plan, heads),
                "pictures": [_address(session, number) for number in range(len(session.pictures))],
                "left_out": _left_out(plan, len(places)),
            }
        },
    }


Place = tuple[int, int]  # layer, head
_LANGS: tuple[Lang, ...] = get_args(Lang)


def _name(place: Place) -> str:
    return f"{place[0]}.{place[1]}"


def _address(session: Session, number: int) -> str:
    found = image(session, number)
    return f"data:{found['kind']};base64,{found['base64']}"


def _labels(session: Session, start: int) -> list[str]:
    return answers.tokens(session, start, min(start + (1 << 16), len(session.tokens)))["labels"]


def _sentence(session: Session, place: Place, heads: dict[str, Any], lang: Lang) -> str:
    layer, head = place
    return sentence(session, layer, head, heads[_name(place)]["numbers"], lang)


def _strength(answer: Any) -> float:
    """The strongest link that leads neither to the first key, where heads rest, nor to the token itself."""
    return max((link["weight"] for link in answer["links"] if link["key"] not in (0, link["query"])), default=0.0)


# ------------------------------------------------------------------------------------------------------ what is carried


@dataclass(frozen=True)
class ExportPlan:
    """Which heads carry what.

    whole: those of which every weight is there, in `exact` fp32 or rounded.  links: those with each query's strongest.
    stepped: those of which some links' steps are there, unless `vectors`, q and k of all heads, are.
    kept: were q and k kept with the capture, for every head?
    """

    whole: tuple[Place, ...]
    links: tuple[Place, ...]
    stepped: tuple[Place, ...]
    exact: bool
    vectors: bool
    kept: bool


def _planned(session: Session, places: list[Place]) -> ExportPlan:
    """What fits. places: the heads, those first that are worth most."""
    there = [place for place in places if session.layers[place[0]].view.weights is not None]
    stepped = tuple(p for p in there if _has_steps(_weights(session, p)))[: ROOM // (STEPS * STEP_BYTES)]
    kept, cells = len(there) == len(places), {layer: _cells(session, layer) for layer, _ in there}
    longest = max((max(session.layers[layer].view.sizes[2:]) for layer in cells), default=0)
    exact = 4 * sum(cells[layer] for layer, _ in there) <= ROOM
    if exact or longest <= SHORT:
        return ExportPlan(tuple(there), (), stepped, exact, _room_for_vectors(session, there), kept)
    whole = _fitting(there, {layer: 2 * n for layer, n in cells.items()}, ROOM)
    rest = [place for place in there if place not in set(whole)]
    each = {layer: LINKS * 4 * session.layers[layer].sizes[0] for layer in cells}
    links = [place for place in _fitting(rest, each, ROOM) if place in set(_fitting(rest, cells, WORK))]
    return ExportPlan(tuple(whole), tuple(links), stepped, exact=False, vectors=False, kept=kept)


def _cells(session: Session, layer: int) -> int:
    seen = session.layers[layer]
    return seen.sizes[0] * seen.view.sizes[3]


def _has_steps(weights: HeadWeights) -> bool:
    return isinstance(weights.parts[0] if isinstance(weights, WindowedWeights) else weights, Scored)


def _fitting(places: list[Place], each: dict[int, int], room: int) -> list[Place]:
    """The first heads that fit into the room together, each as large as its layer says."""
    found = []
    for place in places:
        room -= each[place[0]]
        if room < 0:
            break
        found.append(place)
    return found


def _room_for_vectors(session: Session, places: list[Place]) -> bool:
    """Has every head q and k of one call, and do these fit, with as many values?"""
    heads = [_weights(session, place) for place in places]
    scored = [head for head in heads if isinstance(head, Scored)]
    return len(scored) == len(heads) > 0 and 4 * sum(h.q.numel() + 2 * h.k.numel() for h in scored) <= ROOM


def _weights(session: Session, place: Place) -> HeadWeights:
    return head_of(session.layers[place[0]], place[1])


def _arrays(session: Session, plan: ExportPlan) -> Iterator[tuple[Place, dict[str, Any]]]:
    for place in sorted(plan.whole):  # layer by layer: a live model is asked for the values of one at a time
        weights = _weights(session, place)
        given = {"weights": _packed_weights(_whole(weights), plan.exact)}
        yield place, given | (_vectors(session, place, weights) if plan.vectors else {})
    for place in plan.links:
        yield place, {"top": _strongest(_weights(session, place))}


def _whole(weights: HeadWeights) -> Tensor:
    """(Nq, Nk), or the windows below each other, (W·Nq, Nk)."""
    parts = weights.parts if isinstance(weights, WindowedWeights) else [weights]
    return torch.cat([part.tile(slice(None), slice(None)) for part in parts])


def _vectors(session: Session, place: Place, weights: HeadWeights) -> dict[str, Any]:
    """What the steps are made of."""
    assert isinstance(weights, Scored)
    parts = {"q": weights.q, "k": weights.k, "lse": weights.lse}  # (Nq, D), (Nk, D), (Nq)
    values = _values(session, *place)
    if values is not None:
        parts["v"] = values  # (Nk, Dv)
    packed = {name: _packed(_plain(part), "f32") for name, part in parts.items()}
    hidden = weights.hidden(slice(None))  # (Nq, Nk)
    if bool(hidden.any()):
        packed["hidden"] = _packed(_plain(hidden), "u16")
    return packed | {"scale": float(weights.call.scale)}


def _values(session: Session, layer: int, head: int) -> Tensor | None:
    """The values of a head, (Nk, Dv); None where no model is at hand that could be asked."""
    seen = session.layers[layer]
    if session.values is None or len(seen.records) != 1:
        return None
    values = session.values.of(seen.records[0], len(session.capture.records))  # (B, H or fewer, Nk, Dv)
    if values is None or values.shape[2] != seen.view.sizes[3]:
        return None
    return values[0, head * values.shape[1] // seen.view.sizes[1]]


def _steps(session: Session, plan: ExportPlan, heads: dict[str, Any]) -> dict[str, Any]:
    """The steps of the strongest links of some heads."""
    links = [(place, link) for place in sorted(plan.stepped) for link in heads[_name(place)]["links"][:STEPS]]
    return {
        f"{_name(place)}.{link['query']}.{link['key']}": answers.steps(session, *place, link["query"], link["key"])
        for place, link in links
    }


def _strongest(weights: HeadWeights) -> dict[str, Any]:
    """The strongest links of each query, a part of the queries at a time."""
    nq, nk = weights.sizes
    at_once, k = max(1, AT_ONCE // max(1, nk)), min(LINKS, nk)
    parts = [
        weights.tile(slice(i, min(i + at_once, nq)), slice(None)).nan_to_num(0.0).topk(k, -1)
        for i in range(0, nq, at_once)
    ]
    index = np.concatenate([part.indices.cpu().numpy() for part in parts])  # (Nq, k)
    weight = torch.cat([part.values for part in parts])
    kind = "u16" if nk <= LEVELS + 1 else "u32"
    return {"keys": nk, "index": _packed(index, kind), "weight": _packed_weights(weight, exact=False)}


# -------------------------------------------------------------------------------------------------------------- packing


def _plain(values: Tensor) -> np.ndarray[Any, Any]:
    return values.detach().to("cpu", torch.float32).numpy()


def _packed_weights(weights: Tensor, exact: bool) -> dict[str, Any]:
    if exact or not bool(weights.isfinite().all()):  # NaN has to be seen, and has no level
        return _packed(_plain(weights), "f32")
    levels = np.rint(_plain(weights).clip(0, 1) * LEVELS)
    return _packed(levels, "u16") | {"error": 0.5 / LEVELS}


def _packed(values: np.ndarray[Any, Any], kind: str) -> dict[str, Any]:
    """An array as the page reads it, compressed where that makes it a tenth smaller."""
    plain = values.astype({"f32": "<f4", "u16": "<u2", "u32": "<u4"}[kind]).tobytes()
    small = zlib.compress(plain, 6)
    deflate = len(small) < 0.9 * len(plain)
    text = b64encode(small if deflate else plain).decode("ascii")
    return {"shape": list(values.shape), kind: text} | ({"deflate": True} if deflate else {})


# ---------------------------------------------------------------------------------------------------------------- words


def _left_out(plan: ExportPlan, heads: int) -> dict[Lang, str] | None:
    """What is not there, in words; None where nothing is missing."""
    whole, links, none = len(plan.whole), len(plan.links), heads - len(plan.whole) - len(plan.links)
    if none == links == 0 and plan.exact and plan.vectors:
        return None
    said: dict[Lang, str] = {}
    for lang, words in WORDS.items():
        parts = [words["whole"].format(whole, heads)] * bool(whole and links + none)
        parts += [words["links"].format(links, LINKS)] * bool(links) + [words["map"].format(none)] * bool(none)
        parts += [words["rounded"]] * bool(whole + links and not plan.exact)
        steps = "some steps" if plan.stepped else "steps"
        parts += [words[steps].format(STEPS, len(plan.stepped))] * (not plan.vectors)
        said[lang] = " ".join([*parts, words["serve" if plan.kept else "unkept"]])
    return said


WORDS: dict[Lang, dict[str, str]] = {
    "en": {
        "whole": "This file holds every weight of {} of {} heads.",
        "links": "Of {} heads it holds the {} strongest links of each token.",
        "map": "Of {} heads it holds the map and the strongest links only.",
        "rounded": "Weights are rounded to 1/65535.",
        "steps": "The steps are not in it.",
        "some steps": "It holds the steps of the {} strongest links of {} heads.",
        "serve": "`regard serve` shows everything.",
        "unkept": "The capture was made without queries and keys: watch(model, keep='qk') keeps them.",
    },
    "ko": {
        "whole": "이 파일에는 헤드 {1}개 중 {0}개의 모든 가중치가 들어 있습니다.",
        "links": "헤드 {}개는 토큰마다 가장 강한 연결 {}개만 들어 있습니다.",
        "map": "헤드 {}개는 맵과 가장 강한 연결만 들어 있습니다.",
        "rounded": "가중치는 1/65535 단위로 반올림했습니다.",
        "steps": "계산 과정은 들어 있지 않습니다.",
        "some steps": "계산 과정은 헤드 {1}개의 가장 강한 연결 {0}개씩만 들어 있습니다.",
        "serve": "`regard serve`에서는 모두 볼 수 있습니다.",
        "unkept": "캡처에 쿼리와 키가 없습니다. watch(model, keep='qk')로 남길 수 있습니다.",
    },
}
