"""Image-text matching, zero-shot classification and patch features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from regard import tables
from regard.data.images import Source, is_batch
from regard.data.tokenizer import BatchEncoding
from regard.layouts import Frame, Layout
from regard.nn.vision import PatchGrid, VisionTower
from regard.nn.windows import WindowTower
from regard.tasks.images import ImageGroup, Several, as_list, image_batches, score_images, vision_tower
from regard.tasks.inputs import batches, max_text_positions, probabilities, shortened
from regard.tasks.text import Classified, ranking

if TYPE_CHECKING:
    from regard.models.dual_encoder import DualEncoder
    from regard.models.image_text import Matcher
    from regard.models.model import Model


@dataclass(frozen=True, eq=False, repr=False)
class Features:
    """The vectors of one image.

    >>> layout, frame = Layout.grid(2, 3, size=(4, 4)), Frame.whole(8, 12)
    >>> found = Features("photo.jpg", torch.arange(7.0).reshape(7, 1), PatchGrid(2, 3), layout, frame)
    >>> found
    Features(photo.jpg: 1 cls, 6 patches; vectors (7, 1), map (1, 2, 3))
    >>> found.map[0]
    tensor([[1., 2., 3.],
            [4., 5., 6.]])

    Attributes:
        name: of its file.
        vectors: (N, d).
        grid: rows and columns of the patches.
        layout: what each token is, and the box of each patch in the model's pixels.
        frame: where these lie in the image.
        pooled: (d,) or another width, the tower's own summary; None if it has none, or another layer was asked for. It
            is not the vector that CLIP and BLIP compare with texts: `model.encode_image` gives that.
    """

    name: str
    vectors: Tensor
    grid: PatchGrid
    layout: Layout
    frame: Frame
    pooled: Tensor | None = None

    @property
    def cls(self) -> Tensor | None:
        """The vector of the token that sums up the image, (d,); None where there is none (Swin)."""
        at = self.layout.indices("cls")
        return self.vectors[int(at[0, 1])] if len(at) else None

    @property
    def map(self) -> Tensor:
        """The patches' vectors where they lie: (d, rows, columns)."""
        patches = self.vectors[len(self.vectors) - self.grid.rows * self.grid.columns :]
        return patches.T.reshape(-1, *self.grid)

    def __repr__(self) -> str:
        tokens = str(self.layout).removeprefix("Layout(").partition(" of ")[0]  # "1 cls, 6 patches"
        shapes = f"vectors {tuple(self.vectors.shape)}, map {tuple(self.map.shape)}"
        pooled = "" if self.pooled is None else f", pooled {tuple(self.pooled.shape)}"
        return f"Features({self.name}: {tokens}; {shapes}{pooled})"


@torch.no_grad()
def features(
    model: Model, images: Source | Several, *, layer: int | None = None, batch: int = 32
) -> Features | list[Features]:
    """The vectors of an image, or of each of a list; see `Model.features`."""
    tower = vision_tower(model)
    if tower is None:
        raise ValueError(f"features are of images, and {model.family.title} looks at none: model.embed is for texts")
    depth = len(tower.stages if isinstance(tower, WindowTower) else tower.blocks)
    if layer is not None:
        if not isinstance(layer, int) or isinstance(layer, bool) or not -depth - 1 <= layer <= depth:
            raise ValueError(
                f"layer must be 0 (before the first block) to {depth}, or {-depth - 1} to -1 from the end, or None "
                f"for the model's last vectors; got {layer!r}"
            )
        layer %= depth + 1
    found: dict[int, Features] = {}
    for part in image_batches(model, as_list(images), batch):
        found |= dict(zip(part.numbers, _features_of(model, tower, part, layer), strict=True))
    several = [found[n] for n in range(len(found))]
    return several if is_batch(images) else several[0]


def _features_of(model: Model, tower: VisionTower | WindowTower, part: ImageGroup, layer: int | None) -> list[Features]:
    """Of images of one size. layer: None for the last."""
    pooled = None
    if model.kind in ("dual-encoder", "vision"):
        result = model(pixel_values=part.pixels, output_hidden_states=layer is not None)
        vectors, layers, pooled = result.last_hidden_state, result.hidden_states, result.pooler_output  # (B, N, d)
    else:
        patches, size = tower.embed.patches, tuple(part.pixels.shape[2:])
        if size[0] < patches.least[0] or size[1] < patches.least[1]:
            raise ValueError(f"the image has {size} pixels, and the model needs at least {tuple(patches.least)}")
        vectors, layers = tower(part.pixels.to(model.dtype), output_hidden_states=layer is not None)
    if layer is not None:
        assert layers is not None
        vectors, pooled = layers[layer], None
    grid, layout = _grid_of(tower, part.frames[0].pixels, layer)
    summaries = [None] * len(vectors) if pooled is None else list(pooled)
    rows = zip(part.names, vectors, summaries, part.frames, strict=True)
    return [Features(name, row, grid, layout, frame, summary) for name, row, summary, frame in rows]


def _grid_of(tower: VisionTower | WindowTower, pixels: tuple[int, int], layer: int | None) -> tuple[PatchGrid, Layout]:
    """The grid of a layer's patches, and what its tokens are: where patches are merged, a layer has larger ones."""
    patches, before = tower.embed.patches, tower.embed.before
    if isinstance(tower, VisionTower):
        grid = tower.grid(*pixels)
        return grid, Layout.grid(*grid, patches.size, before)
    last = len(tower.stages) - 1  # whose tokens are not merged
    merged = 2 ** (last if layer is None else min(layer, last))
    grid = PatchGrid(*(-(-n // merged) for n in patches.grid(*pixels)))
    return grid, Layout.grid(*grid, (patches.size[0] * merged, patches.size[1] * merged), before, pixels=pixels)


PROMPT = "a photo of {}"


@dataclass(frozen=True, eq=False, repr=False)
class Matched:
    """Images with a value for each text; prints as a table.

    >>> Matched(("photo.jpg",), ("a cat", "a dog"), torch.tensor([[0.1, 0.3]]), "cosine")
    text   cosine
    ─────  ──────
    a dog  0.3000
    a cat  0.1000

    Attributes:
        images: names of their files.
        texts: the inputs.
        values: (P, T).
        measure: "cosine", −1 to 1, or "probability" that the two belong together.
    """

    images: tuple[str, ...]
    texts: tuple[str, ...]
    values: Tensor
    measure: str

    @property
    def best(self) -> tuple[str, ...]:
        """The text that goes best with each image."""
        return tuple(self.texts[n] for n in self.values.argmax(1).tolist())

    def __len__(self) -> int:
        return len(self.images)

    def _table(self) -> tuple[list[str], list[list[str]]]:
        texts = tuple(map(shortened, self.texts))
        return ranking(self.values, self.images, texts, ("image", "text", self.measure))

    def __repr__(self) -> str:
        return tables.text(*self._table())

    def _repr_html_(self) -> str:
        return tables.html(*self._table())


def match(
    model: Model, images: Source | Several, texts: str | Sequence[str], *, batch: int = 32, truncate: bool = False
) -> Matched:
    """Images with a value for each text; see `Model.match`."""
    if model.kind not in ("dual-encoder", "image-text-matching"):
        raise ValueError(
            "match needs a model that compares images with texts (CLIP or BLIP, with task "
            f"'zero-shot-image-classification' or 'image-text-matching'), and this {model.family.title} has the task "
            f"{model.task!r}"
        )
    given = _checked([texts] if isinstance(texts, str) else texts, "text")
    read = _read(model, given, batch, truncate)
    if model.kind == "image-text-matching":
        matcher = cast("Matcher", model)
        names, values = score_images(model, images, batch, lambda pixels: _beside(matcher, pixels, read))
        return Matched(names, tuple(given), values.cpu(), "probability")
    dual = cast("DualEncoder", model)
    words = _wide(_vectors(dual, read))  # (T, e)
    names, values = score_images(model, images, batch, lambda pixels: _wide(dual.encode_image(pixels)) @ words.T)
    return Matched(names, tuple(given), values.cpu(), "cosine")


def classify_by(
    model: Model,
    images: Source | Several,
    labels: Sequence[str],
    *,
    prompt: str | None = None,
    batch: int = 32,
    truncate: bool = False,
) -> Classified:
    """Images with the probability of each label, read as a text; see `Model.classify`."""
    if model.kind != "dual-encoder":
        raise ValueError(
            "labels= is for models that compare vectors of images and texts (CLIP, BLIP), with the task "
            f"'zero-shot-image-classification', and this {model.family.title} has the task {model.task!r}"
        )
    prompt = PROMPT if prompt is None else prompt
    if not isinstance(prompt, str) or "{}" not in prompt:
        raise ValueError(f"prompt must hold {{}} where the label goes, as {PROMPT!r} does, got {prompt!r}")
    if isinstance(labels, str) or not isinstance(labels, Sequence) or not labels:
        raise ValueError(f"labels must be a list of at least one text, got {labels!r:.60}")
    said = [prompt.replace("{}", label) for label in _checked(labels, "label")]
    dual = cast("DualEncoder", model)
    words = _vectors(dual, _read(model, said, batch, truncate))  # (T, e)
    names, logits = score_images(model, images, batch, lambda pixels: dual.head(words, dual.encode_image(pixels)))
    return Classified(names, tuple(labels), probabilities(logits), of="image")


# --------------------------------------------------------------------------------------------------------------- pieces

Read = list[tuple[list[int], BatchEncoding]]
"""Texts as batches, with their numbers."""


def _checked(texts: Sequence[str], what: str) -> Sequence[str]:
    """Refuse what is no text among texts or labels: pairs are for models of texts. What is no list is told later."""
    for number, text in enumerate(texts if isinstance(texts, Sequence) else ()):
        if not isinstance(text, str):
            raise TypeError(f"{what} {number} must be a str, got {type(text).__name__}: {text!r:.60}")
    return texts


def _read(model: Model, texts: Sequence[str], batch: int, truncate: bool) -> Read:
    return list(batches(model, texts, batch, length=max_text_positions(model), truncate=truncate))


@torch.no_grad()
def _vectors(model: DualEncoder, read: Read) -> Tensor:
    """Vectors (T, e) of length 1."""
    rows: dict[int, Tensor] = {}
    for numbers, part in read:
        rows |= dict(zip(numbers, model.encode_text(part.ids, part.mask), strict=True))
    return torch.stack([rows[n] for n in range(len(rows))])


def _beside(model: Matcher, pixels: Tensor, read: Read) -> Tensor:
    """How likely each text belongs to each image: (B, T)."""
    rows = []
    for memory in model.look(pixels).unsqueeze(1):  # (1, patches, d)
        found: dict[int, Tensor] = {}
        for numbers, part in read:
            found |= dict(zip(numbers, probabilities(model.judge(memory, part.ids, part.mask))[:, 1], strict=True))
        rows.append(torch.stack([found[n] for n in range(len(found))]))
    return torch.stack(rows)


def _wide(x: Tensor) -> Tensor:
    """In fp32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
