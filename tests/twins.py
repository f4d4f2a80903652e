"""Tiny random models of `transformers`, written to disk and opened by regard: both must compute the same.

The numeric rule (regard/testing.py) with truth = transformers in fp64 and baseline = transformers in the dtype at hand,
both with eager attention. Two things need saying:
- transformers computes norms, rotary angles and softmax in fp32 even in an fp64 model. `widened` makes truth true: what
  it asks to have in fp32 it gets in fp64.
- In fp64 truth and baseline are one computation. There the baseline's error is the one it makes in fp32, scaled by the
  ratio of the two rounding steps; and truth, which errs as much, may be that far from the truth itself.


Weights are drawn so that every one matters, and representable in bf16, so that all dtypes compute one function.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from regard.models.encoder_decoder import shift_right
from regard.models.family import places
from regard.models.loading import load
from regard.models.model import Model
from regard.models.outputs import ModelOutput
from regard.testing import largest_error

RATIO = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps


@contextmanager
def widened() -> Iterator[None]:
    """Inside, torch.float32 means fp64 for Python code: transformers' own casts to fp32 lose nothing.

    Nor do numbers without a dtype (the base of a dynamic rotary): fp64 is the default there too.
    """
    kept = torch.float32, torch.float, Tensor.float
    torch.set_default_dtype(torch.float64)
    torch.float32 = torch.float = torch.float64
    Tensor.float = Tensor.double
    try:
        yield
    finally:
        torch.float32, torch.float, Tensor.float = kept
        torch.set_default_dtype(torch.float32)


def build(
    architecture: str, config: Any, dtype: torch.dtype, change: Callable[[nn.Module], None] | None = None
) -> nn.Module:
    """The `transformers` model, its weights drawn from a fixed seed, the same in every dtype; what is fixed stays."""
    config._attn_implementation = "eager"
    model = getattr(transformers, architecture)(config).eval()
    for p in model.parameters():  # not the buffers: rotary frequencies stay in fp32, as from_pretrained leaves them
        p.data = p.data.to(dtype)
    random = torch.Generator().manual_seed(17)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not p.requires_grad:
                continue
            drawn = torch.randn(p.shape, generator=random, dtype=torch.float64)
            wide = p.shape[-1] ** -0.5 if p.ndim > 1 else 0.2
            near = 1.0 if p.ndim == 1 and name.endswith("weight") else 0.0  # a norm
            p.copy_((near + drawn * wide).bfloat16())
        model.tie_weights()
        if change is not None:
            change(model)
    return model


def texts(vocabulary: int, side: str = "none", *, length: int = 11, pad: int = 0, first: int = 3) -> dict[str, Tensor]:
    """Thirteen texts of ids from `first` on; padded to the left or right, with their mask and counted positions.

    Ids below `first` stand for special tokens: transformers gives the row of the padding token no gradient, ours does.
    Thirteen, because the rule compares largest errors, and the largest of a few numbers may be small by luck.
    """
    ids = torch.randint(first, vocabulary, (13, length), generator=torch.Generator().manual_seed(3))
    if side == "none":
        return {"input_ids": ids}
    lengths, place = (length - torch.arange(13) % (length - 1))[:, None], torch.arange(length)
    mask = place < lengths if side == "right" else place >= length - lengths
    return {
        "input_ids": ids.where(mask, pad),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
    }


def pairs(vocabulary: int, side: str = "none", *, end: int | None = None, start: int = 2) -> dict[str, Tensor]:
    """Texts of 11 tokens for an encoder, and others of 7 and of other lengths for a decoder, with their masks.

    end: each text ends with this token, and the decoder reads the same text after `start`, as to classify it.
    """
    given = texts(vocabulary, side)
    given.pop("position_ids", None)
    mask = given.get("attention_mask", torch.ones_like(given["input_ids"], dtype=torch.bool))
    if end is not None:
        given["input_ids"][torch.arange(13), (mask * torch.arange(1, 12)).argmax(1)] = end
        again = {"decoder_input_ids": shift_right(given["input_ids"], start, mask), "decoder_attention_mask": mask}
    else:
        other = texts(vocabulary, side, length=7)
        again = {
            "decoder_input_ids": other["input_ids"].flip(0),
            "decoder_attention_mask": other.get("attention_mask", mask[:, :7]).flip(0),
        }
    return given | again if side != "none" else given | {"decoder_input_ids": again["decoder_input_ids"]}


def side_by_side(model: Model, right: dict[str, Tensor], left: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """What a model with two towers makes of the same tokens padded right and left: logits or vectors of tokens."""
    for name, mask in (("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask")):
        left[name] = torch.zeros_like(left[name]).masked_scatter(left[mask], right[name][right[mask]])
    made = []
    for given in (right, left):
        result = model(**given)
        found = result.last_hidden_state if result.logits is None else result.logits
        made.append(
            found[given["decoder_attention_mask"]]
            if found.shape[:2] == given["decoder_attention_mask"].shape
            else found
        )
    return made[0], made[1]


def pictures(height: int, width: int, count: int = 3, channels: int = 3) -> dict[str, Tensor]:
    """Pixels (count, channels, height, width), representable in bf16."""
    drawn = torch.randn(count, channels, height, width, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return {"pixel_values": drawn.bfloat16().double()}


@dataclass
class Twin:
    """One model of transformers in fp64, and the directory it is in.

    change: what is done to the weights after they are drawn.
    stored: regular expressions of names in transformers' memory → what it calls them in files, where these differ.
    read: what transformers' model makes of its inputs, by name, where its result does not hold all of it.
    """

    architecture: str
    config: Any
    directory: Path
    change: Callable[[nn.Module], None] | None = None
    stored: Mapping[str, str] = field(default_factory=dict)
    read: Callable[[nn.Module, dict[str, Any]], dict[str, Tensor]] = field(default_factory=lambda: of_theirs)

    def __post_init__(self) -> None:
        self.written: nn.Module | None = build(self.architecture, self.config, torch.float32, self.change)
        self.written.save_pretrained(self.directory)

    @cached_property
    def truth(self) -> nn.Module:
        with widened():  # after the other: modules imported in here would keep what fp32 means here
            return build(self.architecture, self.config, torch.float64, self.change)

    def baseline(self, dtype: torch.dtype) -> nn.Module:
        written, self.written = self.written, None  # the first in fp32 is there already; whoever has it may change it
        if dtype == torch.float32 and written is not None:
            return written
        return build(self.architecture, self.config, dtype, self.change)

    def ours(self, dtype: torch.dtype, **more: Any) -> Model:
        return load(self.directory, dtype=dtype, **more)


def assert_same(
    twin: Twin,
    dtype: torch.dtype,
    inputs: dict[str, Any],
    theirs: dict[str, Any] | None = None,
    *,
    real: Tensor | None = None,
    gradients: bool = True,
    device: str = "cpu",
) -> None:
    """Ours on `inputs` obeys the rule against transformers on `theirs` (ids and mask renamed by default).

    theirs: what else transformers gets, or gets otherwise; None: it does not get it.
    real: (B, N) booleans, the positions that count (of the decoder); default the mask given, else all.
    device: where ours and the baseline run; truth is made on the CPU.
    """
    theirs = {n: t for n, t in {**their_names(inputs), **(theirs or {})}.items() if t is not None}
    real = inputs.get("attention_mask") if real is None else real
    ours = twin.ours(dtype, device=device)
    mine = run(ours, inputs, lambda m, x: of_ours(m(**x, output_hidden_states=True)), real, gradients)
    baseline = twin.baseline(torch.float32 if dtype == torch.float64 else dtype)
    base = run(baseline.to(device), theirs, twin.read, real, gradients)
    with widened():
        truth = run(twin.truth, theirs, twin.read, real, gradients)
    carried = RATIO if dtype == torch.float64 else 1.0
    mine |= _gradients_by_their_names(ours, mine.pop("gradients", {}))
    base |= _as_stored(twin, base.pop("gradients", {}))
    truth |= _as_stored(twin, truth.pop("gradients", {}))
    for name in {"pooled", "text", "picture"} - truth.keys():  # transformers does not hand them out beside some logits
        mine.pop(name, None)
    assert set(mine) == set(truth), f"ours lacks {set(truth) - set(mine)}, and has beside {set(mine) - set(truth)}"
    slope = max((float(t.abs().max()) for n, t in truth.items() if n.startswith("gradient")), default=0.0)
    for name, value in mine.items():
        steep = name.startswith("gradient")
        expected = truth[name]
        assert value.shape == expected.shape, (name, value.shape, expected.shape)
        assert value.dtype == dtype, name
        assert bool(value.isfinite().all()), name
        err, where = largest_error(value, expected)
        allowed = largest_error(base[name], expected)[0] * carried
        scale = slope if steep else float(expected.abs().max())
        step = torch.finfo(dtype).eps * scale
        limit = ((3 if steep else 2) + (1 if dtype == torch.float64 else 0)) * (allowed + step)
        assert err <= limit, f"{name} in {dtype} errs by {err:.3g} at {where}; baseline {allowed:.3g}, step {step:.3g}"


def their_names(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same arguments for transformers, masks as integers. A decoder beside an encoder takes no positions there."""
    given = {n: t for n, t in inputs.items() if t is not None and n != "decoder_position_ids"}
    return {n: t.long() if t.dtype == torch.bool and n != "bool_masked_pos" else t for n, t in given.items()}


def run(model: nn.Module, inputs: dict[str, Any], read: Any, real: Tensor | None, gradients: bool) -> dict[str, Any]:
    """What a model makes of its inputs, and the gradient of a fixed random projection of it to every weight."""
    device = next(model.parameters()).device
    made = read(model, {n: t.to(device) if isinstance(t, Tensor) else t for n, t in inputs.items()})
    made = {n: t.cpu() for n, t in made.items()}
    made = {n: t[real] if real is not None and t.shape[:2] == real.shape else t for n, t in made.items()}
    found: dict[str, Any] = {n: t.detach() for n, t in made.items()}
    if gradients:
        last = next(made[n] for n in ("logits", "text", "picture", "hidden") if n in made)
        towards = torch.randn(last.shape, generator=torch.Generator().manual_seed(13), dtype=torch.float64)
        model.zero_grad()
        (last * towards.bfloat16().to(last)).sum().backward()
        found["gradients"] = {
            f"gradient of {n}": p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None
        }
    return found


def of_ours(output: ModelOutput) -> dict[str, Tensor]:
    return _named(output, output.hidden_states) | {
        n: t for n, t in (("text", output.text_embeds), ("picture", output.image_embeds)) if t is not None
    }


def of_theirs(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    dtype = next(model.parameters()).dtype  # Swin takes pixels in no other
    floats = {n: t.to(dtype) for n, t in inputs.items() if isinstance(t, Tensor) and t.is_floating_point()}
    out = model(**{**inputs, **floats}, output_hidden_states=True)
    return _named(out, out.get("decoder_hidden_states", out.get("hidden_states")))


def _named(out: Any, hidden_states: tuple[Tensor, ...] | None) -> dict[str, Tensor]:
    """What is compared of an output, ours or transformers'."""
    get = out.get
    logits = get("logits", get("prediction_logits", get("reconstruction", get("logits_per_image"))))
    if get("start_logits") is not None:
        logits = torch.stack([out["start_logits"], out["end_logits"]], -1)
    named = {"logits": logits, "pooled": get("pooler_output")}
    named["next sentence"] = get("seq_relationship_logits", get("sop_logits"))
    if logits is None:
        named["hidden"] = out["last_hidden_state"]
    named |= {f"layer {i}": t for i, t in enumerate(hidden_states or ())}
    named |= {f"memory layer {i}": t for i, t in enumerate(get("encoder_hidden_states") or ())}
    return {n: t for n, t in named.items() if t is not None}


def _as_stored(twin: Twin, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients under the names that the weights have in files; what has one name there is one matrix."""

    def renamed(name: str) -> str:
        for memory, file in twin.stored.items():
            name = re.sub(memory, file, name)
        return name

    found: dict[str, list[Tensor]] = {}
    for name, gradient in gradients.items():
        found.setdefault(renamed(name), []).append(gradient)
    return {name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in found.items()}


def _gradients_by_their_names(model: Model, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    named = {}
    for place in places(model, model.family.prefix_of(model.task)):
        gradient = gradients.get(f"gradient of {place.name}")
        if gradient is not None:
            parts = place.source.split(gradient, place.rows)
            named |= {f"gradient of {n}": part for n, part in zip(place.theirs, parts, strict=True)}
    return named


def assert_saved(twin: Twin, elsewhere: Path, inputs: dict[str, Any], *, remade: Collection[str] = ()) -> None:
    """What ours writes, transformers opens, and computes with it exactly what it did.

    remade: tensors that it makes by itself, though it calls them missing.
    """
    twin.ours(torch.float32).save(elsewhere)
    again, info = getattr(transformers, twin.architecture).from_pretrained(
        elsewhere, attn_implementation="eager", output_loading_info=True
    )
    assert info["missing_keys"] == set(remade), info
    assert not info["unexpected_keys"], info
    assert not info["mismatched_keys"], info
    theirs = their_names(inputs)
    before, after = twin.read(twin.baseline(torch.float32), theirs), twin.read(again.eval(), theirs)
    for name, value in before.items():
        assert torch.equal(value, after[name]), name


def assert_side_of_padding_changes_nothing(model: Model, *, pad: int = 0) -> None:
    """Ours, in fp64, on the same texts padded right and left: the same vectors, logits and pooled vectors.

    For heads that look at the first token: transformers takes the first position, padding or not.
    """
    assert model.dtype == torch.float64
    made = {}
    tokens = texts(31, "right", first=7)
    for side in ("right", "left"):
        mask = texts(31, side)["attention_mask"]
        ids = torch.full(mask.shape, pad).masked_scatter(mask, tokens["input_ids"][tokens["attention_mask"]])
        found = of_ours(model(ids, mask))
        made[side] = {n: t[mask] if t.shape[:2] == mask.shape else t for n, t in found.items()}
    assert made["right"]
    for name, value in made["right"].items():
        torch.testing.assert_close(
            made["left"][name], value, rtol=0, atol=1e-13, msg=lambda said, n=name: f"{n}: {said}"
        )


def change(directory: Path, **values: Any) -> Path:
    """The same directory, its config.json changed."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return directory
