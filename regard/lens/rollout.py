"""Attention followed through the layers: rollout, and relevance by gradients; streamed, without an N×N matrix.

Both are products of one matrix per layer, (N, N): the row of one token is a vector × matrix pass per layer, from the
last to the first, over some query rows at a time. Rows that the vector does not reach are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import groupby
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from regard.checks import index_among, part_of_axis
from regard.layouts import Layout, Sides
from regard.lens.measures.weights import Part
from regard.lens.overlays import HOW, Overlay, Token, TokenPlacement, find_token, make_overlay
from regard.lens.values import Attribution
from regard.lens.view import View
from regard.locale import translate

if TYPE_CHECKING:
    from regard.lens.capture import Capture, ModuleRun

__all__ = ["TokenFlow", "relevance", "rollout"]

Heads = Literal["mean", "max"]

Tokens = int | str | slice | range | Sequence[int] | None
"""One token, by its index, word or kind ("cls"); or several, by their indices."""

AT_ONCE = 1 << 24  # weights held at once
MOST_CELLS = 1 << 26  # of all rows together, B · tokens · N: 256 MiB in fp32, one matrix of 8,192 tokens


@dataclass(repr=False, eq=False)
class TokenFlow(Attribution):
    """What reaches tokens from the input through all layers: the result of `Capture.rollout` and `Capture.relevance`.

    Prints as a table of the strongest tokens.

    Attributes:
        scores: (B, N) one number per input position; (B, n, N) for several tokens or the matrix.
        title: what the scores are.
        how: "heuristic": a product of weights is no measured effect.
        words: the tokens as text, a row per batch entry or one for all, or None.
        rows: names of the tokens asked for.
        tokens: (n,) their positions.
        layers: names of the runs that took part, first to last.
        sides: layouts of the tokens in an image, one for all batch entries or one each; empty if unknown.
    """

    tokens: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    layers: tuple[str, ...] = ()
    sides: tuple[Sides, ...] = ()

    def overlay(self, image: object = None, token: Token = None, *, batch: int = 0, image_index: int = 0) -> Overlay:
        """The scores of a token on the image that the tokens are patches of. Other tokens are in its `shares`.

        Args:
            image: a Pillow image or an array to draw on; default blank paper.
            token: which of the tokens asked for; needed if there are several.
            batch: which batch entry.
            image_index: which of the entry's images.

        Raises:
            LookupError: if the layouts are not known (`capture.layouts`), or the token is not one of those asked for.
            IndexError: if there is no such batch entry or image.
        """
        if not self.sides:
            raise LookupError(f"it is not known where the tokens of these layers lie: {HOW}")
        if token is None:
            if len(self.tokens) != 1:
                raise LookupError(f"which of the {len(self.tokens)} tokens? Name it: overlay(token=…)")
            token = int(self.tokens[0])
        count, n = self.scores.shape[0], self.scores.shape[-1]
        rows = _ScoreRows(self.scores.reshape(count, 1, -1, n), self.tokens)
        view = View(rows.sizes, {}, weights=rows, placed=TokenPlacement(sides=self.sides, words=self.words))
        drawn = make_overlay(view, image, token, batch=batch, image_index=image_index)
        name = self.title.partition(",")[0]
        titles = {
            lang: f"{translate(name, lang)} ({translate(self.how, lang)}): {title.partition(': ')[2]}"
            for lang, title in drawn.titles.items()
        }
        return replace(drawn, titles=titles, quantity="score")


class _ScoreRows:
    """The scores of some tokens as rows of an N×N matrix, for an overlay."""

    def __init__(self, scores: Tensor, tokens: Tensor) -> None:
        self._scores, self._tokens = scores, tokens.tolist()  # (B, 1, n, N)
        self.sizes = (scores.shape[0], 1, scores.shape[-1], scores.shape[-1])

    def tile(self, rows: Part, cols: Part) -> Tensor:
        wanted = torch.arange(self.sizes[2])[rows].tolist()
        if other := [i for i in wanted if i not in self._tokens]:
            listed = ", ".join(map(str, self._tokens[:6])) + (", …" if len(self._tokens) > 6 else "")
            raise LookupError(f"token {other[0]} was not asked for, but {listed}")
        return self._scores[:, :, [self._tokens.index(i) for i in wanted]][..., cols]

    def pairs(self, keys: Tensor) -> Tensor:
        raise LookupError("single pairs of a rollout are read from its scores")


def rollout(capture: Capture, token: Tokens, *, layers: object, heads: str, residual: float, matrix: bool) -> TokenFlow:
    """Attention rollout. See `Capture.rollout` for the arguments."""
    if heads not in ("mean", "max"):
        raise ValueError(f"heads must be 'mean' or 'max', got {heads!r}")
    if isinstance(residual, bool) or not isinstance(residual, (int, float)):
        raise TypeError(f"residual must be a number from 0 to 1, got {type(residual).__name__}")
    if not 0 <= residual <= 1:
        raise ValueError(f"residual is the share of the residual connection, from 0 to 1; got {residual}")

    def mixed(view: View, rows: Tensor) -> Tensor:
        weights: Tensor = view.tile(rows.tolist(), slice(None))
        joined = weights.mean(1) if heads == "mean" else weights.amax(1)
        at = rows.to(joined.device)
        joined = joined * (1.0 - residual)
        joined[:, torch.arange(len(at), device=at.device), at] += residual
        total = joined.sum(-1, keepdim=True)  # of a row that sees nothing, or shares with a sink, less than 1
        return joined / torch.where(total == 0, 1.0, total)

    title = f"rollout, {heads} over heads, residual {residual:g}"
    return _follow(capture, token, layers, matrix, "rollout", title, mixed, keeps=False)


def relevance(capture: Capture, token: Tokens, *, layers: object, matrix: bool) -> TokenFlow:
    """Relevance by gradients. See `Capture.relevance` for the arguments."""

    def mixed(view: View, rows: Tensor) -> Tensor:
        return view.weighted_gradient_tile(rows, "relevance").clamp(min=0).mean(1)

    return _follow(capture, token, layers, matrix, "relevance", "relevance by gradients", mixed, keeps=True)


def _follow(
    capture: Capture,
    token: Tokens,
    layers: object,
    matrix: bool,
    name: str,
    title: str,
    mixed: Callable[[View, Tensor], Tensor],
    *,
    keeps: bool,
) -> TokenFlow:
    """Rows of a product over the layers: r ← r·M, or r + r·M if `keeps`; mixed(view, rows) gives rows (B, rows, Nk)."""
    # 1. The layers, and the tokens whose rows are wanted.
    runs = _chain(capture, layers, name)
    batch, _, n, _ = runs[0].view.sizes
    path = runs[-1].path
    sides = capture.layouts.get(path, ())
    if sides and sides[0].queries.shape[0] > 1:
        raise LookupError(f"the tokens of {path!r} are cut into windows, so its layers are not one sequence")
    if len(sides) not in (1, batch) or not all(side.queries.shape == (1, n) for side in sides):
        sides = ()
    tokens, single = _read_tokens(token, matrix, n, capture, sides, name)
    if (count := batch * len(tokens) * n) > MOST_CELLS:
        raise ValueError(
            f"{name} of {len(tokens)} tokens over {n} positions in {batch} batch rows takes {count:,} numbers, and at "
            f"most {MOST_CELLS:,} are made: ask for one token, or for some of them as {name}(slice(0, 64))"
        )
    # 2. One pass per layer, from the last to the first.
    scores = torch.zeros(batch, len(tokens), n, dtype=torch.float64)
    scores[:, torch.arange(len(tokens)), tokens] = 1.0
    for run in reversed(runs):
        view = run.view
        before, scores = scores, scores.clone() if keeps else torch.zeros_like(scores)
        reached = (before != 0).any(0).any(0).nonzero().view(-1).cpu()
        at_once = max(1, AT_ONCE // max(1, batch * view.sizes[1] * view.sizes[3]))
        for rows in torch.split(reached, at_once):
            part = mixed(view, rows)  # (B, rows, Nk)
            if part.shape[-1] > n and bool((part[..., n:] != 0).any()):
                raise LookupError(f"{run.name!r} looks at keys beyond its own {n} tokens, so {name} cannot follow it")
            if scores.dtype != part.dtype or scores.device != part.device:
                before, scores = before.to(part), scores.to(part)
            scores = scores + before[..., rows.to(before.device)] @ part[..., :n]
    # 3. The result, with names for its rows.
    words = None if capture.tokens is None or len(capture.tokens[0]) != n else capture.tokens
    names = tuple(str(i) if words is None else f"{words[0][i].strip()} ({i})" for i in tokens.tolist())
    title += f", over {len(runs)} layer{'s' if len(runs) > 1 else ''}{f' to {names[0]}' if single else ''}"
    return TokenFlow(
        scores[:, 0] if single else scores,
        title,
        "heuristic",
        words,
        ("",) if single else names,
        tokens,
        tuple(run.name for run in runs),
        sides,
    )


def _chain(capture: Capture, layers: object, name: str) -> list[ModuleRun]:
    """The runs of self-attention to follow, in order. Raises LookupError if they do not make one chain."""
    # 1. Those selected.
    paths = capture.names
    if not paths:
        raise LookupError("no attention was seen")
    chosen: Sequence[object] = () if layers is None else (layers,) if isinstance(layers, (str, int)) else list(layers)  # type: ignore[call-overload]
    selected = set[str]()
    for selector in chosen:
        if isinstance(selector, int):
            selected.add(paths[index_among("layers", selector, len(paths), "modules")])
            continue
        if not isinstance(selector, str):
            raise TypeError(f"layers must be path patterns such as 'encoder.*' or numbers, got {selector!r}")
        matching = [path for path in paths if fnmatchcase(path, selector)]
        if not matching:
            raise LookupError(f"layers={selector!r} matches none of {', '.join(paths[:4])}{', …' if paths[4:] else ''}")
        selected.update(matching)
    runs = [run for run in capture.runs() if layers is None or run.path in selected]
    pick = f"pick the layers of one sequence: {name}(token, layers='encoder.*')"
    if crossing := [run.name for run in runs if run.view.kind == "cross"]:
        if layers is not None:
            raise LookupError(f"{crossing[0]!r} is cross-attention, and {name} follows one sequence only; {pick}")
        raise LookupError(f"the model has cross-attention ({crossing[0]!r}), so there are two sequences; {pick}")
    if not runs:
        raise LookupError(f"layers is empty; {pick}")
    # 2. They must be layers of one pass over one sequence.
    order = [path for path, _ in groupby(run.path for run in runs)]  # a layer used twice in a row may be a shared one
    if len(order) > len(set(order)):
        again = next(path for at, path in enumerate(order) if path in order[:at])
        raise LookupError(f"{again!r} ran again after other layers: watch one forward pass of the model in a block")
    sizes = {(run.view.sizes[0], run.view.sizes[2]) for run in runs}
    if len(sizes) > 1:
        some = " and ".join(f"{n} tokens in {batch} batch rows" for batch, n in sorted(sizes)[:3])
        raise LookupError(f"the layers have {some}, so they are not one sequence; {pick}")
    for run in runs:
        _, _, nq, nk = run.view.sizes
        if nq != nk and not (nq < nk and isinstance(run.view.place.offset, int) and run.view.place.offset == 0):
            raise LookupError(
                f"{run.name!r} has {nq} queries and {nk} keys: {name} needs every token as a query; put the whole "
                "generation, prompt included, into the block"
            )
    return runs


def _read_tokens(
    token: Tokens, matrix: bool, n: int, capture: Capture, sides: tuple[Sides, ...], name: str
) -> tuple[Tensor, bool]:
    """The positions asked for, (tokens,), and whether it is one."""
    if (token is None) != bool(matrix):
        raise ValueError(f"{name} takes either a token or matrix=True, got token={token!r} and matrix={matrix!r}")
    if matrix:
        return torch.arange(n), False
    if isinstance(token, str):
        layout = sides[0].queries if sides else Layout.text(n)
        return torch.tensor(
            [find_token(layout, token, capture.tokens[0] if capture.tokens else None, "query")[1]]
        ), True
    if isinstance(token, (slice, range, list, tuple, Tensor)):
        part = part_of_axis("token", token, n, "tokens")
        return torch.arange(n)[part], False
    return torch.tensor([index_among("token", token, n, "tokens")]), True
