"""What a Performer keeps between calls: sums over the positions so far, of a size that does not grow.

    >>> state = PerformerState()
    >>> len(state), state.nbytes
    (0, 0)

It is a `regard.cache.Cache`. One of keys and values holds 2·N·D numbers per head, this one m·(Dv + 2) at any N, and m·D
once, a copy of the directions by which it knows whose sums they are: so it can be copied, pickled and moved to another
process. It does not know layers, nor how features are made.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.efficient.feature_sums import FeatureSums, no_keys

__all__ = ["PerformerState"]


class PerformerState:
    """The sums over a decoder's positions so far, as `PerformerAttention` leaves and reads them.

    >>> import regard, torch
    >>> from regard.efficient.performer import PerformerAttention, PerformerState
    >>> layer, state, x = PerformerAttention(6, 2), PerformerState(), torch.randn(1, 5, 6)
    >>> steps = [layer(x[:, i : i + 1], mask=regard.masks.causal(), cache=state) for i in range(5)]
    >>> torch.allclose(torch.cat(steps, 1), layer(x, mask=regard.masks.causal()), atol=1e-5)
    True
    """

    holds_padding = False  # a key that is hidden does not enter the sums

    def __init__(self) -> None:
        self._sums: FeatureSums | None = None
        self._drawn: _Drawn | None = None
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def nbytes(self) -> int:
        """Bytes taken: by the sums, and by the copy of the directions."""
        kept = [] if self._drawn is None else [self._drawn.copy]
        return sum(t.nbytes for t in (*(self._sums or ()), *kept))

    def sums(self, batch: int, heads: int, width: int, directions: Tensor, like: Tensor) -> FeatureSums:
        """The sums so far: of nothing, in the first call.

        batch, heads, width: of the values that come next.  directions: what features are made with.
        like: has the dtype and the device.  Raises ValueError where they do not continue what is kept.
        """
        if self._sums is None or self._drawn is None:
            return no_keys(batch, heads, len(directions), width, like)
        kept = self._sums.values
        for name, old, new in (("batch", kept.shape[0], batch), ("heads", kept.shape[1], heads)):
            if old != new:
                raise ValueError(f"keys have {name} {new}, but the state has {old}")
        if kept.dtype != like.dtype or kept.device != like.device:
            raise ValueError(f"keys are {like.dtype} on {like.device}, but the state is {kept.dtype} on {kept.device}")
        if not self._drawn.same(directions):
            raise ValueError(
                "this state was summed with other features: after a redraw, or in another layer, begin with a new "
                "PerformerState"
            )
        return self._sums

    def store(self, sums: FeatureSums, count: int, directions: Tensor) -> None:
        """Keep the sums after `count` more positions, made with the directions that `sums` was asked for."""
        if self._drawn is None:
            self._drawn = _Drawn(directions)
        self._sums, self._length = sums, self._length + count

    def crop(self, length: int) -> None:
        """Forget everything (0), or nothing. Raises ValueError for anything between: a sum cannot be taken apart."""
        if length == 0:
            self._sums, self._drawn, self._length = None, None, 0
        elif length != self._length:
            raise ValueError(
                f"cannot keep the first {length} of {self._length} positions: they are summed, and a sum cannot be "
                "taken apart"
            )

    def keep(self, rows: Tensor) -> None:
        """Row i becomes the old row rows[i]: beams that branch, finished texts that leave."""
        if self._sums is not None:
            self._sums = FeatureSums(*(t[rows] for t in self._sums))

    def clear(self) -> None:
        """Forget everything."""
        self.crop(0)

    def __repr__(self) -> str:
        return f"PerformerState({self._length} positions, {self.nbytes} bytes)"


class _Drawn:
    """The directions that sums were made with, known again by their numbers.

    Numbers are compared where they may have changed: that waits for a GPU. In a decoder's step the tensor is the one it
    was, at the version it had, and nothing is compared. A compiled step cannot read versions, and trusts the tensor.
    """

    def __init__(self, directions: Tensor) -> None:
        self.copy = directions.detach().clone()  # (m, D)
        self._met: tuple[Tensor, int | None] | None = directions, _version(directions)

    def same(self, directions: Tensor) -> bool:
        """Are these the directions? They are then known at once the next time."""
        if self._met is not None and self._met[0] is directions:
            version = self._met[1]
            if torch.compiler.is_compiling() or (version is not None and version == _version(directions)):
                return True
        kept = self.copy
        if (kept.shape, kept.dtype, kept.device) != (directions.shape, directions.dtype, directions.device):
            return False
        equal = torch.equal(kept, directions)
        self._met = (directions, _version(directions)) if equal else None
        return equal

    def __getstate__(self) -> dict[str, object]:
        return {"copy": self.copy, "_met": None}  # another process, or a copy, meets another tensor


def _version(tensor: Tensor) -> int | None:
    """How often a tensor was changed in place; None where torch does not count, as for tensors of inference mode."""
    return None if torch.compiler.is_compiling() or tensor.is_inference() else tensor._version
