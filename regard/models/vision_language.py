"""Language models that read images among their tokens (LLaVA): each patch takes the place of one token.

    pixel_values ─ image tower ─ projector ─┐
    input_ids ──── token embedding ─────────┴─ one sequence ─ language model ─ logits

Axis letters: B texts, N tokens, P images of all texts together, C channels, H, W height and width in pixels,
n vectors of an image, d width of the language model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from regard.layouts import Frame, Layout, Sides
from regard.models.family import Config
from regard.models.model import Model
from regard.models.outputs import ModelOutput
from regard.models.text import ModelState, TextModel
from regard.models.vision import check_form, check_pixels
from regard.nn.blocks import Inserted, LanguageHead, activation
from regard.nn.projections import Linear
from regard.nn.vision import VisionTower
from regard.tasks.inputs import check_placeholders


class Projector(nn.Module):
    """Image vectors (…, d_in) to vectors (…, d_out) that a language model reads: two layers, one function between them.

    function: a name of `ACTIVATIONS`.
    """

    def __init__(self, d_in: int, d_out: int, function: str, *, bias: bool = True) -> None:
        super().__init__()
        self.w_in, self.w_out = Linear(d_in, d_out, bias), Linear(d_out, d_out, bias)
        self.function = activation(function)

    def forward(self, x: Tensor) -> Tensor:
        """(…, d_in) → (…, d_out)."""
        return cast(Tensor, self.w_out(self.function(self.w_in(x))))


class VisionFeatures(NamedTuple):
    """Which vectors of an image tower a projector sees."""

    layers: Sequence[int]  # after so many blocks, side by side; below 0 counts from the end, −1 being after the last
    full: bool  # cls, too, and not the patches alone


class VisionLanguageModel(Model):
    """An image tower, a projector, and a language model.

    Args:
        placeholder: the token that an image's vectors take the place of.
        features: what the projector sees; ValueError for a layer that the tower does not have.
        vision_pooler: the checkpoint's pooler of images; unused, kept to be saved.
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
        features: VisionFeatures,
        vision_pooler: nn.Module | None = None,
    ) -> None:
        super().__init__(config)
        self.vision, self.projector, self.text = vision, projector, text
        self.placeholder, self.full, self.vision_pooler = placeholder, features.full, vision_pooler
        layers, depth = features.layers, len(vision.blocks)
        wrong = [layer for layer in layers if not -depth - 1 <= layer <= depth]
        if wrong or not layers:
            raise ValueError(
                f"the image's vectors are taken after {list(layers)} blocks, and there are {depth}: "
                f"0 to {depth}, or {-depth - 1} to -1 counted from the end"
            )
        self.layers = tuple(layer % (depth + 1) for layer in layers)

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""
        return self.text.vocabulary

    @property
    def max_positions(self) -> int | None:
        """The most positions of a text, images included; None without a limit."""
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
        """
        attention_mask = self.check(input_ids, attention_mask, self.text.tower, position_ids)
        if pixel_values is not None:
            pixel_values = check_pixels(pixel_values, self.vision.embed.patches, self)
        places = self._places(input_ids, None if pixel_values is None else pixel_values.shape)
        images, hidden_states, inserted = None, None, None
        if pixel_values is not None:
            images, hidden_states = self._look(pixel_values, bool(output_hidden_states))
            inserted = Inserted(places, images.flatten(0, 1))
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
        return self._look(check_pixels(pixel_values, self.vision.embed.patches, self), False)[0]

    # ------------------------------------------------------------------------------------------------- images as tokens

    def num_image_tokens(self, height: int, width: int) -> int:
        """How many tokens an image of this size takes: one for each patch, and one for cls if that is kept."""
        rows, columns = self.vision.embed.patches.grid(height, width)
        return rows * columns + (len(self.vision.embed.before) if self.full else 0)

    @property
    def spelling(self) -> str:
        """How the checkpoint's tokenizer writes the placeholder. Raises ValueError where it has no such token."""
        tokenizer = self.tokenizer
        if self.placeholder >= tokenizer.size:
            raise ValueError(
                f"the tokenizer has {tokenizer.size} tokens, and none for image_token_index {self.placeholder} of "
                "config.json: add <image> to it with transformers, tokenizer.add_tokens(['<image>'])"
            )
        return tokenizer.tokens([self.placeholder])[0]

    def expand(self, text: str, pixel_values: Tensor | None, *, token: str | None = None) -> str:
        """A text in which each placeholder stands as many times as its image has vectors.

        >>> model.expand("<image> What is it?", torch.zeros(1, 3, 28, 28))     # doctest: +SKIP
        '<image><image><image><image> What is it?'

        Args:
            text: with one placeholder for each image.
            pixel_values: (P, C, H, W), its images; None for none.
            token: how the placeholder is written; by default as the checkpoint's tokenizer writes it.

        Raises:
            TypeError: as a call for pixel_values.
            ValueError: more or fewer placeholders than images, no such token, and as a call for pixel_values.
        """
        token = self.spelling if token is None else token
        if pixel_values is not None:
            check_form(pixel_values, self.vision.embed.patches)
        check_placeholders(text, token, 0 if pixel_values is None else len(pixel_values), "pixel_values")
        if pixel_values is None:
            return text
        return text.replace(token, token * self.num_image_tokens(*pixel_values.shape[-2:]))

    def layouts(
        self, input_ids: Tensor, frames: Sequence[Frame], *, attention_mask: Tensor | None = None
    ) -> dict[str, Sides]:
        """What each token of every attention is and where it lies, for `regard.watch(model, layouts=…)`.

        Args:
            input_ids: (N,), one text, with what was written after it if that is looked at, too.
            frames: of its images, as `model.preprocessor` gives them.
            attention_mask: (N,) booleans, True = token; None if all are.
        """
        is_token = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask
        frames, embed = tuple(frames), self.vision.embed
        shape = (len(frames), 0, *frames[0].pixels) if frames else None
        places = self._places(input_ids.unsqueeze(0), shape)[0].cpu().numpy()  # (N,)
        words, sides = Layout.of([("padding", "text")[token] for token in is_token.tolist()]), {}
        if frames:
            grids = [embed.patches.grid(*frame.pixels) for frame in frames]
            images = [Layout.grid(*g, embed.patches.size, embed.before, image=i) for i, g in enumerate(grids)]
            seen = Layout.stacked(images)  # the tower reads them as P sequences
            sides = {f"vision.blocks.{i}.attention": Sides(seen, seen, frames) for i in range(len(self.vision.blocks))}
            # The images' tokens, in their places among those of the text.
            first = 0 if self.full else len(embed.before)
            arrays = {field.name: getattr(words, field.name).copy() for field in fields(Layout)}
            for name, array in arrays.items():
                array[:, places] = np.concatenate([getattr(image, name)[:, first:] for image in images], axis=1)
            words = Layout(**arrays)
        both = Sides(words, words, frames)
        return sides | {f"text.tower.blocks.{i}.attention": both for i in range(len(self.text.tower.blocks))}

    # ---------------------------------------------------------------------------------------- one token after another

    @torch.no_grad()
    def read_image(self, pixel_values: Tensor | None) -> VisionLanguageDecoder:
        """Encode the images (P, C, H, W) of all texts once: a decoder that reads them among the tokens.

        >>> generate(model.read_image(pixel_values), input_ids, max_new_tokens=64, eos_token_ids=2)     # doctest: +SKIP

        Raises ValueError for a model without a language-model head; else as `forward`.
        """
        if not isinstance(self.text.head, LanguageHead):
            raise ValueError(f"a model with task {self.task!r} writes no text: load it with task='image-text-to-text'")
        if pixel_values is None:
            return VisionLanguageDecoder(self, None, None)
        return VisionLanguageDecoder(self, self.encode(pixel_values), pixel_values.shape)

    # ----------------------------------------------------------------------------------------------------------- pieces

    def _look(self, pixel_values: Tensor, output_hidden_states: bool) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """(P, C, H, W) → (P, n, d), and the output of every block if output_hidden_states."""
        depth = len(self.vision.blocks) if output_hidden_states else max(self.layers)  # those above are not read
        x = self.vision.embed(pixel_values)
        layers = [x]
        for block in self.vision.blocks[:depth]:
            x = block(x)
            layers.append(x)
        before = 0 if self.full else len(self.vision.embed.before)
        taken = torch.cat([layers[layer][:, before:] for layer in self.layers], -1)  # (P, n, layers · width)
        return self.projector(taken), tuple(layers) if output_hidden_states else None

    def _places(self, input_ids: Tensor, shape: Sequence[int] | None) -> Tensor:
        """Where vectors of images stand, (B, N) booleans. shape: of pixel_values, None without images.

        Raises ValueError if input_ids do not hold as many image tokens as the images have vectors.
        """
        places = input_ids == self.placeholder
        if torch.compiler.is_compiling():
            return places
        held = places.sum(1).tolist()  # of each text; a wait for the device
        images, each = (0, 1) if shape is None else (shape[0], self.num_image_tokens(shape[2], shape[3]))
        if sum(held) != images * each or any(count % each for count in held):
            raise ValueError(
                f"the texts of input_ids hold {held} image tokens (id {self.placeholder}), and there are {images} "
                f"images of {each} tokens: model.expand(text, pixel_values) writes as many as one takes"
            )
        return places


class VisionLanguageDecoder:
    """A decoder with encoded images: reads them in their places of a prompt, then continues token by token.

    vectors: (P, n, d), or None without images.  shape: of the pixel_values.
    """

    def __init__(self, model: VisionLanguageModel, vectors: Tensor | None, shape: Sequence[int] | None) -> None:
        self.model, self.vectors, self.shape = model, vectors, shape

    @torch.no_grad()
    def begin(self, input_ids: Tensor, attention_mask: Tensor | None, *, length: int) -> tuple[Tensor, ModelState]:
        """Read a prompt (B, N) and make room for `length` positions in all: logits (B, V) after it, and the state.

        attention_mask: (B, N), True = token, padded on the left. Raises ValueError as `forward`, for padding on the
        right, and if length exceeds the positions.
        """
        model = self.model
        attention_mask = model.check(input_ids, attention_mask, model.text.tower)
        places = model._places(input_ids, self.shape)
        inserted = None if self.vectors is None else Inserted(places, self.vectors.flatten(0, 1))
        return model.text.begin(input_ids, attention_mask, length=length, inserted=inserted)

    def step(self, state: ModelState, tokens: Tensor) -> Tensor:
        """tokens (B,) → logits (B, V) of the next position; the state moves on by one, as the language model's does."""
        return self.model.text.step(state, tokens)

    def extend(self, state: ModelState, tokens: Tensor) -> Tensor:
        """tokens (B, n) → logits (B, n, V) after each of them; as in `TextModel`."""
        return self.model.text.extend(state, tokens)
