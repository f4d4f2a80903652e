"""Dual encoders: a text tower and an image tower whose outputs are compared (CLIP, BLIP).

    input_ids (B, N) ─ text ─ end token ─ projection ─ normalize ────────┐
    pixel_values (P, C, H, W) ─ vision ─ cls ─ projection ─ normalize ───┴─ similarity (P, B)

Axis letters: B texts, P images, N tokens, d width of a tower, e width that both share.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from regard.layouts import Frame, Sides
from regard.models.family import Config
from regard.models.losses import contrastive_loss
from regard.models.model import Model
from regard.models.outputs import ModelOutput
from regard.models.vision import check_pixels
from regard.nn.blocks import EndPooler, Pooler, Tower
from regard.nn.projections import Linear
from regard.nn.vision import NormedFirst, VisionTower


class SimilarityHead(nn.Module):
    """Projections of pooled texts and images to one width e, and their similarity.

    text, image: widths of the pooled vectors; None without such a tower. The scale of similarities is kept as its
    logarithm; one tower alone has none.
    """

    scale: Tensor | None

    def __init__(self, e: int, *, text: int | None = None, image: int | None = None) -> None:
        super().__init__()
        self.text = None if text is None else Linear(text, e, bias=False)
        self.image = None if image is None else Linear(image, e, bias=False)
        self.scale = None if text is None or image is None else nn.Parameter(torch.zeros(()))

    def forward(self, texts: Tensor, images: Tensor) -> Tensor:
        """Normalized vectors (B, e) and (P, e) → similarities (P, B)."""
        assert self.scale is not None
        return self.scale.exp() * (images @ texts.T)


class DualEncoder(Model):
    """A text tower and an image tower, each with a pooler, and a head that compares them; or one tower alone."""

    kind = "dual-encoder"

    def __init__(
        self,
        config: Config,
        head: SimilarityHead,
        *,
        text: Tower | None = None,
        text_pooler: EndPooler | Pooler | None = None,
        vision: VisionTower | None = None,
        vision_pooler: NormedFirst | None = None,
    ) -> None:
        super().__init__(config)
        assert (text is None) == (text_pooler is None) == (head.text is None)
        assert (vision is None) == (vision_pooler is None) == (head.image is None)
        self.text, self.text_pooler, self.vision, self.vision_pooler = text, text_pooler, vision, vision_pooler
        self.head = head

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        pixel_values: Tensor | None = None,
        return_loss: bool | None = None,
        output_hidden_states: bool | None = False,
        **options: Any,
    ) -> ModelOutput:
        """Read texts, images, or both.

        Of both: `logits_per_image` (P, B), `logits_per_text`, `text_embeds` (B, e), `image_embeds` (P, e); hidden
        states and pooler_output are the text's, encoder_last_hidden_state and encoder_hidden_states the image's. Of
        one alone: its embeds, last_hidden_state, pooler_output and hidden_states.

        Args:
            input_ids: (B, N).
            attention_mask: (B, N), 1 or True = token; None if all are.
            pixel_values: (P, C, H, W). Positions are interpolated for images of another size than trained on.
            return_loss: compute the contrastive loss: text i belongs to image i.
            output_hidden_states: return the output of every block, before the last norm.
            options: as `Model.read_options`.
        """
        self.read_options(options)
        if input_ids is None and pixel_values is None:
            raise ValueError("there is nothing to read: give input_ids (B, N), pixel_values (B, C, H, W), or both")
        if input_ids is None and attention_mask is not None:
            raise ValueError("attention_mask came without input_ids: give both, or neither")
        checked = None if input_ids is None else self._check_text(input_ids, attention_mask)
        pixel_values = None if pixel_values is None else check_pixels(pixel_values, self._vision().embed.patches, self)
        text = None if checked is None else self._text_output(*checked, bool(output_hidden_states))
        image = None if pixel_values is None else self._image_output(pixel_values, bool(output_hidden_states))
        if text is None or image is None:
            return text or image or ModelOutput()
        logits = self.head(text.text_embeds, image.image_embeds)  # (P, B)
        return ModelOutput(
            text,
            loss=contrastive_loss(logits.t()) if return_loss else None,
            logits_per_image=logits,
            logits_per_text=logits.t(),
            image_embeds=image.image_embeds,
            encoder_last_hidden_state=image.last_hidden_state,
            encoder_hidden_states=image.hidden_states,
        )

    def encode_text(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """input_ids (B, N) → normalized vectors (B, e). Raises as a call of the model does."""
        embeds = self._text_output(*self._check_text(input_ids, attention_mask), False).text_embeds
        assert embeds is not None
        return embeds

    def encode_image(self, pixel_values: Tensor) -> Tensor:
        """pixel_values (P, C, H, W) → normalized vectors (P, e). Raises as a call of the model does."""
        pixel_values = check_pixels(pixel_values, self._vision().embed.patches, self)
        embeds = self._image_output(pixel_values, False).image_embeds
        assert embeds is not None
        return embeds

    def layouts(self, frame: Frame) -> dict[str, Sides]:
        """What each token of the image tower's attentions is and where it lies, for `regard.watch(model, layouts=…)`.

        frame: of one image, as `model.preprocessor` gives it; a batch has a mapping for each. Raises ValueError for a
        model without an image tower.
        """
        return {f"vision.{path}": sides for path, sides in self._vision().sides(frame).items()}

    @property
    def vocabulary(self) -> int:
        """How many tokens there are. Raises ValueError for a model without a text tower."""
        return self._text().embed.tokens.num_embeddings

    @property
    def max_positions(self) -> int | None:
        """How many tokens a text may have. Raises ValueError for a model without a text tower."""
        return self._text().embed.max_positions

    def _text(self) -> Tower:
        if self.text is None:
            raise ValueError(f"this {self.family.title} has no text tower: give pixel_values=, or load both towers")
        return self.text

    def _vision(self) -> VisionTower:
        if self.vision is None:
            raise ValueError(f"this {self.family.title} has no image tower: give input_ids, or load both towers")
        return self.vision

    def _check_text(
        self, input_ids: Tensor, attention_mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """input_ids, mask, and where texts end or their tokens stand: the vector of each row's first True is pooled."""
        mask = self.check(input_ids, attention_mask, self._text())
        pooler = self.text_pooler
        return input_ids, mask, pooler.ends(input_ids, mask) if isinstance(pooler, EndPooler) else mask

    def _text_output(
        self, input_ids: Tensor, attention_mask: Tensor | None, ends: Tensor | None, output_hidden_states: bool
    ) -> ModelOutput:
        assert self.text_pooler is not None
        assert self.head.text is not None
        x, hidden_states = self._text()(
            input_ids, attention_mask=attention_mask, output_hidden_states=output_hidden_states
        )
        pooled = self.text_pooler(x, ends)
        embeds = normalize(self.head.text(pooled), dim=-1)
        return ModelOutput(text_embeds=embeds, last_hidden_state=x, pooler_output=pooled, hidden_states=hidden_states)

    def _image_output(self, pixel_values: Tensor, output_hidden_states: bool) -> ModelOutput:
        assert self.vision_pooler is not None
        assert self.head.image is not None
        x, hidden_states = self._vision()(pixel_values, output_hidden_states=output_hidden_states)
        pooled = self.vision_pooler(x)
        embeds = normalize(self.head.image(pooled), dim=-1)
        return ModelOutput(image_embeds=embeds, last_hidden_state=x, pooler_output=pooled, hidden_states=hidden_states)
