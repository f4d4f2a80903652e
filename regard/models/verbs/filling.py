"""What could stand at a text's mask tokens, and how likely. It does not know any family or tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from regard import tables
from regard.models.model import Model
from regard.models.verbs.asking import one, probabilities, require, result_of

__all__ = ["Filled", "Guess", "fill"]


@dataclass(frozen=True)
class Guess:
    """A token that could stand at a mask, as people read it, and how likely it is."""

    token: str
    id: int
    probability: float


@dataclass(frozen=True, repr=False)
class Filled:
    """Guesses for each mask of a text, likeliest first; prints as a table.

    >>> Filled("Paris is [MASK].", ((Guess("big", 7, 0.625), Guess("far", 11, 0.25)),), "paris is big.")
    mask  token  probability
    ────  ─────  ───────────
    0     big    0.6250
          far    0.2500

    text: as asked.  blanks: the guesses of each mask, in order.  best: the text with the likeliest in their places, as
    the tokenizer writes it.
    """

    text: str
    blanks: tuple[tuple[Guess, ...], ...]
    best: str

    def _rows(self) -> list[list[str]]:
        return [
            ["" if rank else str(n), guess.token, f"{guess.probability:.4f}"]
            for n, guesses in enumerate(self.blanks)
            for rank, guess in enumerate(guesses)
        ]

    def __repr__(self) -> str:
        return tables.text(["mask", "token", "probability"], self._rows())

    def _repr_html_(self) -> str:
        return tables.html(["mask", "token", "probability"], self._rows())


def fill(model: Model, text: str, top: int = 5) -> Filled:
    """The `top` likeliest tokens for each mask of a text; see `Model.fill`."""
    require(model, "fill", "fill", "pretrain")
    if not isinstance(top, int) or isinstance(top, bool) or top < 1:
        raise ValueError(f"top must be a whole number of at least 1, got {top!r}")
    tokenizer = model.tokenizer
    mask = tokenizer.ids_of.mask
    if mask is None:
        raise ValueError(f"the tokenizer of this {model.family.title} has no mask token, so there is nothing to fill")
    batch = one(model, text)
    places = (batch.ids[0] == mask).nonzero().flatten()  # (masks,)
    if not len(places):
        raise ValueError(f"the text has no mask: write {tokenizer.tokens([mask])[0]} where a word is to be found")
    logits = result_of(model, batch).logits
    assert logits is not None
    chances = probabilities(logits[0, places])[:, : tokenizer.size]  # (masks, V); rows beyond are no tokens
    found = chances.topk(min(top, chances.shape[1]))
    blanks = tuple(
        tuple(Guess(*guess) for guess in zip(tokenizer.tokens(ids), ids.tolist(), values.tolist(), strict=True))
        for ids, values in zip(found.indices, found.values, strict=True)
    )
    filled = batch.ids[0].cpu().clone()
    filled[places.cpu()] = torch.tensor([guesses[0].id for guesses in blanks])
    return Filled(text, blanks, tokenizer.decode(filled))
