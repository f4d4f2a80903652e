"""The layers that an explorer shows: each attention module of a capture, or each of its runs where it has several.

A module that stands in several places of a model, as ALBERT's one block does, is called once for each: these are layers
of their own here. The steps of one generation are one layer.

It does not know sessions.
"""

from __future__ import annotations

from dataclasses import dataclass

from regard.lens.assembling import assemble
from regard.lens.capture import Capture, Record
from regard.lens.describing import plain
from regard.lens.runs import by_sizes, runs_of
from regard.lens.view import View

__all__ = ["SeenLayer", "seen_layers"]


@dataclass(frozen=True, eq=False)
class SeenLayer:
    """One attention of a model.

    path: of its module.  call: the number of its first call, where the module has several runs; else None.
    view: what it did, on torch, with axes (B, H, …).  records: its calls by their number in the capture.
    """

    path: str
    call: int | None
    view: View
    records: tuple[int, ...]


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
    found = [layer for path in capture.names for layer in _of_module(path, capture.calls(path), number)]
    return tuple(sorted(found, key=lambda layer: layer.records[0]))


def _of_module(path: str, records: list[Record], number: dict[int, int]) -> list[SeenLayer]:
    views = [plain(record.view) for record in records if record.view is not None]
    links = [record.link for record in records if record.link is not None]
    if len(links) < len(records):
        links = by_sizes([view.sizes for view in views], records[0].kind)
    runs = runs_of(links)
    if any(view.pooled for view in views):  # pooled measures cannot be put together
        runs = [[n] for n in range(len(records))]
    layers = []
    for run in runs:
        whole = plain(assemble([views[n] for n in run], [links[n] for n in run]))
        call = run[0] if len(runs) > 1 else None
        layers.append(SeenLayer(path, call, whole, tuple(number[id(records[n])] for n in run)))
    return layers
