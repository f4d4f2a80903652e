"""A model with one tower: an encoder with a task (BERT) or a decoder that continues text (GPT-2, LLaMA).

    >>> model = regard.load("sentence-transformers/all-MiniLM-L6-v2")     # doctest: +SKIP
    >>> model(model.tokenizer.batch(["It was too tired."]).ids).hidden.shape      # doctest: +SKIP
    torch.Size([1, 7, 384])

It knows no family.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from regard.models.heads import EndPooler, LanguageHead, Pooler, PretrainingHead, Seen
from regard.models.model import Model, Result
from regard.models.parts import Inserted, Tower
from regard.models.settings import Settings
from regard.models.state import State

if TYPE_CHECKING:
    from regard.cache import FixedCache
    from regard.models.decoding.capturing import Captured

__all__ = ["TextModel"]


class TextModel(Model):
    """One tower, its pooler if it has one, and the head of its task if it has one.

    most: the most positions, where no table of positions says so (rotary).
    """

    def __init__(
        self,
        settings: Settings,
        tower: Tower,
        *,
        pooler: Pooler | EndPooler | None = None,
        head: nn.Module | None = None,
        most: int | None = None,
    ) -> None:
        super().__init__(settings)
        self.tower, self.pooler, self.head = tower, pooler, head
        self.most = tower.embed.most if most is None else most

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""
        return self.tower.embed.tokens.num_embeddings

    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        *,
        types: Tensor | None = None,
        positions: Tensor | None = None,
        inserted: Inserted | None = None,
        every_layer: bool = False,
    ) -> Result:
        """ids (B, N) → Result.

        mask: (B, N), True = token; None if all are.  types: (B, N), the segment of each token (BERT, ALBERT).
        positions: (N,) or (B, N); by default tokens are counted, so that padding shifts nobody.
        inserted: vectors that stand for some of the tokens, as a picture's do.
        every_layer: keep what stood after each block.
        Raises TypeError or ValueError for ids, mask, types and positions that do not fit the model or each other.
        """
        mask = self.check(ids, mask, self.vocabulary, self.most)
        self.check_positions(ids, positions, self.tower)
        self._check_types(ids, types)
        # (B, N): the vector of each row's first True is pooled.
        candidates = self.pooler.ends(ids, mask) if isinstance(self.pooler, EndPooler) else mask
        hidden, layers = self.tower(
            ids, mask=mask, positions=positions, types=types, inserted=inserted, every_layer=every_layer
        )
        pooled = None if self.pooler is None else self.pooler(hidden, candidates)
        seen = Seen(hidden, pooled, self.tower.embed.tokens.weight, mask)
        relation = self.head.relation(seen) if isinstance(self.head, PretrainingHead) else None
        logits = None if self.head is None else self.head(seen)
        return Result(hidden, logits, pooled, relation, layers if every_layer else None)

    def _check_types(self, ids: Tensor, types: Tensor | None) -> None:
        if types is None:
            return
        if self.tower.embed.types is None:
            raise ValueError(f"{self.family.title} has no segments: leave out types=")
        if not isinstance(types, Tensor) or types.dtype not in (torch.int64, torch.int32):
            got = str(types.dtype) if isinstance(types, Tensor) else type(types).__name__
            raise TypeError(f"types must be a torch tensor of int64 or int32, (B, N), got {got}")
        if types.shape != ids.shape:
            raise ValueError(f"types must be {tuple(ids.shape)} as ids, got {tuple(types.shape)}")
        most = self.tower.embed.types.num_embeddings
        if not torch.compiler.is_compiling() and not bool(((types >= 0) & (types < most)).all()):
            raise ValueError(
                f"types must be 0 to {most - 1}, the model's segments; got {int(types.min())} to {int(types.max())}"
            )

    # ---------------------------------------------------------------------------------------- one token after another

    @torch.no_grad()
    def begin(
        self, ids: Tensor, mask: Tensor | None, *, length: int, inserted: Inserted | None = None
    ) -> tuple[Tensor, State]:
        """Read a prompt (B, N) and make room for `length` positions in all: logits (B, V) after it, and the state.

        mask: (B, N), True = token, padded on the left.  inserted: vectors that stand for some of the tokens.
        Raises ValueError for a model that does not score words, for padding on the right, and if the room is more than
        the positions.
        """
        if not isinstance(self.head, LanguageHead):
            raise ValueError(
                f"this model has the task {self.task!r}, and only one that scores words goes on with a text"
            )
        mask = self.check(ids, mask, self.vocabulary, self.most)
        if mask is not None and not bool(mask[:, -1].all()):
            raise ValueError("texts to go on with are padded on the left: here a row ends in padding")
        if self.most is not None and length > self.most:
            raise ValueError(
                f"{length} positions are asked for, and the model has {self.most}: ask for fewer new tokens"
            )
        state = State.room(self.tower, len(ids), length, mask, self.dtype, self.device)
        logits = self._advance(state, ids, inserted)
        state.forget_mask()
        return logits, state

    @torch.no_grad()
    def step(self, state: State, tokens: Tensor) -> Tensor:
        """tokens (B,) → logits (B, V) of the next position; the state moves on by one. The next step may reuse them.

        On a GPU the step is captured and replayed where it can be; see regard/models/decoding.
        """
        state.see(len(tokens))
        captured = self._captured(state)
        if captured is None:
            return self._advance(state, tokens.unsqueeze(1))
        for cache in cast("list[FixedCache]", state.caches):  # nothing else is captured
            cache.advance(1)
        return captured.step(tokens)

    def _captured(self, state: State) -> Captured | None:
        """The captured step of this state, made now if there is none; None where it cannot be captured."""
        if self.device.type != "cuda":
            return None
        from regard.models.decoding.capturing import Captured, capturable, unseen_by_a_replay

        if unseen_by_a_replay() or (state.captured is not None and not state.captured.fits(state)):
            state.captured = None  # and a later step may capture anew
        if state.captured is None and capturable(self.tower, self.head, state, self.dtype):
            assert isinstance(self.head, LanguageHead)
            state.captured = Captured(self.tower, self.head, state)
        return state.captured

    def _advance(self, state: State, ids: Tensor, inserted: Inserted | None = None) -> Tensor:
        passed = self.tower(ids, mask=state.mask, positions=state.positions, caches=state.caches, inserted=inserted)
        hidden = passed.hidden[:, -1:]  # (B, 1, d)
        seen = Seen(hidden, None, self.tower.embed.tokens.weight, None)
        assert self.head is not None
        return cast(Tensor, self.head(seen))[:, 0]  # (B, V)
