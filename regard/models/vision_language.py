r"""A language model that reads pictures among its words (LLaVA): each patch of a picture takes the place of one token.

    pixels ─ tower of pictures ─ projector ─┐
    ids ──── table of the words ────────────┴─ one sequence ─ language model ─ scores of words

    >>> model = regard.load("llava-hf/llava-1.5-7b-hf")                                       # doctest: +SKIP
    >>> pixels = model.preprocessor(["photo.jpg"]).pixel_values                                     # doctest: +SKIP
    >>> asked = model.expand("USER: <image>\nWhat is it? ASSISTANT:", pixels)                 # doctest: +SKIP
    >>> model(model.tokenizer.batch([asked]).ids, pixels=pixels).memory.shape                 # doctest: +SKIP
    torch.Size([1, 576, 4096])

Axis letters: B texts, N tokens, P pictures of all texts together, C channels, H, W height and width in pixels,
n vectors of a picture, d width of the language model.

It knows no family.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from regard.generation.loop import ModelState
from regard.layouts import Frame, Layout, Sides
from regard.models.config import Config
from regard.models.model import Model, Result
from regard.models.text import TextModel
from regard.models.vision import check_form, check_pixels
from regard.nn.blocks import Inserted, activation
from regard.nn.heads import LanguageHead
from regard.nn.linear import Linear
from regard.nn.vision import VisionTower
from regard.tasks.images import check_placeholders

__all__ = ["PictureReading", "PictureWriter", "Projector"]

KEYS = ("image_token_index", "image_token_id")  # of config.json: which token a picture's vectors take the place of


class Projector(nn.Module):
    """Vectors of a picture to vectors that a language model reads: two layers, one function between them.

    >>> Projector(6, 10, "gelu")(torch.zeros(2, 5, 6)).shape
    torch.Size([2, 5, 10])

    d_in, d_out: widths of the picture's vectors and of the words'.  function: a name of `ACTIVATIONS`.
    """

    def __init__(self, d_in: int, d_out: int, function: str, *, bias: bool = True) -> None:
        super().__init__()
        self.w_in, self.w_out = Linear(d_in, d_out, bias), Linear(d_out, d_out, bias)
        self.function = activation(function)

    def forward(self, x: Tensor) -> Tensor:
        """(…, d_in) → (…, d_out)."""
        return cast(Tensor, self.w_out(self.function(self.w_in(x))))


class PictureWriter(Model):
    """A tower of pictures, a projector, and a language model.

    placeholder: the token that a picture's vectors take the place of.
    layers: what the projector sees: after how many blocks of the tower, one or several side by side; below 0 counts
      from the end, −1 being after the last block.
    full: does it see cls, too, and not the patches alone.
    vision_pooler: what the checkpoint has to sum up a picture. Nothing here asks for it; it is kept to be saved.
    Raises ValueError for a layer that the tower does not have.
    """

    kind = "vision-language"

    def __init__(
        self,
        config: Config,
        vision: VisionTower,
        projector: Projector,
        text: TextModel,
        *,
        placeholder: int,
        layers: Sequence[int],
        full: bool,
        vision_pooler: nn.Module | None = None,
    ) -> None:
        super().__init__(config)
        self.vision, self.projector, self.text = vision, projector, text
        self.placeholder, self.full, self.vision_pooler = placeholder, full, vision_pooler
        depth = len(vision.blocks)
        wrong = [layer for layer in layers if not -depth - 1 <= layer <= depth]
        if wrong or not layers:
            raise ValueError(
                f"the picture's vectors are taken after {list(layers)} blocks, and there are {depth}: "
                f"0 to {depth}, or {-depth - 1} to -1 counted from the end"
            )
        self.layers = tuple(layer % (depth + 1) for layer in layers)

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""
        return self.text.vocabulary

    @property
    def max_positions(self) -> int | None:
        """The most positions of a text, a picture's vectors among them; None without a limit."""
        return self.text.max_positions

    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        *,
        pixels: Tensor | None = None,
        positions: Tensor | None = None,
        every_layer: bool = False,
    ) -> Result:
        """ids (B, N) and the pictures (P, C, H, W) of all texts, in order → Result of the language model.

        mask: (B, N), True = token; None if all are.
        pixels: None where no text speaks of a picture. A picture takes as many placeholders in ids as it has vectors,
          `picture_tokens`; `expand` makes them of one.
        positions: (N,) or (B, N); by default tokens are counted, so that padding shifts nobody.
        every_layer: keep what stood after each block, of both towers.

        `.memory` (P, n, d) is what stands in the texts for the pictures. Raises TypeError or ValueError for ids, mask,
        pixels and positions that do not fit the model or each other.
        """
        mask = self.check(ids, mask, self.vocabulary, self.max_positions)
        self.check_positions(ids, positions, self.text.tower)
        if pixels is not None:
            pixels = self._checked(pixels)
        places = self._places(ids, None if pixels is None else pixels.shape)
        memory, seen = (None, None) if pixels is None else self._look(pixels, every_layer)
        inserted = None if memory is None else Inserted(places, memory.flatten(0, 1))
        read = self.text(ids, mask, positions=positions, inserted=inserted, every_layer=every_layer)
        return Result(read.hidden, read.logits, layers=read.layers, memory=memory, memory_layers=seen)

    def encode(self, pixels: Tensor) -> Tensor:
        """What stands in a text for each picture (P, C, H, W): (P, n, d). Raises as `forward`."""
        return self._look(self._checked(pixels), False)[0]

    # ----------------------------------------------------------------------------------------------- pictures as tokens

    def picture_tokens(self, height: int, width: int) -> int:
        """How many tokens a picture of so many pixels takes: one for each patch, and one for cls where that is kept."""
        rows, columns = self.vision.embed.patches.grid(height, width)
        return rows * columns + (len(self.vision.embed.before) if self.full else 0)

    @property
    def spelling(self) -> str:
        """How the checkpoint's tokenizer writes the placeholder. Raises ValueError where it has no such token."""
        tokenizer = self.tokenizer
        try:
            return tokenizer.tokens([self.placeholder])[0]
        except ValueError:
            key = next((key for key in KEYS if key in self.config), KEYS[0])
            raise ValueError(
                f"the tokenizer has no token for {key} {self.placeholder} of config.json (its vocabulary has "
                f"{tokenizer.size}), so nothing in a text stands for a picture: add <image> to it, as with "
                "tokenizer.add_tokens(['<image>'], special_tokens=True) and save_pretrained of transformers"
            ) from None

    def expand(self, text: str, pixels: Tensor | None, *, token: str | None = None) -> str:
        """A text in which each placeholder stands as many times as its picture has vectors.

        >>> model.expand("<image> What is it?", torch.zeros(1, 3, 28, 28))     # doctest: +SKIP
        '<image><image><image><image> What is it?'

        pixels: (P, C, H, W), the pictures that the text speaks of, None for none.
        token: how the placeholder is written; by default as the checkpoint's tokenizer writes it.
        Raises ValueError where there are more or fewer placeholders than pictures, or the tokenizer does not have one,
        and as a call for pixels that do not fit.
        """
        token = self.spelling if token is None else token
        if pixels is not None:
            patches = self.vision.embed.patches
            check_form(pixels, patches.channels, patches.least)
        check_placeholders(text, token, 0 if pixels is None else len(pixels), "pixels")
        return text if pixels is None else text.replace(token, token * self.picture_tokens(*pixels.shape[-2:]))

    def layouts(self, ids: Tensor, frames: Sequence[Frame], *, mask: Tensor | None = None) -> dict[str, Sides]:
        """What each token of every attention is and where it lies, for `regard.watch(model, layouts=…)`.

        ids: (N,), one text, with what was written after it if that is looked at, too.
        frames: of its pictures, as `model.preprocessor` gives them.  mask: (N,), True = token; None if all are.
        A batch of several texts has one such mapping for each.
        Raises ValueError for ids that are not of one text, or hold more or fewer image tokens than the pictures take,
        for a mask that is not of these ids, and for pictures of unlike sizes.
        """
        frames, before = tuple(frames), len(self.vision.embed.before)
        if not isinstance(ids, Tensor) or ids.ndim != 1:
            got = f"{tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
            raise ValueError(f"ids must be those of one text, a tensor (N,), got {got}: a batch has layouts for each")
        if mask is not None and (not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != ids.shape):
            got = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(f"mask must be booleans ({len(ids)},), True = token, got {got}")
        if len({frame.pixels for frame in frames}) > 1:
            raise ValueError(f"the pictures of one pass have one size, got {[frame.pixels for frame in frames]}")
        places = self._places(ids.unsqueeze(0), (len(frames), 0, *frames[0].pixels) if frames else None)[0]  # (N,)
        words = Layout.of(
            ["text"] * len(ids) if mask is None else [("padding", "text")[token] for token in mask.tolist()]
        )
        pictures = [self._patches(frame, number) for number, frame in enumerate(frames)]
        sides = {}
        if frames:
            seen = Layout.stacked(pictures)  # the tower reads them as W sequences
            sides = {f"vision.blocks.{i}.attention": Sides(seen, seen, frames) for i in range(len(self.vision.blocks))}
            words = _put(words, places.cpu().numpy(), pictures if self.full else [_from(x, before) for x in pictures])
        both = Sides(words, words, frames)
        return sides | {f"text.tower.blocks.{i}.attention": both for i in range(len(self.text.tower.blocks))}

    # ---------------------------------------------------------------------------------------- one token after another

    @torch.no_grad()
    def read_picture(self, pixels: Tensor | None) -> PictureReading:
        """Look at the pictures (P, C, H, W) of all texts, once: a decoder that reads them among the words.

        >>> generate(model.read_picture(pixels), ids, max_new_tokens=64, eos_token_ids=2)     # doctest: +SKIP

        pixels: None where no text speaks of a picture.
        Raises ValueError for a model that has no words to choose from; else as `forward`.
        """
        if not isinstance(self.text.head, LanguageHead):
            raise ValueError(f"a model with task {self.task!r} writes no text: load it with task='image-text-to-text'")
        if pixels is None:
            return PictureReading(self, None, None)
        return PictureReading(self, self.encode(pixels), pixels.shape)

    # ----------------------------------------------------------------------------------------------------------- pieces

    def _look(self, pixels: Tensor, every_layer: bool) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """(P, C, H, W) → (P, n, d), and what stood after each block if asked for."""
        depth = len(self.vision.blocks) if every_layer else max(self.layers)  # above them nobody looks
        x = self.vision.embed(pixels)
        layers = [x]
        for block in self.vision.blocks[:depth]:
            x = block(x)
            layers.append(x)
        before = 0 if self.full else len(self.vision.embed.before)
        taken = torch.cat([layers[layer][:, before:] for layer in self.layers], -1)  # (P, n, layers · width)
        return self.projector(taken), tuple(layers) if every_layer else None

    def _checked(self, pixels: Tensor) -> Tensor:
        patches = self.vision.embed.patches
        return check_pixels(pixels, patches.channels, patches.least, self)

    def _places(self, ids: Tensor, shape: Sequence[int] | None) -> Tensor:
        """Where vectors of pictures stand, (B, N) booleans. shape: of the pixels, None for no picture.

        Raises ValueError where ids do not hold as many image tokens as the pictures have vectors.
        """
        places = ids == self.placeholder
        if torch.compiler.is_compiling():
            return places
        held = places.sum(1).tolist()  # a wait for the device
        if shape is None and any(held):
            raise ValueError(
                f"ids hold {_tokens(sum(held))} (id {self.placeholder}), and no picture was given: give pixels=, "
                "or a text without them"
            )
        if shape is not None:
            self._check_held(held, shape[0], self.picture_tokens(shape[2], shape[3]))
        return places

    def _check_held(self, held: list[int], pictures: int, each: int) -> None:
        """held: image tokens of each text.  each: how many a picture takes."""
        total = sum(held)
        if total == pictures * each and not any(count % each for count in held):
            return
        odd = next((text for text, count in enumerate(held) if count % each), None)
        if odd is not None:
            raise ValueError(
                f"text {odd} of ids holds {_tokens(held[odd])} (id {self.placeholder}), which is no whole number of "
                f"pictures of {each:,}: model.expand(text, pixels) writes as many as a picture takes"
            )
        were = "was" if pictures == 1 else "were"
        raise ValueError(
            f"ids hold {_tokens(total)} (id {self.placeholder}), which is {_pictures(total // each)} of {each:,}; "
            f"{pictures:,} {were} given"
        )

    def _patches(self, frame: Frame, picture: int) -> Layout:
        """The tokens of a picture in the tower."""
        embed = self.vision.embed
        return Layout.grid(*embed.patches.grid(*frame.pixels), embed.patches.size, embed.before, picture=picture)


class PictureReading:
    """A decoder that has looked at pictures: reads them in their places of a prompt, then goes on token by token.

    vectors: (P, n, d), or None for no picture.  shape: of the pixels that they were made of.
    """

    def __init__(self, model: PictureWriter, vectors: Tensor | None, shape: Sequence[int] | None) -> None:
        self.model, self.vectors, self.shape = model, vectors, shape

    @torch.no_grad()
    def begin(self, ids: Tensor, mask: Tensor | None, *, length: int) -> tuple[Tensor, ModelState]:
        """Read a prompt (B, N) and make room for `length` positions in all: logits (B, V) after it, and the state.

        mask: (B, N), True = token, padded on the left. Raises ValueError where the prompt does not hold as many image
        tokens as the pictures have, for padding on the right, and if the room is more than the positions.
        """
        model = self.model
        mask = model.check(ids, mask, model.vocabulary, model.max_positions)
        places = model._places(ids, self.shape)
        inserted = None if self.vectors is None else Inserted(places, self.vectors.flatten(0, 1))
        return model.text.begin(ids, mask, length=length, inserted=inserted)

    def step(self, state: ModelState, tokens: Tensor) -> Tensor:
        """tokens (B,) → logits (B, V) of the next position; the state moves on by one, as the language model's does."""
        return self.model.text.step(state, tokens)


# -------------------------------------------------------------------------------------------------------------- layouts


def _arrays(layout: Layout) -> tuple[NDArray[Any], ...]:
    return layout.kind, layout.picture, layout.box


def _from(layout: Layout, first: int) -> Layout:
    """The tokens from `first` on."""
    return Layout(*(array[:, first:] for array in _arrays(layout)))


def _put(words: Layout, places: NDArray[np.bool_], pictures: Sequence[Layout]) -> Layout:
    """The words, and the pictures' tokens where they stand among them."""
    arrays = [array.copy() for array in _arrays(words)]
    for array, tokens in zip(arrays, _arrays(sum(pictures[1:], pictures[0])), strict=True):
        array[:, places] = tokens
    return Layout(*arrays)


def _tokens(number: int) -> str:
    return "no image token" if number == 0 else f"{number:,} image token{'s' * (number > 1)}"


def _pictures(number: int) -> str:
    return "1 picture" if number == 1 else f"{number:,} pictures"
