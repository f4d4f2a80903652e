"""Models that read a text while they look at a picture: to write a caption, to answer a question, to say if both match.

    Captioner   pixels ─ vision ─┐                         Matcher   pixels ─ vision ─┐
                           text ─ decoder ─ next words                         text ─ encoder ─ match or not

    Answerer    pixels ─ vision ─┐
                       question ─ encoder ─┐
                                   answer ─ decoder ─ next words

Each ┐ is cross-attention: every word looks at all patches, or at all words of the question. It knows no family.

    >>> model = regard.load("Salesforce/blip-image-captioning-base")                       # doctest: +SKIP
    >>> seen = model.preprocessor(["photo.jpg"])                                           # doctest: +SKIP
    >>> begun = torch.full((1, 1), model.start)                                            # doctest: +SKIP
    >>> generate(model.read_picture(seen.pixels), begun, max_new_tokens=20, eos_token_ids=model.end)  # doctest: +SKIP

Axis letters: B batch, N tokens of the text, M of the answer, d width of the model, V words.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from regard.layouts import Frame, Layout, Sides
from regard.models.config import Config
from regard.models.encoder_decoder import Reading
from regard.models.model import Model, Result
from regard.models.vision import check_pixels
from regard.nn.blocks import Passed, Tower
from regard.nn.heads import LanguageHead, Seen, first_token
from regard.nn.linear import Linear
from regard.nn.vision import VisionTower

__all__ = ["Answerer", "Bounds", "Captioner", "Matcher", "Matching"]


class Bounds(NamedTuple):
    """The tokens around a text that is written."""

    start: int  # before it
    end: int  # after it
    pad: int  # behind its end, where others go on


class Captioner(Model):
    """A decoder that writes about a picture.

    start, end, pad: the tokens around a caption.
    """

    kind = "image-caption"

    def __init__(self, config: Config, vision: VisionTower, decoder: Tower, head: LanguageHead, bounds: Bounds) -> None:
        super().__init__(config)
        self.vision, self.decoder, self.head = vision, decoder, head
        self.start, self.end, self.pad = bounds

    def forward(self, ids: Tensor, mask: Tensor | None = None, *, pixels: Tensor, every_layer: bool = False) -> Result:
        """ids (B, N), captions so far, each with `start` first, and pixels (B, C, H, W) → Result.

        .logits (B, N, V) of the next word, .hidden of the text, .memory of the picture.
        mask: (B, N), True = token; None if all are.  every_layer: keep what stood after each block, of both.
        Raises TypeError or ValueError for ids, mask and pixels that do not fit the model or each other.
        """
        mask = _check_text(self, ids, mask, self.decoder)
        picture = _look(self, self.vision, pixels, len(ids), every_layer)
        passed = self.decoder(ids, mask=mask, memory=picture.hidden, every_layer=every_layer)
        logits = self.head(Seen(passed.hidden, None, self.decoder.embed.tokens.weight, mask))
        return _result(passed, picture, logits, every_layer)

    def prompt(self, ids: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Texts as the tokenizer frames them, (B, N), as beginnings of captions: ids (B, N − 1) and mask, padded left.

        >>> model.prompt(model.tokenizer.batch(["a photo"]).ids)     # doctest: +SKIP
        (tensor([[30522,  1037,  6302]]), None)

        The first token of each text becomes `start`, and its last is left out: [CLS] a photo [SEP] → [DEC] a photo.
        mask: (B, N), True = token, padded on either side. Raises TypeError or ValueError for ids and mask that do not
        fit, and for a text of fewer than two tokens.
        """
        mask = _check_text(self, ids, mask, self.decoder)
        whole = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        count, n = whole.sum(1, keepdim=True), ids.shape[1]  # (B, 1)
        if int(count.min()) < 2:
            raise ValueError(
                f"text {int(count.argmin())} has {int(count.min())} tokens: a prompt comes as the tokenizer frames it, "
                "with a token before it and one after it"
            )
        at = torch.arange(n - 1, device=ids.device) - (n - count)  # (B, N − 1), below 0 where padding will be
        begun = ids.gather(1, (at + whole.int().argmax(1, keepdim=True)).clamp(min=0))
        begun = torch.where(at == 0, self.start, torch.where(at > 0, begun, self.pad))
        return begun, None if mask is None else at >= 0

    @torch.no_grad()
    def read_picture(self, pixels: Tensor) -> Reading:
        """Look at pictures (B, C, H, W) once; the result begins captions and goes on with them token by token.

        A caption without a prompt begins with `start` alone: ids = torch.full((B, 1), model.start).
        """
        return Reading(self, self.decoder, self.head, _look(self, self.vision, pixels).hidden)

    def layouts(self, frame: Frame, tokens: int) -> dict[str, Sides]:
        """What each token of every attention is and where it lies, for one entry: `regard.watch(model, layouts=…)`.

        frame: of the picture, as `model.preprocessor` gives it.  tokens: how many the text has, padding included.
        """
        text, patches = Layout.text(tokens), _patches(self.vision, frame)
        return _seen_by(patches, self.vision) | _read_by("decoder", self.decoder, text, patches.keys, (frame,))


class Answerer(Model):
    """An encoder that reads a question while it looks at a picture, and a decoder that writes the answer.

    start, end, pad: the tokens around an answer.
    """

    kind = "image-question"

    def __init__(
        self,
        config: Config,
        vision: VisionTower,
        encoder: Tower,
        decoder: Tower,
        head: LanguageHead,
        bounds: Bounds,
    ) -> None:
        super().__init__(config)
        self.vision, self.encoder, self.decoder, self.head = vision, encoder, decoder, head
        self.start, self.end, self.pad = bounds

    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        *,
        pixels: Tensor,
        target: Tensor,
        target_mask: Tensor | None = None,
        every_layer: bool = False,
    ) -> Result:
        """ids (B, N), questions, pixels (B, C, H, W), and target (B, M), answers so far with `start` first → Result.

        .logits (B, M, V) of the next word, .hidden of the answer, .memory of the question.
        mask: (B, N), target_mask: (B, M), True = token; None if all are. Nobody looks at padding.
        every_layer: keep what stood after each block, of answer and question; `model.vision` gives the picture's.
        Raises TypeError or ValueError for ids, target, masks and pixels that do not fit the model or each other.
        """
        mask = _check_text(self, ids, mask, self.encoder)
        target_mask = _check_text(self, target, target_mask, self.decoder)
        if len(target) != len(ids):
            raise ValueError(f"target has {len(target)} texts, and ids {len(ids)}: they must be as many")
        question = self._read(ids, mask, pixels, every_layer)
        passed = self.decoder(
            target, mask=target_mask, memory=question.hidden, memory_mask=mask, every_layer=every_layer
        )
        logits = self.head(Seen(passed.hidden, None, self.decoder.embed.tokens.weight, target_mask))
        return _result(passed, question, logits, every_layer)

    def _read(self, ids: Tensor, mask: Tensor | None, pixels: Tensor, every_layer: bool) -> Passed:
        picture = _look(self, self.vision, pixels, len(ids))
        return cast(Passed, self.encoder(ids, mask=mask, memory=picture.hidden, every_layer=every_layer))

    @torch.no_grad()
    def read_picture(self, pixels: Tensor, ids: Tensor, mask: Tensor | None = None) -> Reading:
        """Look at pictures (B, C, H, W) and read questions (B, N) once; the result writes answers token by token.

        An answer begins with `start` alone: torch.full((B, 1), model.start).
        mask: (B, N), True = token; None if all are. Raises as a call of the model does.
        """
        mask = _check_text(self, ids, mask, self.encoder)
        return Reading(self, self.decoder, self.head, self._read(ids, mask, pixels, False).hidden, mask)

    def layouts(self, frame: Frame, tokens: int, target: int) -> dict[str, Sides]:
        """What each token of every attention is and where it lies, for one entry: `regard.watch(model, layouts=…)`.

        frame: of the picture, as `model.preprocessor` gives it.
        tokens, target: how many tokens question and answer have, padding included.
        """
        question, patches = Layout.text(tokens), _patches(self.vision, frame)
        seen = _seen_by(patches, self.vision) | _read_by("encoder", self.encoder, question, patches.keys, (frame,))
        return seen | _read_by("decoder", self.decoder, Layout.text(target), question, ())


class Matching(nn.Module):
    """Scores of whether a text belongs to a picture, and vectors of each alone.

    >>> Matching(6, 5, 7)
    Matching(
      (score): Linear(in_features=6, out_features=2, bias=True)
      (text): Linear(in_features=6, out_features=7, bias=True)
      (picture): Linear(in_features=5, out_features=7, bias=True)
    )

    d, d_picture: widths of the towers.  e: width of the vectors.
    """

    def __init__(self, d: int, d_picture: int, e: int) -> None:
        super().__init__()
        self.score, self.text, self.picture = Linear(d, 2), Linear(d, e), Linear(d_picture, e)


class Matcher(Model):
    """An encoder that reads a text while it looks at a picture and says if they match; or that reads the text alone.

    A pair looked at together is judged better; vectors of each alone compare many with many (`encode_text`,
    `encode_picture`: their products are cosines).
    """

    kind = "image-text-matching"

    def __init__(self, config: Config, vision: VisionTower, encoder: Tower, head: Matching) -> None:
        super().__init__(config)
        self.vision, self.encoder, self.head = vision, encoder, head

    def forward(self, ids: Tensor, mask: Tensor | None = None, *, pixels: Tensor, every_layer: bool = False) -> Result:
        """ids (B, N) and pixels (B, C, H, W), a picture for each text → Result.

        .logits (B, 2): 0 does not match, 1 matches.  .hidden of the text, .memory of the picture.
        mask: (B, N), True = token; None if all are.  every_layer: keep what stood after each block, of both.
        Raises TypeError or ValueError for ids, mask and pixels that do not fit the model or each other.
        """
        mask = _check_text(self, ids, mask, self.encoder)
        picture = _look(self, self.vision, pixels, len(ids), every_layer)
        passed = self.encoder(ids, mask=mask, memory=picture.hidden, every_layer=every_layer)
        return _result(passed, picture, self.head.score(first_token(passed.hidden, mask)), every_layer)

    def look(self, pixels: Tensor) -> Tensor:
        """What is seen of pictures (P, C, H, W), for `judge`: (P, patches, d). Raises as a call of the model does."""
        return _look(self, self.vision, pixels).hidden

    def judge(self, seen: Tensor, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits (B, 2) of texts (B, N) beside one picture, which is looked at once for however many texts.

        seen: (1, patches, d), a row of `look`.  mask: (B, N), True = token; None if all are.
        Raises as a call of the model does, and ValueError for what is seen of several pictures.
        """
        mask = _check_text(self, ids, mask, self.encoder)
        if seen.ndim != 3 or len(seen) != 1:
            raise ValueError(f"seen must be of one picture, (1, patches, d), got {tuple(seen.shape)}: look(pixels)[:1]")
        read = self.encoder(ids, mask=mask, memory=seen.expand(len(ids), -1, -1)).hidden
        return cast(Tensor, self.head.score(first_token(read, mask)))

    def encode_text(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Vectors of length 1 of texts (B, N), read without a picture: (B, e)."""
        mask = _check_text(self, ids, mask, self.encoder)
        return normalize(self.head.text(first_token(self.encoder(ids, mask=mask).hidden, mask)), dim=-1)

    def encode_picture(self, pixels: Tensor) -> Tensor:
        """Vectors of length 1 of pictures (B, C, H, W): (B, e)."""
        return normalize(self.head.picture(_look(self, self.vision, pixels).hidden[:, 0]), dim=-1)

    def layouts(self, frame: Frame, tokens: int) -> dict[str, Sides]:
        """What each token of every attention is and where it lies, for one entry: `regard.watch(model, layouts=…)`.

        frame: of the picture, as `model.preprocessor` gives it.  tokens: how many the text has, padding included.
        """
        text, patches = Layout.text(tokens), _patches(self.vision, frame)
        return _seen_by(patches, self.vision) | _read_by("encoder", self.encoder, text, patches.keys, (frame,))


# --------------------------------------------------------------------------------------------------------------- pieces


def _check_text(model: Model, ids: Tensor, mask: Tensor | None, tower: Tower) -> Tensor | None:
    return model.check(ids, mask, tower.embed.tokens.num_embeddings, tower.embed.max_positions)


def _look(
    model: Model, vision: VisionTower, pixels: Tensor, texts: int | None = None, every_layer: bool = False
) -> Passed:
    """What the tower makes of pixels, checked; texts: how many there are beside them, one for each picture."""
    patches = vision.embed.patches
    pixels = check_pixels(pixels, patches.channels, patches.least, model)
    if texts is not None and texts != len(pixels):
        raise ValueError(
            f"there are {texts} texts and {len(pixels)} pictures, and each text looks at one picture: "
            "pixels.expand(…) or pixels[[…]] gives several texts the same one"
        )
    return cast(Passed, vision(pixels, every_layer=every_layer))


def _result(passed: Passed, memory: Passed, logits: Tensor, every_layer: bool) -> Result:
    layers = (passed.layers, memory.layers) if every_layer else (None, None)
    return Result(passed.hidden, logits, layers=layers[0], memory=memory.hidden, memory_layers=layers[1])


def _patches(vision: VisionTower, frame: Frame) -> Sides:
    return Sides.patches(frame, vision.embed.patches.size, vision.embed.before)


def _seen_by(patches: Sides, vision: VisionTower) -> dict[str, Sides]:
    return {f"vision.blocks.{number}.attention": patches for number in range(len(vision.blocks))}


def _read_by(name: str, tower: Tower, text: Layout, memory: Layout, frames: tuple[Frame, ...]) -> dict[str, Sides]:
    """A tower's attentions: to the text itself, and to a memory, of pictures with these frames."""
    sides = {"attention": Sides(text, text, ()), "cross": Sides(text, memory, frames)}
    return {f"{name}.blocks.{n}.{part}": both for n in range(len(tower.blocks)) for part, both in sides.items()}
