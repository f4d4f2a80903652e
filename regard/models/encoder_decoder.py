"""A model with two towers: an encoder reads a text, a decoder writes another while looking at it (2017, T5, BART).

    >>> shift_right(torch.tensor([[5, 6, 7]]), start=1)  # what the decoder reads, to write 5 6 7
    tensor([[1, 5, 6]])

It knows no family.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from regard.generation.loop import ModelState
from regard.models.config import Config
from regard.models.model import Model, Result
from regard.nn.blocks import Passed, Tower
from regard.nn.heads import LanguageHead, Seen

__all__ = ["EncoderDecoder", "Reading", "shift_right"]


def shift_right(ids: Tensor, start: int, mask: Tensor | None = None) -> Tensor:
    """What a decoder reads in order to write ids (B, N): start, then all but the last, wherever padding stands.

    >>> shift_right(torch.tensor([[5, 6, 7], [0, 8, 9]]), 1, torch.tensor([[True, True, True], [False, True, True]]))
    tensor([[1, 5, 6],
            [0, 1, 8]])

    start: the token that the decoder begins with.  mask: (B, N), True = token; None if all are. It is the mask of the
    result, too.
    """
    before = ids.roll(1, 1)
    if mask is None:
        return before.index_fill(1, torch.zeros(1, dtype=torch.long, device=ids.device), start)
    first = mask & (mask.cumsum(1) == 1)  # (B, N), True where a text begins
    return torch.where(first, start, torch.where(mask, before, ids))


class EncoderDecoder(Model):
    """Encoder, decoder, and the head of its task if it has one.

    start: the token that the decoder begins with.  rereads: may target be left out, the decoder then reading the
    same text as the encoder (BART; tasks that judge a text instead of writing one).
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
        ids: Tensor,
        mask: Tensor | None = None,
        *,
        target: Tensor | None = None,
        target_mask: Tensor | None = None,
        positions: Tensor | None = None,
        target_positions: Tensor | None = None,
        every_layer: bool = False,
    ) -> Result:
        """ids (B, N), read by the encoder, and target (B, M), read so far by the decoder → Result of the decoder.

        mask: (B, N), target_mask: (B, M), True = token; None if all are.
        target: by default, where the model `rereads`, ids shifted right.
        positions, target_positions: by default tokens are counted, so that padding shifts nobody.
        every_layer: keep what stood after each block, of both.
        Raises TypeError or ValueError for ids, target and masks that do not fit the model or each other.
        """
        target, target_mask = self._target(ids, mask, target, target_mask)
        read, mask = self._encode(ids, mask, positions, every_layer)
        target_mask = self.check(target, target_mask, self.vocabulary, self.decoder.embed.max_positions)
        self.check_positions(target, target_positions, self.decoder)
        if len(target) != len(ids):
            raise ValueError(f"target has {len(target)} texts, and ids {len(ids)}: they must be as many")
        hidden, layers = self.decoder(
            target,
            mask=target_mask,
            positions=target_positions,
            memory=read.hidden,
            memory_mask=mask,
            every_layer=every_layer,
        )
        logits = None if self.head is None else self.head(self._seen(hidden, target_mask, ids))
        kept = (layers, read.layers) if every_layer else (None, None)
        return Result(hidden, logits, layers=kept[0], memory=read.hidden, memory_layers=kept[1])

    def encode(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """What the encoder makes of ids (B, N): (B, N, d)."""
        return self._encode(ids, mask, None, False)[0].hidden

    def _encode(
        self, ids: Tensor, mask: Tensor | None, positions: Tensor | None, every_layer: bool
    ) -> tuple[Passed, Tensor | None]:
        mask = self.check(ids, mask, self.encoder.embed.tokens.num_embeddings, self.encoder.embed.max_positions)
        self.check_positions(ids, positions, self.encoder)
        return self.encoder(ids, mask=mask, positions=positions, every_layer=every_layer), mask

    def _target(
        self, ids: Tensor, mask: Tensor | None, target: Tensor | None, target_mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """What the decoder reads."""
        if target is None and target_mask is None and self.rereads:
            self.check(ids, mask, self.encoder.embed.tokens.num_embeddings, self.encoder.embed.max_positions)
            return shift_right(ids, self.start, mask), mask
        if target is None:
            raise ValueError(
                "target is missing: the tokens (B, M) that the decoder has read so far, the first of them "
                f"model.start, {self.start}; shift_right makes them of a text to be learnt"
            )
        return target, target_mask

    def _seen(self, hidden: Tensor, mask: Tensor | None, ids: Tensor | None = None) -> Seen:
        return Seen(hidden, None, self.decoder.embed.tokens.weight, mask, ids)

    # ---------------------------------------------------------------------------------------- one token after another

    @torch.no_grad()
    def read(self, ids: Tensor, mask: Tensor | None = None) -> Reading:
        """Let the encoder read, once, what the decoder will look at in every step.

        Raises ValueError for a model that has no words to choose from.
        """
        if not isinstance(self.head, LanguageHead):
            raise ValueError(
                f"a model with task {self.task!r} writes no text: load it with task='text2text-generation'"
            )
        passed, mask = self._encode(ids, mask, None, False)
        return Reading(self, self.decoder, self.head, passed.hidden, mask)


class Reading:
    """A decoder that has a memory to look at: begins with start tokens, then goes on token by token.

    model: whose decoder and head they are.  memory: (B, M, d) what they look at, a text's or a picture's vectors.
    mask: (B, M), True = token; None if all are.
    """

    def __init__(
        self, model: Model, decoder: Tower, head: LanguageHead, memory: Tensor, mask: Tensor | None = None
    ) -> None:
        self.model, self.decoder, self.head, self.memory, self.mask = model, decoder, head, memory, mask

    @torch.no_grad()
    def begin(self, ids: Tensor, mask: Tensor | None, *, length: int) -> tuple[Tensor, ModelState]:
        """Read start tokens (B, N) and make room for `length` positions in all: logits (B, V), and the state.

        mask: (B, N), True = token, padded on the left. Raises ValueError if the room is more than the positions.
        """
        model, most = self.model, self.decoder.embed.max_positions
        mask = model.check(ids, mask, self.decoder.embed.tokens.num_embeddings, most)
        if most is not None and length > most:
            raise ValueError(f"{length} positions are asked for, and the decoder has {most}: ask for fewer new tokens")
        if len(ids) != len(self.memory):
            raise ValueError(f"{len(ids)} texts are to be written, and the encoder has read {len(self.memory)}")
        state = ModelState.room(self.decoder, len(ids), length, mask, model.dtype, model.device)
        state.memory, state.memory_mask = self.decoder.keys(self.memory), self.mask
        logits = self._advance(state, ids)
        state.forget_mask()
        return logits, state

    @torch.no_grad()
    def step(self, state: ModelState, tokens: Tensor) -> Tensor:
        """tokens (B,) → logits (B, V) of the next position; the state moves on by one."""
        state.see(len(tokens))
        return self._advance(state, tokens.unsqueeze(1))

    def _advance(self, state: ModelState, ids: Tensor) -> Tensor:
        passed = self.decoder(
            ids,
            mask=state.mask,
            positions=state.positions,
            caches=state.caches,
            memory=state.memory,
            memory_mask=state.memory_mask,
        )
        seen = Seen(passed.hidden[:, -1:], None, self.decoder.embed.tokens.weight, None)
        return cast(Tensor, self.head(seen))[:, 0]  # (B, V)
