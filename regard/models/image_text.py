"""Image-text models with cross-attention (BLIP): caption an image, answer a question about it, judge if a text matches.

    Captioner   pixel_values ─ vision ─┐                   Matcher   pixel_values ─ vision ─┐
                                 text ─ decoder ─ next token                         text ─ encoder ─ match or not

    Answerer    pixel_values ─ vision ─┐
                             question ─ encoder ─┐
                                         answer ─ decoder ─ next token

Each ┐ is cross-attention: every token attends to all patches, or to all tokens of the question.

Axis letters: B batch, N tokens of the text, M of the answer, d width of the model, V vocabulary.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from regard.layouts import Frame, Layout, Sides
from regard.models.encoder_decoder import CrossAttentionDecoder, check_same_batch
from regard.models.family import Config
from regard.models.losses import classification_loss, token_loss
from regard.models.model import Model
from regard.models.outputs import ModelOutput
from regard.models.vision import check_pixels
from regard.nn.blocks import HeadInput, LanguageHead, Tower, TowerOutput, first_token
from regard.nn.projections import Linear
from regard.nn.vision import VisionTower

Bounds = tuple[int, int, int]
"""The tokens around a text that is written: before it, after it, and behind its end, where others go on."""


class ImageTextModel(Model):
    """An image tower, and a text tower that attends to its output: the attribute named by `reader`."""

    reader: ClassVar[str]
    head: nn.Module

    def __init__(self, config: Config, vision: VisionTower) -> None:
        super().__init__(config)
        self.vision = vision

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = False,
        **options: Any,
    ) -> ModelOutput:
        """Read texts and look at an image for each.

        Args:
            input_ids: (B, N); captions so far have `start` first.
            attention_mask: (B, N), 1 or True = token; None if all are.
            pixel_values: (B, C, H, W).
            labels: of captions (B, N) token ids, shifted by the model, -100 = ignored; to match (B,), 1 = matches.
            output_hidden_states: return the output of every block, of both towers.
            options: as `Model.read_options`.

        Returns:
            `logits` of captions (B, N, V), to match (B, 2): 0 does not match, 1 matches; encoder_last_hidden_state and
            encoder_hidden_states are the image's.
        """
        items = self.read_options(options)
        tower: Tower = getattr(self, self.reader)
        attention_mask = self.check(input_ids, attention_mask, tower)
        image = self.see(pixel_values, len(input_ids), output_hidden_states)
        text = tower(
            input_ids,
            attention_mask=attention_mask,
            encoder_hidden_states=image.last_hidden_state,
            output_hidden_states=bool(output_hidden_states),
        )
        logits = self.score(text.last_hidden_state, attention_mask)
        loss = None if labels is None else self.loss(logits, labels, items)
        return _output(logits, text, image, loss)

    def score(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Logits of a text tower's output (B, N, d): here of the next tokens."""
        tower: Tower = getattr(self, self.reader)
        return cast(Tensor, self.head(HeadInput(x, None, tower.embed.tokens.weight, attention_mask)))

    def loss(self, logits: Tensor, labels: Tensor, items: Tensor | int | None) -> Tensor:
        """The loss of labels: here of the next tokens, with the label smoothing of config.json."""
        smoothing = float(self.config.sub_config("text_config").get("label_smoothing", 0.0))
        return token_loss(logits, labels, shift=True, smoothing=smoothing, items=items)

    def see(
        self, pixel_values: Tensor, texts: int | None = None, output_hidden_states: bool | None = False
    ) -> TowerOutput:
        """The image tower's output. texts: how many there are, one for each image; None for any number.

        Raises TypeError or ValueError for pixel_values that do not fit the model or the texts.
        """
        pixel_values = check_pixels(pixel_values, self.vision.embed.patches, self)
        if texts is not None and texts != len(pixel_values):
            raise ValueError(
                f"there are {texts} texts and {len(pixel_values)} images, and each text looks at one image: "
                "pixel_values.expand(…) or pixel_values[[…]] gives several texts the same one"
            )
        return cast(TowerOutput, self.vision(pixel_values, output_hidden_states=bool(output_hidden_states)))

    def layouts(self, frame: Frame, tokens: int) -> dict[str, Sides]:
        """What each token of every attention is and where it lies, for one entry: `regard.watch(model, layouts=…)`.

        Args:
            frame: of the image, as `model.preprocessor` gives it.
            tokens: how many the text has, padding included.
        """
        patches, sides = self.image_sides(frame)
        return sides | _text_sides(self, self.reader, Layout.text(tokens), patches.keys, (frame,))

    def image_sides(self, frame: Frame) -> tuple[Sides, dict[str, Sides]]:
        """An image's patches, and the image tower's attentions by path."""
        patches = Sides.patches(frame, self.vision.embed.patches.size, self.vision.embed.before)
        return patches, {f"vision.blocks.{number}.attention": patches for number in range(len(self.vision.blocks))}


class Captioner(ImageTextModel):
    """A decoder that writes about an image. start, end, pad: the tokens around a caption."""

    kind = "image-caption"
    reader = "decoder"
    head: LanguageHead

    def __init__(self, config: Config, vision: VisionTower, decoder: Tower, head: LanguageHead, bounds: Bounds) -> None:
        super().__init__(config, vision)
        self.decoder, self.head = decoder, head
        self.start, self.end, self.pad = bounds

    def prompt(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Texts as the tokenizer frames them, (B, N), as beginnings of captions: ids (B, N − 1) and mask, padded left.

        >>> model.prompt(model.tokenizer.batch(["a photo"]).input_ids)  # doctest: +SKIP
        (tensor([[30522,  1037,  6302]]), None)

        The first token of each text becomes `start`, and its last is left out: [CLS] a photo [SEP] → [DEC] a photo.
        The mask (B, N) may be padded on either side. Raises as a call, and ValueError for a text of fewer than two
        tokens.
        """
        mask = self.check(input_ids, attention_mask, self.decoder)
        whole = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask
        count, n = whole.sum(1, keepdim=True), input_ids.shape[1]  # (B, 1)
        if int(count.min()) < 2:
            raise ValueError(
                f"text {int(count.argmin())} has {int(count.min())} tokens: a prompt comes as the tokenizer frames it, "
                "with a token before it and one after it"
            )
        at = torch.arange(n - 1, device=input_ids.device) - (n - count)  # (B, N − 1), below 0 where padding will be
        begun = input_ids.gather(1, (at + whole.int().argmax(1, keepdim=True)).clamp(min=0))
        begun = torch.where(at == 0, self.start, torch.where(at > 0, begun, self.pad))
        return begun, None if mask is None else at >= 0

    @torch.no_grad()
    def read_image(self, pixel_values: Tensor) -> CrossAttentionDecoder:
        """Encode images (B, C, H, W) once, for captions that are written token by token.

        A caption without a prompt begins with `start` alone: input_ids = torch.full((B, 1), model.start).
        """
        return CrossAttentionDecoder(self, self.decoder, self.head, self.see(pixel_values).last_hidden_state)


class Answerer(ImageTextModel):
    """An encoder that reads a question while it attends to an image, and a decoder that writes the answer.

    start, end, pad: the tokens around an answer.
    """

    kind = "image-question"
    reader = "decoder"
    head: LanguageHead

    def __init__(
        self, config: Config, vision: VisionTower, encoder: Tower, decoder: Tower, head: LanguageHead, bounds: Bounds
    ) -> None:
        super().__init__(config, vision)
        self.encoder, self.decoder, self.head = encoder, decoder, head
        self.start, self.end, self.pad = bounds

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        pixel_values: Tensor,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = False,
        **options: Any,
    ) -> ModelOutput:
        """Read questions and answers so far, and look at an image for each.

        Args:
            input_ids: (B, N), questions.
            attention_mask: (B, N), 1 or True = token; None if all are.
            pixel_values: (B, C, H, W).
            decoder_input_ids: (B, M), answers with `start` first; default labels, as in transformers.
            decoder_attention_mask: (B, M).
            labels: (B, M) token ids, shifted by the model, -100 = ignored.
            output_hidden_states: return the output of every block, of answer and question.
            options: as `Model.read_options`.

        Returns:
            `logits` (B, M, V); encoder_last_hidden_state and encoder_hidden_states are the question's.
        """
        items = self.read_options(options)
        decoder_input_ids = labels if decoder_input_ids is None else decoder_input_ids
        if decoder_input_ids is None:
            raise ValueError(f"decoder_input_ids (B, M) is missing: answers so far, model.start, {self.start}, first")
        attention_mask = self.check(input_ids, attention_mask, self.encoder)
        decoder_attention_mask = self.check(decoder_input_ids, decoder_attention_mask, self.decoder)
        check_same_batch(decoder_input_ids, len(input_ids))
        question = self._read_question(input_ids, attention_mask, pixel_values, bool(output_hidden_states))
        answer = self.decoder(
            decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=question.last_hidden_state,
            encoder_attention_mask=attention_mask,
            output_hidden_states=bool(output_hidden_states),
        )
        logits = self.score(answer.last_hidden_state, decoder_attention_mask)
        return _output(logits, answer, question, None if labels is None else self.loss(logits, labels, items))

    def _read_question(
        self, input_ids: Tensor, attention_mask: Tensor | None, pixel_values: Tensor, output_hidden_states: bool
    ) -> TowerOutput:
        encoder = self.encoder(
            input_ids,
            attention_mask=attention_mask,
            encoder_hidden_states=self.see(pixel_values, len(input_ids)).last_hidden_state,
            output_hidden_states=output_hidden_states,
        )
        return cast(TowerOutput, encoder)

    @torch.no_grad()
    def read_image(
        self, pixel_values: Tensor, input_ids: Tensor, attention_mask: Tensor | None = None
    ) -> CrossAttentionDecoder:
        """Encode images (B, C, H, W) and questions (B, N) once, for answers that are written token by token.

        An answer begins with `start` alone: torch.full((B, 1), model.start). Raises as a call of the model does.
        """
        attention_mask = self.check(input_ids, attention_mask, self.encoder)
        question = self._read_question(input_ids, attention_mask, pixel_values, False)
        return CrossAttentionDecoder(self, self.decoder, self.head, question.last_hidden_state, attention_mask)

    def layouts(self, frame: Frame, tokens: int, decoder_tokens: int) -> dict[str, Sides]:  # type: ignore[override]
        """As `ImageTextModel.layouts`; tokens, decoder_tokens: of question and answer, padding included."""
        question, (patches, sides) = Layout.text(tokens), self.image_sides(frame)
        sides |= _text_sides(self, "encoder", question, patches.keys, (frame,))
        return sides | _text_sides(self, "decoder", Layout.text(decoder_tokens), question, ())


class Matching(nn.Module):
    """Scores of whether a text belongs to an image, and projections of each alone, e wide.

    d, d_image: widths of the towers.
    """

    def __init__(self, d: int, d_image: int, e: int) -> None:
        super().__init__()
        self.score, self.text, self.image = Linear(d, 2), Linear(d, e), Linear(d_image, e)


class Matcher(ImageTextModel):
    """An encoder that reads a text while it attends to an image and says if they match; or that reads the text alone.

    A pair read together is judged better; vectors of each alone compare many with many (`encode_text`, `encode_image`:
    their products are cosines).
    """

    kind = "image-text-matching"
    reader = "encoder"
    head: Matching

    def __init__(self, config: Config, vision: VisionTower, encoder: Tower, head: Matching) -> None:
        super().__init__(config, vision)
        self.encoder, self.head = encoder, head

    def score(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Logits (B, 2) of the encoder's output (B, N, d)."""
        return cast(Tensor, self.head.score(first_token(x, attention_mask)))

    def loss(self, logits: Tensor, labels: Tensor, items: Tensor | int | None) -> Tensor:
        """The loss of labels (B,)."""
        return classification_loss(logits, labels, self.config.get("problem_type"))

    def look(self, pixel_values: Tensor) -> Tensor:
        """Image vectors (P, patches, d) of (P, C, H, W), for `judge`. Raises as a call of the model does."""
        return self.see(pixel_values).last_hidden_state

    def judge(self, image: Tensor, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Logits (B, 2) of texts (B, N) beside one image, (1, patches, d) of `look`, encoded once for all texts.

        Raises as a call of the model does.
        """
        attention_mask = self.check(input_ids, attention_mask, self.encoder)
        context = image.expand(len(input_ids), -1, -1)
        text = self.encoder(input_ids, attention_mask=attention_mask, encoder_hidden_states=context)
        return self.score(text.last_hidden_state, attention_mask)

    def encode_text(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Normalized vectors (B, e) of texts (B, N), read without an image."""
        attention_mask = self.check(input_ids, attention_mask, self.encoder)
        x = self.encoder(input_ids, attention_mask=attention_mask).last_hidden_state
        return normalize(self.head.text(first_token(x, attention_mask)), dim=-1)

    def encode_image(self, pixel_values: Tensor) -> Tensor:
        """Normalized vectors (B, e) of images (B, C, H, W)."""
        return normalize(self.head.image(self.see(pixel_values).last_hidden_state[:, 0]), dim=-1)


def _output(logits: Tensor, text: TowerOutput, encoder: TowerOutput, loss: Tensor | None) -> ModelOutput:
    return ModelOutput(
        loss=loss,
        logits=logits,
        last_hidden_state=text.last_hidden_state,
        hidden_states=text.hidden_states,
        encoder_last_hidden_state=encoder.last_hidden_state,
        encoder_hidden_states=encoder.hidden_states,
    )


def _text_sides(
    model: ImageTextModel, name: str, text: Layout, context: Layout, frames: tuple[Frame, ...]
) -> dict[str, Sides]:
    """A text tower's attentions by path: to the text itself, and to a context, of images with these frames."""
    sides = {"attention": Sides(text, text, ()), "cross": Sides(text, context, frames)}
    depth = len(getattr(model, name).blocks)
    return {f"{name}.blocks.{n}.{part}": both for n in range(depth) for part, both in sides.items()}
