"""Decoder state between generation steps: caches, padding and the encoder's output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

from regard.nn.attention import ContextKeys
from regard.nn.blocks import Tower
from regard.nn.cache import Cache

if TYPE_CHECKING:
    from regard.generation.cuda_graph import Captured


class DecoderState(Protocol):
    """What a decoder remembers of its rows between steps."""

    def keep(self, rows: Tensor) -> None:
        """Row i becomes what row rows[i] was; rows may repeat, be left out, and change in number."""

    def __len__(self) -> int:
        """Positions so far."""


S = TypeVar("S", bound=DecoderState)


class Decoder(Protocol[S]):
    """A model that continues sequences; an encoder–decoder is one once its encoder has run."""

    def begin(self, input_ids: Tensor, attention_mask: Tensor | None, *, length: int) -> tuple[Tensor, S]:
        """Read a prompt: logits (B, V) after its last position, and the state that `step` continues.

        input_ids: (B, N).  attention_mask: (B, N), True = token, padding on the left; None: all are tokens.
        length: positions to make room for, the prompt's and those of the new tokens that a `step` will read.
        """

    def step(self, state: S, tokens: Tensor) -> Tensor:
        """One more token (B,) for each row: logits (B, V) of the position after it; the state advances in place."""


def projected(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What a linear layer with weights of this dtype gives: autocast's dtype where that is on. It lets fp64 be.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     [projected(dtype, torch.device("cpu")) for dtype in (torch.float32, torch.float64)]
    [torch.bfloat16, torch.float64]
    """
    kind = device.type
    if dtype == torch.float64 or not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return dtype
    return torch.get_autocast_dtype(kind)


@dataclass(eq=False)
class ModelState:
    """Room for a number of positions, taken once.

    caches: one for each depth, as its attention makes it.  length: the most positions.
    mask: (B, positions so far), True = token, or None where nothing has to be hidden.
    padding: (B,) how much of it each row has, where no cache holds any: then positions need it, and nobody the mask.
    memory, memory_mask: keys of an encoder's memory for each depth, and which of them are tokens.
    readers: (B,) which of the texts or pictures that the encoder read each row looks at; None: each at its own.
    captured: the step as a CUDA graph, if there is one.
    """

    caches: list[Cache]
    mask: Tensor | None
    length: int
    padding: Tensor | None = None
    memory: list[ContextKeys] | None = None
    memory_mask: Tensor | None = None
    readers: Tensor | None = None
    captured: Captured | None = None

    @classmethod
    def room(
        cls, tower: Tower, batch: int, length: int, mask: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> ModelState:
        """Room for `length` positions of `batch` texts. Raises ValueError where there is not as much memory, or where
        an attention cannot go on step by step.

        dtype, device: of the weights; autocast, where it is on, says what keys and values come in.
        """
        dtype = projected(dtype, device)

        def caches(device: torch.device | str) -> list[Cache]:
            return [block.attention.new_cache(batch, length, dtype=dtype, device=device) for block in tower.depth]

        try:
            return cls(caches(device), mask, length)
        except RuntimeError as error:  # torch's word for memory that is not there
            gib = sum(cache.nbytes for cache in caches("meta")) / 2**30
            raise ValueError(
                f"{batch} texts of {length} positions take {gib:,.1f} GiB for what attention keeps of them, and "
                f"{device} does not have as much: ask for fewer new tokens, texts or beams"
            ) from error

    def __len__(self) -> int:
        return len(self.caches[0])

    @property
    def nbytes(self) -> int:
        """Bytes taken for the texts so far, without an encoder's memory."""
        held = [t.nbytes for t in (self.mask, self.padding) if t is not None]
        return sum(cache.nbytes for cache in self.caches) + sum(held)

    @property
    def positions(self) -> Tensor | None:
        """(B, 1) of the next tokens, where the mask cannot be asked any more; else None."""
        return None if self.padding is None else (len(self) - self.padding).unsqueeze(1)

    def forget_mask(self) -> None:
        """After the prompt: where no cache holds padding, keep how much there was instead of a mask that grows."""
        if self.mask is not None and not any(cache.holds_padding for cache in self.caches):
            self.padding, self.mask = (~self.mask).sum(1), None

    @property
    def padded_left(self) -> bool:
        """Does padding, if there is any, stand before the tokens of its row alone?"""
        if self.mask is None:
            return True
        return bool((self.mask.int().diff(dim=1) >= 0).all())

    def see(self, batch: int) -> None:
        """One more token in every row. Raises ValueError, before anything changes, if there is no room for it."""
        if len(self) == self.length:
            raise ValueError(f"no room: all {len(self)} positions are used")
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(batch, 1)], 1)

    def keep(self, rows: Tensor) -> None:
        """Row i becomes the old row rows[i]; the number of rows may change."""
        if self.captured is not None:
            self.captured.keep(rows)
        for cache in self.caches:
            cache.keep(rows)
        self.mask = None if self.mask is None else self.mask[rows]
        self.padding = None if self.padding is None else self.padding[rows]
        if self.memory is None or not self._swaps(rows, len(self.memory[0].k)):
            return
        self.memory = [ContextKeys(k[rows], v[rows]) for k, v in self.memory]
        self.memory_mask = None if self.memory_mask is None else self.memory_mask[rows]

    def _swaps(self, rows: Tensor, batch: int) -> bool:
        """Does any row come to look at another memory? Beams of one text change places, and their memory stays.

        A memory of 577 patches is most of what a step would copy. A GPU copies it sooner than it answers.
        """
        before = torch.arange(batch, device=rows.device) if self.readers is None else self.readers
        self.readers = before[rows]
        return not rows.is_cpu or not torch.equal(self.readers, before)
