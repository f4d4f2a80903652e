"""One number per head of a view: the mean of a measure, or the score of a pattern; and which of them a view can tell.

It does not know captures.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from typing import Any

import torch
from torch import Tensor

from regard.lens.view import PER_QUERY, View

__all__ = ["known_values", "no_such_value", "per_head", "table_of"]


BY_TOKEN = ("delimiter", "same token", "induction")


def per_head(view: View, measure: str) -> Tensor:
    """One number per head, (B, H): a measure's mean over the queries, or a pattern's score.

    >>> import regard
    >>> x = torch.zeros(1, 2, 4, 3)
    >>> per_head(regard.look(x, x, x), "entropy")
    tensor([[1.3863, 1.3863]])

    measure: "entropy", "effective", "max_logit", "lse", or a pattern's name. Raises LookupError where it is not known.
    """
    plain = (
        view if view.lead is None and not view.numpy else View(view.sizes, view.held, place=view.place, kind=view.kind)
    )
    if measure in PER_QUERY:  # an overview keeps the means, which its pooled numbers no longer give
        found: Any = plain.held[f"mean {measure}"] if f"mean {measure}" in plain.held else plain.mean(measure)
    else:
        scores = plain.patterns()
        if measure not in scores:
            raise LookupError(no_such_value(measure, known_values(plain)) + _why_no_pattern(measure, view))
        found = scores[measure]
    assert isinstance(found, Tensor)
    return found


def known_values(view: View) -> list[str]:
    """The measures and patterns that `per_head` can tell of a view.

    >>> import regard
    >>> x = torch.zeros(1, 2, 4, 3)
    >>> known_values(regard.look(x, x, x))[:4]
    ['lse', 'entropy', 'max_logit', 'effective']
    """
    held, exact = view.held, view.weights is not None
    told = [n for n in PER_QUERY if f"mean {n}" in held or (n in held and n not in view.pooled)]
    told += [n for n in ("entropy", "effective") if exact and n not in told]
    scored = exact or any(name.startswith("pattern ") for name in held)
    return [*told, *(view.patterns() if scored else ())]


def no_such_value(measure: str, known: Sequence[str]) -> str:
    """What to say where a measure is not known.

    >>> no_such_value("nope", ["entropy", "own", "own"])
    "no measure or pattern 'nope' here; there are entropy, own"
    """
    return f"no measure or pattern {measure!r} here; there are {', '.join(dict.fromkeys(known)) or 'none'}"


def _why_no_pattern(measure: str, view: View) -> str:
    """What a pattern that goes by token lacks, as the end of a message; "" for any other name."""
    if measure not in BY_TOKEN:
        return ""
    if view.kind == "cross" and measure != "delimiter":
        return f"; {measure!r} compares the tokens of one sequence, and this is cross-attention"
    if view.tokens.ids is None:
        return f"; {measure!r} goes by token: pass tokens= to watch, one for each of the {view.sizes[3]} keys"
    if measure == "delimiter":
        return "; none of the tokens= is a delimiter, such as '.' or '[SEP]': pass them as words, not numbers"
    return ""


def table_of(rows: Sequence[Tensor | None], heads: int) -> Tensor:
    """Rows of numbers (at most `heads` each) as one table (rows, heads), NaN where there is none.

    >>> table_of([torch.ones(1), None], 2)
    tensor([[1., nan],
            [nan, nan]])
    """
    whole = torch.full((len(rows), heads), nan)
    for line, row in zip(whole, rows, strict=True):
        if row is not None:
            line[: len(row)] = row
    return whole
