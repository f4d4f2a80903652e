"""Initial weights of a model that is to be trained from scratch, as each family's paper or original code draws them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.models.model import Model
from regard.nn.projections import Joined

__all__ = ["initialize"]


class Constant(NamedTuple):
    """Every number is this one."""

    value: float


Draw = float | tuple[float, ...] | Constant | None
"""Standard deviation of a normal distribution (one for each map joined in a matrix), a constant, or the default."""


@torch.no_grad()
def initialize(model: Model, generator: torch.Generator | None = None, *, only: Collection[str] | None = None) -> None:
    """Draw every parameter of a model, in the order of `named_parameters`.

    By default matrices and embeddings are N(0, initializer_range²), biases 0, norms 1; `RULES` has the families that
    differ.

    generator: default torch's own.  only: names of the parameters to draw; default all.
    """
    values = model.config.values
    std = float(values.get("initializer_range", values.get("init_std", 0.02)))
    rule = RULES.get(model.family.model_type)
    owners = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        if only is not None and name not in only:
            continue
        path, _, leaf = name.rpartition(".")
        draw = None if rule is None else rule(name, parameter, model)
        if leaf.endswith("bias") and not isinstance(draw, Constant):
            parameter.zero_()
        elif isinstance(draw, Constant):
            parameter.fill_(draw.value)
        elif draw is None and parameter.ndim == 1 and leaf == "weight":
            parameter.fill_(1.0)  # of a norm
        elif model.family.model_type == "transformer":
            _draw_2017(owners[path], parameter, generator)
        elif isinstance(draw, tuple):
            owner = owners[path]
            assert isinstance(owner, Joined), name
            for part, width in zip(torch.split(parameter, list(owner.rows)), draw, strict=True):
                part.normal_(0.0, width, generator=generator)
        else:
            parameter.normal_(0.0, std if draw is None else draw, generator=generator)


def _draw_2017(owner: nn.Module, parameter: Tensor, generator: torch.Generator | None) -> None:
    """Xavier for matrices, each of query, key and value by itself; embeddings with variance 1/d."""
    if isinstance(owner, nn.Embedding):
        parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
        return
    rows = list(owner.rows) if isinstance(owner, Joined) else [len(parameter)]
    for part in torch.split(parameter, rows):
        nn.init.xavier_uniform_(part, generator=generator)


# ------------------------------------------------------------------------------------------------- families that differ


def _gpt2(name: str, parameter: Tensor, model: Model) -> Draw:
    """Each block adds to the residual stream twice (Radford et al. 2019, section 2.3)."""
    values = model.config.values
    if name.endswith((".w_o.weight", ".w_out.weight")):
        return float(values.get("initializer_range", 0.02)) / math.sqrt(2 * int(values["n_layer"]))
    return None


def _t5(name: str, parameter: Tensor, model: Model) -> Draw:
    """Mesh-TensorFlow's: queries are not scaled by √d_kv, so they start smaller (Raffel et al. 2020)."""
    values = model.config.values
    factor, d, d_kv = float(values.get("initializer_factor", 1.0)), int(values["d_model"]), int(values["d_kv"])
    if name.endswith("norm.weight"):
        return Constant(factor)
    if "embed.tokens" in name or name == "head.words.weight":
        return factor
    if name.endswith("w_qkv.weight"):
        return (factor * (d * d_kv) ** -0.5, factor * d**-0.5, factor * d**-0.5)
    if name.endswith((".w_o.weight", ".w_out.weight")):
        return float(factor * parameter.shape[1] ** -0.5)
    if name == "head.score.weight" and model.task == "token-classification":
        return factor
    return float(factor * d**-0.5)


def _vision(name: str, parameter: Tensor, model: Model) -> Draw:
    """Hidden patches, registers and Swin's biases start at 0, DINOv2's scales at layerscale_value."""
    if name.endswith(("embed.hidden", "embed.registers", "position.table")):
        return Constant(0.0)
    if model.family.model_type == "deit" and name.startswith("tower.embed.") and "patches" not in name:
        return Constant(0.0)
    if name.endswith(("attention_scale", "feed_forward_scale")):
        return Constant(float(model.config.values.get("layerscale_value", 1.0)))
    return None


def _clip(name: str, parameter: Tensor, model: Model) -> Draw:
    """Radford et al. 2021: the deeper the tower, the smaller what is added to the residual stream."""
    values = model.config.values
    factor = float(values.get("initializer_factor", 1.0))
    if name == "head.scale":
        return Constant(float(values.get("logit_scale_init_value", 2.6592)))
    if name.endswith("embed.cls"):
        return float(factor * parameter.shape[0] ** -0.5)
    if name.startswith("head.") and parameter.ndim == 2:
        return float(factor * parameter.shape[1] ** -0.5)
    if ".blocks." not in name or parameter.ndim != 2:
        return None
    blocks = model.get_submodule(name.partition(".blocks.")[0] + ".blocks")
    d = parameter.shape[0] if name.endswith(("w_o.weight", "w_out.weight")) else parameter.shape[1]
    if name.endswith("w_o.weight"):
        return float(factor * d**-0.5)
    if name.endswith("w_in.weight"):
        return float(factor * (2 * d) ** -0.5)
    small = float(factor * (2 * len(blocks) * d) ** -0.5)  # type: ignore[arg-type]
    return (small,) * 3 if name.endswith("w_qkv.weight") else small


def _blip(name: str, parameter: Tensor, model: Model) -> Draw:
    """The scale is CLIP's; the image's first weights are ViT's, not the 1e-10 of transformers' default config."""
    if name == "head.scale":
        return Constant(float(model.config.values.get("logit_scale_init_value", 2.6592)))
    return None


def _idefics(name: str, parameter: Tensor, model: Model) -> Draw:
    """Flamingo's gates start at 0, so that training begins with the language model as it is (Alayrac et al. 2022)."""
    if name.endswith("_gate"):
        return Constant({"zeros": 0.0, "ones": 1.0}[model.config.values.get("alpha_initializer", "zeros")])
    if name in ("resampler.latents", "vision.embed.cls"):
        return 1.0
    return None


def _llava(name: str, parameter: Tensor, model: Model) -> Draw:
    """The vision tower is CLIP's."""
    return _clip(name, parameter, model) if name.startswith("vision.") else None


RULES: dict[str, Callable[[str, Tensor, Model], Draw]] = {
    "gpt2": _gpt2,
    "t5": _t5,
    "vit": _vision,
    "deit": _vision,
    "dinov2": _vision,
    "dinov2_with_registers": _vision,
    "swin": _vision,
    "clip": _clip,
    "clip_text_model": _clip,
    "clip_vision_model": _clip,
    "blip": _blip,
    "idefics": _idefics,
    "llava": _llava,
}
