"""`regard.build`: a model from a config, with the initial weights of each family's paper or original code."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.checks import check_int
from regard.data.image_processing import ImageProcessor
from regard.data.tokenizer import Tokenizer
from regard.models.family import DTYPES, FAMILIES, Config, check_task, empty, family_of, named_labels, places
from regard.models.model import Model
from regard.nn.projections import Joined

MAIN_TASKS = (
    *("text-generation", "fill-mask", "text2text-generation", "zero-shot-image-classification"),
    *("image-text-to-text", "image-to-text", "image-classification", "pretraining"),
)
"""What a family is trained for where neither the caller nor config.json says: the first of these that it has."""


def build(
    config: str | Path | Mapping[str, Any] | Any,
    *,
    task: str | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    num_labels: int | None = None,
    labels: Sequence[str] | None = None,
    **values: Any,
) -> Model:
    """Build a model from its config, with the initial weights of its paper or original code.

    >>> import regard
    >>> model = regard.build("gpt2", n_embd=8, n_head=2, n_layer=1, n_positions=16, vocab_size=13)
    >>> model.task, model.training
    ('text-generation', True)
    >>> regard.build({"model_type": "bert"}, task="text-classification").family.title    # doctest: +SKIP
    'BERT'

    Args:
        config: a config.json (the file or its directory; a tokenizer and image processor there are used), a dict of
            its keys, a config of `transformers`, or the model_type of a family ("gpt2"), whose sizes are then given as
            keywords.
        task: which head, as in `regard.load`; default: what "architectures" names, else the task that the family is
            pretrained with.
        seed: of the initial weights. The same seed gives the same weights on every device.
        dtype: of the weights.
        device: where the weights go.
        num_labels: number of labels of a classifier, named LABEL_0 and so on; default: those of the config.
        labels: their names; num_labels is then their number.
        **values: keys of config.json that replace those of `config`.

    Returns:
        The model, in training mode.

    Raises:
        FileNotFoundError: there is no config.json.
        TypeError: `config` is of another type, or dtype is not one of torch's four floating ones.
        ValueError: an unknown family or key, or sizes that do not fit each other.
    """
    if dtype not in DTYPES:
        raise TypeError(f"dtype must be {', '.join(map(str, DTYPES))}; got {dtype!r}")
    check_int("seed", seed, 0)
    read = _read_config(config, values)
    names = named_labels(labels, num_labels)
    if names is not None:
        read = read.with_labels(names)
    family = family_of(read)
    if task is None and read.values.get("architectures"):
        task = family.task_of(read.values["architectures"])
    elif task is None:
        task = next((name for name in MAIN_TASKS if name in family.tasks), family.bare_task)
    check_task(family, task, None if names is None else len(names))
    model = empty(family, read, task)
    read.check_unused(family.title, harmless=family.harmless, ignore=())
    for place in places(model, ""):
        place.put(torch.empty(place.shape, dtype=torch.float32))
    initialize(model, torch.Generator().manual_seed(seed))
    if isinstance(config, (str, Path)) and config not in FAMILIES:
        folder = Path(config) if Path(config).is_dir() else Path(config).parent
        if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
            model.tokenizer = Tokenizer.open(folder)
        if (folder / "preprocessor_config.json").is_file():
            model.preprocessor = ImageProcessor.open(folder)
    return model.to(device=device, dtype=dtype).train()


def _read_config(config: Any, values: dict[str, Any]) -> Config:
    if isinstance(config, str) and config in FAMILIES:
        return Config({"model_type": config, **values}, f"build({config!r}, …)")
    if isinstance(config, (str, Path)):
        path = Path(config)
        if not path.exists():
            raise FileNotFoundError(
                f"there is no config {str(config)!r}; name a config.json, its directory, or a family: "
                + ", ".join(FAMILIES)
            )
        config = Config.open(path)
    if isinstance(config, Config):
        return Config({**config.values, **values}, config.where)
    if isinstance(config, Mapping):
        return Config({**config, **values}, "build({…})")
    if hasattr(config, "to_dict"):  # of transformers
        return Config({**config.to_dict(), **values}, f"build({type(config).__name__})")
    raise TypeError(
        f"config must be a path, a dict, a transformers config or a family's name, got {type(config).__name__}"
    )


# ------------------------------------------------------------------------------------------------------ initial weights


class Constant(NamedTuple):
    """A tensor filled with this value."""

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


def _idefics(name: str, parameter: Tensor, model: Model) -> Draw:
    """Flamingo's gates start at 0, so that training begins with the language model as it is (Alayrac et al. 2022)."""
    if name.endswith("_gate"):
        return Constant({"zeros": 0.0, "ones": 1.0}[model.config.values.get("alpha_initializer", "zeros")])
    if name in ("resampler.latents", "vision.embed.cls"):
        return 1.0
    return None


RULES: dict[str, Callable[[str, Tensor, Model], Draw]] = {
    "gpt2": _gpt2,
    "t5": _t5,
    **dict.fromkeys(("vit", "deit", "dinov2", "dinov2_with_registers", "swin"), _vision),
    **dict.fromkeys(("clip", "clip_text_model", "clip_vision_model"), _clip),
    # The image's first weights are ViT's, not the 1e-10 of transformers' default config.
    "blip": lambda name, parameter, model: _clip(name, parameter, model) if name == "head.scale" else None,
    "idefics": _idefics,
    "llava": lambda name, parameter, model: _clip(name, parameter, model) if name.startswith("vision.") else None,
}
