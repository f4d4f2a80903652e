"""Models of long texts: one whose tokens have roles, a few being global (Longformer), and one that answers (BigBird).

    >>> model = regard.load("allenai/longformer-base-4096")                                   # doctest: +SKIP
    >>> model(ids, global_tokens=torch.arange(ids.shape[1]).expand_as(ids) < 8)               # doctest: +SKIP

They know no family: which tokens are global unless somebody says so, the family's file says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from regard.linear_maps import Linear
from regard.models.heads import Pooler, Seen
from regard.models.long_attention import Roles
from regard.models.model import Result
from regard.models.parts import FeedForward, Inserted, Passed, Tower, count
from regard.models.settings import Settings
from regard.models.text_model import TextModel

__all__ = ["AnswerHead", "AnsweringModel", "Choice", "LongTextModel", "TokensBefore", "first_tokens"]

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
        settings: Settings,
        tower: Tower,
        *,
        pooler: Pooler | None = None,
        head: nn.Module | None = None,
        choice: Choice | None = None,
    ) -> None:
        super().__init__(settings, tower, pooler=pooler, head=head)
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
        mask = self.check(ids, mask, self.vocabulary, self.most)
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

    def __init__(self, settings: Settings, tower: Tower, *, head: nn.Module, separator: int) -> None:
        super().__init__(settings, tower, head=head)
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
        mask = self.check(ids, mask, self.vocabulary, self.most)
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
