"""Image classification from scratch or fine-tuned (ViT, DeiT, DINOv2, Swin), and images with texts (CLIP)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from regard.data.image_processing import ImageProcessor
from regard.data.rows import read_rows
from regard.models.model import Model
from regard.training.recipes.labelled_texts import cut, label_metrics, label_number, model_labels, text_sizes
from regard.training.recipes.recipe import Batch, Recipe, pad_rows, tokenizer_of

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif")


@dataclass(frozen=True, kw_only=True)
class ImageClassification(Recipe):
    """One label for each image: a directory with a folder per label, an .npz with images and labels, or such arrays.

    Args:
        labels: the names of the labels, in the order of the model's outputs.
        mean: subtracted from each channel, in [0, 1].
        std: what each channel is divided by.
        flip: mirror half of the training images.
        shift: training images move by up to so many pixels, filled with black.
        cutout: side of a square that is blacked out at a random place of each training image (DeVries & Taylor 2017); 0
            for none.
        mixup: α of the Beta distribution that two images are mixed with (Zhang et al. 2018); 0 for none. The partner is
            the row before, in the same micro-batch.
        cutmix: α of the Beta distribution of the area that keeps its own image, where the partner fills a rectangle of
            each (Yun et al. 2019); 0 for none. With mixup too, each image draws one of the two.
        smoothing: label smoothing in training.
    """

    labels: tuple[str, ...]
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    flip: bool = False
    shift: int = 0
    cutout: int = 0
    mixup: float = 0.0
    cutmix: float = 0.0
    smoothing: float = 0.0
    name: ClassVar[str] = "image-classification"
    task: ClassVar[str] = "image-classification"

    def __post_init__(self) -> None:
        if min(self.shift, self.cutout, self.mixup, self.cutmix) < 0 or not 0 <= self.smoothing < 1:
            raise ValueError(
                "shift, cutout, mixup and cutmix must be 0 or more and smoothing in [0, 1); "
                f"got {self.shift}, {self.cutout}, {self.mixup}, {self.cutmix}, {self.smoothing}"
            )

    @classmethod
    def for_model(
        cls,
        model: Model,
        *,
        flip: bool = False,
        shift: int = 0,
        cutout: int = 0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        smoothing: float = 0.0,
    ) -> ImageClassification:
        """With the model's labels and the normalisation of its image processor; 0.5 ± 0.5 where it has none."""
        values = processor_of(model).values
        mean, std = (tuple(values[name]) for name in ("image_mean", "image_std"))
        return cls(
            labels=model_labels(model), mean=mean, std=std, flip=flip, shift=shift, cutout=cutout, mixup=mixup,
            cutmix=cutmix, smoothing=smoothing,
        )  # fmt: skip

    def rows(self, data: Any, model: Model, *, training: bool) -> ImageRows:
        """Images of the model's size as bytes, and the numbers of their labels."""
        images, labels = read_images(data, processor_of(model), self.labels)
        channels = int(model.config.values.get("num_channels", 3))
        if images.shape[1] != channels:
            if images.shape[1] != 1:
                raise ValueError(f"the images have {images.shape[1]} channels and the model reads {channels}")
            images = images.expand(-1, channels, -1, -1)
        return ImageRows(images, labels, training)

    def batch(self, rows: Sequence[Any], rng: Sequence[np.random.Generator]) -> Batch:
        """pixel_values (B, C, H, W) and labels (B,); with mixup or cutmix, labels (B, L) of probabilities."""
        training = all(training for _, _, training in rows)
        images = torch.stack([image for image, _, _ in rows])
        pixels = (self.augment(images, rng) if training else images).float().div_(255)
        mean, std = (torch.tensor(values[: pixels.shape[1]]).reshape(-1, 1, 1) for values in (self.mean, self.std))
        pixels.sub_(mean).div_(std)
        labels = torch.tensor([label for _, label, _ in rows])
        if (self.mixup or self.cutmix) and training:
            own = torch.stack(
                [self.own_share(pixels.shape[-2], pixels.shape[-1], random) for random in rng]
            )  # (B, H, W)
            pixels = torch.lerp(pixels.roll(1, 0), pixels, own[:, None])
            probabilities = one_hot(labels, len(self.labels)).float()
            labels = torch.lerp(probabilities.roll(1, 0), probabilities, own.mean((1, 2))[:, None])
        return {"pixel_values": pixels, "labels": labels}

    def own_share(self, height: int, width: int, random: np.random.Generator) -> Tensor:
        """How much of each pixel (H, W) an image keeps of itself when it is mixed with its partner."""
        if self.cutmix and (not self.mixup or random.random() < 0.5):
            share = torch.ones(height, width)
            side = math.sqrt(1 - random.beta(self.cutmix, self.cutmix))  # of the rectangle ÷ that of the image
            (y, x), (tall, wide) = random.random(2) * (height, width), (side * height / 2, side * width / 2)
            share[max(0, round(y - tall)) : round(y + tall), max(0, round(x - wide)) : round(x + wide)] = 0
            return share
        return torch.full((height, width), random.beta(self.mixup, self.mixup))

    def augment(self, images: Tensor, rng: Sequence[np.random.Generator]) -> Tensor:
        """Training images (B, C, H, W), mirrored, moved and cut out of, each by its own generator."""
        if not (self.flip or self.shift or self.cutout):
            return images
        (batch, _, height, width), shift, cutout = images.shape, self.shift, self.cutout
        draws = torch.from_numpy(np.stack([random.random(5) for random in rng]))  # (B, 5) in [0, 1)
        mirrored = (draws[:, :1] < 0.5) & self.flip
        down, right = (draws[:, 1:3] * (2 * shift + 1)).long().sub(shift).chunk(2, -1)  # (B, 1) each, −shift … shift
        top, left = (draws[:, 3:5] * torch.tensor([height, width])).long().sub(cutout // 2).chunk(2, -1)
        # Where each row and column comes from, and which are black.
        y, x = torch.arange(height).expand(batch, -1), torch.arange(width).expand(batch, -1)
        square = ((y >= top) & (y < top + cutout))[:, :, None] & ((x >= left) & (x < left + cutout))[:, None]
        y, x = y + down, x + right
        inside = ((y >= 0) & (y < height))[:, :, None] & ((x >= 0) & (x < width))[:, None]
        x = torch.where(mirrored, width - 1 - x, x)
        y, x = y.clamp(0, height - 1), x.clamp(0, width - 1)
        moved: Tensor = images[torch.arange(batch)[:, None, None], :, y[:, :, None], x[:, None]].movedim(-1, 1)
        return moved.mul_((inside & ~square)[:, None])

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Over the images."""
        labels = batch["labels"]
        count = torch.full((), len(labels), device=labels.device)
        logits = model(pixel_values=batch["pixel_values"]).logits
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        labels = labels.to(logits.dtype) if labels.is_floating_point() else labels
        smoothing = self.smoothing if model.training else 0.0
        return cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum"), count

    def metrics(self, model: Model, rows: Sequence[Any], loss: float) -> dict[str, Any]:
        """Accuracy, and the mean F1 of the labels."""
        return label_metrics(self, model, rows)


class ImageRows(Sequence[Any]):
    """(image, label, training) for each image; images (N, C, H, W) as bytes."""

    def __init__(self, images: Tensor, labels: Tensor, training: bool) -> None:
        self.images, self.labels, self.training = images, labels, training

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: Any) -> Any:
        return self.images[index], int(self.labels[index]), self.training


@dataclass(frozen=True, kw_only=True)
class Contrastive(Recipe):
    """Each text is to find its own image in the batch, and the reverse (CLIP).

    Rows have the columns image (a path, a Pillow image or an array) and text.

    The other rows of the same micro-batch are the negatives, so accumulation and more processes make the task easier.

    Args:
        length: longer texts are cut.
        pad_token_id: fills up short texts.
    """

    length: int
    pad_token_id: int = 0
    name: ClassVar[str] = "contrastive"
    task: ClassVar[str] = "zero-shot-image-classification"

    @classmethod
    def for_model(cls, model: Model, *, length: int | None = None) -> Contrastive:
        """With the padding of the model's tokenizer."""
        return cls(**text_sizes(model, length, 77))

    def rows(self, data: Any, model: Model, *, training: bool) -> Sequence[Any]:
        """(pixel_values, ids) of each row."""
        tokenizer, processor, rows = tokenizer_of(model), processor_of(model), read_rows(data, ("image", "text"))
        return [
            (processor(row["image"]).pixel_values[0], cut(tokenizer.encode(row["text"]).ids, self.length))
            for row in rows
        ]

    def batch(self, rows: Sequence[Any], rng: Sequence[np.random.Generator]) -> Batch:
        """pixel_values (B, C, H, W), input_ids and attention_mask (B, N)."""
        texts = [row[1] for row in rows]
        return {
            "input_ids": pad_rows(texts, self.pad_token_id),
            "attention_mask": pad_rows([[1] * len(text) for text in texts], 0),
            "pixel_values": torch.stack([row[0] for row in rows]),
        }

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Over the pairs."""
        count = len(batch["input_ids"])
        return model(**batch, return_loss=True).loss * count, torch.full((), count, device=batch["input_ids"].device)


def processor_of(model: Model) -> ImageProcessor:
    """The model's image processor; a model that has none gets one for its image size."""
    if model.directory is None and "preprocessor" not in vars(model):
        values = model.config.values
        size = values.get("vision_config", values).get("image_size", 224)
        height, width = (size, size) if isinstance(size, int) else size
        options = {"size": {"height": height, "width": width}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        model.preprocessor = ImageProcessor.of("ViT", options)
    return model.preprocessor


def read_images(data: Any, processor: ImageProcessor, labels: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Images (N, C, H, W) as bytes and the numbers of their labels.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: there are no images, or a label is not one of the model's.
    """
    if isinstance(data, (str, Path)):
        path = Path(data)
        if not path.exists():
            raise FileNotFoundError(f"there is no data {str(data)!r}")
        if path.suffix == ".npz":
            with np.load(path) as file:
                missing = {"images", "labels"} - set(file)
                if missing:
                    raise ValueError(f"{path} has no {', '.join(sorted(missing))}; it has {', '.join(file)}")
                data = (file["images"], file["labels"])
        else:
            from PIL import Image

            files = [file for file in sorted(path.glob("*/*")) if file.suffix.lower() in SUFFIXES]
            if not files:
                raise ValueError(f"{path} has no images: one folder for each label is expected, with images in it")
            sides = processor.values["size"]["width"], processor.values["size"]["height"]
            resized = []
            for file in files:
                with Image.open(file) as opened:
                    resized.append(np.asarray(opened.convert("RGB").resize(sides, Image.Resampling.BICUBIC)))
            data = (resized, [file.parent.name for file in files])
    images, names = data
    if len(images) != len(names) or not len(images):
        raise ValueError(f"as many labels as images are needed, and one or more; got {len(images)} and {len(names)}")
    pixels = torch.as_tensor(np.stack([np.asarray(image) for image in images]))
    if pixels.dtype != torch.uint8 or pixels.ndim not in (3, 4):
        raise ValueError(f"images must be (N, H, W) or (N, H, W, C) of uint8, got {tuple(pixels.shape)} {pixels.dtype}")
    pixels = pixels[:, None] if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2)
    names = names.tolist() if hasattr(names, "tolist") else names
    return pixels.contiguous(), torch.tensor([label_number(name, labels, row) for row, name in enumerate(names)])
