"""Image-text matching, zero-shot classification and patch features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard import tables
from regard.data.images import Source, are_several
from regard.data.tokenizer import Batch
from regard.layouts import Frame, Layout
from regard.models.dual_encoder import DualEncoder
from regard.models.image_text import Matcher
from regard.models.model import Model
from regard.models.outputs import ModelOutput
from regard.models.vision import VisionModel, check_pixels
from regard.nn.vision import PatchGrid, VisionTower
from regard.nn.windows import WindowTower
from regard.tasks.images import Looked, Several, as_list, judge, look_at, tower_of
from regard.tasks.inputs import batches, positions, probabilities, shortened
from regard.tasks.text import Classified, ranking


@dataclass(frozen=True, eq=False, repr=False)
class Features:
    """The vectors of one picture.

    >>> layout, frame = Layout.grid(2, 3, size=(4, 4)), Frame.whole(8, 12)
    >>> found = Features("photo.jpg", torch.arange(7.0).reshape(7, 1), PatchGrid(2, 3), layout, frame)
    >>> found
    Features(photo.jpg: 1 cls, 6 patches; vectors (7, 1), map (1, 2, 3))
    >>> found.map[0]
    tensor([[1., 2., 3.],
            [4., 5., 6.]])

    name: of its file.  vectors: (N, d).  grid: rows and columns of the patches.
    layout: what each token is, and the box of each patch in the model's pixels.  frame: where these lie in the picture.
    pooled: (d,) or another width, the tower's own summary; None where it has none, or another layer was asked for. It
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
        """The vector of the token that sums up the picture, (d,); None where there is none (Swin)."""
        at = self.layout.indices("cls")
        return self.vectors[int(at[0, 1])] if len(at) else None

    @property
    def map(self) -> Tensor:
        """The patches' vectors where they lie: (d, rows, columns)."""
        patches = self.vectors[len(self.vectors) - self.grid.rows * self.grid.columns :]
        return patches.T.reshape(-1, *self.grid)

    def __repr__(self) -> str:
        said = str(self.layout).removeprefix("Layout(").removesuffix(" of picture 0)")
        shapes = f"vectors {tuple(self.vectors.shape)}, map {tuple(self.map.shape)}"
        pooled = "" if self.pooled is None else f", pooled {tuple(self.pooled.shape)}"
        return f"Features({self.name}: {said}; {shapes}{pooled})"


@torch.no_grad()
def features(
    model: Model, pictures: Source | Several, *, layer: int | None = None, batch: int = 32
) -> Features | list[Features]:
    """The vectors of a picture, or of each of a list; see `Model.features`."""
    tower = tower_of(model)
    if tower is None:
        raise ValueError(f"features are of pictures, and {model.family.title} looks at none: model.embed is for texts")
    depth = len(tower.stages if isinstance(tower, WindowTower) else tower.blocks)
    number = None if layer is None else _layer(layer, depth)
    found: dict[int, Features] = {}
    for part in look_at(model, as_list(pictures), batch):
        found |= dict(zip(part.numbers, _of(model, tower, part, number), strict=True))
    several = [found[n] for n in range(len(found))]
    return several if are_several(pictures) else several[0]


def _layer(layer: int, depth: int) -> int:
    """0 to depth. Raises ValueError for a layer that is none."""
    if not isinstance(layer, int) or isinstance(layer, bool) or not -depth - 1 <= layer <= depth:
        raise ValueError(
            f"layer must be 0 (what enters the first block) to {depth}, or {-depth - 1} to -1 from the end, or None "
            f"for the model's last vectors; got {layer!r}"
        )
    return layer % (depth + 1)


def _of(model: Model, tower: VisionTower | WindowTower, part: Looked, layer: int | None) -> list[Features]:
    """Of pictures of one size. layer: None for the last."""
    result = _result(model, tower, part.pixels, layer is not None)
    vectors = result.last_hidden_state  # (B, N, d)
    if layer is not None:
        assert result.hidden_states is not None
        vectors = result.hidden_states[layer]
    pooled = [None] * len(vectors) if layer is not None or result.pooler_output is None else list(result.pooler_output)
    grid, layout = _lies(tower, part.frames[0].pixels, layer)
    rows = zip(part.names, vectors, pooled, part.frames, strict=True)
    return [Features(name, row, grid, layout, frame, summary) for name, row, summary, frame in rows]


def _result(model: Model, tower: VisionTower | WindowTower, pixels: Tensor, output_hidden_states: bool) -> ModelOutput:
    """What the tower makes; with a summary where the model has one for pictures."""
    if isinstance(model, (DualEncoder, VisionModel)):
        result = model(pixel_values=pixels, output_hidden_states=output_hidden_states)
        assert isinstance(result, ModelOutput)
        return result
    patches = tower.embed.patches
    pixels = check_pixels(pixels, patches.channels, patches.least, model)
    x, hidden_states = tower(pixels, output_hidden_states=output_hidden_states)
    return ModelOutput(last_hidden_state=x, hidden_states=hidden_states)


def _lies(tower: VisionTower | WindowTower, pixels: tuple[int, int], layer: int | None) -> tuple[PatchGrid, Layout]:
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
    """Pictures with a value for each text; prints as a table.

    >>> Matched(("photo.jpg",), ("a cat", "a dog"), torch.tensor([[0.1, 0.3]]), "cosine")
    text   cosine
    ─────  ──────
    a dog  0.3000
    a cat  0.1000

    pictures: names of their files.  texts: as asked.  values: (P, T).
    measure: what the values are: "cosine", −1 to 1, or "probability" that the two belong together, each by itself.
    """

    pictures: tuple[str, ...]
    texts: tuple[str, ...]
    values: Tensor
    measure: str

    @property
    def best(self) -> tuple[str, ...]:
        """The text that goes best with each picture."""
        return tuple(self.texts[n] for n in self.values.argmax(1).tolist())

    def __len__(self) -> int:
        return len(self.pictures)

    def _table(self) -> tuple[list[str], list[list[str]]]:
        texts = tuple(map(shortened, self.texts))
        return ranking(self.values, self.pictures, texts, ("picture", "text", self.measure))

    def __repr__(self) -> str:
        return tables.text(*self._table())

    def _repr_html_(self) -> str:
        return tables.html(*self._table())


def match(
    model: Model, pictures: Source | Several, texts: str | Sequence[str], *, batch: int = 32, truncate: bool = False
) -> Matched:
    """Pictures with a value for each text; see `Model.match`."""
    if not isinstance(model, (DualEncoder, Matcher)):
        raise ValueError(
            "match needs a model that compares pictures with texts (CLIP, or BLIP with task 'none' or 'match'), and "
            f"this {model.family.title} has the task {model.task!r}"
        )
    given = _checked([texts] if isinstance(texts, str) else texts, "text")
    read = _read(model, given, batch, truncate)
    if isinstance(model, Matcher):
        names, values = judge(model, pictures, batch, lambda pixels: _beside(model, pixels, read))
        return Matched(names, tuple(given), values.cpu(), "probability")
    words = _vectors(model, read)  # (T, e)
    names, values = judge(model, pictures, batch, lambda pixels: _wide(model.encode_image(pixels)) @ _wide(words).T)
    return Matched(names, tuple(given), values.cpu(), "cosine")


def classify_by(
    model: Model,
    pictures: Source | Several,
    labels: Sequence[str],
    *,
    prompt: str | None = None,
    batch: int = 32,
    truncate: bool = False,
) -> Classified:
    """Pictures with the probability of each label, read as a text; see `Model.classify`."""
    if not isinstance(model, DualEncoder):
        raise ValueError(
            "labels= is for models that compare vectors of pictures and texts (CLIP, BLIP with task 'none'), and this "
            f"{model.family.title} has the task {model.task!r}"
        )
    prompt = PROMPT if prompt is None else prompt
    if not isinstance(prompt, str) or "{}" not in prompt:
        raise ValueError(f"prompt must hold {{}} where the label goes, as {PROMPT!r} does, got {prompt!r}")
    if isinstance(labels, str) or not isinstance(labels, Sequence) or not labels:
        raise ValueError(f"labels must be a list of at least one text, got {labels!r:.60}")
    said = [prompt.replace("{}", label) for label in _checked(labels, "label")]
    words = _vectors(model, _read(model, said, batch, truncate))  # (T, e)
    names, logits = judge(model, pictures, batch, lambda pixels: model.head(words, model.encode_image(pixels)))
    return Classified(names, tuple(labels), probabilities(logits), of="picture")


# --------------------------------------------------------------------------------------------------------------- pieces

Read = list[tuple[list[int], Batch]]
"""Texts as batches, with their numbers."""


def _checked(texts: Sequence[str], what: str) -> Sequence[str]:
    """Refuse what is no text among texts or labels: pairs are for models of texts. What is no list is told later."""
    for number, text in enumerate(texts if isinstance(texts, Sequence) else ()):
        if not isinstance(text, str):
            raise TypeError(f"{what} {number} must be a str, got {type(text).__name__}: {text!r:.60}")
    return texts


def _read(model: Model, texts: Sequence[str], batch: int, truncate: bool) -> Read:
    return list(batches(model, texts, batch, length=positions(model), truncate=truncate))


@torch.no_grad()
def _vectors(model: DualEncoder, read: Read) -> Tensor:
    """Vectors (T, e) of length 1."""
    rows: dict[int, Tensor] = {}
    for numbers, part in read:
        rows |= dict(zip(numbers, model.encode_text(part.ids, part.mask), strict=True))
    return torch.stack([rows[n] for n in range(len(rows))])


def _beside(model: Matcher, pixels: Tensor, read: Read) -> Tensor:
    """How likely each text belongs to each picture: (B, T)."""
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
