"""What one forward pass made of pictures, and of texts beside them, place by place: of ours and of `transformers`'.

    picture: embedding, layers, last norm → question or text: the same → vectors and logits

transformers hands out the layers of some towers only to their caller: they are taken where they are made, with hooks.
This file compares nothing, and knows no family.

Axis letters: B texts, P pictures, N positions, d width, R sampled rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import normalize

from regard.backends.call import Call
from regard.models.dual_model import DualModel
from regard.models.flamingo_model import FlamingoModel
from regard.models.model import Model, Result
from regard.models.parity.certificate import Place
from regard.models.parity.passes import Made, rows_of, told
from regard.models.parity.picture_inputs import Shown
from regard.models.picture_text_model import Answerer, Captioner, Matcher
from regard.models.picture_writer import PictureWriter
from regard.models.vision_model import VisionModel

__all__ = ["Reader", "of_ours_seeing", "reader_of"]

Reader = Callable[[Any, Shown], Made]
"""A model of transformers and what it is given → what it made."""

THEIRS = {
    "ids": "input_ids",
    "mask": "attention_mask",
    "target": "decoder_input_ids",
    "target_mask": "decoder_attention_mask",
    "pixels": "pixel_values",
    "sees": "image_attention_mask",
    "hidden": "bool_masked_pos",
}


def of_ours_seeing(model: Model, shown: Shown) -> Made:
    """Our model's pass."""
    weights: list[Tensor] = []
    looks, number = {call: (b, n) for call, b, n in shown.looks}, count()

    def note(call: Call) -> None:
        at = looks.get(next(number))
        if at is not None:
            weights.append(rows_of(call, *shown.chosen(*at)))

    with torch.inference_mode(), told(note):
        result = model(**shown.inputs, every_layer=True)
    made: Made = {}
    if isinstance(model, Answerer):
        with torch.inference_mode():
            seen = model.vision(shown.inputs["pixels"].to(model.dtype), every_layer=True)
        made |= _tower("picture", seen.layers, seen.hidden)
    for part, layers, hidden in _towers(model, result):
        made |= _tower(part, layers, hidden, weights)
    if isinstance(model, Matcher):
        made |= _head({"cosines": _cosines(model, shown.inputs)})
    head = {"pooled": result.pooled, "text vectors": result.text, "picture vectors": result.picture}
    return _tokens(made | _head(head | {"logits": result.logits}), shown)


def reader_of(model: Model) -> Reader:
    """How the pass of transformers' model is read, for a model of ours."""
    if isinstance(model, VisionModel):
        return _alone("")
    if isinstance(model, DualModel):
        if model.text is None or model.vision is None:
            return _alone("text" if model.vision is None else "picture")
        return _hooked({"picture": "vision_model", "text": "text_model"})
    if isinstance(model, Captioner):
        return _hooked({"picture": "vision_model", "text": "text_decoder"})
    if isinstance(model, Answerer):
        return _hooked({"picture": "vision_model", "question": "text_encoder", "answer": "text_decoder"})
    if isinstance(model, Matcher):
        return _hooked({"picture": "vision_model", "text": "text_encoder"})
    if isinstance(model, PictureWriter):
        return _writing
    assert isinstance(model, FlamingoModel), type(model)
    return _looking


# ----------------------------------------------------------------------------------------------------------------- ours


def _towers(model: Model, result: Result) -> list[tuple[str, Sequence[Tensor] | None, Tensor | None]]:
    """Part, layers and last vectors of each tower, in the order of the computation."""
    if isinstance(model, Answerer):
        return [("question", result.memory_layers, result.memory), ("answer", result.layers, result.hidden)]
    if isinstance(model, (PictureWriter, FlamingoModel)):  # what stands for a picture is no tower's last vector
        return [("picture", result.memory_layers, None), ("text", result.layers, result.hidden)]
    if result.memory_layers is not None:
        return [("picture", result.memory_layers, result.memory), ("text", result.layers, result.hidden)]
    part = "" if isinstance(model, VisionModel) else "picture" if result.text is None else "text"
    return [(part, result.layers, result.hidden)]


def _cosines(model: Matcher, inputs: dict[str, Tensor]) -> Tensor:
    """Of every picture with every text, each read alone: (P, B)."""
    with torch.inference_mode():
        return model.encode_picture(inputs["pixels"]) @ model.encode_text(inputs["ids"], inputs["mask"]).T


# --------------------------------------------------------------------------------------------------------------- theirs


def _alone(part: str) -> Reader:
    """A model whose own result holds all of its one tower. part: its name."""

    def read(model: Any, shown: Shown) -> Made:
        out = _run(model, shown, output_attentions=bool(shown.looks))
        weights: list[Tensor | None] = []
        for handed, (_, b, n) in zip(out.get("attentions") or (), shown.looks, strict=False):
            alike = handed is not None and handed.ndim == 4 and (len(handed), *handed.shape[2:]) == (b, n, n)
            i, j = shown.chosen(b, n)
            weights.append(handed[i, :, j] if alike else None)  # (R, H, N)
        made = _tower(part, out.get("hidden_states"), out.get("last_hidden_state"), weights)
        return _tokens(made | _results(out, part), shown)

    return read


def _hooked(paths: dict[str, str]) -> Reader:
    """A model whose towers are its children. paths: part → the child's name, in the order of the computation."""

    def read(model: Any, shown: Shown) -> Made:
        with _made_by({part: model.get_submodule(path) for part, path in paths.items()}) as found:
            out = _run(model, shown)
        made: Made = {}
        for part in paths:
            tower = found[part][0]
            made |= _tower(part, tower.get("hidden_states"), tower.get("last_hidden_state"))
        last = found[list(paths)[-1]][0]  # which may be a decoder, with its scores of words
        results = _results(out, "text")
        if "itm_score" in out:
            cosines = _run(model, shown, use_itm_head=False).itm_score
            results = _head({"cosines": cosines, "logits": out.itm_score})
        elif last.get("logits") is not None:
            results = _head({"logits": last["logits"]})
        elif last.get("pooler_output") is not None:
            results = _head({"pooled": last["pooler_output"]}) | results
        return _tokens(made | results, shown)

    return read


def _writing(model: Any, shown: Shown) -> Made:
    """A language model with pictures among its words."""
    with _made_by({"picture": getattr(model, "model", model).vision_tower}) as found:
        out = _run(model, shown)
    made = _tower("picture", found["picture"][0]["hidden_states"], None)
    made |= _tower("text", out.hidden_states, out.get("last_hidden_state"))
    return _tokens(made | _results(out, "text"), shown)


def _looking(model: Any, shown: Shown) -> Made:
    """A language model that looks at pictures between its blocks.

    Its first hidden state is what enters the first block, after a look: here the words before it stand there.
    """
    body = getattr(model, "model", model)
    vision = body.vision_model
    steps = [vision.pre_layrnorm, *vision.encoder.layers]
    with _made_by({"text": body.embed_tokens, **{str(n): step for n, step in enumerate(steps)}}) as found:
        out = _run(model, shown)
    b, p = shown.inputs["pixels"].shape[:2]
    flat = [_first(found[str(n)][0]) for n in range(len(steps))]
    layers = [t.reshape(b, p, *t.shape[1:]) for t in flat]  # (B, P, n, d)
    made = _tower("picture", layers, None)
    made |= _tower("text", (found["text"][0], *out.hidden_states[1:]), out.get("last_hidden_state"))
    return _tokens(made | _results(out, "text"), shown)


def _run(model: Any, shown: Shown, **asked: bool) -> Any:
    dtype = next(model.parameters()).dtype  # Swin takes pixels in no other
    given = {}
    for name, t in shown.inputs.items():
        whole = t.long() if t.dtype == torch.bool and name != "hidden" else t
        given[THEIRS[name]] = t.to(dtype) if t.is_floating_point() else whole
    with torch.inference_mode():
        return model(**given, output_hidden_states=True, **asked)


def _results(out: Any, part: str) -> Made:
    """What the head gave. Vectors are taken at length 1, as they are compared; the towers alone do not."""
    logits = next((out[n] for n in ("logits", "logits_per_image", "reconstruction") if n in out), None)
    vectors = {"text vectors": out.get("text_embeds"), "picture vectors": out.get("image_embeds")}
    named = {"pooled": out.get("pooler_output")}
    named |= {n: None if t is None else normalize(t, dim=-1) for n, t in vectors.items()}
    return _head(named | {"logits": logits})


@contextmanager
def _made_by(modules: dict[str, Any]) -> Iterator[dict[str, list[Any]]]:
    """What each module gave, call by call, while inside.

    Copied as it was given: CLIP later puts the projected summary in the place of the summary.
    """
    found: dict[str, list[Any]] = {name: [] for name in modules}

    def note(name: str) -> Callable[[Any, Any, Any], None]:
        return lambda _, __, made: found[name].append(dict(made) if isinstance(made, dict) else made)

    hooks = [module.register_forward_hook(note(name)) for name, module in modules.items()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _first(made: Any) -> Tensor:
    return cast(Tensor, made[0] if isinstance(made, tuple) else made)


# ----------------------------------------------------------------------------------------------------------------- both


def _tower(
    part: str, layers: Sequence[Tensor] | None, last: Tensor | None, weights: Sequence[Tensor | None] = ()
) -> Made:
    """The places of one tower, in order. layers: the embedding, then what each block or stage gave, unnormed."""
    assert layers is not None, part
    made = {Place(part, None, "embedding"): layers[0]}
    for n, hidden in enumerate(layers[1:]):
        rows = weights[n] if n < len(weights) else None
        if rows is not None:
            made[Place(part, n, "attention weights")] = rows
        made[Place(part, n, "hidden states")] = hidden
    return made if last is None else made | {Place(part, None, "last norm"): last}


def _head(named: dict[str, Tensor | None]) -> Made:
    return {Place("", None, name): t for name, t in named.items() if t is not None}


def _tokens(made: Made, shown: Shown) -> Made:
    """Texts without padding: (B, N, d) → (tokens, d)."""
    mask = shown.inputs.get("target_mask", shown.inputs.get("mask"))
    if mask is None:
        return made
    texts = ("text", "answer", "")
    return {p: t[mask] if p.part in texts and t.ndim == 3 and t.shape[:2] == mask.shape else t for p, t in made.items()}
