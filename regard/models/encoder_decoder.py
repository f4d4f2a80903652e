"""Encoder–decoder models: the encoder reads a text, the decoder writes another while attending to it (2017, T5, BART).

>>> shift_right(torch.tensor([[5, 6, 7]]), start=1)  # what the decoder reads, to write 5 6 7
tensor([[1, 5, 6]])
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from regard.models.family import Config
from regard.models.losses import IGNORED, Targets, language_head, linear_loss, text_loss
from regard.models.model import Model
from regard.models.outputs import ModelOutput, named_logits
from regard.models.text import ModelState
from regard.nn.blocks import HeadInput, LanguageHead, Tower, TowerOutput


def shift_right(input_ids: Tensor, start: int, attention_mask: Tensor | None = None) -> Tensor:
    """What a decoder reads in order to write input_ids (B, N): start, then all but the last token of each text.

    >>> shift_right(torch.tensor([[5, 6, 7], [0, 8, 9]]), 1, torch.tensor([[True, True, True], [False, True, True]]))
    tensor([[1, 5, 6],
            [0, 1, 8]])

    Args:
        input_ids: (B, N).
        start: the token that the decoder begins with.
        attention_mask: (B, N), True = token; None if all are. It is the mask of the result, too.
    """
    before = input_ids.roll(1, 1)
    if attention_mask is None:
        return before.index_fill(1, torch.zeros(1, dtype=torch.long, device=input_ids.device), start)
    first = attention_mask & (attention_mask.cumsum(1) == 1)  # (B, N), True where a text begins
    return torch.where(first, start, torch.where(attention_mask, before, input_ids))


class EncoderDecoder(Model):
    """Encoder, decoder, and the task head if the task has one.

    start: the token that the decoder begins with.  rereads: by default the decoder reads the same text as the encoder
    (BART; tasks that classify a text instead of writing one).
    """

    kind = "encoder-decoder"

    def __init__(
        self,
        config: Config,
        encoder: Tower,
        decoder: Tower,
        *,
        start: int,
        rereads: bool,
        head: nn.Module | None = None,
    ) -> None:
        super().__init__(config)
        self.encoder, self.decoder, self.head = encoder, decoder, head
        self.start, self.rereads = start, rereads

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""
        return self.decoder.embed.tokens.num_embeddings

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        decoder_position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        output_hidden_states: bool | None = False,
        skip_logits: bool = False,
        **options: Any,
    ) -> ModelOutput:
        """Read a text and what is written so far; the output is the decoder's.

        Args:
            input_ids: (B, N), read by the encoder.
            attention_mask: (B, N), 1 or True = token; None if all are.
            decoder_input_ids: (B, M), read by the decoder. Default: labels shifted right; where the model `rereads`,
                input_ids shifted right.
            decoder_attention_mask: (B, M).
            position_ids: (N,) or (B, N); by default tokens are counted and padding is not.
            decoder_position_ids: (M,) or (B, M), likewise.
            labels: (B, M) token ids that the decoder is to write, -100 = ignored; (B,) to classify.
            start_positions: (B,), question answering.
            end_positions: (B,), question answering.
            output_hidden_states: return the output of every block, of both.
            skip_logits: with labels, compute a language model's loss without its logits, which need much memory; they
                are None in the output.
            options: as `Model.read_options`, and `label_smoothing` of the loss of token labels.
        """
        # Not in the signature: transformers.Trainer takes every argument with "label" in its name for labels.
        smoothing = options.pop("label_smoothing", 0.0)
        targets = Targets(labels, start_positions, end_positions, self.read_options(options), smoothing)
        if decoder_input_ids is None:
            if labels is not None and isinstance(self.head, LanguageHead):
                # Ignored labels become padding, whose vectors no loss is computed from.
                pad = self.config.get("pad_token_id", 0)
                decoder_input_ids = shift_right(labels, self.start)
                decoder_input_ids = decoder_input_ids.masked_fill(decoder_input_ids == IGNORED, pad)
            elif self.rereads and decoder_attention_mask is None:
                decoder_attention_mask = self.check(input_ids, attention_mask, self.encoder)
                decoder_input_ids = shift_right(input_ids, self.start, decoder_attention_mask)
        if decoder_input_ids is None:
            raise ValueError(
                "decoder_input_ids is missing: the tokens (B, M) that the decoder has read so far, the first of them "
                f"model.start, {self.start}; shift_right makes them of labels"
            )
        encoder, attention_mask = self._encode(input_ids, attention_mask, position_ids, bool(output_hidden_states))
        decoder_attention_mask = self.check(
            decoder_input_ids, decoder_attention_mask, self.decoder, decoder_position_ids
        )
        check_same_batch(decoder_input_ids, len(input_ids))
        decoder = self.decoder(
            decoder_input_ids,
            attention_mask=decoder_attention_mask,
            position_ids=decoder_position_ids,
            encoder_hidden_states=encoder.last_hidden_state,
            encoder_attention_mask=attention_mask,
            output_hidden_states=bool(output_hidden_states),
        )
        x = decoder.last_hidden_state
        inputs = HeadInput(x, None, self.decoder.embed.tokens.weight, decoder_attention_mask, input_ids)
        loss_head = language_head(self) if skip_logits and labels is not None else None
        output = ModelOutput(
            **named_logits(self, None if self.head is None or loss_head is not None else self.head(inputs)),
            last_hidden_state=x,
            hidden_states=decoder.hidden_states,
            encoder_last_hidden_state=encoder.last_hidden_state,
            encoder_hidden_states=encoder.hidden_states,
        )
        if loss_head is not None:
            return ModelOutput(output, loss=linear_loss(loss_head, inputs, targets))
        if labels is None and start_positions is None and end_positions is None:
            return output
        return ModelOutput(output, loss=text_loss(self, output, targets))

    def encode(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """The encoder's output for input_ids (B, N): (B, N, d)."""
        return self._encode(input_ids, attention_mask, None, False)[0].last_hidden_state

    def _encode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        output_hidden_states: bool,
    ) -> tuple[TowerOutput, Tensor | None]:
        attention_mask = self.check(input_ids, attention_mask, self.encoder, position_ids)
        encoder = self.encoder(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            output_hidden_states=output_hidden_states,
        )
        return encoder, attention_mask

    # ---------------------------------------------------------------------------------------- one token after another

    @torch.no_grad()
    def read(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> CrossAttentionDecoder:
        """Encode a text once, for a decoder that attends to it in every step.

        Raises ValueError for a model without a language-model head.
        """
        if not isinstance(self.head, LanguageHead):
            raise ValueError(
                f"a model with task {self.task!r} writes no text: load it with task='text2text-generation'"
            )
        encoder, attention_mask = self._encode(input_ids, attention_mask, None, False)
        return CrossAttentionDecoder(self, self.decoder, self.head, encoder.last_hidden_state, attention_mask)


def check_same_batch(decoder_input_ids: Tensor, count: int) -> None:
    """Raise ValueError unless the decoder reads a text for each of the `count` inputs of the encoder."""
    if len(decoder_input_ids) != count:
        raise ValueError(
            f"decoder_input_ids has {len(decoder_input_ids)} texts, and the encoder reads {count}: they must be as many"
        )


class CrossAttentionDecoder:
    """A decoder with an encoder's output to attend to: begins with start tokens, then continues token by token.

    model: whose decoder and head they are.  encoder_hidden_states: (B, M, d) of a text or an image.
    encoder_attention_mask: (B, M), True = token; None if all are.
    """

    def __init__(
        self,
        model: Model,
        decoder: Tower,
        head: LanguageHead,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor | None = None,
    ) -> None:
        self.model, self.decoder, self.head = model, decoder, head
        self.encoder_hidden_states, self.encoder_attention_mask = encoder_hidden_states, encoder_attention_mask

    @torch.no_grad()
    def begin(self, input_ids: Tensor, attention_mask: Tensor | None, *, length: int) -> tuple[Tensor, ModelState]:
        """Read start tokens (B, N) and make room for `length` positions in all: logits (B, V), and the state.

        attention_mask: (B, N), True = token, padded on the left. Raises ValueError if length exceeds the positions.
        """
        model = self.model
        attention_mask = model.check_prompt(input_ids, attention_mask, self.decoder, length)
        check_same_batch(input_ids, len(self.encoder_hidden_states))
        state = ModelState.room(self.decoder, len(input_ids), length, attention_mask, model.dtype, model.device)
        state.memory = self.decoder.keys(self.encoder_hidden_states)
        state.memory_mask = self.encoder_attention_mask
        logits = self._advance(state, input_ids, 1)[:, 0]
        state.forget_mask()
        return logits, state

    @torch.no_grad()
    def step(self, state: ModelState, tokens: Tensor) -> Tensor:
        """tokens (B,) → logits (B, V) of the next position; the state moves on by one."""
        return self.extend(state, tokens.unsqueeze(1))[:, 0]

    @torch.no_grad()
    def extend(self, state: ModelState, tokens: Tensor) -> Tensor:
        """tokens (B, n) → logits (B, n, V) after each of them; as in `TextModel`."""
        state.see(*tokens.shape)
        return self._advance(state, tokens, tokens.shape[1])

    def _advance(self, state: ModelState, input_ids: Tensor, count: int) -> Tensor:
        decoder = self.decoder(
            input_ids,
            attention_mask=state.mask,
            position_ids=state.positions,
            caches=state.caches,
            encoder_hidden_states=state.memory,
            encoder_attention_mask=state.memory_mask,
        )
        inputs = HeadInput(decoder.last_hidden_state[:, -count:], None, self.decoder.embed.tokens.weight, None)
        return cast(Tensor, self.head(inputs))  # (B, count, V)
