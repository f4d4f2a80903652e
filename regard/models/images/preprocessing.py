"""Pictures into the pixels that a checkpoint was trained on, exactly as its preprocessor_config.json says.

    >>> preprocessor = Preprocessor.of("CLIP")
    >>> preprocessor
    Preprocessor(CLIP: resize the shorter side to 224 (bicubic), crop the middle 224 × 224, ÷ 255, normalise)
    >>> prepared = preprocessor(np.zeros((480, 640, 3), np.uint8))
    >>> prepared.pixels.shape, prepared.frames[0].corner
    (torch.Size([1, 3, 224, 224]), (0.0, 79.46308724832215))

The pixels are bit for bit those of `transformers`' processors that use Pillow (its `…ImageProcessorPil`); those that
use torchvision round differently. Each picture keeps its frame: where the pixels lie in it. Axis letters: B pictures,
H height, W width. It knows no model: patches are the model's affair.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from regard.frames import Frame
from regard.models.checkpoint.side_files import read_side
from regard.models.images.options import Plan, defaults, kind_of_model, kind_of_type, read_plan
from regard.models.images.pictures import Picture, Source, are_several, numbered, open_picture
from regard.models.settings import Settings

__all__ = ["FILE", "Prepared", "Preprocessor"]

FILE = "preprocessor_config.json"
NESTED = "processor_config.json"  # where newer checkpoints keep the same values, under "image_processor"


@dataclass(frozen=True, eq=False)
class Prepared:
    """Pictures as a model takes them.

    pixels: (B, 3, H, W) float32.  frames: for each picture, where its pixels lie in it.
    """

    pixels: Tensor
    frames: tuple[Frame, ...]


@dataclass(frozen=True, repr=False)
class Preprocessor:
    """What a checkpoint does to pictures before it looks at them.

    kind: which of the kinds in `regard.models.images.options.KINDS`.  plan: the steps, as values.
    values: what its file says, as it stands: json.dump them to FILE to save it.
    """

    kind: str
    plan: Plan
    values: dict[str, Any] = field(compare=False)

    @classmethod
    def open(cls, directory: str | Path, *, ignore: Iterable[str] = ()) -> Preprocessor:
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
    def of(cls, kind: str, options: Mapping[str, Any] | None = None) -> Preprocessor:
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
    def _made(cls, kind: str, values: dict[str, Any], where: str, ignore: Iterable[str]) -> Preprocessor:
        plan = read_plan(kind, Settings(defaults(kind) | values, where), ignore=ignore)
        return cls(kind, plan, deepcopy(values))

    def __call__(self, pictures: Source | list[Source] | tuple[Source, ...] | Iterator[Source]) -> Prepared:
        """Make the pixels of one picture or of several.

        >>> Preprocessor.of("ViT")([np.zeros((5, 7), np.uint8), np.zeros((11, 3), np.uint8)]).pixels.shape
        torch.Size([2, 3, 224, 224])

        pictures: a Picture, or whatever `open_picture` opens, or several of them, in a list or one after another.
        Raises ValueError for no picture, for pictures that become pixels of different sizes, and for one so long and
        narrow that it would be enlarged beyond all bounds; and what `open_picture` raises; of several, with its number.
        """
        several: list[Any] = list(cast(Iterable[Any], pictures)) if are_several(pictures) else [pictures]
        opened: list[Picture] = []
        for number, picture in enumerate(several):
            with numbered(number, len(several)):
                opened.append(open_picture(picture))
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
        return Prepared(torch.from_numpy(pixels), tuple(frames))

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
            "are prepared. If you know: regard.models.images.preprocessing.Preprocessor.of(kind, options)"
        )
    return values, str(directory / FILE)
