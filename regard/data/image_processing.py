"""Images to pixel values, as a checkpoint's preprocessor_config.json says."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from regard.data.image_steps import (
    FILTERS,
    MOST_MADE,
    Crop,
    Normalize,
    Pad,
    Resize,
    Square,
    Step,
    read_pair,
    read_target,
)
from regard.data.images import OpenedImage, Source, is_batch, numbered, open_image
from regard.layouts import Frame
from regard.models.checkpoint import read_side
from regard.models.config import Settings

HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
# Of the pictures that CLIP was trained on: https://github.com/openai/CLIP/blob/main/clip/clip.py
OF_CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
ALWAYS = {"do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


_CROPPED = {"size": {"shortest_edge": 224}, "do_center_crop": True, "crop_size": _square(224)}

# default_to_square: what one number means as `size`, both sides or the shorter one.
KINDS: dict[str, dict[str, Any]] = {
    "ViT": {**ALWAYS, **HALF, "size": _square(224), "resample": 2, "default_to_square": True},
    "DeiT": {
        **ALWAYS, **HALF, "size": _square(256), "resample": 3, "default_to_square": True,
        "do_center_crop": True, "crop_size": _square(224),
    },
    "Bit": {**ALWAYS, **OF_CLIP, **_CROPPED, "resample": 3, "default_to_square": False},
    "CLIP": {**ALWAYS, **OF_CLIP, **_CROPPED, "resample": 3, "default_to_square": False},
    "Blip": {**ALWAYS, **OF_CLIP, "size": _square(384), "resample": 3, "default_to_square": True},
    "Idefics": {**ALWAYS, **OF_CLIP, "size": _square(224), "resample": 3, "default_to_square": True},
    "Llava": {**ALWAYS, **OF_CLIP, **_CROPPED, "resample": 3, "default_to_square": False, "do_pad": False},
}  # fmt: skip
"""What each kind does unless the file says otherwise, in the file's own words."""

# For files that name no kind: what `transformers` then takes for a model of the type.
MODELS = {
    "vit": "ViT", "swin": "ViT", "deit": "DeiT", "dinov2": "Bit", "clip": "CLIP", "blip": "Blip",
    "idefics": "Idefics", "llava": "Llava",
}  # fmt: skip

# do_convert_rgb: pictures are RGB before they come here. size_divisor: of old BLIP files; no kind here reads it. The
# others say how arrays come in and go out, or where from.
HARMLESS = {
    "_processor_class", "_valid_processor_keys", "auto_map", "device", "disable_grouping", "do_convert_rgb",
    "feature_extractor_type", "image_processor_type", "image_seq_length", "input_data_format", "processor_class",
    "return_tensors", "size_divisor",
}  # fmt: skip
# What a step that is switched off would have read.
UNUSED = {
    "crop_size", "default_to_square", "image_mean", "image_std", "pad_size", "resample", "rescale_factor", "size",
}  # fmt: skip


@dataclass(frozen=True)
class ImageTransforms:
    """Everything that is done to a picture, in order: steps, then numbers, then padding."""

    steps: tuple[Step, ...]
    numbers: Normalize
    pad: Pad | None

    def __str__(self) -> str:
        return ", ".join(str(part) for part in (*self.steps, self.numbers, self.pad) if part is not None)


def kind_of_type(name: object, where: str) -> str:
    """The kind that an image_processor_type or a feature_extractor_type names, old and new.

    >>> kind_of_type("CLIPFeatureExtractor", "file"), kind_of_type("ViTImageProcessorFast", "file")
    ('CLIP', 'ViT')

    where: the file, for the error. Raises ValueError for a kind that is not known.
    """
    match = re.fullmatch(r"(\w+?)(ImageProcessor|FeatureExtractor)(Fast|Pil)?", str(name))
    if match is None or match[1] not in KINDS:
        known = ", ".join(f"{kind}ImageProcessor" for kind in KINDS)
        raise ValueError(f"{where} is for a {name!s:.80}, which is not known here. Known: {known}")
    return match[1]


def kind_of_model(model: object, where: str) -> str:
    """The kind for a model_type, where the file names none itself. Raises ValueError where it is not known.

    >>> kind_of_model("dinov2", "file")
    'Bit'
    """
    if not isinstance(model, str) or model not in MODELS:
        raise ValueError(
            f"{where} names no image_processor_type, and config.json beside it no model_type that tells it "
            f"({', '.join(MODELS)}), but {model!r:.80}: add the image_processor_type"
        )
    return MODELS[model]


def defaults(kind: str) -> dict[str, Any]:
    """A kind's own values. Raises ValueError for a kind that is not known.

    >>> defaults("Blip")["size"]
    {'height': 384, 'width': 384}
    """
    if kind not in KINDS:
        raise ValueError(f"there is no preprocessor {kind!r}; there are {', '.join(KINDS)}")
    return {key: (value.copy() if isinstance(value, (dict, list)) else value) for key, value in KINDS[kind].items()}


def read_plan(kind: str, settings: Settings, *, ignore: Iterable[str] = ()) -> ImageTransforms:
    """The plan that the values of a kind mean.

    >>> print(read_plan("DeiT", Settings(defaults("DeiT") | {"do_resize": None})))
    crop the middle 224 × 224, ÷ 255, normalise

    settings: the kind's own values, and over them those of the file; null switches off, as it does there.
    ignore: keys that the user says change nothing.
    Raises ValueError for a value that is none, and for a key that is not known.
    """
    steps = (*_squaring(kind, settings), *_resizing(kind, settings), *_cropping(settings))
    plan = ImageTransforms(steps, _numbers(settings), _padding(kind, settings))
    settings.only("data_format", "channels_first")
    settings.finish(f"{kind}'s preprocessing", harmless=HARMLESS | UNUSED, ignore=ignore)
    return plan


def without_ignored(kind: str, values: dict[str, Any]) -> dict[str, Any]:
    """The values of a file without the keys that were read only because the user said to ignore them.

    >>> without_ignored("ViT", {"size": 384, "do_thumbnail": False, "resample": 3})
    {'size': 384, 'resample': 3}

    Raises as `read_plan`, but for a key that is not known.
    """
    settings = Settings(defaults(kind) | values)
    read_plan(kind, settings, ignore=values)
    kept = settings.without_ignored(harmless=HARMLESS | UNUSED, ignore=values)
    return {key: value for key, value in values.items() if key in kept}


def _squaring(kind: str, settings: Settings) -> tuple[Step, ...]:
    if kind != "Llava" or not settings.flag("do_pad", False):
        return ()
    colour = tuple(int(mean * 255) for mean in _three(settings, "image_mean"))
    if not all(0 <= part <= 255 for part in colour):
        raise ValueError(f"{settings.where}: do_pad pads with image_mean, so it must be 0 to 1, got {colour} of 255")
    return (Square((colour[0], colour[1], colour[2])),)


def _resizing(kind: str, settings: Settings) -> tuple[Step, ...]:
    key = "size"
    if kind == "Idefics":
        settings.only("image_num_channels", 3)
        key = "size" if settings.get("image_size") is None else "image_size"  # the older name goes before the newer
    if not settings.flag("do_resize", False):
        return ()
    target = read_target(settings, key, square=settings.flag("default_to_square", False))
    return (Resize(target, settings.whole("resample", least=0, most=len(FILTERS) - 1)),)


def _cropping(settings: Settings) -> tuple[Step, ...]:
    return (Crop(*_bounded(settings, "crop_size")),) if settings.flag("do_center_crop", False) else ()


def _padding(kind: str, settings: Settings) -> Pad | None:
    if kind == "Llava" or not settings.flag("do_pad", False):  # Llava's do_pad comes first: Square
        return None
    return Pad(_bounded(settings, "pad_size") if "pad_size" in settings else None)


def _numbers(settings: Settings) -> Normalize:
    scale = settings.number("rescale_factor") if settings.flag("do_rescale", False) else None
    if scale is not None and not isfinite(scale):
        raise ValueError(f"{settings.where}: rescale_factor must be a number, got {scale}")
    if not settings.flag("do_normalize", False):
        return Normalize(scale, None, None)
    mean, std = _three(settings, "image_mean"), _three(settings, "image_std")
    if 0.0 in std:
        raise ValueError(f"{settings.where}: image_std divides, so it must not be 0, got {std}")
    return Normalize(scale, mean, std)


def _bounded(settings: Settings, key: str) -> tuple[int, int]:
    """A height and a width of which the pixels can be made."""
    height, width = read_pair(settings, key)
    if height * width > MOST_MADE:
        raise ValueError(f"{settings.where}: {key} is {height} × {width}, more than {MOST_MADE:,} pixels")
    return height, width


def _three(settings: Settings, key: str) -> tuple[float, float, float]:
    """One number for each colour; a single one is for all."""
    value = settings.get(key)
    values = value if isinstance(value, (list, tuple)) else [value] * 3
    if len(values) != 3 or not all(isinstance(n, (int, float)) and isfinite(n) for n in values):
        raise ValueError(
            f"{settings.where}: {key} must be one number, or three for red, green and blue, got {value!r:.80}"
        )
    return float(values[0]), float(values[1]), float(values[2])


FILE = "preprocessor_config.json"
NESTED = "processor_config.json"  # where newer checkpoints keep the same values, under "image_processor"


@dataclass(frozen=True, eq=False)
class ImageBatch:
    """Pictures as a model takes them.

    pixels: (B, 3, H, W) float32.  frames: for each picture, where its pixels lie in it.
    """

    pixels: Tensor
    frames: tuple[Frame, ...]


@dataclass(frozen=True, repr=False)
class ImageProcessor:
    """What a checkpoint does to pictures before it looks at them.

    kind: which of the kinds in `regard.data.image_processing.KINDS`.  plan: the steps, as values.
    values: what its file says, as it stands: json.dump them to FILE to save it.
    """

    kind: str
    plan: ImageTransforms
    values: dict[str, Any] = field(compare=False)

    @classmethod
    def open(cls, directory: str | Path, *, ignore: Iterable[str] = ()) -> ImageProcessor:
        """Read a checkpoint's preprocessor_config.json, or processor_config.json with an image_processor in it.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     text = '{"feature_extractor_type": "DeiTFeatureExtractor", "size": 250, "crop_size": 240}'
        ...     _ = Path(folder, "preprocessor_config.json").write_text(text)
        ...     Preprocessor.open(folder)
        Preprocessor(DeiT: resize to 250 × 250 (bicubic), crop the middle 240 × 240, ÷ 255, normalise)

        ignore: keys that are not known here and change nothing, as the user says.
        Raises FileNotFoundError where there is none, ValueError for a kind, a key or a value that is not understood.
        """
        values, where = _stored(Path(directory))
        named = values.get("image_processor_type") or values.get("feature_extractor_type")
        if named is None:
            model = read_side(Path(directory), "config.json", dict) or {}
            return cls._made(kind_of_model(model.get("model_type"), where), values, where, ignore)
        return cls._made(kind_of_type(named, where), values, where, ignore)

    @classmethod
    def of(cls, kind: str, options: Mapping[str, Any] | None = None) -> ImageProcessor:
        """A preprocessor without a file: what the kind does, but for the options given.

        >>> Preprocessor.of("ViT", {"size": 384, "resample": 3})
        Preprocessor(ViT: resize to 384 × 384 (bicubic), ÷ 255, normalise)

        kind: "ViT" (Swin too), "DeiT", "Bit" (DINOv2), "CLIP", "Blip", "Idefics" or "Llava".
        options: keys of preprocessor_config.json and their values.
        Raises ValueError for a kind, a key or a value that is not understood.
        """
        values = defaults(kind) | dict(options or {}) | {"image_processor_type": f"{kind}ImageProcessor"}
        return cls._made(kind, values, "options", ())

    @classmethod
    def _made(cls, kind: str, values: dict[str, Any], where: str, ignore: Iterable[str]) -> ImageProcessor:
        plan = read_plan(kind, Settings(defaults(kind) | values, where), ignore=ignore)
        return cls(kind, plan, deepcopy(values))

    def __call__(self, pictures: Source | list[Source] | tuple[Source, ...] | Iterator[Source]) -> ImageBatch:
        """Make the pixels of one picture or of several.

        >>> Preprocessor.of("ViT")([np.zeros((5, 7), np.uint8), np.zeros((11, 3), np.uint8)]).pixels.shape
        torch.Size([2, 3, 224, 224])

        pictures: a Picture, or whatever `open_picture` opens, or several of them, in a list or one after another.
        Raises ValueError for no picture, for pictures that become pixels of different sizes, and for one so long and
        narrow that it would be enlarged beyond all bounds; and what `open_picture` raises; of several, with its number.
        """
        several: list[Any] = list(cast(Iterable[Any], pictures)) if is_batch(pictures) else [pictures]
        opened: list[OpenedImage] = []
        for number, picture in enumerate(several):
            with numbered(number, len(several)):
                opened.append(open_image(picture))
        if not opened:
            raise ValueError("there is no picture to prepare: the list is empty")
        frames = self._frames([picture.size for picture in opened])  # all are checked before the first is touched
        height, width = frames[0].pixels
        pixels = np.zeros((len(opened), 3, height, width), np.float32)  # (B, 3, H, W)
        for row, picture in zip(pixels, opened, strict=True):
            image = picture.image
            for step in self.plan.steps:
                image = step.apply(image)
            self.plan.numbers.apply(image, row)  # what is left is padding
        return ImageBatch(torch.from_numpy(pixels), tuple(frames))

    def frame(self, height: int, width: int) -> Frame:
        """Where the pixels of one picture of this size will lie in it.

        >>> Preprocessor.of("CLIP").frame(480, 640).pixels
        (224, 224)

        Raises ValueError for a picture that cannot be prepared, as a call does.
        """
        return self._frames([(height, width)])[0]

    def _frames(self, sizes: list[tuple[int, int]]) -> list[Frame]:
        """sizes: height and width of each picture."""
        frames = []
        for number, size in enumerate(sizes):
            frame = Frame.whole(*size)
            with numbered(number, len(sizes)):
                for step in self.plan.steps:
                    frame = step.frame(frame)
            frames.append(frame)
        if self.plan.pad is not None:
            return self.plan.pad.frames(frames)
        found = list(dict.fromkeys(frame.pixels for frame in frames))
        if len(found) > 1:
            said = ", ".join(f"{height} × {width}" for height, width in found[:5])
            raise ValueError(
                f"the pictures become pixels of different sizes ({said}), and a batch has one: give them one at a "
                "time, or use a preprocessor with do_center_crop, or with a height and a width as its size"
            )
        return frames

    def __repr__(self) -> str:
        return f"Preprocessor({self.kind}: {self.plan})"


def _stored(directory: Path) -> tuple[dict[str, Any], str]:
    """The values of a checkpoint's image processor, and the file they are in; the nested ones go first, as theirs."""
    nested = (read_side(directory, NESTED, dict) or {}).get("image_processor")
    if nested is not None:
        if not isinstance(nested, dict):
            raise ValueError(f"{directory / NESTED}: image_processor must be an object, got {nested!r:.80}")
        return nested, str(directory / NESTED)
    values = read_side(directory, FILE, dict)
    if values is None:
        raise FileNotFoundError(
            f"{directory} holds neither {FILE} nor {NESTED} with an image_processor, so nothing says how its pictures "
            "are prepared. If you know: regard.data.image_processing.Preprocessor.of(kind, options)"
        )
    return values, str(directory / FILE)
