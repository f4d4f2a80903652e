"""A model that reads texts and looks at pictures, and says how well they go together (CLIP, BLIP).

    ids (B, N) ─ text ─ end token ─ layer ─ length 1 ────────┐
    pixels (P, C, H, W) ─ vision ─ cls ─ layer ─ length 1 ───┴─ likeness (P, B)

    >>> model = regard.load("openai/clip-vit-base-patch32")                                     # doctest: +SKIP
    >>> words = model.tokenizer.batch(["a photo of a cat", "a photo of a dog"])                 # doctest: +SKIP
    >>> model(words.ids, words.mask, pixels=torch.zeros(1, 3, 224, 224)).logits.shape           # doctest: +SKIP
    torch.Size([1, 2])

Texts and pictures never see each other before the end: as many of either as one likes. It knows no family.

Axis letters: B texts, P pictures, N tokens, d width of a tower, e width that both share.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from regard.layouts import Frame, Sides
from regard.models.config import Config
from regard.models.model import Model, Result
from regard.models.vision import check_pixels
from regard.nn.blocks import Tower
from regard.nn.heads import EndPooler, Pooler
from regard.nn.linear import Linear
from regard.nn.vision import NormedFirst, VisionTower

__all__ = ["Comparison", "DualModel"]


class Comparison(nn.Module):
    """Summaries of texts and pictures as vectors of length 1 in one space, and how alike they are.

    >>> Comparison(7, text=6, picture=5)
    Comparison(
      (text): Linear(in_features=6, out_features=7, bias=False)
      (picture): Linear(in_features=5, out_features=7, bias=False)
    )

    e: width of that space.  text, picture: widths of the summaries, None where there is no such tower.
    The scale of the likeness is kept as its logarithm; one tower alone has none.
    """

    scale: Tensor | None

    def __init__(self, e: int, *, text: int | None = None, picture: int | None = None) -> None:
        super().__init__()
        self.text = None if text is None else Linear(text, e, bias=False)
        self.picture = None if picture is None else Linear(picture, e, bias=False)
        both = text is not None and picture is not None
        self.scale = nn.Parameter(torch.zeros(())) if both else None

    def forward(self, texts: Tensor, pictures: Tensor) -> Tensor:
        """Vectors (B, e) and (P, e) → likeness (P, B)."""
        assert self.scale is not None
        return self.scale.exp() * (pictures @ texts.T)


class _Read(NamedTuple):
    """What one tower made."""

    hidden: Tensor  # (B, N, d)
    layers: tuple[Tensor, ...] | None
    pooled: Tensor  # (B, d)
    vector: Tensor  # (B, e)


class DualModel(Model):
    """A tower of texts and one of pictures, whose summaries are compared; a checkpoint may hold one of them alone.

    text, vision: the towers.  text_pooler, vision_pooler: what sums them up.  head: what compares the summaries.
    """

    kind = "dual-encoder"

    def __init__(
        self,
        config: Config,
        head: Comparison,
        *,
        text: Tower | None = None,
        text_pooler: EndPooler | Pooler | None = None,
        vision: VisionTower | None = None,
        vision_pooler: NormedFirst | None = None,
    ) -> None:
        super().__init__(config)
        assert (text is None) == (text_pooler is None) == (head.text is None)
        assert (vision is None) == (vision_pooler is None) == (head.picture is None)
        self.text, self.text_pooler, self.vision, self.vision_pooler = text, text_pooler, vision, vision_pooler
        self.head = head

    def forward(
        self,
        ids: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        pixels: Tensor | None = None,
        every_layer: bool = False,
    ) -> Result:
        """ids (B, N), pixels (P, C, H, W), or both → Result.

        Both: .logits (P, B) how alike, .text (B, e) and .picture (P, e) the vectors compared; .hidden, .pooled and
        .layers are the text's, .memory and .memory_layers the picture's. One alone: .hidden, .pooled, .layers and its
        vector. Positions are interpolated where a picture is not of the size that they were learnt for.

        mask: (B, N), True = token; None if all are.
        every_layer: keep what stood after each block, before the last norm.
        Raises TypeError or ValueError, before anything runs, for what does not fit the model or each other.
        """
        if ids is None and pixels is None:
            raise ValueError("there is nothing to read: give ids (B, N), pixels (B, C, H, W), or both")
        if ids is None and mask is not None:
            raise ValueError("mask says which ids are tokens, and there are no ids: give both, or neither")
        text = None if ids is None else self._check_text(ids, mask)
        pixels = None if pixels is None else self._check_pixels(pixels)
        if text is None:
            assert pixels is not None
            seen = self._look(pixels, every_layer)
            return Result(seen.hidden, pooled=seen.pooled, layers=seen.layers, picture=seen.vector)
        read = self._read(*text, every_layer)
        if pixels is None:
            return Result(read.hidden, pooled=read.pooled, layers=read.layers, text=read.vector)
        seen = self._look(pixels, every_layer)
        return Result(
            read.hidden,
            self.head(read.vector, seen.vector),
            read.pooled,
            layers=read.layers,
            memory=seen.hidden,
            memory_layers=seen.layers,
            text=read.vector,
            picture=seen.vector,
        )

    def encode_text(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """ids (B, N), mask (B, N) True = token → vectors (B, e) of length 1. Raises as the model does."""
        return self._read(*self._check_text(ids, mask), False).vector

    def encode_picture(self, pixels: Tensor) -> Tensor:
        """pixels (P, C, H, W) → vectors (P, e) of length 1. Raises as the model does."""
        return self._look(self._check_pixels(pixels), False).vector

    def layouts(self, frame: Frame) -> dict[str, Sides]:
        """What each token of the picture's attentions is and where it lies, for `regard.watch(model, layouts=…)`.

        frame: of a picture, as `model.preprocessor` gives it. A batch of several has one such mapping for each.
        Raises ValueError for a model without a tower of pictures.
        """
        vision = self._vision()
        sides = Sides.patches(frame, vision.embed.patches.size, vision.embed.before)
        return {f"vision.blocks.{number}.attention": sides for number in range(len(vision.blocks))}

    @property
    def vocabulary(self) -> int:
        """How many tokens there are. Raises ValueError for a model without a tower of texts."""
        return self._text().embed.tokens.num_embeddings

    @property
    def max_positions(self) -> int | None:
        """How many tokens a text may have. Raises ValueError for a model without a tower of texts."""
        return self._text().embed.max_positions

    # ---------------------------------------------------------------------------------------------------- either side

    def _text(self) -> Tower:
        if self.text is None:
            raise ValueError(
                f"this {self.family.title} has no tower of texts: give pixels=, or load a whole checkpoint"
            )
        return self.text

    def _vision(self) -> VisionTower:
        if self.vision is None:
            raise ValueError(f"this {self.family.title} has no tower of pictures: give ids, or load a whole checkpoint")
        return self.vision

    def _check_text(self, ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """ids, mask and where texts end, or their tokens: the vector of each row's first True is pooled."""
        mask = self.check(ids, mask, self.vocabulary, self.max_positions)
        pooler = self.text_pooler
        return ids, mask, pooler.ends(ids, mask) if isinstance(pooler, EndPooler) else mask

    def _check_pixels(self, pixels: Tensor) -> Tensor:
        patches = self._vision().embed.patches
        return check_pixels(pixels, patches.channels, patches.least, self)

    def _read(self, ids: Tensor, mask: Tensor | None, ends: Tensor | None, every_layer: bool) -> _Read:
        assert self.text_pooler is not None
        assert self.head.text is not None
        hidden, layers = self._text()(ids, mask=mask, every_layer=every_layer)
        pooled = self.text_pooler(hidden, ends)
        return _Read(hidden, layers if every_layer else None, pooled, normalize(self.head.text(pooled), dim=-1))

    def _look(self, pixels: Tensor, every_layer: bool) -> _Read:
        assert self.vision_pooler is not None
        assert self.head.picture is not None
        hidden, layers = self._vision()(pixels, every_layer=every_layer)
        pooled = self.vision_pooler(hidden)
        return _Read(hidden, layers if every_layer else None, pooled, normalize(self.head.picture(pooled), dim=-1))
