"""Text models with one stack: encoders (BERT), decoders (GPT-2, LLaMA) and long-text encoders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from regard.generation.loop import ModelState
from regard.models.config import Config
from regard.models.model import Model, Result
from regard.nn.blocks import FeedForward, Inserted, Passed, Tower, count
from regard.nn.heads import EndPooler, LanguageHead, Pooler, PretrainingHead, Seen
from regard.nn.linear import Linear
from regard.nn.sliding_attention import Roles

if TYPE_CHECKING:
    from regard.generation.cuda_graph import CapturedStep
    from regard.nn.cache import FixedCache


class TextModel(Model):
    """One tower, its pooler if it has one, and the head of its task if it has one.

    max_positions: the longest text, where no table of positions says so (rotary).
    """

    kind = "text"

    def __init__(
        self,
        config: Config,
        tower: Tower,
        *,
        pooler: Pooler | EndPooler | None = None,
        head: nn.Module | None = None,
        max_positions: int | None = None,
    ) -> None:
        super().__init__(config)
        self.tower, self.pooler, self.head = tower, pooler, head
        self.max_positions = tower.embed.max_positions if max_positions is None else max_positions

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
        mask = self.check(ids, mask, self.vocabulary, self.max_positions)
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
    ) -> tuple[Tensor, ModelState]:
        """Read a prompt (B, N) and make room for `length` positions in all: logits (B, V) after it, and the state.

        mask: (B, N), True = token, padded on the left.  inserted: vectors that stand for some of the tokens.
        Raises ValueError for a model that does not score words, for padding on the right, and if the room is more than
        the positions.
        """
        if not isinstance(self.head, LanguageHead):
            raise ValueError(
                f"this model has the task {self.task!r}, and only one that scores words goes on with a text"
            )
        mask = self.check(ids, mask, self.vocabulary, self.max_positions)
        if mask is not None and not bool(mask[:, -1].all()):
            raise ValueError("texts to go on with are padded on the left: here a row ends in padding")
        if self.max_positions is not None and length > self.max_positions:
            raise ValueError(
                f"{length} positions are asked for, and the model has {self.max_positions}: ask for fewer new tokens"
            )
        state = ModelState.room(self.tower, len(ids), length, mask, self.dtype, self.device)
        logits = self._advance(state, ids, inserted)
        state.forget_mask()
        return logits, state

    @torch.no_grad()
    def step(self, state: ModelState, tokens: Tensor) -> Tensor:
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

    def _captured(self, state: ModelState) -> CapturedStep | None:
        """The captured step of this state, made now if there is none; None where it cannot be captured."""
        if self.device.type != "cuda":
            return None
        from regard.generation.cuda_graph import CapturedStep, can_capture, needs_eager_step

        if needs_eager_step() or (state.captured is not None and not state.captured.fits(state)):
            state.captured = None  # and a later step may capture anew
        if state.captured is None and can_capture(self.tower, self.head, state, self.dtype):
            assert isinstance(self.head, LanguageHead)
            state.captured = CapturedStep(self.tower, self.head, state)
        return state.captured

    def _advance(self, state: ModelState, ids: Tensor, inserted: Inserted | None = None) -> Tensor:
        passed = self.tower(ids, mask=state.mask, positions=state.positions, caches=state.caches, inserted=inserted)
        hidden = passed.hidden[:, -1:]  # (B, 1, d)
        seen = Seen(hidden, None, self.tower.embed.tokens.weight, None)
        assert self.head is not None
        return cast(Tensor, self.head(seen))[:, 0]  # (B, V)


Choice = Callable[[Tensor, Tensor | None], Tensor]
"""ids (B, N) and their mask → (B, N) booleans, which tokens are global."""


def first_tokens(ids: Tensor, mask: Tensor | None) -> Tensor:
    """The first token of each text is global; padding on the left is passed over.

    >>> first_tokens(torch.zeros(1, 3, dtype=torch.int64), torch.tensor([[False, True, True]])).tolist()
    [[False, True, False]]
    """
    tokens = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    return tokens & (tokens.cumsum(1) == 1)


@dataclass(frozen=True)
class TokensBefore:
    """The choice of all tokens before the first `separator`: a question before the text that answers it.

    >>> TokensBefore(2)(torch.tensor([[0, 7, 8, 2, 2, 9, 2]]), None).int().tolist()
    [[1, 1, 1, 0, 0, 0, 0]]

    A value and no function of a function, so that models that hold it can be pickled.
    The choice raises ValueError for a text without a separator.
    """

    separator: int

    def __call__(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        """(B, N) booleans."""
        ends = ids == self.separator if mask is None else (ids == self.separator) & mask
        if not torch.compiler.is_compiling() and not bool(ends.any(1).all()):
            raise ValueError(
                f"text {int(ends.any(1).int().argmin())} has no separator (id {self.separator}) after its question: "
                "say which tokens are global, as global_tokens= (B, N) booleans"
            )
        before = ends.cumsum(1) == 0
        return before if mask is None else before & mask


class LongTextModel(TextModel):
    """`TextModel` with global tokens. Its blocks hold `SlidingAttention`.

    choice: which tokens are global where the call does not say; None for none.
    """

    def __init__(
        self,
        config: Config,
        tower: Tower,
        *,
        pooler: Pooler | None = None,
        head: nn.Module | None = None,
        choice: Choice | None = None,
    ) -> None:
        super().__init__(config, tower, pooler=pooler, head=head)
        self.choice = choice

    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        *,
        global_tokens: Tensor | None = None,
        types: Tensor | None = None,
        positions: Tensor | None = None,
        inserted: Inserted | None = None,
        every_layer: bool = False,
    ) -> Result:
        """ids (B, N) → Result.

        global_tokens: (B, N) booleans, True = sees all and is seen by all; default what the task has. Padding is none.
        mask, types, positions, inserted, every_layer: as in `TextModel`.
        Raises TypeError or ValueError for what does not fit the model or each other.
        """
        mask = self.check(ids, mask, self.vocabulary, self.max_positions)
        self.check_positions(ids, positions, self.tower)
        self._check_types(ids, types)
        roles = self._roles(ids, mask, global_tokens)
        positions = count(ids, mask) if positions is None else positions
        passed = self._pass(self.tower.embed(ids, positions, types, inserted), roles, every_layer)
        pooled = None if self.pooler is None else self.pooler(passed.hidden, mask)
        seen = Seen(passed.hidden, pooled, self.tower.embed.tokens.weight, mask)
        logits = None if self.head is None else self.head(seen)
        return Result(passed.hidden, logits, pooled, layers=passed.layers if every_layer else None)

    def _roles(self, ids: Tensor, mask: Tensor | None, chosen: Tensor | None) -> Roles | None:
        """What the tokens are; None where all are local."""
        if chosen is not None and (
            not isinstance(chosen, Tensor) or chosen.dtype != torch.bool or chosen.shape != ids.shape
        ):
            got = f"{chosen.dtype} {tuple(chosen.shape)}" if isinstance(chosen, Tensor) else type(chosen).__name__
            raise ValueError(f"global_tokens must be booleans {tuple(ids.shape)}, True = global, got {got}")
        if chosen is None and self.choice is not None:
            chosen = self.choice(ids, mask)
        if chosen is None and mask is None:
            return None
        return Roles.of(mask, torch.zeros_like(ids, dtype=torch.bool) if chosen is None else chosen)

    def _pass(self, x: Tensor, roles: Roles | None, every_layer: bool) -> Passed:
        """x (B, N, d) through the blocks."""
        layers = [x] if every_layer else []
        for block in self.tower.depth:
            x = block(x, mask=roles)
            layers += [x] if every_layer else []
        return Passed(x, tuple(layers))


class AnswerHead(nn.Module):
    """Where an answer starts and ends, after one more feed-forward.

    d: width of the model.  eps: of the norm.  dropout: before the feed-forward and after it, in training only.
    """

    def __init__(self, feed_forward: FeedForward, d: int, eps: float, dropout: float) -> None:
        super().__init__()
        self.feed_forward, self.norm = feed_forward, nn.LayerNorm(d, eps)
        self.score, self.dropout = Linear(d, 2), nn.Dropout(dropout)

    def forward(self, seen: Seen) -> Tensor:
        """→ (B, N, 2)."""
        x = seen.hidden
        added = self.dropout(self.feed_forward(self.dropout(x)))
        return cast(Tensor, self.score(self.norm(x + added)))


class AnsweringModel(TextModel):
    """`TextModel` that looks for an answer behind the question, never in it (BigBird).

    The question is what stands up to the first separator, and that. Where no segments are given it is segment 0, the
    rest 1. Its tokens cannot begin or end an answer: their scores are a million less, but for the first token's, which
    stands for "not here".

    separator: id of the token after the question. A text without one has no question but its first token.
    """

    FAR = 1e6  # as much less as in transformers

    def __init__(self, config: Config, tower: Tower, *, head: nn.Module, separator: int) -> None:
        super().__init__(config, tower, head=head)
        self.separator = separator

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
        """ids (B, N) → Result; arguments and what it raises as in `TextModel`."""
        mask = self.check(ids, mask, self.vocabulary, self.max_positions)
        first = first_tokens(ids, mask)
        ends = ids == self.separator if mask is None else (ids == self.separator) & mask
        question = ends.cumsum(1) - ends.long() == 0  # up to the first separator
        question = question.where(ends.any(1, keepdim=True), first)
        types = (~question).long() if types is None else types
        result = super().forward(
            ids, mask, types=types, positions=positions, inserted=inserted, every_layer=every_layer
        )
        assert result.logits is not None
        logits = result.logits - self.FAR * (question & ~first).unsqueeze(-1).to(result.logits.dtype)
        return replace(result, logits=logits)
