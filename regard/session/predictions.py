"""What a session's model predicts: the next token, the words at mask tokens, or labels; also without some heads."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from regard.edits import ablate
from regard.edits.editing import edit
from regard.session.effects import check_single_runs
from regard.session.protocol import NoPredictions, PredictedJSON, PredictionKind, PredictionsAnswer
from regard.session.session import Session, token_labels

TASKS: dict[str, PredictionKind] = {
    "text-generation": "next_token",
    "text2text-generation": "next_token",
    "image-to-text": "next_token",
    "image-text-to-text": "next_token",
    "fill-mask": "fill_mask",
    "pretraining": "fill_mask",
    "text-classification": "labels",
    "image-classification": "labels",
    "image-classification-cls": "labels",
}
TOP = 10
# The log-sum-exp of all logits ÷ T cannot be told from the largest ones, so it is given for these T.
TEMPERATURES = tuple(round(0.1 * n, 1) for n in range(1, 21))


def predict(session: Session, without: Sequence[tuple[int, int]] = ()) -> PredictionsAnswer:
    """Run the model once and read what it predicts; see `PredictionsAnswer`.

    Args:
        session: with the model that read the text or image; without one nothing is predicted.
        without: (layer, head) of heads whose output is set to 0.

    Raises:
        IndexError: a layer or head that is not there.
        ValueError: logits that are NaN; heads of a model that runs one layer several times, or that cannot be edited.
    """
    heads: dict[int, set[int]] = {}
    for layer, head in without:
        if not 0 <= layer < len(session.layers) or not 0 <= head < session.layers[layer].view.sizes[1]:
            raise IndexError(f"there is no head {head} in layer {layer}")
        heads.setdefault(layer, set()).add(head)
    if session.model is None or session.again is None:
        return _answer("none", without, reason="no_model")
    kind = TASKS.get(session.model.task)
    if kind is None:
        return _answer("none", without, reason="no_head")
    logits, before = _logits(session, heads), _logits(session, {}) if heads else None
    if logits is None:
        return _answer("none", without, reason="no_head")
    if kind == "labels":
        return _answer(kind, without, [_labels(session, logits, before)])
    if kind == "next_token":
        last = len(session.tokens) - 1 if len(logits) == len(session.tokens) else None  # else of a decoder's own text
        return _answer(kind, without, [_tokens(session, logits, before, -1, last)])
    mask = session.model.tokenizer.ids_of.mask
    (sign,) = session.model.tokenizer.tokens([mask]) if mask is not None else (None,)
    masks = [at for at, label in enumerate(session.tokens) if label == sign]
    places = [_tokens(session, logits, before, at, at) for at in masks]
    return _answer(kind, without, places, reason=None if places else "no_mask")


def _logits(session: Session, heads: dict[int, set[int]]) -> Tensor | None:
    """(N, V) or (labels,) in fp64, with these heads switched off; None if the model has none."""
    assert session.model is not None
    assert session.again is not None
    with ExitStack() as stack:
        if heads:
            check_single_runs(session)
            edits = [ablate(session.layers[layer].path, sorted(listed)) for layer, listed in heads.items()]
            stack.enter_context(edit(session.model, *edits))
        logits = getattr(session.again(), "logits", None)
    if not isinstance(logits, Tensor):
        return None
    if bool(logits.isnan().any()):
        raise ValueError("the model's logits are NaN: capture.doctor(), or regard doctor, says where NaN came first")
    return logits[0].double().cpu()


def _answer(
    kind: PredictionKind,
    without: Sequence[tuple[int, int]],
    places: Sequence[PredictedJSON] = (),
    reason: NoPredictions | None = None,
) -> PredictionsAnswer:
    return {
        "kind": kind,
        "reason": reason,
        "without": [[*place] for place in without],
        "temperatures": list(TEMPERATURES),
        "places": list(places),
    }


def _tokens(session: Session, logits: Tensor, before: Tensor | None, at: int, token: int | None) -> PredictedJSON:
    assert session.model is not None
    logits, before = logits[at], None if before is None else before[at]  # (V,)
    ids = _likeliest(logits, before)
    return _predicted(logits, before, ids, token_labels(session.model, ids), token)


def _labels(session: Session, logits: Tensor, before: Tensor | None) -> PredictedJSON:
    assert session.model is not None
    names, problem = session.model.config.labels(len(logits)), session.model.config.get("problem_type")
    ids = _likeliest(logits, before)
    prediction = _predicted(logits, before, ids, [names[n] for n in ids.tolist()], None)
    if problem == "regression" or len(logits) == 1:
        chances: list[float | None] = [None] * len(ids)
    elif problem == "multi_label_classification":
        chances = list(logits[ids].sigmoid().tolist())
    else:
        return prediction
    for one, chance in zip(prediction["top"], chances, strict=True):
        one["probability"] = chance
    return prediction | {"lse": None}


def _likeliest(logits: Tensor, before: Tensor | None) -> Tensor:
    """The numbers of the largest logits, largest first, then of those that were the largest before."""
    ids = logits.topk(min(TOP, len(logits))).indices
    if before is None:
        return ids
    lost = before.topk(min(TOP, len(before))).indices
    lost = lost[~torch.isin(lost, ids)]
    return torch.cat([ids, lost[logits[lost].argsort(descending=True)]])


def _predicted(
    logits: Tensor, before: Tensor | None, ids: Tensor, labels: list[str], token: int | None
) -> PredictedJSON:
    sums = [float((logits / temperature).logsumexp(0)) for temperature in TEMPERATURES]
    chances = logits.softmax(0)[ids].tolist()
    values = logits[ids].clamp(min=-1e300).tolist()  # −∞ is no JSON
    old = [None] * len(ids) if before is None else before[ids].clamp(min=-1e300).tolist()
    rows = zip(ids.tolist(), labels, values, chances, old, strict=True)
    return {
        "token": token,
        "lse": sums,
        "top": [{"id": n, "label": s, "logit": logit, "probability": p, "before": b} for n, s, logit, p, b in rows],
    }
