"""What generation asks of a model, and nothing more: begin on a prompt, step by a token, keep rows.

A model keeps its promise when

- a row's logits do not depend on the other rows, nor on the padding before it;
- `step` only reads `tokens`, and may give the same logits buffer every time: generation is done with it by then;
- nothing but the state changes, so that an interrupted run leaves the model as it was.

It does not know how a token is chosen, nor what a state holds.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from torch import Tensor

__all__ = ["Decoder", "State"]


class State(Protocol):
    """What a decoder remembers of its rows between steps."""

    def keep(self, rows: Tensor) -> None:
        """Row i becomes what row rows[i] was; rows may repeat, be left out, and change in number."""

    def __len__(self) -> int:
        """Positions so far."""


S = TypeVar("S", bound=State)


class Decoder(Protocol[S]):
    """A model that continues sequences; an encoder–decoder is one once its encoder has run."""

    def begin(self, ids: Tensor, mask: Tensor | None, *, length: int) -> tuple[Tensor, S]:
        """Read a prompt: logits (B, V) after its last position, and the state that `step` continues.

        ids: (B, N) tokens.  mask: (B, N), True = token, padding on the left; None: all are tokens.
        length: positions to make room for, the prompt's and those of the new tokens that a `step` will read.
        """

    def step(self, state: S, tokens: Tensor) -> Tensor:
        """One more token (B,) for each row: logits (B, V) of the position after it; the state advances in place."""
