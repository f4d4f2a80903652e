r"""A language model that reads pictures among its words (LLaVA): each patch of a picture takes the place of one token.

    pixel_values ─ tower of pictures ─ projector ─┐
    input_ids ──── table of the words ────────────┴─ one sequence ─ language model ─ scores of words

    >>> model = regard.load("llava-hf/llava-1.5-7b-hf")                                       # doctest: +SKIP
    >>> pixel_values = model.preprocessor(["photo.jpg"]).pixel_values                                  # doctest: +SKIP
    >>> asked = model.expand("USER: <image>\nWhat is it? ASSISTANT:", pixel_values)                 # doctest: +SKIP
    >>> output = model(model.tokenizer.batch([asked]).input_ids, pixel_values=pixel_values)         # doctest: +SKIP
    >>> output.encoder_last_hidden_state.shape                                                      # doctest: +SKIP
    torch.Size([1, 576, 4096])

Axis letters: B texts, N tokens, P pictures of all texts together, C channels, H, W height and width in pixels,
n vectors of a picture, d width of the language model.
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
from regard.models.model import Model
from regard.models.outputs import ModelOutput
from regard.models.text import TextModel
from regard.models.vision import check_form, check_pixels
from regard.nn.blocks import Inserted, activation
from regard.nn.heads import LanguageHead
from regard.nn.linear import Linear
from regard.nn.vision import VisionTower
from regard.tasks.inputs import check_placeholders

__all__ = ["Projector", "VisionLanguageDecoder", "VisionLanguageModel"]

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


class VisionLanguageModel(Model):
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

    @property
    def head(self) -> nn.Module | None:
        """The language model's head."""
        return self.text.head

    @property
    def loss_type(self) -> str | None:
        """The name of the loss in transformers, where the model shifts the labels."""
        return self.text.loss_type

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        pixel_values: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = False,
        **options: Any,
    ) -> ModelOutput:
        """Read texts with images among their tokens; the output is the language model's.

        Args:
            input_ids: (B, N). An image takes as many placeholders as it has vectors, `num_image_tokens`; `expand` makes
                them of one.
            attention_mask: (B, N), 1 or True = token; None if all are.
            pixel_values: (P, C, H, W), the images of all texts in order; None if no text has one.
            position_ids: (N,) or (B, N); by default tokens are counted and padding is not.
            labels: (B, N) token ids, shifted by the model, -100 = ignored.
            output_hidden_states: return the output of every block, of both towers.
            options: as `Model.read_options`.

        Returns:
            `encoder_last_hidden_state` (P, n, d) are the vectors that replace the placeholders; `encoder_hidden_states`
            are the image tower's.

        Raises:
            TypeError: if an argument has another type.
            ValueError: if arguments do not fit the model or each other.
        """
        attention_mask = self.check(input_ids, attention_mask, self.vocabulary, self.max_positions)
        self.check_positions(input_ids, position_ids, self.text.tower)
        if pixel_values is not None:
            pixel_values = self._checked(pixel_values)
        places = self._places(input_ids, None if pixel_values is None else pixel_values.shape)
        images, hidden_states = (None, None)
        if pixel_values is not None:
            images, hidden_states = self._look(pixel_values, bool(output_hidden_states))
        inserted = None if images is None else Inserted(places, images.flatten(0, 1))
        output: ModelOutput = self.text(
            input_ids,
            attention_mask,
            position_ids=position_ids,
            labels=labels,
            inserted=inserted,
            output_hidden_states=output_hidden_states,
            **options,
        )
        return ModelOutput(output, encoder_last_hidden_state=images, encoder_hidden_states=hidden_states)

    def encode(self, pixel_values: Tensor) -> Tensor:
        """The vectors (P, n, d) that stand in a text for each image (P, C, H, W). Raises as `forward`."""
        return self._look(self._checked(pixel_values), False)[0]

    # ----------------------------------------------------------------------------------------------- pictures as tokens

    def num_image_tokens(self, height: int, width: int) -> int:
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

    def expand(self, text: str, pixel_values: Tensor | None, *, token: str | None = None) -> str:
        """A text in which each placeholder stands as many times as its picture has vectors.

        >>> model.expand("<image> What is it?", torch.zeros(1, 3, 28, 28))     # doctest: +SKIP
        '<image><image><image><image> What is it?'

        pixel_values: (P, C, H, W), the pictures that the text speaks of, None for none.
        token: how the placeholder is written; by default as the checkpoint's tokenizer writes it.
        Raises ValueError where there are more or fewer placeholders than pictures, or the tokenizer does not have one,
        and as a call for pixel_values that do not fit.
        """
        token = self.spelling if token is None else token
        if pixel_values is not None:
            patches = self.vision.embed.patches
            check_form(pixel_values, patches.channels, patches.least)
        check_placeholders(text, token, 0 if pixel_values is None else len(pixel_values), "pixel_values")
        return (
            text
            if pixel_values is None
            else text.replace(token, token * self.num_image_tokens(*pixel_values.shape[-2:]))
        )

    def layouts(
        self, input_ids: Tensor, frames: Sequence[Frame], *, attention_mask: Tensor | None = None
    ) -> dict[str, Sides]:
        """What each token of every attention is and where it lies, for `regard.watch(model, layouts=…)`.

        input_ids: (N,), one text, with what was written after it if that is looked at, too.
        frames: of its images, as `model.preprocessor` gives them.  attention_mask: (N,), True = token; None if all are.
        A batch of several texts has one such mapping for each.
        Raises ValueError for input_ids that are not of one text, or hold more or fewer image tokens than the images
        take, for a mask that is not of these input_ids, and for pictures of unlike sizes.
        """
        frames, before = tuple(frames), len(self.vision.embed.before)
        if not isinstance(input_ids, Tensor) or input_ids.ndim != 1:
            got = f"{tuple(input_ids.shape)}" if isinstance(input_ids, Tensor) else type(input_ids).__name__
            raise ValueError(
                f"input_ids must be those of one text, a tensor (N,), got {got}: a batch has layouts for each"
            )
        if attention_mask is not None and (
            not isinstance(attention_mask, Tensor)
            or attention_mask.dtype != torch.bool
            or attention_mask.shape != input_ids.shape
        ):
            got = (
                f"{attention_mask.dtype} {tuple(attention_mask.shape)}"
                if isinstance(attention_mask, Tensor)
                else type(attention_mask).__name__
            )
            raise ValueError(f"attention_mask must be booleans ({len(input_ids)},), True = token, got {got}")
        if len({frame.pixels for frame in frames}) > 1:
            raise ValueError(f"the pictures of one pass have one size, got {[frame.pixels for frame in frames]}")
        places = self._places(input_ids.unsqueeze(0), (len(frames), 0, *frames[0].pixels) if frames else None)[
            0
        ]  # (N,)
        words = Layout.of(
            ["text"] * len(input_ids)
            if attention_mask is None
            else [("padding", "text")[token] for token in attention_mask.tolist()]
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
    def read_image(self, pixel_values: Tensor | None) -> VisionLanguageDecoder:
        """Look at the pictures (P, C, H, W) of all texts, once: a decoder that reads them among the words.

        >>> generate(model.read_image(pixel_values), input_ids, max_new_tokens=64, eos_token_ids=2)     # doctest: +SKIP

        pixel_values: None where no text speaks of a picture.
        Raises ValueError for a model that has no words to choose from; else as `forward`.
        """
        if not isinstance(self.text.head, LanguageHead):
            raise ValueError(f"a model with task {self.task!r} writes no text: load it with task='image-text-to-text'")
        if pixel_values is None:
            return VisionLanguageDecoder(self, None, None)
        return VisionLanguageDecoder(self, self.encode(pixel_values), pixel_values.shape)

    # ----------------------------------------------------------------------------------------------------------- pieces

    def _look(self, pixel_values: Tensor, output_hidden_states: bool) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """(P, C, H, W) → (P, n, d), and what stood after each block if asked for."""
        depth = len(self.vision.blocks) if output_hidden_states else max(self.layers)  # above them nobody looks
        x = self.vision.embed(pixel_values)
        layers = [x]
        for block in self.vision.blocks[:depth]:
            x = block(x)
            layers.append(x)
        before = 0 if self.full else len(self.vision.embed.before)
        taken = torch.cat([layers[layer][:, before:] for layer in self.layers], -1)  # (P, n, layers · width)
        return self.projector(taken), tuple(layers) if output_hidden_states else None

    def _checked(self, pixel_values: Tensor) -> Tensor:
        patches = self.vision.embed.patches
        return check_pixels(pixel_values, patches.channels, patches.least, self)

    def _places(self, input_ids: Tensor, shape: Sequence[int] | None) -> Tensor:
        """Where vectors of pictures stand, (B, N) booleans. shape: of pixel_values, None for no picture.

        Raises ValueError where input_ids do not hold as many image tokens as the pictures have vectors.
        """
        places = input_ids == self.placeholder
        if torch.compiler.is_compiling():
            return places
        held = places.sum(1).tolist()  # a wait for the device
        if shape is None and any(held):
            raise ValueError(
                f"input_ids hold {_tokens(sum(held))} (id {self.placeholder}), and no image was given: give "
                "pixel_values=, or a text without them"
            )
        if shape is not None:
            self._check_held(held, shape[0], self.num_image_tokens(shape[2], shape[3]))
        return places

    def _check_held(self, held: list[int], pictures: int, each: int) -> None:
        """held: image tokens of each text.  each: how many a picture takes."""
        total = sum(held)
        if total == pictures * each and not any(count % each for count in held):
            return
        odd = next((text for text, count in enumerate(held) if count % each), None)
        if odd is not None:
            raise ValueError(
                f"text {odd} of input_ids holds {_tokens(held[odd])} (id {self.placeholder}), which is no whole "
                f"number of images of {each:,}: model.expand(text, pixel_values) writes as many as a picture takes"
            )
        were = "was" if pictures == 1 else "were"
        raise ValueError(
            f"input_ids hold {_tokens(total)} (id {self.placeholder}), which is {_pictures(total // each)} of {each:,}"
            f"; {pictures:,} {were} given"
        )

    def _patches(self, frame: Frame, picture: int) -> Layout:
        """The tokens of a picture in the tower."""
        embed = self.vision.embed
        return Layout.grid(*embed.patches.grid(*frame.pixels), embed.patches.size, embed.before, picture=picture)


class VisionLanguageDecoder:
    """A decoder that has looked at pictures: reads them in their places of a prompt, then goes on token by token.

    vectors: (P, n, d), or None for no picture.  shape: of pixel_values that they were made of.
    """

    def __init__(self, model: VisionLanguageModel, vectors: Tensor | None, shape: Sequence[int] | None) -> None:
        self.model, self.vectors, self.shape = model, vectors, shape

    @torch.no_grad()
    def begin(self, input_ids: Tensor, attention_mask: Tensor | None, *, length: int) -> tuple[Tensor, ModelState]:
        """Read a prompt (B, N) and make room for `length` positions in all: logits (B, V) after it, and the state.

        attention_mask: (B, N), True = token, padded on the left. Raises ValueError where the prompt does not hold as
        many image tokens as the pictures have, for padding on the right, and if the room is more than the positions.
        """
        model = self.model
        attention_mask = model.check(input_ids, attention_mask, model.vocabulary, model.max_positions)
        places = model._places(input_ids, self.shape)
        inserted = None if self.vectors is None else Inserted(places, self.vectors.flatten(0, 1))
        return model.text.begin(input_ids, attention_mask, length=length, inserted=inserted)

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
    return "1 image" if number == 1 else f"{number:,} images"
