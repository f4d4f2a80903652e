"""A language model that looks at pictures beside its text (Flamingo): some of its blocks are preceded by a look.

    pixels ─ tower of pictures ─ resampler ─ latents ─┐
    ids ─ words ─ look ─ block ─ block ─ … ─ look ─ block ─ … ─ norm ─ scores of words

    >>> model = regard.load("HuggingFaceM4/idefics-9b")                                      # doctest: +SKIP
    >>> text = "<s>A photo of <fake_token_around_image><image><fake_token_around_image>"     # doctest: +SKIP
    >>> pixels = model.preprocessor(["photo.jpg"]).pixel_values                                    # doctest: +SKIP
    >>> model(model.tokenizer.batch([text]).ids, pixels=pixels[None]).logits.shape           # doctest: +SKIP
    torch.Size([1, 9, 32002])

Each word looks at the pictures that it sees alone (`sees`); one that sees none is as if there were none.

Axis letters: B texts, N tokens, P pictures of each text, C channels, H, W height and width in pixels, L vectors of a
picture that words look at, e and d widths of pictures and words.

It knows no family.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from regard import masks
from regard.generation.loop import ModelState
from regard.layouts import Frame, Layout, Sides
from regard.masks import Mask
from regard.models.config import Config
from regard.models.model import Model, Result
from regard.models.vision import check_pixels
from regard.nn.attention import ContextKeys
from regard.nn.blocks import Passed, Tower, count, visible
from regard.nn.cache import Cache
from regard.nn.flamingo import GatedLook, Resampler, Sight
from regard.nn.heads import LanguageHead, Seen
from regard.nn.vision import VisionTower

__all__ = ["FlamingoModel", "FlamingoReading", "last_picture"]

PLACEHOLDER = "<image>"


def last_picture(ids: Tensor, pictures: int, *, placeholder: int, ends: Sequence[int] = ()) -> Tensor:
    """Which picture each token sees: that of the last placeholder, itself or before it. (B, N, P) booleans.

    >>> last_picture(torch.tensor([[5, 9, 5, 9, 5, 2, 5]]), 2, placeholder=9, ends=[2])[0].int().T
    tensor([[0, 1, 1, 0, 0, 0, 0],
            [0, 0, 0, 1, 1, 1, 0]], dtype=torch.int32)

    ids: (B, N). The placeholders of a text stand for its pictures in order.
    ends: tokens that end a text: what follows one sees no picture until the next placeholder.
    """
    here, place = ids == placeholder, torch.arange(ids.shape[1], device=ids.device)
    last = torch.isin(ids, torch.tensor(ends, dtype=ids.dtype, device=ids.device))
    began = torch.where(here, place, -1).cummax(1).values  # (B, N), where the last placeholder stands
    ended = pad(torch.where(last, place + 1, 0).cummax(1).values[:, :-1], (1, 0))  # where the last text ended before
    number = torch.where(ended > began, -1, here.cumsum(1) - 1)
    return number.unsqueeze(-1) == torch.arange(pictures, device=ids.device)


class FlamingoModel(Model):
    """A language model, looks at pictures between its blocks, and what makes of pixels what they look at.

    tower: of the text.  looks: one before the first block, and one before each further block at equal distances.
    vision: tower of the pictures.  resampler: what gathers its vectors; None where words look at all of them.
    vision_pooler: what the checkpoint has to sum up a picture. Nothing here asks for it; it is kept to be saved.
    max_positions: the longest text.  ends: tokens that end a text.
    """

    kind = "flamingo"

    def __init__(
        self,
        config: Config,
        tower: Tower,
        looks: Sequence[GatedLook],
        vision: VisionTower,
        *,
        resampler: Resampler | None,
        vision_pooler: nn.Module,
        head: LanguageHead | None,
        max_positions: int,
        ends: Sequence[int],
    ) -> None:
        super().__init__(config)
        assert len(tower.depth) % len(looks) == 0, (len(tower.depth), len(looks))
        self.tower, self.looks, self.vision = tower, nn.ModuleList(looks), vision
        self.resampler, self.vision_pooler, self.head = resampler, vision_pooler, head
        self.max_positions, self.ends = max_positions, tuple(ends)

    @property
    def vocabulary(self) -> int:
        """How many tokens there are, added ones included."""
        return self.tower.embed.tokens.num_embeddings

    @cached_property
    def placeholder(self) -> int:
        """The token that stands in a text for a picture: "<image>" of the tokenizer; or set it yourself.

        Raises ValueError where the tokenizer has no such token, and as `tokenizer` does.
        """
        found = self.tokenizer.encode(PLACEHOLDER, special=False).ids
        if len(found) != 1:
            raise ValueError(
                f"the tokenizer has no token {PLACEHOLDER!r}, so nothing in a text stands for a picture: "
                "set model.placeholder to the id that does, or give sees="
            )
        return found[0]

    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        *,
        pixels: Tensor | None = None,
        sees: Tensor | None = None,
        positions: Tensor | None = None,
        every_layer: bool = False,
    ) -> Result:
        """ids (B, N) and the pictures (B, P, C, H, W) of each text → Result of the language model.

        mask: (B, N), True = token; None if all are.
        pixels: None for texts that speak of none. Texts with fewer pictures than others are filled up with any.
        sees: (B, N, P) booleans, which pictures each token sees. By default each sees the picture of the last
          placeholder, itself or before it, and none after the end of a text (`last_picture`).
        positions: (N,) or (B, N); by default tokens are counted, so that padding shifts nobody.
        every_layer: keep what stood after each block, of both towers; in between there are looks.

        `.memory` (B, P, L, e) is what words look at; `.memory_layers` are of the pictures' tower, (B, P, n, e) each.
        Raises TypeError or ValueError for arguments that do not fit the model or each other.
        """
        mask = self.check(ids, mask, self.vocabulary, self.max_positions)
        self.check_positions(ids, positions, self.tower)
        pixels = None if pixels is None else self._checked(pixels)
        sees = self._sees(ids, None if pixels is None else pixels.shape[:2], sees)
        memory, seen = (None, ()) if pixels is None else self._look(pixels, every_layer)
        latents = None if memory is None else memory.flatten(1, 2)  # (B, P·L, e)
        hidden, layers = self._read(
            ids, mask=mask, positions=positions, memory=latents, sees=sees, every_layer=every_layer
        )
        logits = None if self.head is None else self._scores(hidden)
        if not every_layer:
            return Result(hidden, logits, memory=memory)
        return Result(hidden, logits, layers=layers, memory=memory, memory_layers=seen or None)

    def encode(self, pixels: Tensor) -> Tensor:
        """What words look at of each picture (B, P, C, H, W): (B, P, L, e). Raises as `forward`."""
        return self._look(self._checked(pixels), False)[0]

    def layouts(self, frames: Sequence[Frame], tokens: int) -> dict[str, Sides]:
        """What each token of every attention is and where it lies, for one text: `regard.watch(model, layouts=…)`.

        frames: of its pictures, as `model.preprocessor` gives them; one for each of P.
        tokens: how many the text has, padding included.
        Raises ValueError for pictures of unlike sizes.
        """
        frames = tuple(frames)
        if len({frame.pixels for frame in frames}) > 1:
            raise ValueError(f"the pictures of one pass have one size, got {[frame.pixels for frame in frames]}")
        words, patches = Layout.text(tokens), [self._patches(frame, number) for number, frame in enumerate(frames)]
        sides = {f"tower.blocks.{i}.attention": Sides(words, words, ()) for i in range(len(self.tower.blocks))}
        if not frames:
            return sides
        looked_at, pictures = patches, Layout.stacked(patches)
        if self.resampler is not None:
            looked_at = [Layout.latents(len(self.resampler.latents), number) for number in range(len(frames))]
            gathering = Sides(Layout.stacked(looked_at), pictures + Layout.stacked(looked_at), frames)
            sides |= {f"resampler.blocks.{i}.attention": gathering for i in range(len(self.resampler.blocks))}
        within, beside = Sides(pictures, pictures, frames), Sides(words, sum(looked_at[1:], looked_at[0]), frames)
        sides |= {f"vision.blocks.{i}.attention": within for i in range(len(self.vision.blocks))}
        return sides | {f"looks.{i}.attention": beside for i in range(len(self.looks))}

    @torch.no_grad()
    def read_picture(self, pixels: Tensor | None, *, sees: Tensor | None = None) -> FlamingoReading:
        """Look at the pictures (B, P, C, H, W) of each text, once: a decoder that has them before its eyes.

        >>> generate(model.read_picture(pixels), ids, max_new_tokens=64, eos_token_ids=2)     # doctest: +SKIP

        pixels, sees: as in `forward`, of the prompts.
        Raises ValueError for a model that has no words to choose from; else as `forward`.
        """
        if self.head is None:
            raise ValueError(f"a model with task {self.task!r} writes no text: load it with task='image-text-to-text'")
        return FlamingoReading(self, None if pixels is None else self.encode(pixels), sees)

    # ----------------------------------------------------------------------------------------------------------- pieces

    def _look(self, pixels: Tensor, every_layer: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        """(B, P, C, H, W) → (B, P, L, e), and what stood after each block of the tower if asked for."""
        shape = pixels.shape[:2]
        seen, layers = self.vision(pixels.flatten(0, 1), every_layer=every_layer)  # (B·P, n, e)
        latents = seen if self.resampler is None else self.resampler(seen)  # (B·P, L, e)
        return latents.unflatten(0, shape), tuple(layer.unflatten(0, shape) for layer in layers)

    def _read(
        self,
        ids: Tensor,
        *,
        mask: Tensor | None,
        positions: Tensor | None = None,
        caches: Sequence[Cache] | None = None,
        memory: Tensor | Sequence[ContextKeys] | None,
        sees: Tensor | None,
        every_layer: bool = False,
    ) -> Passed:
        """ids (B, N) → vectors; as `Tower`, with looks in between.

        memory: (B, P·L, e), or the keys of it for each look.  sees: (B, N, P).
        """
        tower, every = self.tower, len(self.tower.depth) // len(self.looks)
        if positions is None:
            positions = count(ids, mask, len(caches[0]) if caches else 0)
        x = tower.embed(ids, positions)  # (B, N, d)
        assert tower.rotary is not None
        angles = tower.rotary.angles(positions, torch.promote_types(x.dtype, torch.float32))
        seen, sight = visible(mask, causal=True), self._sight(memory, sees)
        layers = [x]
        for number, block in enumerate(tower.depth):
            at, due = divmod(number, every)
            if due == 0:
                pictures = memory if memory is None or isinstance(memory, Tensor) else memory[at]
                x = self.looks[at](x, pictures, sight)
            x = block(x, mask=seen, cache=caches[number] if caches else None, positions=angles)
            layers += [x] if every_layer else []
        assert tower.norm is not None
        x = tower.norm(x)
        return Passed(x, (*layers[:-1], x) if every_layer else ())

    @staticmethod
    def _sight(memory: Tensor | Sequence[ContextKeys] | None, sees: Tensor | None) -> Mask | None:
        if memory is None or sees is None:
            return None
        vectors = memory.shape[1] if isinstance(memory, Tensor) else memory[0].k.shape[2]
        # Sight hides all from words before a picture; `queries` says so where the lens looks for rows that see nothing.
        return Sight(sees, vectors // sees.shape[2]) & masks.queries(sees.any(-1))

    def _scores(self, hidden: Tensor) -> Tensor:
        """(B, N, d) → (B, N, V)."""
        return cast(Tensor, cast(nn.Module, self.head)(Seen(hidden, None, self.tower.embed.tokens.weight, None)))

    def _patches(self, frame: Frame, picture: int) -> Layout:
        """The tokens of a picture in the tower."""
        patches = self.vision.embed.patches
        return Layout.grid(*patches.grid(*frame.pixels), patches.size, self.vision.embed.before, picture=picture)

    # ----------------------------------------------------------------------------------------------------------- checks

    def _checked(self, pixels: Tensor) -> Tensor:
        """Pixels in the model's dtype."""
        patches = self.vision.embed.patches
        wanted = f"(B, P, {patches.channels}, H, W)"
        if not isinstance(pixels, Tensor) or not pixels.is_floating_point():
            got = str(pixels.dtype) if isinstance(pixels, Tensor) else type(pixels).__name__
            raise TypeError(
                f"pixels must be a torch tensor of floats, {wanted}, got {got}; model.preprocessor([…]).pixel_values "
                "makes those of one text"
            )
        if pixels.ndim != 5 or pixels.shape[2] != patches.channels or 0 in pixels.shape:
            raise ValueError(
                f"pixels must be {wanted}, P pictures for each text, got {tuple(pixels.shape)}; without pictures "
                "leave out pixels="
            )
        flat = check_pixels(pixels.flatten(0, 1), patches.channels, patches.least, self)
        return flat.reshape(pixels.shape)

    def _sees(self, ids: Tensor, pictures: Sequence[int] | None, sees: Tensor | None) -> Tensor | None:
        """Which pictures each token sees. pictures: B and P of the pixels, None without any."""
        if pictures is None:
            if sees is not None:
                raise ValueError("sees says which pictures each token sees, and there are none: give pixels, too")
            self._refuse_placeholders(ids)
            return None
        batch, most = pictures
        if batch != len(ids):
            raise ValueError(f"there are {len(ids)} texts, and pixels hold pictures of {batch}: they must be as many")
        wanted = (*ids.shape, most)
        if sees is None:
            self._check_placeholders(ids, most)
            return last_picture(ids, most, placeholder=self.placeholder, ends=self.ends)
        if not isinstance(sees, Tensor) or sees.dtype != torch.bool or sees.shape != wanted:
            got = f"{sees.dtype} {tuple(sees.shape)}" if isinstance(sees, Tensor) else type(sees).__name__
            raise ValueError(f"sees must be booleans {wanted}, True where a token sees a picture, got {got}")
        return sees

    def _refuse_placeholders(self, ids: Tensor) -> None:
        """Raise ValueError where a text speaks of pictures, and there are none."""
        if torch.compiler.is_compiling():
            return
        try:
            placeholder = self.placeholder
        except (ImportError, OSError, ValueError):
            return  # without a tokenizer nobody can tell which id it is, and texts alone need none
        held = (ids == placeholder).sum(1)
        text = int(held.argmax())  # a wait for the device
        if int(held[text]) > 0:
            raise ValueError(
                f"text {text} of ids has placeholders of pictures (id {placeholder}, {int(held[text])} of them), and "
                "no picture was given: give pixels=, or a text without them"
            )

    def _check_placeholders(self, ids: Tensor, pictures: int) -> None:
        if torch.compiler.is_compiling():
            return
        held = (ids == self.placeholder).sum(1)
        text = int(held.argmax())
        if int(held[text]) != pictures:
            raise ValueError(
                f"pixels hold {pictures} pictures for each text, and the most placeholders that a text has are "
                f"{int(held[text])} (id {self.placeholder}, text {text}): write one where each picture stands, or say "
                "with sees= which tokens see it"
            )


class FlamingoReading:
    """A decoder that has looked at pictures: reads a prompt, then goes on token by token.

    memory: (B, P, L, e), or None without pictures.  sees: of the prompt, as in `FlamingoModel`.
    """

    def __init__(self, model: FlamingoModel, memory: Tensor | None, sees: Tensor | None) -> None:
        self.model, self.memory, self.sees = model, memory, sees

    @torch.no_grad()
    def begin(self, ids: Tensor, mask: Tensor | None, *, length: int) -> tuple[Tensor, ModelState]:
        """Read a prompt (B, N) and make room for `length` positions in all: logits (B, V) after it, and the state.

        mask: (B, N), True = token, padded on the left. Raises ValueError for padding on the right, if the room is more
        than the positions, and where pictures do not fit the prompt.
        """
        model = self.model
        mask = model.check(ids, mask, model.vocabulary, model.max_positions)
        if mask is not None and not bool(mask[:, -1].all()):
            raise ValueError("texts to go on with are padded on the left: here a row ends in padding")
        if length > model.max_positions:
            raise ValueError(
                f"{length} positions are asked for, and the model has {model.max_positions}: ask for fewer new tokens"
            )
        sees = model._sees(ids, None if self.memory is None else self.memory.shape[:2], self.sees)
        state = ModelState.room(model.tower, len(ids), length, mask, model.dtype, model.device)
        if self.memory is not None:
            latents = self.memory.flatten(1, 2)
            state.memory = [cast(GatedLook, look).attention.keys(latents) for look in model.looks]
        logits = self._advance(state, ids, sees)
        state.memory_mask = None if sees is None else sees[:, -1:]  # what the last token saw, the next will see
        return logits, state

    @torch.no_grad()
    def step(self, state: ModelState, tokens: Tensor) -> Tensor:
        """tokens (B,) → logits (B, V) of the next position; the state moves on by one."""
        state.see(len(tokens))
        return self._advance(state, tokens.unsqueeze(1), state.memory_mask)

    def _advance(self, state: ModelState, ids: Tensor, sees: Tensor | None) -> Tensor:
        passed = self.model._read(ids, mask=state.mask, caches=state.caches, memory=state.memory, sees=sees)
        return self.model._scores(passed.hidden[:, -1:])[:, 0]
