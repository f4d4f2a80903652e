"""One forward pass of a regard model and of its transformers peer: the same inputs, and tensors that compare."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from regard.backends.call import Call
from regard.data.tokenizer import FILE_SETS
from regard.layouts import Frame
from regard.locale import Lang, catalogue, translate
from regard.models.dual_encoder import DualEncoder
from regard.models.encoder_decoder import EncoderDecoder, shift_right
from regard.models.flamingo import FlamingoModel
from regard.models.image_text import Answerer, Captioner, Matcher
from regard.models.model import Model
from regard.models.text import AnsweringModel, LongTextModel, TextModel
from regard.models.vision import VisionModel
from regard.models.vision_language import VisionLanguageModel
from regard.nn.blocks import EndPooler
from regard.nn.sparse_attention import BlockAttention, SlidingAttention
from regard.nn.vision import VisionTower
from regard.nn.windows import WindowTower
from regard.op import observe, unobserve


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
        where = " ".join(filter(None, (word(self.part, lang), layer)))
        return f"{where}, {word(self.what, lang)}" if where else word(self.what, lang)


def word(text: str, lang: Lang) -> str:
    """A name of the certificate in another language."""
    return catalogue(lang).get(text, text)


Tensors = dict[TensorPlace, Tensor]
"""What stood at each place, in the order of the computation; of (B, N, …) the tokens alone."""

LENGTHS = (19, 11, 5, 17, 7)  # of texts whose ids are drawn
PICTURES = 3
SIDE = 224  # of an image, where config.json does not say, as in transformers

VISUAL = (VisionModel, DualEncoder, Captioner, Answerer, Matcher, VisionLanguageModel, FlamingoModel)
"""Kinds of model that get drawn images, or, as CLIP's text tower with its projection, drawn ids."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """The inputs of both models, and the queries whose attention weights are compared.

    arguments: of our model, by name; transformers has the same names.
    rows: sequence (R,) and token (R,) of these queries, in every call of attention; None for none, or as `looks` says.
    looks: of each compared layer of a vision model: the number of its call of attention, how many sequences of how many
      tokens that has, and its sequence (R,) and token (R,).
    """

    arguments: dict[str, Tensor]
    rows: tuple[Tensor, Tensor] | None = None
    looks: tuple[tuple[int, int, int, tuple[Tensor, Tensor]], ...] = ()

    @property
    def mask(self) -> Tensor | None:
        """(B, N), True = token of what is read last: the decoder's where there is one."""
        return self.arguments.get("decoder_attention_mask", self.arguments.get("attention_mask"))

    @property
    def texts(self) -> int:
        """How many texts there are."""
        return len(self.arguments.get("input_ids", ()))

    @property
    def tokens(self) -> int:
        """How many tokens they have, padding left out."""
        if not self.texts:
            return 0
        mask = self.arguments.get("attention_mask")
        return self.arguments["input_ids"].numel() if mask is None else int(mask.sum())

    @property
    def pictures(self) -> int:
        """How many images there are, of all texts together."""
        return self.arguments["pixel_values"].shape[:-3].numel() if "pixel_values" in self.arguments else 0


# --------------------------------------------------------------------------------------------------------------- texts


def text_inputs(ours: Model, sentences: Sequence[str] | None, cut: bool, rows: int, seed: int) -> Inputs:
    """Texts padded on the right. sentences: None draws ids.  cut: texts longer than the model are cut, else refused."""
    random = torch.Generator().manual_seed(seed)
    most = ours.max_text_positions
    if sentences is None:
        ids, mask = _draw_texts(ours, most, random)
    else:
        batch = ours.tokenizer.batch(sentences, pad="right", length=most, truncate=cut and most is not None)
        mask = batch.attention_mask
        ids = batch.input_ids.where(mask, pad_id(ours))  # by this id transformers finds the last token
    for n, length in enumerate(mask.sum(1).tolist()):
        if length == 0:
            raise ValueError(f"text {n} has no token: an empty text says nothing to this model")
    text, position = mask.nonzero(as_tuple=True)
    chosen = torch.randperm(len(text), generator=random)[:rows]
    ids, mask, text, position = (t.to(ours.device) for t in (ids, mask, text[chosen], position[chosen]))
    arguments = {"input_ids": ids, "attention_mask": mask}
    if isinstance(ours, EncoderDecoder):
        arguments |= {"decoder_input_ids": shift_right(ids, ours.start, mask), "decoder_attention_mask": mask}
    # transformers hands out Longformer's weights by windows. BigBird's leave out what a block counts more than once,
    # and in short texts, where it changes to full attention on the way, there are none.
    sparse = any(isinstance(m, (SlidingAttention, BlockAttention)) for m in ours.modules())
    return Inputs(arguments, None if sparse else (text, position))


def longest_dense(ours: Model) -> int:
    """The longest text that sparse attention looks at as a whole; 0 where attention is not sparse."""
    sliding = [2 * m.reach * m.dilation for m in ours.modules() if isinstance(m, SlidingAttention)]
    blocks = [(5 + 2 * m.random) * m.size for m in ours.modules() if isinstance(m, BlockAttention)]
    return max([*sliding, *blocks], default=0)


def wants_question(ours: Model) -> bool:
    """Whether the model reads a question before each text."""
    return isinstance(ours, (LongTextModel, AnsweringModel)) and ours.task == "question-answering"


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory holds files of a tokenizer."""
    names = {name for files in FILE_SETS for name in files.split(" + ")}
    return any((directory / name).is_file() for name in names)


def pad_id(ours: Model) -> int:
    """The id that texts are padded with: config.json's, else the tokenizer's, else 0."""
    pad = ours.config.values.get("pad_token_id")
    if isinstance(pad, int) and pad >= 0:
        return pad
    if ours.directory is None or not has_tokenizer(ours.directory):
        return 0
    known = ours.tokenizer.ids_of
    return next((n for n in (known.pad, known.eos) if n is not None), 0)


def _draw_texts(ours: Model, most: int | None, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Texts of random ids, no special ones among them but for those that some models look for."""
    if not isinstance(ours, (TextModel, EncoderDecoder)):
        raise ValueError(f"verify does not compare {type(ours).__name__} yet")
    # Where attention may be sparse: one text that it is sparse in, and a shorter one.
    dense = longest_dense(ours)
    wanted = (dense + LENGTHS[0], dense // 2 + LENGTHS[1]) if dense else LENGTHS
    block = max((m.size for m in ours.modules() if isinstance(m, BlockAttention)), default=1)
    room = None if most is None else most - most % block  # transformers fills up a block, and needs positions for it
    lengths = [n if room is None else min(n, room) for n in wanted]
    ids, mask = _draw_ids(ours.vocabulary, _special_ids(ours), lengths, random)
    ends = torch.tensor(lengths)[:, None] - 1
    end = ours.config.values.get("eos_token_id") if isinstance(ours, EncoderDecoder) else None
    if isinstance(ours, TextModel) and isinstance(ours.pooler, EndPooler):
        end = ours.pooler.end
    if isinstance(end, int):
        ids = ids.scatter(1, ends, end)
    if isinstance(ours, LongTextModel) and wants_question(ours):  # transformers wants three separators, two as one
        separator = ours.config.int("sep_token_id", 2, minimum=0)
        ids = ids.scatter(1, torch.cat([ends - ends + 1, ends - ends + 2, ends], 1), separator)
    return ids.where(mask, pad_id(ours)), mask


def _draw_ids(
    vocabulary: int, special: Collection[int], lengths: Sequence[int], random: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Texts of ids that are not special, padded on the right with such an id, and their mask: (B, N) each."""
    plain = torch.tensor([n for n in range(vocabulary) if n not in special])
    ids = plain[torch.randint(len(plain), (len(lengths), max(lengths)), generator=random)]
    mask = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
    return ids.where(mask, int(plain[0])), mask


def _special_ids(ours: Model) -> set[int]:
    """The ids that config.json names for a purpose, for the whole and for its text."""
    values: dict[str, Any] = ours.config.values
    both = [*values.items(), *(values.get("text_config") or {}).items()]
    named = [value for key, value in both if key.endswith("_token_id")]
    return {n for value in named for n in (value if isinstance(value, list) else [value]) if isinstance(n, int)}


# -------------------------------------------------------------------------------------------------------------- images


def visual_inputs(ours: Model, rows: int, seed: int) -> Inputs:
    """Images, and ids beside them, drawn from a seed for one of the VISUAL models.

    Raises:
        ValueError: for another kind of model, and for images that transformers cannot rebuild.
    """
    random = torch.Generator().manual_seed(seed)
    if isinstance(ours, VisionModel):
        arguments = _for_vision(ours, random)
    elif isinstance(ours, DualEncoder):
        arguments = _for_dual_encoder(ours, random)
    elif isinstance(ours, (Captioner, Answerer, Matcher)):
        arguments = _for_image_text(ours, random)
    elif isinstance(ours, VisionLanguageModel):
        arguments = _for_vision_language(ours, random)
    elif isinstance(ours, FlamingoModel):
        # Two images for each of three texts; each token sees none, one or both.
        lengths = _clipped(LENGTHS[:3], ours.max_positions)
        ids, mask = _draw_ids(ours.vocabulary, _special_ids(ours), lengths, random)
        sees = torch.rand(*ids.shape, 2, generator=random) < 0.4
        pixels = _draw_pixels(ours, ours.vision, (len(ids), 2), random)
        arguments = {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels, "image_attention_mask": sees}
    else:
        raise ValueError(f"verify does not compare {type(ours).__name__} yet")

    # The compared queries, as shares of how many sequences and tokens a layer has.
    shares = torch.rand(rows, 2, generator=random, dtype=torch.float64).to(ours.device)  # times a count it stays below
    looks = []
    if isinstance(ours, VisionModel):  # in every block; of stages in the last block, as in transformers
        sides = list(ours.layouts(Frame.whole(*_image_size(ours, ours.tower))).values())
        calls = list(range(len(sides)))
        if isinstance(ours.tower, WindowTower):
            blocks = torch.tensor([len(stage.blocks) for stage in ours.tower.stages])  # type: ignore[arg-type]
            calls = (blocks.cumsum(0) - 1).tolist()
        for call in calls:
            windows, tokens = sides[call].queries.shape
            chosen = (shares[:, 0] * (PICTURES * windows)).long(), (shares[:, 1] * tokens).long()
            looks.append((call, PICTURES * windows, tokens, chosen))
    return Inputs({name: t.to(ours.device) for name, t in arguments.items()}, looks=tuple(looks))


def _for_vision(ours: VisionModel, random: torch.Generator) -> dict[str, Tensor]:
    arguments = {"pixel_values": _draw_pixels(ours, ours.tower, (PICTURES,), random)}
    if ours.task != "masked-image-modeling":
        return arguments
    grid = ours.tower.embed.patches.grid(*_image_size(ours, ours.tower))
    if grid.rows != grid.columns:
        raise ValueError(
            f"this {ours.family.title} rebuilds {grid.rows} × {grid.columns} patches, and transformers takes every "
            "image for a square: there is nothing to compare with; load it with task='feature-extraction'"
        )
    return arguments | {"bool_masked_pos": torch.rand(PICTURES, grid.rows * grid.columns, generator=random) < 0.5}


def _for_dual_encoder(ours: DualEncoder, random: torch.Generator) -> dict[str, Tensor]:
    arguments = {}
    if ours.text is not None:
        lengths = _clipped(LENGTHS, ours.max_positions)
        ids, mask = _draw_ids(ours.vocabulary, _special_ids(ours), lengths, random)
        if isinstance(ours.text_pooler, EndPooler) and ours.text_pooler.end is not None:
            ids = ids.scatter(1, mask.sum(1, keepdim=True) - 1, ours.text_pooler.end)
        arguments = {"input_ids": ids, "attention_mask": mask}
    if ours.vision is not None:
        arguments["pixel_values"] = _draw_pixels(ours, ours.vision, (PICTURES,), random)
    return arguments


def _for_image_text(ours: Captioner | Answerer | Matcher, random: torch.Generator) -> dict[str, Tensor]:
    """An image for each text. Questions are of one length: transformers lets answers look at the padding of others."""
    reading = ours.decoder if isinstance(ours, Captioner) else ours.encoder
    words, special = reading.embed.tokens.num_embeddings, _special_ids(ours)
    lengths = _clipped(LENGTHS, ours.max_text_positions)
    if isinstance(ours, Answerer):
        lengths = [max(lengths)] * len(lengths)
    ids, mask = _draw_ids(words, special, lengths, random)
    arguments = {"input_ids": ids, "attention_mask": mask}
    if isinstance(ours, Answerer):
        written = ours.decoder.embed
        lengths = _clipped(LENGTHS[::-1], written.max_positions)
        answers, answer_mask = _draw_ids(written.tokens.num_embeddings, special, lengths, random)
        arguments = {"input_ids": ids, "decoder_input_ids": answers, "decoder_attention_mask": answer_mask}
    return arguments | {"pixel_values": _draw_pixels(ours, ours.vision, (len(ids),), random)}


def _for_vision_language(ours: VisionLanguageModel, random: torch.Generator) -> dict[str, Tensor]:
    """Three texts: one with an image after its first word, one without any, one with an image before its words."""
    each = ours.num_image_tokens(*_image_size(ours, ours.vision))
    special = _special_ids(ours) | {ours.placeholder}
    words, _ = _draw_ids(ours.vocabulary, special, [max(LENGTHS)] * 3, random)
    room = None if ours.max_positions is None else ours.max_positions - each
    rows = []
    for text, (length, before) in enumerate(zip(_clipped(LENGTHS[:3], room), (1, None, 0), strict=True)):
        own = words[text, :length]
        image = torch.full((0 if before is None else each,), ours.placeholder)
        rows.append(torch.cat([own[: before or 0], image, own[before or 0 :]]))
    mask = torch.arange(max(map(len, rows))) < torch.tensor([[len(row)] for row in rows])
    ids = torch.full(mask.shape, int(words[0, 0])).masked_scatter(mask, torch.cat(rows))
    return {"input_ids": ids, "attention_mask": mask, "pixel_values": _draw_pixels(ours, ours.vision, (2,), random)}


def _clipped(lengths: Sequence[int], most: int | None) -> list[int]:
    return [n if most is None else max(1, min(n, most)) for n in lengths]


def _image_size(ours: Model, tower: VisionTower | WindowTower) -> tuple[int, int]:
    """Height and width that the checkpoint was made for."""
    return ours.config.pair("image_size", SIDE) if isinstance(tower, WindowTower) else tower.embed.pixels


def _draw_pixels(
    ours: Model, tower: VisionTower | WindowTower, number: tuple[int, ...], random: torch.Generator
) -> Tensor:
    """(*number, C, H, W)."""
    shape = (*number, tower.embed.patches.channels, *_image_size(ours, tower))
    return torch.randint(-128, 129, shape, generator=random) / 64


# ---------------------------------------------------------------------------------------------------------------- ours


def our_pass(model: Model, inputs: Inputs) -> Tensors:
    """What our model computes at every place."""
    weights: list[Tensor] = []
    looks, number = {call: rows for call, _, _, rows in inputs.looks}, count()

    def note(call: Call, backend: str, output: Any) -> None:
        rows = looks.get(next(number), inputs.rows)
        if rows is not None:
            weights.append(rows_of(call, *rows))

    observe(note)
    try:
        with torch.inference_mode():
            output = model(**inputs.arguments, output_hidden_states=True)
    finally:
        unobserve(note)

    # The towers, in the order of the computation.
    tensors: Tensors = {}
    text = output.hidden_states, output.last_hidden_state
    encoder = output.encoder_hidden_states, output.encoder_last_hidden_state
    if isinstance(model, EncoderDecoder):
        depth = len(model.encoder.depth)
        tensors |= _tower("encoder", encoder[0], None, weights[:depth])
        tensors |= _tower("decoder", text[0], None, weights[depth::2], weights[depth + 1 :: 2])
    elif isinstance(model, TextModel):
        tensors |= _tower("", text[0], None, weights)
    elif isinstance(model, Answerer):
        with torch.inference_mode():
            seen = model.vision(inputs.arguments["pixel_values"].to(model.dtype), output_hidden_states=True)
        tensors |= _tower("picture", seen.hidden_states, seen.last_hidden_state)
        tensors |= _tower("question", *encoder) | _tower("answer", *text)
    elif encoder[0] is not None:
        # What stands for an image in a language model is no tower's last hidden state.
        inside = isinstance(model, (VisionLanguageModel, FlamingoModel))
        tensors |= _tower("picture", encoder[0], None if inside else encoder[1]) | _tower("text", *text)
    else:
        part = "" if isinstance(model, VisionModel) else "picture" if output.text_embeds is None else "text"
        tensors |= _tower(part, *text, weights)
    if isinstance(model, Matcher):
        # Of every image with every text, each read alone: (P, B).
        ids, mask = inputs.arguments["input_ids"], inputs.arguments["attention_mask"]
        with torch.inference_mode():
            cosines = model.encode_image(inputs.arguments["pixel_values"]) @ model.encode_text(ids, mask).T
        tensors |= _head({"cosines": cosines})
    vectors = {"text vectors": output.text_embeds, "picture vectors": output.image_embeds}
    return _without_padding(tensors | _results(output, vectors), inputs)


def rows_of(call: Call, text: Tensor, position: Tensor) -> Tensor:
    """The exact weights e^(s − lse) of some queries of a call, computed in fp64: (R, H, Nk).

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


# -------------------------------------------------------------------------------------------------------------- theirs


def their_pass(model: Any, inputs: Inputs, ours: Model) -> Tensors:
    """What transformers' model with eager attention computes at the places of our model."""
    if isinstance(ours, EncoderDecoder):
        out = _run(model, inputs, output_attentions=True)
        assert inputs.rows is not None
        i, j = inputs.rows
        names = ("encoder_attentions", "decoder_attentions", "cross_attentions")
        encoder, decoder, cross = ([weights[i, :, j] for weights in out.get(name) or ()] for name in names)  # (R, H, N)
        tensors = _tower("encoder", out.get("encoder_hidden_states"), None, encoder)
        tensors |= _tower("decoder", out.get("decoder_hidden_states"), None, decoder, cross)
        tensors |= _their_results(out)
    elif isinstance(ours, (TextModel, VisionModel)):
        tensors = _read_tower(model, inputs, "")
    elif isinstance(ours, DualEncoder) and (ours.text is None or ours.vision is None):
        tensors = _read_tower(model, inputs, "text" if ours.vision is None else "picture")
    elif isinstance(ours, DualEncoder):
        tensors = _read_children(model, inputs, {"picture": "vision_model", "text": "text_model"})
    elif isinstance(ours, Captioner):
        tensors = _read_children(model, inputs, {"picture": "vision_model", "text": "text_decoder"})
    elif isinstance(ours, Answerer):
        children = {"picture": "vision_model", "question": "text_encoder", "answer": "text_decoder"}
        tensors = _read_children(model, inputs, children)
    elif isinstance(ours, Matcher):
        tensors = _read_children(model, inputs, {"picture": "vision_model", "text": "text_encoder"})
    elif isinstance(ours, VisionLanguageModel):
        tensors = _read_llava(model, inputs)
    else:
        tensors = _read_idefics(model, inputs)
    return _without_padding(tensors, inputs)


def _run(model: Any, inputs: Inputs, **options: bool) -> Any:
    dtype = next(model.parameters()).dtype  # Swin takes pixels in no other
    arguments = {}
    for name, t in inputs.arguments.items():
        whole = t.long() if t.dtype == torch.bool and name != "bool_masked_pos" else t
        arguments[name] = t.to(dtype) if t.is_floating_point() else whole
    with torch.inference_mode():
        return model(**arguments, output_hidden_states=True, **options)


def _read_tower(model: Any, inputs: Inputs, part: str) -> Tensors:
    """A model whose own result holds all of its one tower."""
    out = _run(model, inputs, output_attentions=bool(inputs.looks) or inputs.rows is not None)
    weights: list[Tensor | None] = []
    for n, handed in enumerate(out.get("attentions") or ()):
        if inputs.rows is not None:
            weights.append(handed[inputs.rows[0], :, inputs.rows[1]])  # (R, H, N)
        elif n < len(inputs.looks):
            _, sequences, tokens, (i, j) = inputs.looks[n]
            shape = (sequences, tokens, tokens)
            alike = handed is not None and handed.ndim == 4 and (len(handed), *handed.shape[2:]) == shape
            weights.append(handed[i, :, j] if alike else None)
    layers = out.get("hidden_states")
    if inputs.texts:
        layers = [t[:, : inputs.arguments["input_ids"].shape[1]] for t in layers]  # BigBird's have what it padded with
    return _tower(part, layers, out.get("last_hidden_state"), weights) | _their_results(out)


def _read_children(model: Any, inputs: Inputs, paths: dict[str, str]) -> Tensors:
    """A model whose towers are its children. paths: part → the child's name, in the order of the computation."""
    with _outputs_of({part: model.get_submodule(path) for part, path in paths.items()}) as outputs:
        out = _run(model, inputs)
    tensors: Tensors = {}
    for part in paths:
        tower = outputs[part][0]
        tensors |= _tower(part, tower.get("hidden_states"), tower.get("last_hidden_state"))
    last = outputs[list(paths)[-1]][0]  # which may be a decoder, with its scores of words
    if "itm_score" in out:
        cosines = _run(model, inputs, use_itm_head=False).itm_score
        return tensors | _head({"cosines": cosines, "logits": out.itm_score})
    if last.get("logits") is not None:
        return tensors | _head({"logits": last["logits"]})
    return tensors | _head({"pooled": last.get("pooler_output")}) | _their_results(out)


def _read_llava(model: Any, inputs: Inputs) -> Tensors:
    tower = getattr(model, "model", model).vision_tower
    # From 5.23 on, transformers asks its tower for the layers alone that it projects.
    hook = tower.register_forward_pre_hook(
        lambda _, args, given: (args, given | {"output_hidden_states": True}), with_kwargs=True
    )
    try:
        with _outputs_of({"picture": tower}) as outputs:
            out = _run(model, inputs)
    finally:
        hook.remove()
    tensors = _tower("picture", outputs["picture"][0]["hidden_states"], None)
    tensors |= _tower("text", out.hidden_states, out.get("last_hidden_state"))
    return tensors | _their_results(out)


def _read_idefics(model: Any, inputs: Inputs) -> Tensors:
    """Its first hidden state is taken after a look at images; here the embedded words stand in its place."""
    body = getattr(model, "model", model)
    vision = body.vision_model
    steps = [vision.pre_layrnorm, *vision.encoder.layers]
    with _outputs_of({"text": body.embed_tokens, **{str(n): step for n, step in enumerate(steps)}}) as outputs:
        out = _run(model, inputs)
    b, p = inputs.arguments["pixel_values"].shape[:2]
    each = [outputs[str(n)][0] for n in range(len(steps))]
    flat = [output[0] if isinstance(output, tuple) else output for output in each]
    tensors = _tower("picture", [t.reshape(b, p, *t.shape[1:]) for t in flat], None)  # (B, P, n, d)
    tensors |= _tower("text", (outputs["text"][0], *out.hidden_states[1:]), out.get("last_hidden_state"))
    return tensors | _their_results(out)


@contextmanager
def _outputs_of(modules: dict[str, Any]) -> Iterator[dict[str, list[Any]]]:
    """What each module gave, call by call, while inside.

    Copied as it was given: CLIP later puts the projected summary in the place of the summary.
    """
    outputs: dict[str, list[Any]] = {name: [] for name in modules}

    def note(name: str) -> Callable[[Any, Any, Any], None]:
        return lambda _, __, output: outputs[name].append(dict(output) if isinstance(output, dict) else output)

    hooks = [module.register_forward_hook(note(name)) for name, module in modules.items()]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def _their_results(out: Any) -> Tensors:
    # Vectors are taken at length 1, as they are compared; the towers alone do not.
    vectors = {"text vectors": out.get("text_embeds"), "picture vectors": out.get("image_embeds")}
    return _results(out, {name: None if t is None else normalize(t, dim=-1) for name, t in vectors.items()})


# ---------------------------------------------------------------------------------------------------------------- both


def _tower(
    part: str,
    layers: Sequence[Tensor] | None,
    last: Tensor | None,
    weights: Sequence[Tensor | None] = (),
    cross: Sequence[Tensor] = (),
) -> Tensors:
    """The places of one tower, in order.

    layers: the embedding, then what each block or stage gave.  last: after the last norm, where that is compared.
    weights, cross: of each layer, as far as there are such.
    """
    assert layers is not None, part
    tensors = {TensorPlace(part, None, "embedding"): layers[0]}
    for n, hidden in enumerate(layers[1:]):
        for what, of_layers in (("attention weights", weights), ("cross-attention weights", cross)):
            rows = of_layers[n] if n < len(of_layers) else None
            if rows is not None:
                tensors[TensorPlace(part, n, what)] = rows
        tensors[TensorPlace(part, n, "hidden states")] = hidden
    return tensors if last is None else tensors | {TensorPlace(part, None, "last norm"): last}


def _head(named: dict[str, Tensor | None]) -> Tensors:
    return {TensorPlace("", None, name): t for name, t in named.items() if t is not None}


def _results(output: Any, vectors: dict[str, Tensor | None]) -> Tensors:
    """What the head gave, of our model's output or of transformers', whatever the logits are called."""
    names = ("logits", "prediction_logits", "logits_per_image", "reconstruction")
    logits = next((output[name] for name in names if output.get(name) is not None), None)
    if output.get("start_logits") is not None:
        logits = torch.stack([output["start_logits"], output["end_logits"]], -1)
    relation = output.get("seq_relationship_logits", output.get("sop_logits"))
    return _head({"pooled": output.get("pooler_output"), **vectors, "next sentence": relation, "logits": logits})


def _without_padding(tensors: Tensors, inputs: Inputs) -> Tensors:
    """(B, N, d) → (tokens, d). What has no positions stays, and so do rows of weights, images and questions."""
    mask = inputs.mask
    if mask is None:
        return tensors

    def by_token(place: TensorPlace, values: Tensor) -> bool:
        if place.part in ("picture", "question") or "weights" in place.what or values.shape[:2] != mask.shape:
            return False
        return values.ndim == 3 or (values.ndim == 2 and place.what == "logits")  # ELECTRA's discriminator

    return {place: values[mask] if by_token(place, values) else values for place, values in tensors.items()}
