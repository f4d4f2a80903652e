"""A text model whose tokens have roles: a few are global, the others look around themselves (Longformer).

    >>> model = regard.load("allenai/longformer-base-4096")                                   # doctest: +SKIP
    >>> model(ids, global_tokens=torch.arange(ids.shape[1]).expand_as(ids) < 8)               # doctest: +SKIP

It knows no family: which tokens are global unless somebody says so, the family's file says.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from regard.models.heads import Pooler, Seen
from regard.models.long_attention import Roles
from regard.models.model import Result
from regard.models.parts import Inserted, Passed, Tower, count
from regard.models.settings import Settings
from regard.models.text_model import TextModel

__all__ = ["Choice", "LongTextModel", "first_tokens", "tokens_before"]

Choice = Callable[[Tensor, Tensor | None], Tensor]
"""ids (B, N) and their mask → (B, N) booleans, which tokens are global."""


def first_tokens(ids: Tensor, mask: Tensor | None) -> Tensor:
    """The first token of each text is global; padding on the left is passed over.

    >>> first_tokens(torch.zeros(1, 3, dtype=torch.int64), torch.tensor([[False, True, True]])).tolist()
    [[False, True, False]]
    """
    tokens = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    return tokens & (tokens.cumsum(1) == 1)


def tokens_before(separator: int) -> Choice:
    """All tokens before the first `separator` are global: a question before the text that answers it.

    >>> tokens_before(2)(torch.tensor([[0, 7, 8, 2, 2, 9, 2]]), None).int().tolist()
    [[1, 1, 1, 0, 0, 0, 0]]

    The choice raises ValueError for a text without a separator.
    """

    def choose(ids: Tensor, mask: Tensor | None) -> Tensor:
        ends = ids == separator if mask is None else (ids == separator) & mask
        if not torch.compiler.is_compiling() and not bool(ends.any(1).all()):
            raise ValueError(
                f"text {int(ends.any(1).int().argmin())} has no separator (id {separator}) after its question: say "
                "which tokens are global, as global_tokens= (B, N) booleans"
            )
        before = ends.cumsum(1) == 0
        return before if mask is None else before & mask

    return choose


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
