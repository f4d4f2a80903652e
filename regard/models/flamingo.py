"""Language models that attend to images beside their text (Flamingo): some blocks are preceded by cross-attention.

    pixel_values ─ image tower ─ resampler ─ latents ─┐
    input_ids ─ embedding ─ look ─ block ─ block ─ … ─ look ─ block ─ … ─ norm ─ logits

Each token attends to the images that it sees alone (`sees`); for one that sees none it is as if there were none.

Axis letters: B texts, N tokens, P images of each text, C channels, H, W height and width in pixels, L vectors of an
image that tokens attend to, e and d widths of images and tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from regard import masks
from regard.layouts import Frame, Layout, Sides
from regard.models.family import Config
from regard.models.losses import token_loss
from regard.models.model import Model
from regard.models.outputs import ModelOutput
from regard.models.text import ModelState, TextModel
from regard.models.vision import check_pixels
from regard.nn.blocks import HeadInput, LanguageHead, TowerOutput, count, visible
from regard.nn.projections import Cache, ContextKeys
from regard.nn.vision import GatedLook, ImageMask, Resampler, VisionTower
from regard.tasks.inputs import PLACEHOLDER


def last_image(input_ids: Tensor, images: int, *, placeholder: int, ends: Sequence[int] = ()) -> Tensor:
    """Which image each token sees: that of the last placeholder, itself or before it. (B, N, P) booleans.

    >>> last_image(torch.tensor([[5, 9, 5, 9, 5, 2, 5]]), 2, placeholder=9, ends=[2])[0].int().T
    tensor([[0, 1, 1, 0, 0, 0, 0],
            [0, 0, 0, 1, 1, 1, 0]], dtype=torch.int32)

    The placeholders of a text stand for its images in order. ends: tokens that end a text; what follows one sees no
    image until the next placeholder.
    """
    here, place = input_ids == placeholder, torch.arange(input_ids.shape[1], device=input_ids.device)
    last = torch.isin(input_ids, torch.tensor(ends, dtype=input_ids.dtype, device=input_ids.device))
    began = torch.where(here, place, -1).cummax(1).values  # (B, N), where the last placeholder stands
    ended = pad(torch.where(last, place + 1, 0).cummax(1).values[:, :-1], (1, 0))  # where the last text ended before
    number = torch.where(ended > began, -1, here.cumsum(1) - 1)
    return number.unsqueeze(-1) == torch.arange(images, device=input_ids.device)


class FlamingoModel(Model):
    """A language model, looks (gated cross-attention) at images between its blocks, and what encodes the images.

    Args:
        text: the language model, whose tower, head and limit become this model's.
        looks: one before the first block, and one before each further block at equal distances.
        vision: image tower.
        resampler: gathers its vectors; None if tokens attend to all of them.
        vision_pooler: the checkpoint's pooler of images; unused, kept to be saved.
        ends: tokens that end a text.
    """

    kind = "flamingo"

    def __init__(
        self,
        config: Config,
        text: TextModel,
        looks: Sequence[GatedLook],
        vision: VisionTower,
        *,
        resampler: Resampler | None,
        vision_pooler: nn.Module,
        ends: Sequence[int],
    ) -> None:
        super().__init__(config)
        depth = len(text.tower.depth)
        assert depth % len(looks) == 0, (depth, len(looks))
        assert text.max_positions is not None
        self.tower, self.looks, self.vision = text.tower, nn.ModuleList(looks), vision
        self.resampler, self.vision_pooler = resampler, vision_pooler
        self.head = text.head if isinstance(text.head, LanguageHead) else None
        self.max_positions, self.ends = text.max_positions, tuple(ends)

    @property
    def vocabulary(self) -> int:
        """How many tokens there are, added ones included."""
        return self.tower.embed.tokens.num_embeddings

    @cached_property
    def placeholder(self) -> int:
        """The token that stands in a text for an image: "<image>" of the tokenizer; or set it.

        Raises ValueError if the tokenizer has no such token, and as `tokenizer`.
        """
        ids = self.tokenizer.encode(PLACEHOLDER, special=False).ids
        if len(ids) != 1:
            raise ValueError(
                f"the tokenizer has no token {PLACEHOLDER!r}, so nothing in a text stands for an image: "
                "set model.placeholder to the id that does, or give image_attention_mask="
            )
        return ids[0]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        pixel_values: Tensor | None = None,
        image_attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = False,
        **options: Any,
    ) -> ModelOutput:
        """Read texts that attend to images; the output is the language model's.

        Args:
            input_ids: (B, N).
            attention_mask: (B, N), 1 or True = token; None if all are.
            pixel_values: (B, P, C, H, W), the images of each text; None for none. Texts with fewer images than others
                are filled up with any.
            image_attention_mask: (B, N, P), 1 or True = token sees image. By default each sees the image of the last
                placeholder, itself or before it, and none after the end of a text (`last_image`).
            position_ids: (N,) or (B, N); by default tokens are counted and padding is not.
            labels: (B, N) token ids, shifted by the model, -100 = ignored.
            output_hidden_states: return the output of every block, of both towers.
            options: as `Model.read_options`.

        Returns:
            `encoder_last_hidden_state` (B, P, L, e) is what tokens attend to; `encoder_hidden_states` are the image
            tower's, (B, P, n, e) each.
        """
        items = self.read_options(options)
        attention_mask = self.check(input_ids, attention_mask, self.tower, position_ids)
        images, image_states = None, None
        if pixel_values is not None:
            pixel_values = self._check_images(pixel_values)
        sees = self.sees(input_ids, None if pixel_values is None else pixel_values.shape[:2], image_attention_mask)
        if pixel_values is not None:
            images, image_states = self._look(pixel_values, bool(output_hidden_states))
        x, hidden_states = self.read(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            images=None if images is None else images.flatten(1, 2),  # (B, P·L, e)
            sees=sees,
            output_hidden_states=bool(output_hidden_states),
        )
        logits = None if self.head is None else self.score(x)
        if labels is not None and logits is None:
            raise ValueError(f"{self.family.title} with task {self.task!r} has no loss of labels")
        return ModelOutput(
            loss=None if labels is None or logits is None else token_loss(logits, labels, shift=True, items=items),
            logits=logits,
            last_hidden_state=x,
            hidden_states=hidden_states,
            encoder_last_hidden_state=images,
            encoder_hidden_states=image_states,
        )

    def encode(self, pixel_values: Tensor) -> Tensor:
        """What tokens attend to of each image (B, P, C, H, W): (B, P, L, e). Raises as `forward`."""
        return self._look(self._check_images(pixel_values), False)[0]

    def layouts(self, frames: Sequence[Frame], tokens: int) -> dict[str, Sides]:
        """What each token of every attention is and where it lies, for one text: `regard.watch(model, layouts=…)`.

        Args:
            frames: of its images, as `model.preprocessor` gives them; one for each of P.
            tokens: how many the text has, padding included.
        """
        frames = tuple(frames)
        text, embed = Layout.text(tokens), self.vision.embed
        sides = {f"tower.blocks.{i}.attention": Sides(text, text, ()) for i in range(len(self.tower.blocks))}
        if not frames:
            return sides
        grids = [embed.patches.grid(*frame.pixels) for frame in frames]
        vectors = [Layout.grid(*g, embed.patches.size, embed.before, image=i) for i, g in enumerate(grids)]
        images = Layout.stacked(vectors)
        if self.resampler is not None:
            vectors = [Layout.latents(len(self.resampler.latents), number) for number in range(len(frames))]
            gathering = Sides(Layout.stacked(vectors), images + Layout.stacked(vectors), frames)
            sides |= {f"resampler.blocks.{i}.attention": gathering for i in range(len(self.resampler.blocks))}
        within, beside = Sides(images, images, frames), Sides(text, sum(vectors[1:], vectors[0]), frames)
        sides |= {f"vision.blocks.{i}.attention": within for i in range(len(self.vision.blocks))}
        return sides | {f"looks.{i}.attention": beside for i in range(len(self.looks))}

    @torch.no_grad()
    def read_image(self, pixel_values: Tensor | None, *, image_attention_mask: Tensor | None = None) -> FlamingoDecoder:
        """Encode the images (B, P, C, H, W) of each text once: a decoder that attends to them.

        >>> generate(model.read_image(pixel_values), input_ids, max_new_tokens=64, eos_token_ids=2)     # doctest: +SKIP

        Arguments and errors as in `forward`, of the prompts; ValueError for a model without a language-model head.
        """
        if self.head is None:
            raise ValueError(f"a model with task {self.task!r} writes no text: load it with task='image-text-to-text'")
        return FlamingoDecoder(self, None if pixel_values is None else self.encode(pixel_values), image_attention_mask)

    def _look(self, pixel_values: Tensor, output_hidden_states: bool) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """(B, P, C, H, W) → (B, P, L, e), and the output of every block if output_hidden_states."""
        shape = pixel_values.shape[:2]
        x, hidden_states = self.vision(pixel_values.flatten(0, 1), output_hidden_states=output_hidden_states)
        latents = x if self.resampler is None else self.resampler(x)  # (B·P, L, e)
        if hidden_states is not None:
            hidden_states = tuple(layer.unflatten(0, shape) for layer in hidden_states)
        return latents.unflatten(0, shape), hidden_states

    def read(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None,
        position_ids: Tensor | None = None,
        caches: Sequence[Cache] | None = None,
        images: Tensor | Sequence[ContextKeys] | None,
        sees: Tensor | None,
        output_hidden_states: bool = False,
    ) -> TowerOutput:
        """input_ids (B, N) → vectors; as `Tower`, with attention to images in between.

        images: (B, P·L, e), or the keys of it for each look.  sees: (B, N, P).
        """
        tower, every = self.tower, len(self.tower.depth) // len(self.looks)
        if position_ids is None:
            position_ids = count(input_ids, attention_mask, len(caches[0]) if caches else 0)
        x = tower.embed(input_ids, position_ids)  # (B, N, d)
        assert tower.rotary is not None
        angles = tower.rotary.angles(position_ids, torch.promote_types(x.dtype, torch.float32))
        mask, image_mask = visible(attention_mask, causal=True), None
        if images is not None and sees is not None:
            vectors = images.shape[1] if isinstance(images, Tensor) else images[0].k.shape[2]
            # ImageMask hides all from tokens before an image; `queries` tells the lens that such rows see nothing.
            image_mask = ImageMask(sees, vectors // sees.shape[2]) & masks.queries(sees.any(-1))
        hidden_states = [x]
        for number, block in enumerate(tower.depth):
            at, due = divmod(number, every)
            if due == 0:
                context = images if images is None or isinstance(images, Tensor) else images[at]
                x = self.looks[at](x, context, image_mask)
            x = block(x, mask=mask, cache=caches[number] if caches else None, positions=angles)
            hidden_states += [x] if output_hidden_states else []
        assert tower.norm is not None
        x = tower.norm(x)
        return TowerOutput(x, (*hidden_states[:-1], x) if output_hidden_states else None)

    def score(self, x: Tensor) -> Tensor:
        """(B, N, d) → (B, N, V)."""
        assert self.head is not None
        return cast(Tensor, self.head(HeadInput(x, None, self.tower.embed.tokens.weight, None)))

    # ----------------------------------------------------------------------------------------------------------- checks

    def _check_images(self, pixel_values: Tensor) -> Tensor:
        if not isinstance(pixel_values, Tensor) or pixel_values.ndim != 5:
            got = tuple(pixel_values.shape) if isinstance(pixel_values, Tensor) else type(pixel_values).__name__
            raise ValueError(f"pixel_values must be (B, P, C, H, W), P images for each text, got {got}")
        return check_pixels(pixel_values.flatten(0, 1), self.vision.embed.patches, self).reshape(pixel_values.shape)

    def sees(self, input_ids: Tensor, images: Sequence[int] | None, mask: Tensor | None) -> Tensor | None:
        """Which images each token sees, (B, N, P). images: B and P of pixel_values, None without any."""
        if images is None:
            if mask is not None:
                raise ValueError(
                    "image_attention_mask says which images each token sees, and there are none: give pixel_values, too"
                )
            return None
        batch, count = images
        if batch != len(input_ids):
            raise ValueError(
                f"there are {len(input_ids)} texts, and pixel_values hold images of {batch}: they must be as many"
            )
        if mask is None:
            self._check_placeholders(input_ids, count)
            return last_image(input_ids, count, placeholder=self.placeholder, ends=self.ends)
        return self.booleans("image_attention_mask", mask, (*input_ids.shape, count))

    def _check_placeholders(self, input_ids: Tensor, images: int) -> None:
        """Raise ValueError unless the largest number of placeholders in a text is the number of images."""
        if torch.compiler.is_compiling():
            return
        held = (input_ids == self.placeholder).sum(1)
        text = int(held.argmax())  # a wait for the device
        count = int(held[text])
        if count != images:
            raise ValueError(
                f"pixel_values hold {images} images for each text, and the most placeholders that a text has are "
                f"{count} (id {self.placeholder}, text {text}): write one where each image stands, or say with "
                "image_attention_mask= which tokens see it"
            )


class FlamingoDecoder:
    """A decoder with encoded images: reads a prompt, then continues token by token.

    images: (B, P, L, e), or None without images.  image_attention_mask: of the prompt, as in `FlamingoModel`.
    """

    def __init__(self, model: FlamingoModel, images: Tensor | None, image_attention_mask: Tensor | None) -> None:
        self.model, self.images, self.image_attention_mask = model, images, image_attention_mask

    @torch.no_grad()
    def begin(self, input_ids: Tensor, attention_mask: Tensor | None, *, length: int) -> tuple[Tensor, ModelState]:
        """Read a prompt (B, N) and make room for `length` positions in all: logits (B, V) after it, and the state.

        attention_mask: (B, N), True = token, padded on the left. Raises ValueError for padding on the right, if length
        exceeds the positions, and if the images do not fit the prompt.
        """
        model = self.model
        attention_mask = model.check_prompt(input_ids, attention_mask, model.tower, length)
        shape = None if self.images is None else self.images.shape[:2]
        sees = model.sees(input_ids, shape, self.image_attention_mask)
        state = ModelState.room(model.tower, len(input_ids), length, attention_mask, model.dtype, model.device)
        if self.images is not None:
            latents = self.images.flatten(1, 2)
            state.memory = [cast(GatedLook, look).attention.keys(latents) for look in model.looks]
        logits = self._advance(state, input_ids, 1, sees)[:, 0]
        state.memory_mask = None if sees is None else sees[:, -1:]  # what the last token saw, the next will see
        return logits, state

    @torch.no_grad()
    def step(self, state: ModelState, tokens: Tensor) -> Tensor:
        """tokens (B,) → logits (B, V) of the next position; the state moves on by one."""
        return self.extend(state, tokens.unsqueeze(1))[:, 0]

    @torch.no_grad()
    def extend(self, state: ModelState, tokens: Tensor) -> Tensor:
        """tokens (B, n) → logits (B, n, V) after each of them; as in `TextModel`."""
        state.see(*tokens.shape)
        sees = None if state.memory_mask is None else state.memory_mask.expand(-1, tokens.shape[1], -1)
        return self._advance(state, tokens, tokens.shape[1], sees)

    def _advance(self, state: ModelState, input_ids: Tensor, count: int, sees: Tensor | None) -> Tensor:
        tower = self.model.read(
            input_ids, attention_mask=state.mask, caches=state.caches, images=state.memory, sees=sees
        )
        return self.model.score(tower.last_hidden_state[:, -count:])
