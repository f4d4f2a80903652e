"""What a token is called, whatever it is: a word, a patch by its row and column, or its kind.

It does not know how a label is shown.
"""

from __future__ import annotations

from regard.explorer.seen_layers import SeenLayer
from regard.explorer.sessions import Session
from regard.layouts import Layout
from regard.lens.placed_patches import Patches, name_kind

__all__ = ["key_label", "query_label"]


def key_label(session: Session, layer: int, key: int) -> str:
    """The label of a key of a layer, "" where nobody knows one.

    >>> from regard.lens.capture import Capture
    >>> key_label(Session("toy", Capture(), ("a", "b")), 0, 1)
    'b'
    """
    seen = session.layers[layer] if layer < len(session.layers) else None
    if seen is None or seen.sides is None:
        fits = seen is None or seen.sizes[1] == len(session.tokens)  # else they are another sequence's words
        return session.tokens[key] if fits and key < len(session.tokens) else ""
    return _placed(session, seen, seen.sides.keys, key)


def query_label(session: Session, layer: int, query: int) -> str:
    """The label of a query of a layer of which it is known what its tokens are; "" for one that has no label."""
    seen = session.layers[layer]
    return "" if seen.sides is None else _placed(session, seen, seen.sides.queries, query)


def _placed(session: Session, seen: SeenLayer, layout: Layout, number: int) -> str:
    assert seen.sides is not None
    window, index = divmod(number, layout.shape[1])
    kind, picture = str(layout.kind[window, index]), int(layout.picture[window, index])
    if kind == "text":
        return session.tokens[index] if layout.kind.size == len(session.tokens) else ""
    if kind == "patch":
        patches = Patches(layout, seen.sides.frames[picture], picture)
        own = patches.number((window, index))
        assert own is not None
        row, column = patches.cells[own].tolist()
        return f"({row}, {column})"
    return name_kind(layout, (window, index))
