"""Images to pixel values, as a checkpoint's preprocessor_config.json says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.data.images import MOST_PIXELS, OpenedImage, Source, is_batch, numbered, open_image
from regard.formats import read_optional_json
from regard.layouts import Frame
from regard.locale import Lang, translate

if TYPE_CHECKING:
    from PIL.Image import Image


FILTERS = ("nearest", "Lanczos", "bilinear", "bicubic", "box", "Hamming")
"""Pillow's, by their numbers."""

MOST_MADE = 2**24
"""16.8 million pixels, 0.2 GB as numbers: more is what a long image becomes when its shorter side is enlarged."""


@dataclass(frozen=True)
class Square:
    """Padded to a square, the image in the middle."""

    colour: tuple[int, int, int]  # red, green, blue, 0 to 255

    def frame(self, frame: Frame) -> Frame:
        """Where the new pixels lie. Raises ValueError where they would be too many."""
        height, width = frame.pixels
        side = max(height, width)
        if side * side > MOST_PIXELS:
            raise ValueError(
                f"an image {height} high and {width} wide, padded to a square, has more than {MOST_PIXELS:,} pixels: "
                "crop it first"
            )
        return frame.cropped(-((side - height) // 2), -((side - width) // 2), side, side)

    def apply(self, image: Image) -> Image:
        """The padded image."""
        import PIL.Image

        side = max(image.size)
        square = PIL.Image.new("RGB", (side, side), self.colour)
        square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
        return square

    def text(self, lang: Lang = "en") -> str:
        """In words."""
        return translate("pad to a square (colour {colour})", lang, colour=", ".join(map(str, self.colour)))


@dataclass(frozen=True)
class Resize:
    """Made larger or smaller by Pillow.

    >>> Resize({"shortest_edge": 224, "longest_edge": 280}, 3).new_size(480, 640)
    (210, 280)

    size: as in preprocessor_config.json: height and width; or, where the shape stays, max_height and max_width, which
      it fits into, or shortest_edge, made smaller where the longer side would pass longest_edge.
    resample: the number of the filter in FILTERS.
    """

    size: Mapping[str, int]
    resample: int

    def new_size(self, height: int, width: int) -> tuple[int, int]:
        """The new height and width of an image."""
        match self.size:
            case {"height": new_height, "width": new_width}:
                return new_height, new_width
            case {"max_height": max_height, "max_width": max_width}:
                scale = min(max_height / height, max_width / width)
                return int(height * scale), int(width * scale)
        short, long = min(height, width), max(height, width)
        side: float = self.size["shortest_edge"]
        longest = self.size.get("longest_edge")
        if longest is not None and long / short * side > longest:
            side = longest * short / long
        shorter = round(side)
        if shorter == short:  # nothing to resize, though the longer side may still be a pixel too long
            return height, width
        longer = int(side * long / short)
        return (longer, shorter) if width < height else (shorter, longer)

    def frame(self, frame: Frame) -> Frame:
        """Where the new pixels lie. Raises ValueError where they would be too many, or none."""
        height, width = self.new_size(*frame.pixels)
        if height * width > MOST_MADE or min(height, width) < 1:
            raise ValueError(
                f"an image {frame.pixels[0]} high and {frame.pixels[1]} wide, after {self.text()!r}, would be "
                f"{height} high and {width} wide, and 1 to {MOST_MADE:,} pixels can be made: crop it first"
            )
        return frame.resized(height, width)

    def apply(self, image: Image) -> Image:
        """The resized image."""
        height, width = self.new_size(image.height, image.width)
        return image.resize((width, height), self.resample)

    def text(self, lang: Lang = "en") -> str:
        """In words."""
        return translate(SIZES[frozenset(self.size)], lang, filter=FILTERS[self.resample], **self.size)


SIZES = {
    frozenset(["height", "width"]): "resize to {height} × {width} ({filter})",
    frozenset(["max_height", "max_width"]): "resize to fit into {max_height} × {max_width} ({filter})",
    frozenset(["shortest_edge"]): "resize the shorter side to {shortest_edge} ({filter})",
    frozenset(["shortest_edge", "longest_edge"]): (
        "resize the shorter side to {shortest_edge} (the longer one to {longest_edge} at most) ({filter})"
    ),
}
"""The sizes that there are, in words."""


@dataclass(frozen=True)
class Crop:
    """The middle of the image; black around it where it is smaller."""

    height: int
    width: int

    def frame(self, frame: Frame) -> Frame:
        """Where the new pixels lie."""
        top, left = (frame.pixels[0] - self.height) // 2, (frame.pixels[1] - self.width) // 2
        return frame.cropped(top, left, self.height, self.width)

    def apply(self, image: Image) -> Image:
        """The cropped image."""
        top, left = (image.height - self.height) // 2, (image.width - self.width) // 2
        return image.crop((left, top, left + self.width, top + self.height))  # Pillow's crop is black beyond the edges

    def text(self, lang: Lang = "en") -> str:
        """In words."""
        return translate("crop the middle {height} × {width}", lang, height=self.height, width=self.width)


Step = Square | Resize | Crop


@dataclass(frozen=True)
class Normalize:
    """Pixels 0 to 255 to float32: times `scale`, minus `mean`, divided by `std` (red, green, blue).

    >>> Normalize(1 / 255, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)).table[0, [0, 255]].tolist()
    [-1.0, 1.0]
    """

    scale: float | None
    mean: tuple[float, float, float] | None
    std: tuple[float, float, float] | None

    @cached_property
    def table(self) -> NDArray[np.float32]:
        """The new value of each of the 256 values, by colour: (3, 256)."""
        values = np.tile(np.arange(256, dtype=np.float64), (3, 1))
        # float32 but for the scaling, as in transformers
        table = (values if self.scale is None else values * self.scale).astype(np.float32)
        if self.mean is None or self.std is None:
            return table
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        return np.asarray((table - mean[:, None]) / std[:, None], np.float32)

    def apply(self, image: Image, pixel_values: NDArray[np.float32]) -> None:
        """Write the image to (3, H, W), or into the corner of something larger."""
        pixels = np.asarray(image)  # (H, W, 3) uint8
        for colour in range(3):
            pixel_values[colour, : image.height, : image.width] = self.table[colour][pixels[:, :, colour]]

    def text(self, lang: Lang = "en") -> str:
        """In words."""
        words = []
        if self.scale is not None:
            words.append("÷ 255" if self.scale == 1 / 255 else f"× {self.scale:g}")
        if self.mean is not None:
            words.append(translate("normalise", lang))
        return ", ".join(words) or translate("as they are, 0 to 255", lang)


@dataclass(frozen=True)
class Pad:
    """Zeros to the right and below, after everything else: to `size`, or to the largest of the batch."""

    size: tuple[int, int] | None

    def frames(self, frames: list[Frame]) -> list[Frame]:
        """Where the pixels lie, each frame as large as the others. Raises ValueError for a size that is too small."""
        largest = tuple(max(frame.pixels[axis] for frame in frames) for axis in (0, 1))
        height, width = self.size or largest
        if height < largest[0] or width < largest[1]:
            raise ValueError(
                f"images of up to {largest[0]} × {largest[1]} pixels cannot be padded to {height} × {width}: "
                "pad_size must be larger, or the images resized to less"
            )
        return [frame.cropped(0, 0, height, width) for frame in frames]

    def text(self, lang: Lang = "en") -> str:
        """In words."""
        if self.size is None:
            return translate("pad with 0 to the largest", lang)
        return translate("pad with 0 to {height} × {width}", lang, height=self.size[0], width=self.size[1])


FILE = "preprocessor_config.json"
NESTED = "processor_config.json"  # where newer checkpoints keep the same values, under "image_processor"

HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
# Of the images that CLIP was trained on: https://github.com/openai/CLIP/blob/main/clip/clip.py
OF_CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
ALWAYS = {"do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
CROPPED = {
    "size": {"shortest_edge": 224}, "do_center_crop": True, "crop_size": {"height": 224, "width": 224}, "resample": 3,
    "default_to_square": False,
}  # fmt: skip

# default_to_square: what one number means as `size`, both sides or the shorter one.
KINDS: dict[str, dict[str, Any]] = {
    "ViT": {**ALWAYS, **HALF, "size": {"height": 224, "width": 224}, "resample": 2, "default_to_square": True},
    "DeiT": {
        **ALWAYS, **HALF, "size": {"height": 256, "width": 256}, "resample": 3, "default_to_square": True,
        "do_center_crop": True, "crop_size": {"height": 224, "width": 224},
    },
    "Bit": {**ALWAYS, **OF_CLIP, **CROPPED},
    "CLIP": {**ALWAYS, **OF_CLIP, **CROPPED},
    "Blip": {**ALWAYS, **OF_CLIP, "size": {"height": 384, "width": 384}, "resample": 3, "default_to_square": True},
    "Idefics": {**ALWAYS, **OF_CLIP, "size": {"height": 224, "width": 224}, "resample": 3, "default_to_square": True},
    "Llava": {**ALWAYS, **OF_CLIP, **CROPPED, "do_pad": False},
}  # fmt: skip
"""The defaults of each kind, with the keys of preprocessor_config.json."""

# What `transformers` takes for a model_type if the file names no kind.
MODELS = {
    "vit": "ViT", "swin": "ViT", "deit": "DeiT", "dinov2": "Bit", "clip": "CLIP", "blip": "Blip",
    "idefics": "Idefics", "llava": "Llava",
}  # fmt: skip

KEYS = {
    "crop_size", "data_format", "default_to_square", "do_center_crop", "do_normalize", "do_pad", "do_rescale",
    "do_resize", "image_mean", "image_std", "pad_size", "resample", "rescale_factor", "size",
}  # fmt: skip
IDEFICS_KEYS = {"image_num_channels", "image_size"}
# do_convert_rgb: images are RGB already. size_divisor: of old BLIP files; no kind here reads it. The others say how
# arrays come in and go out, or where the file comes from.
HARMLESS = {
    "_commit_hash", "_name_or_path", "_processor_class", "_valid_processor_keys", "architectures", "auto_map", "device",
    "disable_grouping", "do_convert_rgb", "dtype", "feature_extractor_type", "image_processor_type",
    "image_seq_length", "input_data_format", "model_type", "processor_class", "return_tensors", "size_divisor",
    "torch_dtype", "transformers_version",
}  # fmt: skip


@dataclass(frozen=True)
class ImageTransforms:
    """Everything that is done to an image, in order: `steps`, `normalize`, `pad`."""

    steps: tuple[Step, ...]
    normalize: Normalize
    pad: Pad | None

    def text(self, lang: Lang = "en") -> str:
        """Everything in words, in order."""
        return ", ".join(part.text(lang) for part in (*self.steps, self.normalize, self.pad) if part is not None)

    def __str__(self) -> str:
        return self.text()


@dataclass(frozen=True, eq=False)
class ImageBatch:
    """Images as a model takes them."""

    pixel_values: Tensor  # (B, 3, H, W) float32
    frames: tuple[Frame, ...]  # for each image, where its pixels lie in it


@dataclass(frozen=True, repr=False)
class ImageProcessor:
    """A checkpoint's preprocessing of images.

    Args:
        kind: a key of KINDS.
        transforms: the steps.
        values: the content of its file; json.dump them to FILE to save it.
    """

    kind: str
    transforms: ImageTransforms
    values: dict[str, Any] = field(compare=False)

    @classmethod
    def open(cls, directory: str | Path, *, ignore: Iterable[str] = ()) -> ImageProcessor:
        """Read a checkpoint's preprocessor_config.json, or processor_config.json with an image_processor in it.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     text = '{"feature_extractor_type": "DeiTFeatureExtractor", "size": 250, "crop_size": 240}'
        ...     _ = Path(folder, "preprocessor_config.json").write_text(text)
        ...     ImageProcessor.open(folder)
        ImageProcessor(DeiT: resize to 250 × 250 (bicubic), crop the middle 240 × 240, ÷ 255, normalise)

        Args:
            directory: the checkpoint.
            ignore: unknown keys that change nothing, as the user says.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the kind, a key or a value is not supported.
        """
        folder = Path(directory)
        file = folder / NESTED
        values = (read_optional_json(folder, NESTED, dict) or {}).get("image_processor")
        if values is None:
            file, values = folder / FILE, read_optional_json(folder, FILE, dict)
            if values is None:
                raise FileNotFoundError(
                    f"{directory} holds neither {FILE} nor {NESTED} with an image_processor, so nothing says how its "
                    "images are processed. If you know: regard.data.image_processing.ImageProcessor.of(kind, options)"
                )
        elif not isinstance(values, dict):
            raise ValueError(f"{file}: image_processor must be an object, got {values!r:.80}")
        kind = _kind(values, folder, file)
        return cls(kind, _transforms(kind, values, str(file), ignore), deepcopy(values))

    @classmethod
    def of(cls, kind: str, options: Mapping[str, Any] | None = None) -> ImageProcessor:
        """An image processor without a file: a kind's defaults, changed by options.

        >>> ImageProcessor.of("ViT", {"size": 384, "resample": 3})
        ImageProcessor(ViT: resize to 384 × 384 (bicubic), ÷ 255, normalise)

        Args:
            kind: "ViT" (Swin too), "DeiT", "Bit" (DINOv2), "CLIP", "Blip", "Idefics" or "Llava".
            options: keys of preprocessor_config.json and their values.

        Raises:
            ValueError: the kind, a key or a value is not supported.
        """
        if kind not in KINDS:
            raise ValueError(f"there is no image processor {kind!r}; there are {', '.join(KINDS)}")
        values = deepcopy(KINDS[kind] | dict(options or {})) | {"image_processor_type": f"{kind}ImageProcessor"}
        return cls(kind, _transforms(kind, values, "options", ()), values)

    def __call__(self, images: Source | list[Source] | tuple[Source, ...] | Iterator[Source]) -> ImageBatch:
        """Make the pixel values of one image or of several.

        >>> ImageProcessor.of("ViT")([np.zeros((5, 7), np.uint8), np.zeros((11, 3), np.uint8)]).pixel_values.shape
        torch.Size([2, 3, 224, 224])

        Args:
            images: one that `open_image` opens, or several of them in a list, a tuple or an iterator.

        Raises:
            ValueError: there is no image, the results differ in size, or one would be enlarged beyond all bounds.
            Exception: what `open_image` raises; of several images, with its number.
        """
        sources: list[Any] = list(cast(Iterable[Any], images)) if is_batch(images) else [images]
        opened: list[OpenedImage] = []
        for number, source in enumerate(sources):
            with numbered(number, len(sources)):
                opened.append(open_image(source))
        if not opened:
            raise ValueError("there is no image to process: the list is empty")
        frames = self._frames([image.size for image in opened])  # all are checked before the first is processed
        height, width = frames[0].pixels
        pixel_values = np.zeros((len(opened), 3, height, width), np.float32)  # (B, 3, H, W)
        for row, one in zip(pixel_values, opened, strict=True):
            image = one.image
            for step in self.transforms.steps:
                image = step.apply(image)
            self.transforms.normalize.apply(image, row)  # what is left is padding
        return ImageBatch(torch.from_numpy(pixel_values), tuple(frames))

    def frame(self, height: int, width: int) -> Frame:
        """Where the pixel values of an image of this size will lie in it. Raises ValueError as a call does."""
        return self._frames([(height, width)])[0]

    def _frames(self, sizes: list[tuple[int, int]]) -> list[Frame]:
        frames = []
        for number, size in enumerate(sizes):
            frame = Frame.whole(*size)
            with numbered(number, len(sizes)):
                for step in self.transforms.steps:
                    frame = step.frame(frame)
            frames.append(frame)
        if self.transforms.pad is not None:
            return self.transforms.pad.frames(frames)
        shapes = list(dict.fromkeys(frame.pixels for frame in frames))
        if len(shapes) > 1:
            listed = ", ".join(f"{height} × {width}" for height, width in shapes[:5])
            raise ValueError(
                f"the images become pixel values of different sizes ({listed}), and a batch has one: pass them one at "
                "a time, or use an image processor with do_center_crop, or with a height and a width as its size"
            )
        return frames

    def __repr__(self) -> str:
        return f"ImageProcessor({self.kind}: {self.transforms})"


def known_values(kind: str, values: dict[str, Any]) -> dict[str, Any]:
    """The values of a file without the keys that could be read only because the user said to ignore them."""
    unknown = _unknown(kind, values)
    return {key: value for key, value in values.items() if key not in unknown}


def _kind(values: Mapping[str, Any], folder: Path, file: Path) -> str:
    """The kind that a file names, in old and new spellings; else that of the model_type in config.json."""
    name = values.get("image_processor_type") or values.get("feature_extractor_type")
    if name is not None:
        match = re.fullmatch(r"(\w+?)(ImageProcessor|FeatureExtractor)(Fast|Pil)?", str(name))
        if match is None or match[1] not in KINDS:
            known = ", ".join(f"{kind}ImageProcessor" for kind in KINDS)
            raise ValueError(f"{file} is for a {name!s:.80}, which is not supported. Supported: {known}")
        return match[1]
    model = (read_optional_json(folder, "config.json", dict) or {}).get("model_type")
    if not isinstance(model, str) or model not in MODELS:
        raise ValueError(
            f"{file} names no image_processor_type, and config.json beside it no model_type that implies one "
            f"({', '.join(MODELS)}), but {model!r:.80}: add the image_processor_type"
        )
    return MODELS[model]


# ------------------------------------------------------------------------------------------- preprocessor_config.json


def _unknown(kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    known = KEYS | HARMLESS | (IDEFICS_KEYS if kind == "Idefics" else set())
    return {key: value for key, value in values.items() if key not in known and value is not None}


def _transforms(kind: str, values: Mapping[str, Any], where: str, ignore: Iterable[str]) -> ImageTransforms:
    """The steps of a kind with these values over its defaults; null switches a step off, as in transformers."""
    if isinstance(ignore, str):  # whose letters would be taken for keys
        raise TypeError(f"ignore must be a list of keys, got a str: ignore=[{ignore!r}]")
    config = ImageConfig(KINDS[kind] | dict(values), where)
    steps: list[Step] = []
    if kind == "Llava" and config.flag("do_pad"):
        colour = tuple(int(mean * 255) for mean in config.channels("image_mean"))
        if not all(0 <= part <= 255 for part in colour):
            raise ValueError(f"{where}: do_pad pads with image_mean, so it must be 0 to 1, got {colour} of 255")
        steps.append(Square((colour[0], colour[1], colour[2])))
    if kind == "Idefics":
        config.check_only("image_num_channels", 3)
    if config.flag("do_resize"):
        older = kind == "Idefics" and config.values.get("image_size") is not None
        size = config.size("image_size" if older else "size", square=config.flag("default_to_square"))
        resample: Any = config.values.get("resample")
        if not _is_integer(resample, 0, len(FILTERS) - 1):
            raise ValueError(f"{where}: resample must be an integer from 0 to {len(FILTERS) - 1}, got {resample!r:.80}")
        steps.append(Resize(size, resample))
    if config.flag("do_center_crop"):
        steps.append(Crop(*config.pair("crop_size")))
    pad = None
    if kind != "Llava" and config.flag("do_pad"):
        pad = Pad(None if config.values.get("pad_size") is None else config.pair("pad_size"))
    config.check_only("data_format", "channels_first")
    unknown = {key: value for key, value in _unknown(kind, values).items() if key not in set(ignore)}
    if unknown:
        listed = ", ".join(f"{key} = {value!r:.80}" for key, value in unknown.items())
        raise ValueError(
            f"{where} has keys that {kind}'s image processor does not know, and that may change the pixel values: "
            f"{listed}. If they do not, name them: regard.load(…, ignore={json.dumps(list(unknown))})"
        )
    return ImageTransforms(tuple(steps), config.normalize(), pad)


def _is_integer(value: object, least: int = 1, most: int = 2**31 - 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


@dataclass(frozen=True)
class ImageConfig:
    """The values of one image processor and, for errors, where they come from; null counts as missing."""

    values: Mapping[str, Any]
    where: str

    def flag(self, key: str) -> bool:
        """true or false; false if missing."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{self.where}: {key} must be true or false, got {value!r:.80}")
        return bool(value)

    def check_only(self, key: str, allowed: object) -> None:
        """Raise for a value that is neither missing nor the one that is supported."""
        value = self.values.get(key)
        if value is not None and value != allowed:
            raise ValueError(f"{self.where}: {key} is {value!r:.80}, and only {allowed!r} is supported")

    def size(self, key: str, *, square: bool) -> dict[str, int]:
        """A size; one number (as in old files) means both sides, if `square`, or the shorter one."""
        value = self.values.get(key)
        sides: dict[str, Any] = {}
        if isinstance(value, dict):
            sides = {side: n for side, n in value.items() if n is not None}
        elif isinstance(value, (list, tuple)) and len(value) == 2:
            sides = {"height": value[0], "width": value[1]}
        elif isinstance(value, int) and not isinstance(value, bool):
            sides = {"height": value, "width": value} if square else {"shortest_edge": value}
        for side, n in sides.items():
            if not _is_integer(n):
                raise ValueError(f"{self.where}: {key}: {side} must be an integer of at least 1, got {n!r:.80}")
        if frozenset(sides) not in SIZES:
            raise ValueError(
                f"{self.where}: {key} must be a number, height and width, shortest_edge (and longest_edge), or "
                f"max_height and max_width, got {value!r:.200}"
            )
        return sides

    def pair(self, key: str) -> tuple[int, int]:
        """A height and a width of at most MOST_MADE pixels."""
        size = self.size(key, square=True)
        if size.keys() != {"height", "width"}:
            value = self.values.get(key)
            raise ValueError(f"{self.where}: {key} must be a number, or height and width, got {value!r:.80}")
        if size["height"] * size["width"] > MOST_MADE:
            raise ValueError(
                f"{self.where}: {key} is {size['height']} × {size['width']}, more than {MOST_MADE:,} pixels"
            )
        return size["height"], size["width"]

    def channels(self, key: str) -> tuple[float, float, float]:
        """One number for each colour; a single one is for all."""
        value = self.values.get(key)
        values: Sequence[Any] = value if isinstance(value, (list, tuple)) else [value] * 3
        if len(values) != 3 or not all(isinstance(n, (int, float)) and isfinite(n) for n in values):
            raise ValueError(
                f"{self.where}: {key} must be one number, or three for red, green and blue, got {value!r:.80}"
            )
        return float(values[0]), float(values[1]), float(values[2])

    def normalize(self) -> Normalize:
        """Rescaling and normalisation, each None if switched off."""
        scale: Any = None
        if self.flag("do_rescale"):
            scale = self.values.get("rescale_factor")
            if not isinstance(scale, (int, float)) or isinstance(scale, bool) or not isfinite(scale):
                raise ValueError(f"{self.where}: rescale_factor must be a number, got {scale!r:.80}")
            scale = float(scale)
        if not self.flag("do_normalize"):
            return Normalize(scale, None, None)
        mean, std = self.channels("image_mean"), self.channels("image_std")
        if 0.0 in std:
            raise ValueError(f"{self.where}: image_std divides, so it must not be 0, got {std}")
        return Normalize(scale, mean, std)
