"""One forward pass of a regard model and of its transformers peer, as comparable tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from math import inf
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import normalize

from regard.backends.call import Call
from regard.layouts import Frame
from regard.models.dual_encoder import DualEncoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.flamingo import FlamingoModel
from regard.models.image_text import Answerer, Captioner, Matcher
from regard.models.model import Model
from regard.models.outputs import ModelOutput
from regard.models.text import TextModel
from regard.models.vision import VisionModel
from regard.models.vision_language import VisionLanguageModel
from regard.nn.heads import EndPooler
from regard.nn.vision import VisionTower
from regard.nn.windows import WindowTower
from regard.op import observe, unobserve
from regard.parity.certificate import TensorPlace
from regard.tasks.inputs import max_text_positions

Made = dict[TensorPlace, Tensor]
"""What stood at each place, in the order of the computation; of (B, N, …) the tokens alone."""


@dataclass(frozen=True, eq=False)
class TextInputs:
    """What both models get: texts padded on the right.

    ids: (B, N).  mask: (B, N), True = token.
    decoder_input_ids: (B, N), what a decoder beside an encoder reads; its mask is mask.
    rows: text (R,) and position (R,) of the queries whose weights are looked at.
    weights: are they looked at? Not where transformers hands them out in another form than (B, H, N, N).
    """

    ids: Tensor
    mask: Tensor
    decoder_input_ids: Tensor | None
    rows: tuple[Tensor, Tensor]
    weights: bool = True


def of_ours(model: Model, given: TextInputs) -> Made:
    """Our model's pass."""
    calls: list[Tensor] | None = [] if given.weights else None
    two = (
        {}
        if given.decoder_input_ids is None
        else {"decoder_input_ids": given.decoder_input_ids, "decoder_attention_mask": given.mask}
    )

    def note(call: Call) -> None:
        if calls is not None:
            calls.append(rows_of(call, *given.rows))

    with torch.inference_mode(), told(note):
        output = model(given.ids, given.mask, output_hidden_states=True, **two)
    made: Made = {}
    if isinstance(model, EncoderDecoder):
        assert calls is not None
        depth = len(model.encoder.depth)
        made |= _tower("encoder", output.encoder_hidden_states, calls[:depth], None)
        made |= _tower("decoder", output.hidden_states, calls[depth::2], calls[depth + 1 :: 2])
    else:
        assert isinstance(model, TextModel)
        made |= _tower("", output.hidden_states, calls, None)
    head = {"pooled": output.pooler_output, "next sentence": output.seq_relationship_logits, "logits": _logits(output)}
    return _tokens(made | {TensorPlace("", None, n): t for n, t in head.items() if t is not None}, given.mask)


def of_theirs(model: Any, given: TextInputs) -> Made:
    """The pass of a model of transformers with eager attention, the weights of the sampled rows alone."""
    inputs = {"input_ids": given.ids, "attention_mask": given.mask.long()}
    if given.decoder_input_ids is not None:
        inputs |= {"decoder_input_ids": given.decoder_input_ids, "decoder_attention_mask": given.mask.long()}
    with torch.inference_mode():
        out = model(**inputs, output_hidden_states=True, output_attentions=given.weights)
    get, (b, i), n = out.get, given.rows, given.ids.shape[1]

    def rows(name: str) -> list[Tensor]:
        return [weights[b, :, i] for weights in get(name) or ()]  # (R, H, N)

    if given.decoder_input_ids is not None:
        made = _tower("encoder", get("encoder_hidden_states"), rows("encoder_attentions"), None)
        made |= _tower("decoder", get("decoder_hidden_states"), rows("decoder_attentions"), rows("cross_attentions"))
    else:
        layers = [t[:, :n] for t in get("hidden_states")]  # BigBird's have what it padded with
        made = _tower("", layers, rows("attentions") if given.weights else None, None)
    relation = get("seq_relationship_logits", get("sop_logits"))
    head = {"pooled": get("pooler_output"), "next sentence": relation, "logits": _logits(out)}
    return _tokens(made | {TensorPlace("", None, n): t for n, t in head.items() if t is not None}, given.mask)


def _logits(output: Any) -> Tensor | None:
    """The logits of our model's output or of transformers', whatever they are called."""
    if output.get("start_logits") is not None:
        return torch.stack([output["start_logits"], output["end_logits"]], -1)
    names = ("logits", "prediction_logits", "logits_per_image", "reconstruction")
    return next((output[name] for name in names if output.get(name) is not None), None)


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
    made = {TensorPlace(part, None, "embedding"): layers[0]}
    for n, hidden in enumerate(layers[1:]):
        if weights is not None:
            made[TensorPlace(part, n, "attention weights")] = weights[n]
        if cross is not None:
            made[TensorPlace(part, n, "cross-attention weights")] = cross[n]
        made[TensorPlace(part, n, "hidden states")] = hidden
    return made


def _tokens(made: Made, mask: Tensor) -> Made:
    """Without padding: (B, N, d) → (tokens, d). What has no positions stays, and so do rows of weights."""

    def by_token(place: TensorPlace, values: Tensor) -> bool:
        one_each = place.what == "logits" and values.shape == mask.shape  # ELECTRA's discriminator
        return one_each or (values.ndim == 3 and "weights" not in place.what)

    return {place: values[mask] if by_token(place, values) else values for place, values in made.items()}


DRAWN = (19, 11, 5, 17, 7)  # lengths of texts where ids are drawn
PICTURES = 3
SIDE = 224  # of a picture, where config.json does not say, as in transformers

Seeing = VisionModel | DualEncoder | Captioner | Answerer | Matcher | VisionLanguageModel | FlamingoModel


@dataclass(frozen=True, eq=False)
class ModelImages:
    """What both models get.

    inputs: arguments of our model, by name.
    looks: of each layer whose attention weights are looked at, which call of attention that is, and how many sequences
      of how many tokens it has; none where weights are not looked at.
    rows: (R, 2) numbers from 0 to below 1: which of the sequences, and which of its tokens, are looked at.
    """

    inputs: dict[str, Tensor]
    looks: tuple[tuple[int, int, int], ...]
    rows: Tensor

    @property
    def texts(self) -> int:
        """How many texts there are."""
        return len(self.inputs["input_ids"]) if "input_ids" in self.inputs else 0

    @property
    def tokens(self) -> int:
        """How many tokens they have, padding left out."""
        if "input_ids" not in self.inputs:
            return 0
        return (
            int(self.inputs["attention_mask"].sum())
            if "attention_mask" in self.inputs
            else self.inputs["input_ids"].numel()
        )

    @property
    def pictures(self) -> int:
        """How many pictures there are, of all texts together."""
        return self.inputs["pixel_values"].shape[:-3].numel() if "pixel_values" in self.inputs else 0

    def chosen(self, sequences: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Sequence (R,) and token (R,) of the sampled rows in an attention of so many."""
        return (self.rows[:, 0] * sequences).long(), (self.rows[:, 1] * tokens).long()


def sees_pictures(model: Model) -> bool:
    """Is it a model that is given what `draw_shown` draws? CLIP's tower of texts with its projection is, too."""
    return isinstance(model, Seeing)


def draw_shown(ours: Model, rows: int, seed: int) -> ModelImages:
    """Inputs for a model, drawn from a seed.

    Raises ValueError for a kind of model that nothing is drawn for, and for pictures that transformers cannot rebuild.
    """
    random = torch.Generator().manual_seed(seed)
    looks: tuple[tuple[int, int, int], ...] = ()
    if isinstance(ours, VisionModel):
        inputs, looks = _to_vision(ours, random), _looks(ours)
    elif isinstance(ours, DualEncoder):
        inputs = _to_dual(ours, random)
    elif isinstance(ours, (Captioner, Answerer, Matcher)):
        inputs = _to_both(ours, random)
    elif isinstance(ours, VisionLanguageModel):
        inputs = _to_writer(ours, random)
    elif isinstance(ours, FlamingoModel):
        inputs = _to_flamingo(ours, random)
    else:
        raise ValueError(f"verify does not compare {type(ours).__name__} yet")
    chosen = torch.rand(rows, 2, generator=random, dtype=torch.float64)  # times a count it stays below it
    return ModelImages({name: t.to(ours.device) for name, t in inputs.items()}, looks, chosen.to(ours.device))


# ------------------------------------------------------------------------------------------------------ kinds of models


def _to_vision(ours: VisionModel, random: torch.Generator) -> dict[str, Tensor]:
    size = _size(ours, ours.tower)
    inputs = {"pixel_values": _pixels(ours.tower, (PICTURES,), size, random)}
    if ours.task != "masked-image-modeling":
        return inputs
    grid = ours.tower.embed.patches.grid(*size)
    if grid.rows != grid.columns:
        raise ValueError(
            f"this {ours.family.title} rebuilds {grid.rows} × {grid.columns} patches, and transformers takes every "
            "picture for a square: there is nothing to compare with; load it with task='feature-extraction'"
        )
    return inputs | {"bool_masked_pos": torch.rand(PICTURES, grid.rows * grid.columns, generator=random) < 0.5}


def _to_dual(ours: DualEncoder, random: torch.Generator) -> dict[str, Tensor]:
    inputs = {}
    if ours.text is not None:
        end = ours.text_pooler.end if isinstance(ours.text_pooler, EndPooler) else None
        ids, mask = draw_ids(ours.vocabulary, special_ids(ours), _image_text_lengths(DRAWN, ours.max_positions), random)
        if end is not None:
            ids = ids.scatter(1, mask.sum(1, keepdim=True) - 1, end)
        inputs = {"input_ids": ids, "attention_mask": mask}
    if ours.vision is not None:
        inputs["pixel_values"] = _pixels(ours.vision, (PICTURES,), _size(ours, ours.vision), random)
    return inputs


def _to_both(ours: Captioner | Answerer | Matcher, random: torch.Generator) -> dict[str, Tensor]:
    """A picture for each text. Questions are of one length: transformers lets answers look at the padding of others."""
    reading = ours.decoder if isinstance(ours, Captioner) else ours.encoder
    words, special = reading.embed.tokens.num_embeddings, special_ids(ours)
    lengths = _image_text_lengths(DRAWN, max_text_positions(ours))
    asked = [max(lengths)] * len(lengths) if isinstance(ours, Answerer) else lengths
    ids, mask = draw_ids(words, special, asked, random)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if isinstance(ours, Answerer):
        written = ours.decoder.embed
        answers, its_mask = draw_ids(
            written.tokens.num_embeddings, special, _image_text_lengths(DRAWN[::-1], written.max_positions), random
        )
        inputs = {"input_ids": ids, "decoder_input_ids": answers, "decoder_attention_mask": its_mask}
    return inputs | {"pixel_values": _pixels(ours.vision, (len(ids),), _size(ours, ours.vision), random)}


def _to_writer(ours: VisionLanguageModel, random: torch.Generator) -> dict[str, Tensor]:
    """Three texts: one with a picture after its first word, one without any, one with a picture before its words."""
    size = _size(ours, ours.vision)
    each = ours.num_image_tokens(*size)
    special = special_ids(ours) | {ours.placeholder}
    words, _ = draw_ids(ours.vocabulary, special, [max(DRAWN)] * 3, random)
    room = None if ours.max_positions is None else ours.max_positions - each
    rows = []
    for text, (length, before) in enumerate(zip(_image_text_lengths(DRAWN[:3], room), (1, None, 0), strict=True)):
        own = words[text, :length]
        picture = torch.full((0 if before is None else each,), ours.placeholder)
        rows.append(torch.cat([own[: before or 0], picture, own[before or 0 :]]))
    mask = torch.arange(max(map(len, rows))) < torch.tensor([[len(row)] for row in rows])
    ids = torch.full(mask.shape, int(words[0, 0])).masked_scatter(mask, torch.cat(rows))
    return {"input_ids": ids, "attention_mask": mask, "pixel_values": _pixels(ours.vision, (2,), size, random)}


def _to_flamingo(ours: FlamingoModel, random: torch.Generator) -> dict[str, Tensor]:
    """Two pictures for each of three texts; each token sees none, one or both."""
    ids, mask = draw_ids(ours.vocabulary, special_ids(ours), _image_text_lengths(DRAWN[:3], ours.max_positions), random)
    sees = torch.rand(*ids.shape, 2, generator=random) < 0.4
    pixels = _pixels(ours.vision, (len(ids), 2), _size(ours, ours.vision), random)
    return {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels, "image_attention_mask": sees}


# --------------------------------------------------------------------------------------------------------------- pieces


def draw_ids(
    vocabulary: int, special: Collection[int], lengths: Sequence[int], random: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Texts of ids that are not special, padded on the right with such an id, and their mask: (B, N) each.

    >>> ids, mask = draw_ids(9, {0, 1, 8}, [3, 2], torch.Generator().manual_seed(0))
    >>> mask.int().tolist(), bool(((ids > 1) & (ids < 8)).all())
    ([[1, 1, 1], [1, 1, 0]], True)
    """
    plain = torch.tensor([n for n in range(vocabulary) if n not in special])
    ids = plain[torch.randint(len(plain), (len(lengths), max(lengths)), generator=random)]
    mask = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
    return ids.where(mask, int(plain[0])), mask


def special_ids(ours: Model) -> set[int]:
    """The ids that config.json names for a purpose, for the whole and for its text."""
    values: dict[str, Any] = ours.config.values
    both = [*values.items(), *(values.get("text_config") or {}).items()]
    named = [value for key, value in both if key.endswith("_token_id")]
    return {n for value in named for n in (value if isinstance(value, list) else [value]) if isinstance(n, int)}


def _image_text_lengths(wanted: Sequence[int], most: int | None) -> list[int]:
    return [n if most is None else max(1, min(n, most)) for n in wanted]


def _size(ours: Model, tower: VisionTower | WindowTower) -> tuple[int, int]:
    """Height and width that the checkpoint was made for."""
    return ours.config.pair("image_size", SIDE) if isinstance(tower, WindowTower) else tower.embed.pixels


def _pixels(
    tower: VisionTower | WindowTower, count: tuple[int, ...], size: tuple[int, int], random: torch.Generator
) -> Tensor:
    """(*count, C, H, W)."""
    return torch.randint(-128, 129, (*count, tower.embed.patches.channels, *size), generator=random) / 64


def _looks(ours: VisionModel) -> tuple[tuple[int, int, int], ...]:
    """As `Shown.looks`: every block, or of each stage the last one, whose weights transformers hands out."""
    sides = list(ours.layouts(Frame.whole(*_size(ours, ours.tower))).values())
    calls = list(range(len(sides)))
    if isinstance(ours.tower, WindowTower):
        blocks = torch.tensor([len(stage.blocks) for stage in ours.tower.stages])  # type: ignore[arg-type]
        calls = (blocks.cumsum(0) - 1).tolist()
    return tuple((call, PICTURES * sides[call].queries.shape[0], sides[call].queries.shape[1]) for call in calls)


Reader = Callable[[Any, ModelImages], Made]
"""A model of transformers and what it is given → what it made."""


def of_ours_seeing(model: Model, shown: ModelImages) -> Made:
    """Our model's pass."""
    weights: list[Tensor] = []
    looks, number = {call: (b, n) for call, b, n in shown.looks}, count()

    def note(call: Call) -> None:
        at = looks.get(next(number))
        if at is not None:
            weights.append(rows_of(call, *shown.chosen(*at)))

    with torch.inference_mode(), told(note):
        output = model(**shown.inputs, output_hidden_states=True)
    made: Made = {}
    if isinstance(model, Answerer):
        with torch.inference_mode():
            seen = model.vision(shown.inputs["pixel_values"].to(model.dtype), output_hidden_states=True)
        made |= _image_tower("picture", seen.hidden_states, seen.last_hidden_state)
    for part, layers, hidden in _towers(model, output):
        made |= _image_tower(part, layers, hidden, weights)
    if isinstance(model, Matcher):
        made |= _head({"cosines": _cosines(model, shown.inputs)})
    head = {
        "pooled": output.pooler_output,
        "text vectors": output.text_embeds,
        "picture vectors": output.image_embeds,
        "logits": _logits(output),
    }
    return _image_tokens(made | _head(head), shown)


def reader_of(model: Model) -> Reader:
    """How the pass of transformers' model is read, for a model of ours."""
    if isinstance(model, VisionModel):
        return _alone("")
    if isinstance(model, DualEncoder):
        if model.text is None or model.vision is None:
            return _alone("text" if model.vision is None else "picture")
        return _hooked({"picture": "vision_model", "text": "text_model"})
    if isinstance(model, Captioner):
        return _hooked({"picture": "vision_model", "text": "text_decoder"})
    if isinstance(model, Answerer):
        return _hooked({"picture": "vision_model", "question": "text_encoder", "answer": "text_decoder"})
    if isinstance(model, Matcher):
        return _hooked({"picture": "vision_model", "text": "text_encoder"})
    if isinstance(model, VisionLanguageModel):
        return _writing
    assert isinstance(model, FlamingoModel), type(model)
    return _looking


# ----------------------------------------------------------------------------------------------------------------- ours


def _towers(model: Model, output: ModelOutput) -> list[tuple[str, Sequence[Tensor] | None, Tensor | None]]:
    """Part, hidden states and last hidden state of each tower, in the order of the computation."""
    text = output.hidden_states, output.last_hidden_state
    encoder = output.encoder_hidden_states, output.encoder_last_hidden_state
    if isinstance(model, Answerer):
        return [("question", *encoder), ("answer", *text)]
    if isinstance(model, (VisionLanguageModel, FlamingoModel)):
        # What stands for an image is no tower's last hidden state.
        return [("picture", encoder[0], None), ("text", *text)]
    if encoder[0] is not None:
        return [("picture", *encoder), ("text", *text)]
    part = "" if isinstance(model, VisionModel) else "picture" if output.text_embeds is None else "text"
    return [(part, *text)]


def _cosines(model: Matcher, inputs: dict[str, Tensor]) -> Tensor:
    """Of every picture with every text, each read alone: (P, B)."""
    with torch.inference_mode():
        return (
            model.encode_image(inputs["pixel_values"])
            @ model.encode_text(inputs["input_ids"], inputs["attention_mask"]).T
        )


# --------------------------------------------------------------------------------------------------------------- theirs


def _alone(part: str) -> Reader:
    """A model whose own result holds all of its one tower. part: its name."""

    def read(model: Any, shown: ModelImages) -> Made:
        out = _run(model, shown, output_attentions=bool(shown.looks))
        weights: list[Tensor | None] = []
        for handed, (_, b, n) in zip(out.get("attentions") or (), shown.looks, strict=False):
            alike = handed is not None and handed.ndim == 4 and (len(handed), *handed.shape[2:]) == (b, n, n)
            i, j = shown.chosen(b, n)
            weights.append(handed[i, :, j] if alike else None)  # (R, H, N)
        made = _image_tower(part, out.get("hidden_states"), out.get("last_hidden_state"), weights)
        return _image_tokens(made | _results(out, part), shown)

    return read


def _hooked(paths: dict[str, str]) -> Reader:
    """A model whose towers are its children. paths: part → the child's name, in the order of the computation."""

    def read(model: Any, shown: ModelImages) -> Made:
        with _made_by({part: model.get_submodule(path) for part, path in paths.items()}) as found:
            out = _run(model, shown)
        made: Made = {}
        for part in paths:
            tower = found[part][0]
            made |= _image_tower(part, tower.get("hidden_states"), tower.get("last_hidden_state"))
        last = found[list(paths)[-1]][0]  # which may be a decoder, with its scores of words
        results = _results(out, "text")
        if "itm_score" in out:
            cosines = _run(model, shown, use_itm_head=False).itm_score
            results = _head({"cosines": cosines, "logits": out.itm_score})
        elif last.get("logits") is not None:
            results = _head({"logits": last["logits"]})
        elif last.get("pooler_output") is not None:
            results = _head({"pooled": last["pooler_output"]}) | results
        return _image_tokens(made | results, shown)

    return read


def _writing(model: Any, shown: ModelImages) -> Made:
    """A language model with pictures among its words."""
    with _made_by({"picture": getattr(model, "model", model).vision_tower}) as found:
        out = _run(model, shown)
    made = _image_tower("picture", found["picture"][0]["hidden_states"], None)
    made |= _image_tower("text", out.hidden_states, out.get("last_hidden_state"))
    return _image_tokens(made | _results(out, "text"), shown)


def _looking(model: Any, shown: ModelImages) -> Made:
    """A language model that looks at pictures between its blocks.

    Its first hidden state is what enters the first block, after a look: here the words before it stand there.
    """
    body = getattr(model, "model", model)
    vision = body.vision_model
    steps = [vision.pre_layrnorm, *vision.encoder.layers]
    with _made_by({"text": body.embed_tokens, **{str(n): step for n, step in enumerate(steps)}}) as found:
        out = _run(model, shown)
    b, p = shown.inputs["pixel_values"].shape[:2]
    flat = [_first(found[str(n)][0]) for n in range(len(steps))]
    layers = [t.reshape(b, p, *t.shape[1:]) for t in flat]  # (B, P, n, d)
    made = _image_tower("picture", layers, None)
    made |= _image_tower("text", (found["text"][0], *out.hidden_states[1:]), out.get("last_hidden_state"))
    return _image_tokens(made | _results(out, "text"), shown)


def _run(model: Any, shown: ModelImages, **asked: bool) -> Any:
    dtype = next(model.parameters()).dtype  # Swin takes pixels in no other
    given = {}
    for name, t in shown.inputs.items():
        whole = t.long() if t.dtype == torch.bool and name != "bool_masked_pos" else t
        given[name] = t.to(dtype) if t.is_floating_point() else whole
    with torch.inference_mode():
        return model(**given, output_hidden_states=True, **asked)


def _results(out: Any, part: str) -> Made:
    """What the head gave. Vectors are taken at length 1, as they are compared; the towers alone do not."""
    vectors = {"text vectors": out.get("text_embeds"), "picture vectors": out.get("image_embeds")}
    named = {"pooled": out.get("pooler_output")}
    named |= {n: None if t is None else normalize(t, dim=-1) for n, t in vectors.items()}
    return _head(named | {"logits": _logits(out)})


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


def _image_tower(
    part: str, layers: Sequence[Tensor] | None, last: Tensor | None, weights: Sequence[Tensor | None] = ()
) -> Made:
    """The places of one tower, in order. layers: the embedding, then what each block or stage gave, unnormed."""
    assert layers is not None, part
    made = {TensorPlace(part, None, "embedding"): layers[0]}
    for n, hidden in enumerate(layers[1:]):
        rows = weights[n] if n < len(weights) else None
        if rows is not None:
            made[TensorPlace(part, n, "attention weights")] = rows
        made[TensorPlace(part, n, "hidden states")] = hidden
    return made if last is None else made | {TensorPlace(part, None, "last norm"): last}


def _head(named: dict[str, Tensor | None]) -> Made:
    return {TensorPlace("", None, name): t for name, t in named.items() if t is not None}


def _image_tokens(made: Made, shown: ModelImages) -> Made:
    """Texts without padding: (B, N, d) → (tokens, d)."""
    mask = shown.inputs.get("decoder_attention_mask", shown.inputs.get("attention_mask"))
    if mask is None:
        return made
    texts = ("text", "answer", "")
    return {p: t[mask] if p.part in texts and t.ndim == 3 and t.shape[:2] == mask.shape else t for p, t in made.items()}
