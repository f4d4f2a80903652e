"""What one forward pass made, place by place: of our model and of `transformers`' one, in the same form.

    embedding, then for each layer attention weights (of sampled rows) and hidden states, then what the head gave

Our models never build the weights: they are computed here for the sampled rows alone, exactly, from the q and k that
`attention` was called with. This file compares nothing, and knows no family.

Axis letters: B texts, N positions, H heads, D head size, R sampled rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from regard.backends.call import Call
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.model import Model
from regard.models.parity.certificate import Place
from regard.models.text_model import TextModel
from regard.op import observe, unobserve

__all__ = ["Given", "Made", "of_ours", "of_theirs", "rows_of", "told"]

Made = dict[Place, Tensor]
"""What stood at each place, in the order of the computation; of (B, N, …) the tokens alone."""


@dataclass(frozen=True, eq=False)
class Given:
    """What both models get: texts padded on the right.

    ids: (B, N).  mask: (B, N), True = token.  target: (B, N), what a decoder beside an encoder reads; its mask is mask.
    rows: text (R,) and position (R,) of the queries whose weights are looked at.
    weights: are they looked at? Not where transformers hands them out in another form than (B, H, N, N).
    """

    ids: Tensor
    mask: Tensor
    target: Tensor | None
    rows: tuple[Tensor, Tensor]
    weights: bool = True


def of_ours(model: Model, given: Given) -> Made:
    """Our model's pass."""
    calls: list[Tensor] | None = [] if given.weights else None
    two = {} if given.target is None else {"target": given.target, "target_mask": given.mask}

    def note(call: Call) -> None:
        if calls is not None:
            calls.append(rows_of(call, *given.rows))

    with torch.inference_mode(), told(note):
        result = model(given.ids, given.mask, every_layer=True, **two)
    made: Made = {}
    if isinstance(model, EncoderDecoder):
        assert calls is not None
        depth = len(model.encoder.depth)
        made |= _tower("encoder", result.memory_layers, calls[:depth], None)
        made |= _tower("decoder", result.layers, calls[depth::2], calls[depth + 1 :: 2])
    else:
        assert isinstance(model, TextModel)
        made |= _tower("", result.layers, calls, None)
    head = {"pooled": result.pooled, "next sentence": result.next_sentence, "logits": result.logits}
    return _tokens(made | {Place("", None, n): t for n, t in head.items() if t is not None}, given.mask)


def of_theirs(model: Any, given: Given) -> Made:
    """The pass of a model of transformers with eager attention, the weights of the sampled rows alone."""
    inputs = {"input_ids": given.ids, "attention_mask": given.mask.long()}
    if given.target is not None:
        inputs |= {"decoder_input_ids": given.target, "decoder_attention_mask": given.mask.long()}
    with torch.inference_mode():
        out = model(**inputs, output_hidden_states=True, output_attentions=given.weights)
    get, (b, i), n = out.get, given.rows, given.ids.shape[1]

    def rows(name: str) -> list[Tensor]:
        return [weights[b, :, i] for weights in get(name) or ()]  # (R, H, N)

    if given.target is not None:
        made = _tower("encoder", get("encoder_hidden_states"), rows("encoder_attentions"), None)
        made |= _tower("decoder", get("decoder_hidden_states"), rows("decoder_attentions"), rows("cross_attentions"))
    else:
        layers = [t[:, :n] for t in get("hidden_states")]  # BigBird's have what it padded with
        made = _tower("", layers, rows("attentions") if given.weights else None, None)
    words = get("logits", get("prediction_logits"))
    if get("start_logits") is not None:
        words = torch.stack([out.start_logits, out.end_logits], -1)
    relation = get("seq_relationship_logits", get("sop_logits"))
    head = {"pooled": get("pooler_output"), "next sentence": relation, "logits": words}
    return _tokens(made | {Place("", None, n): t for n, t in head.items() if t is not None}, given.mask)


def rows_of(call: Call, text: Tensor, position: Tensor) -> Tensor:
    """The exact weights e^(s − lse) of some queries of a call, computed in fp64: (R, H, Nk).

    >>> from regard.backends.call import prepare
    >>> from regard.masks import causal
    >>> x = torch.eye(3).expand(1, 1, 3, 3)
    >>> rows_of(prepare(x, x, x, mask=causal(), scale=0.0), torch.tensor([0]), torch.tensor([1]))
    tensor([[[0.5000, 0.5000, 0.0000]]], dtype=torch.float64)

    text, position: (R,), which queries.
    """
    (_, heads, nq, nk), wide = call.sizes, torch.float64
    k = call.k[text].to(wide).repeat_interleave(heads // call.k.shape[1], 1)  # (R, H, Nk, D)
    s = (k @ call.q[text, :, position].to(wide).unsqueeze(-1)).squeeze(-1) * call.scale  # (R, H, Nk)
    if call.softcap is not None:
        s = call.softcap * torch.tanh(s / call.softcap)
    head, key = torch.arange(heads, device=s.device)[:, None], torch.arange(nk, device=s.device)
    at = (text[:, None, None], head, position[:, None, None], key)
    if call.bias is not None:
        s = s + call.bias.bind(nq, nk, call.device, wide)(*at)
    if call.mask is not None:
        s = torch.where(call.mask.bind(nq, nk, call.device, wide)(*at), s, -inf)
    lse = s.logsumexp(-1, keepdim=True)
    if call.sinks is not None:
        lse = torch.logaddexp(lse, call.sinks.to(wide)[:, None])
    return torch.exp(s - torch.where(lse == -inf, 0.0, lse))


@contextmanager
def told(note: Callable[[Call], Any]) -> Iterator[None]:
    """Be told of every call of attention inside."""

    def observer(call: Call, backend: str, output: Any) -> None:
        note(call)

    observe(observer)
    try:
        yield
    finally:
        unobserve(observer)


def _tower(
    part: str, layers: Sequence[Tensor] | None, weights: Sequence[Tensor] | None, cross: Sequence[Tensor] | None
) -> Made:
    """The places of one tower, in order. layers: the embedding, then what each block gave.  weights: None for none."""
    assert layers is not None
    made = {Place(part, None, "embedding"): layers[0]}
    for n, hidden in enumerate(layers[1:]):
        if weights is not None:
            made[Place(part, n, "attention weights")] = weights[n]
        if cross is not None:
            made[Place(part, n, "cross-attention weights")] = cross[n]
        made[Place(part, n, "hidden states")] = hidden
    return made


def _tokens(made: Made, mask: Tensor) -> Made:
    """Without padding: (B, N, d) → (tokens, d). What has no positions stays, and so do rows of weights."""
    return {p: t[mask] if t.ndim == 3 and "weights" not in p.what else t for p, t in made.items()}
