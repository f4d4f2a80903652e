"""The layers that an explorer shows: each attention module of a capture, or each of its runs where it has several.

A module that stands in several places of a model, as ALBERT's one block does, is called once for each: these are layers
of their own here. The steps of one generation are one layer. Attention that is cut into windows (Swin) is one layer,
whose tokens count through its windows: token i of window w is w · N + i.

Axis letters: B batch, H heads, N positions (Nq queries, Nk keys), W windows.

It does not know sessions.
"""

from __future__ import annotations

from dataclasses import dataclass

from regard.layouts import Sides
from regard.lens.capture import Capture, Ran
from regard.lens.describing import plain
from regard.lens.view import View

__all__ = ["SeenLayer", "seen_layers"]


@dataclass(frozen=True, eq=False)
class SeenLayer:
    """One attention of a model.

    path: of its module.  call: the number of its first call, where the module has several runs; else None.
    view: what it did, on torch, with axes (B, H, …).  records: its calls by their number in the capture.
    sides: what the tokens of the first batch entry are and where they lie in a picture; None where nobody said.
    """

    path: str
    call: int | None
    view: View
    records: tuple[int, ...]
    sides: Sides | None = None

    @property
    def windows(self) -> int:
        """W, the batch rows that the first batch entry is cut into; 1 where it is not."""
        return 1 if self.sides is None else self.sides.queries.shape[0]

    @property
    def sizes(self) -> tuple[int, int]:
        """How many queries and keys there are in all windows."""
        return self.windows * self.view.sizes[2], self.windows * self.view.sizes[3]


def seen_layers(capture: Capture) -> tuple[SeenLayer, ...]:
    """The layers of a capture in the order of their first calls.

    >>> import torch, regard
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> with regard.watch(layer) as seen:
    ...     _ = layer(layer(torch.zeros(1, 3, 8)))
    >>> [(layer.path, layer.call) for layer in seen_layers(seen)]
    [('self_attn', 0), ('self_attn', 1)]
    """
    number = {id(record): n for n, record in enumerate(capture.records)}
    return tuple(
        SeenLayer(run.path, run.call, plain(run.view), tuple(number[id(r)] for r in run.records), _sides(capture, run))
        for run in capture.runs()
    )


def _sides(capture: Capture, run: Ran) -> Sides | None:
    """What the tokens of a run are, in the first batch entry."""
    if run.path not in capture.layouts or not (run.call is None or len(run.records) == 1):
        return None
    placed = (capture[run.path] if run.call is None else capture[run.path, run.call]).placed
    return placed.entry(0)[0] if placed.sides else None
