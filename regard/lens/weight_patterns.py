"""`patterns`: which known patterns a matrix of attention weights follows, whoever computed it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from regard import tables
from regard.lens.measures.weights import StoredWeights
from regard.lens.patterns import CALLED, MEANING, label, measure
from regard.lens.validity import check
from regard.lens.view import KeyTokens, KnownVisibility
from regard.locale import Lang, check_lang, translate
from regard.masks import as_mask

__all__ = ["PatternShares", "patterns"]

Kind = Literal["self", "cross"]


@dataclass(frozen=True, repr=False)
class PatternShares:
    """The result of `patterns`. Prints as a table in the terminal and in a notebook; `text(lang="ko")` in Korean.

    Attributes:
        shares: pattern → its share in [0, 1]: a float for one matrix, an array (H,) of the weights' kind for several.
        labels: of each head, the patterns that reach their threshold (0.5; 0.9 for "uniform"), strongest first.
    """

    shares: dict[str, Any]
    labels: tuple[tuple[str, ...], ...]

    def __getitem__(self, name: str) -> Any:
        return self.shares[name]

    def __repr__(self) -> str:
        return self.text()

    def text(self, lang: Lang = "en") -> str:
        """The table as text, in English ("en") or Korean ("ko"). Raises ValueError for another language."""
        return tables.text(*self._table(lang))

    def _repr_html_(self) -> str:
        return tables.html(*self._table("en"))

    def _table(self, lang: Lang) -> tuple[list[str], list[list[str]], list[int]]:
        """A row per pattern with its meaning for one matrix; a row per head for several."""
        check_lang(lang)
        called, meaning = CALLED[lang], MEANING[lang]
        first = next(iter(self.shares.values()))
        if isinstance(first, float):
            headers = translate("pattern|share|meaning", lang).split("|")
            return headers, [[called[n], f"{share:.3f}", meaning[n]] for n, share in self.shares.items()], [1]
        columns = [called[name] for name in self.shares]
        headers = [translate("head", lang), *columns, translate("labels", lang)]
        rows = [
            [str(h), *(f"{float(share[h]):.3f}" for share in self.shares.values()), ", ".join(called[n] for n in names)]
            for h, names in enumerate(self.labels)
        ]
        return headers, rows, list(range(1, len(columns) + 1))


def patterns(weights: Any, *, mask: object = None, kind: Kind = "self") -> PatternShares:
    """The share of all attention that follows each known pattern: own position, neighbours, first token and others.

    >>> import numpy as np
    >>> from regard.masks import causal
    >>> found = patterns(np.array([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.1, 0.1, 0.8]]), mask=causal())
    >>> found
    pattern     share  meaning
    ──────────  ─────  ─────────────────────────────────────────────────────────────────────────────────────────
    own         0.767  looks at its own position
    previous    0.200  looks at the position before
    next        0.000  looks at the position after
    first       0.533  rests on the first token, such as [CLS]
    neighbours  0.233  looks at the two positions before and the two after, its own left out
    uniform     0.791  looks at everything it sees about equally: its entropy as a share of the largest possible
    >>> found["own"], found.labels
    (0.7666666666666666, (('own', 'first'),))

    A weight counts for every pattern that it fits: for query 0, the first token is its own position. These are the
    measures by which `regard.watch` labels the heads of a model; `regard.look(q, k, v)` has them without the matrix.

    Args:
        weights: (N, M), or (H, N, M) for several heads; floats, NumPy or torch, each row 0 or summing to 1.
        mask: the mask that they were computed with, as in `regard.attention`: "uniform" compares with the keys that a
            query sees. Default: it sees all.
        kind: "self", where the queries are the last N of the M positions; or "cross", where queries and keys are two
            sequences, and only "first" and "uniform" mean anything.

    Returns:
        The shares, by pattern; prints as a table.

    Raises:
        TypeError: weights that are not floats, or a mask of another kind.
        ValueError: another number of axes, no query or no key, rows that are no attention weights, a weight on a key
            that the mask hides, another kind, or more queries than keys in self-attention.
    """
    if kind not in get_args(Kind):
        raise ValueError(f"kind must be 'self' or 'cross', got {kind!r}")
    report = check(weights)
    if weights.ndim not in (2, 3) or 0 in weights.shape:
        hint = "; choose a batch row with weights[b]" if weights.ndim == 4 else ""
        raise ValueError(f"weights must be (N, M) or (H, N, M), not empty; got {tuple(weights.shape)}{hint}")
    report.raise_if_bad()
    nq, nk = weights.shape[-2:]
    if kind == "self" and nq > nk:
        raise ValueError(f"self-attention has no more queries than keys, got {nq} × {nk}; kind='cross' takes any")
    tensor = weights.detach() if isinstance(weights, Tensor) else torch.from_numpy(np.array(weights, dtype=np.float64))
    heads = tensor.to(torch.promote_types(tensor.dtype, torch.float32)).reshape(1, -1, nq, nk)
    hiding, visible = as_mask(mask, tuple(heads.shape)), torch.full((1, 1, nq), nk)
    if hiding is not None:
        hiding.fit(*heads.shape)
        cells = hiding.dense(nq, nk).reshape(*hiding.leading, nq, nk).to(heads.device)
        if (heads.masked_fill(cells, 0) != 0).any():
            raise ValueError(
                f"{hiding!r} hides keys that have weight: give the mask that the weights were computed with"
            )
        visible = cells.sum(-1)
    shares = measure(
        StoredWeights(heads),
        KnownVisibility(),
        KeyTokens(),
        kind=kind,
        entropy=torch.special.entr(heads).sum(-1),
        visible=visible,
    ).shares
    if weights.ndim == 2:
        values: dict[str, Any] = {name: float(share) for name, share in shares.items()}
    else:
        values = {name: share[0] if isinstance(weights, Tensor) else share[0].numpy() for name, share in shares.items()}
    return PatternShares(values, tuple(tuple(names) for names in label(shares)[0]))
