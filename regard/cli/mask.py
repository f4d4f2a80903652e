"""`regard mask`: a mask expression, read and drawn."""

from __future__ import annotations

import ast
from collections.abc import Callable
from inspect import Parameter, signature
from operator import and_, or_
from typing import Any

import torch

from regard import masks
from regard.cli.commands import MaskOptions
from regard.cli.outputs import FIGURE_SUFFIXES, Terminal, check_output, write_figure
from regard.masks import FULL, PARTIAL, Mask

NAMES = (
    "causal", "window", "dilated", "prefix", "padding", "documents", "globals", "queries", "blocks", "random_blocks",
    "dense",
)  # fmt: skip
KNOWN: dict[str, Callable[..., Mask]] = {name: getattr(masks, name) for name in NAMES}

LONGEST = 20_000  # characters; Python's own parser needs memory in proportion
DEEPEST = 32  # levels; a mask is evaluated and printed by recursion, and every & or | is a level
LARGEST = 2**24  # more positions than are ever drawn; a document that long still fits the memory
_PAIRS = {ast.BitAnd: and_, ast.BitOr: or_}


def read_mask(text: str) -> Mask:
    """The mask of an expression such as `causal & window(2, 1)`. A ValueError shows the part that is not understood."""
    if len(text) > LONGEST:
        raise ValueError(f"mask of {len(text):,} characters: at most {LONGEST:,} are read")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    # A chain of ~ overflows Python's parser, which says so by MemoryError; a null byte is a ValueError.
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        why = error.msg if isinstance(error, SyntaxError) else str(error) or "nested too deeply"
        raise ValueError(f"cannot read the mask {_short(text)}: {why}; for example: causal & window(2, 1)") from None
    return _Reader(text.strip()).mask(tree.body, DEEPEST)


class _Reader:
    """Reads the tree of one text; keeps the text to show the part that is wrong."""

    def __init__(self, text: str) -> None:
        self.text = text

    def mask(self, node: ast.AST, levels: int) -> Mask:
        if levels == 0:
            raise ValueError(f"the mask {_short(self.text)} is nested deeper than {DEEPEST} levels")
        if isinstance(node, ast.BinOp) and type(node.op) in _PAIRS:
            left, right = self.mask(node.left, levels - 1), self.mask(node.right, levels - 1)
            return self.build(node, _PAIRS[type(node.op)], [left, right], {})
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
            return ~self.mask(node.operand, levels - 1)
        if isinstance(node, ast.Name):
            return self.build(node, self.function(node), [], {})
        if isinstance(node, ast.Call):
            function = self.function(node.func)
            arguments = [self.literal(argument) for argument in node.args]
            if any(keyword.arg is None for keyword in node.keywords):
                raise self.unknown(node, "arguments are written out, not unpacked by **")
            named = {str(keyword.arg): self.literal(keyword.value) for keyword in node.keywords}
            return self.build(node, function, arguments, named)
        worded = isinstance(node, ast.BoolOp) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))
        raise self.unknown(node, "&, | and ~ combine masks, not and, or and not" if worded else "")

    def function(self, node: ast.AST) -> Callable[..., Mask]:
        if not isinstance(node, ast.Name) or node.id not in KNOWN:
            raise self.unknown(node)
        return KNOWN[node.id]

    def build(self, node: ast.AST, make: Callable[..., Mask], arguments: list[Any], named: dict[str, Any]) -> Mask:
        try:
            mask = make(*arguments, **named)
            _ = mask.leading  # parts that disagree on batch or heads are reported here, not where they are drawn
            return mask
        # RuntimeError, OverflowError: what torch says of a list that is no tensor, or of one that memory cannot hold.
        except (TypeError, ValueError, RuntimeError, OverflowError, MemoryError) as error:
            how = ""
            if isinstance(error, TypeError) and make in KNOWN.values():  # how it is called, without types
                plain = signature(make)
                bare = [p.replace(annotation=Parameter.empty) for p in plain.parameters.values()]
                call = plain.replace(parameters=bare, return_annotation=Parameter.empty)
                how = f"; write {make.__name__}{call}"
            raise ValueError(f"mask {self.part(node)}: {str(error) or 'too large'}{how}") from None

    def literal(self, node: ast.AST) -> Any:
        if isinstance(node, ast.List | ast.Tuple):
            return [self.literal(element) for element in node.elts]
        minus = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
        constant = node.operand if isinstance(node, ast.UnaryOp) and minus else node
        if not isinstance(constant, ast.Constant) or not isinstance(constant.value, int | float | str | None):
            raise self.unknown(node, "arguments are numbers, True, False, None, 'text' or lists of them")
        value = constant.value
        if isinstance(value, int | float) and not abs(value) <= LARGEST:
            raise ValueError(f"mask {self.part(node)}: a number is at most {LARGEST:,}")
        if minus and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise self.unknown(node, "only a number has a minus")
        return -value if minus else value  # type: ignore[operator]

    def unknown(self, node: ast.AST, why: str = "") -> ValueError:
        inside = "" if self.part(node) == _short(self.text) else f" in {_short(self.text)}"
        why = why or f"the masks are {', '.join(KNOWN)}"
        return ValueError(f"mask: {self.part(node)}{inside} is not understood; {why}")

    def part(self, node: ast.AST) -> str:
        return _short(ast.get_source_segment(self.text, node) or ast.unparse(node))


def _short(text: str) -> str:
    """A text in quotes, on one line, its middle left out where it is long."""
    return repr(text if len(text) <= 60 else f"{text[:40]} … {text[-15:]}")


# -------------------------------------------------------------------------------------------------------------- drawing


TILE = 128  # what FlexAttention skips or computes whole
MOST_SIGNS = 48  # across a drawing
MOST_TILES = 2**24  # of all batch rows and heads: they are listed, one byte each
MOST_CELLS = 2**24  # of partial tiles that are looked at one by one: about a second


def mask(options: MaskOptions) -> None:
    """Draw who may look at whom."""
    check_output(options.figure, "--figure", FIGURE_SUFFIXES)
    value, nq = read_mask(options.spec), options.queries
    nk = nq if options.keys is None else options.keys
    _check_numbers(value, nk, options)
    if options.figure is not None:
        from regard.viz import figures

        drawn = figures.mask(value, (nq, nk), batch=options.batch, head=options.head, lang=options.lang)
        write_figure(drawn, options.figure)

    out, which = Terminal(options.lang), (options.batch, options.head)
    out.print((repr(value), "bold"), out.say("   {queries:,} queries × {keys:,} keys", queries=nq, keys=nk))
    if value.leading != (1, 1):
        shown = f"{which[0]}, {which[1]}"
        out.print(out.say("shown: batch, head {shown} of {leading}", shown=shown, leading=value.leading))
    side = len(str(nq)) + 2  # the ruler of the queries
    signs = MOST_SIGNS if out.room is None else max(1, min(MOST_SIGNS, (out.room - side + 1) // 2))
    size = max(options.tiles or 1, -(-max(nq, nk) // signs))
    out.print()
    _print_drawing(value.tiles(nq, nk, size)[which].tolist(), size, out)
    out.print()
    legend = [out.say("■ may look"), out.say("· hidden")]
    if size > 1:
        legend = [legend[0], out.say("▒ partly"), legend[1], out.say("one sign: {size} × {size} positions", size=size)]
    out.print(("   ".join(legend), "dim"))
    least, most = visible(value, nq, nk, *which)
    counted = f"{least:,}" if least == most else f"{least:,} – {most:,}"
    share = " – ".join(f"{100 * n / (nq * nk):.1f}%" for n in dict.fromkeys((least, most)))
    out.print(out.say("visible: {counted} of {cells:,} cells ({share})", counted=counted, cells=nq * nk, share=share))
    tile = options.tiles or TILE
    empty, partial, full = value.tiles(nq, nk, tile)[which].flatten().long().bincount(minlength=3).tolist()
    out.print(
        out.say(
            "tiles of {size} × {size}: {empty:,} empty, {partial:,} partial, {full:,} full",
            size=tile, empty=empty, partial=partial, full=full,
        )
    )  # fmt: skip
    out.name_files(figure=options.figure)


def _check_numbers(mask: Mask, nk: int, options: MaskOptions) -> None:
    nq, size = options.queries, TILE if options.tiles is None else options.tiles
    for option, number in (("--queries", nq), ("--keys", nk), ("--tiles", size)):
        if number < 1:
            raise ValueError(f"{option} must be at least 1, got {number}")
    for option, index, count in zip(("--batch", "--head"), (options.batch, options.head), mask.leading, strict=True):
        if not 0 <= index < count:
            raise ValueError(f"{option} {index} is out of range: {mask!r} has {count}, counted from 0")
    mask.fit(*mask.leading, nq, nk)
    count = mask.leading[0] * mask.leading[1] * -(-nq // size) * -(-nk // size)
    if count > MOST_TILES or max(nq, nk) > MOST_TILES:
        raise ValueError(
            f"{nq:,} × {nk:,} positions make {count:,} tiles of {size} × {size}; the limit is {MOST_TILES:,}: "
            "give fewer positions or larger --tiles"
        )


def visible(mask: Mask, nq: int, nk: int, batch: int = 0, head: int = 0) -> tuple[int, int]:
    """Lower and upper bound of the visible cells: the same number, unless there are too many partial tiles to count.

    Empty and full tiles of 128 × 128 are counted whole; N×N is never built.
    """
    kinds = mask.tiles(nq, nk, TILE)[batch, head]  # (Tq, Tk)
    rows, cols = (torch.arange(n) for n in (nq, nk))
    sizes = torch.outer(*(torch.bincount(index // TILE) for index in (rows, cols)))  # (Tq, Tk)
    full, partial = (int(sizes[kinds == kind].sum()) for kind in (FULL, PARTIAL))
    if partial > MOST_CELLS:
        return full, full + partial
    see = mask.bind(nq, nk, torch.device("cpu"), torch.float32)
    b, h = torch.tensor(batch), torch.tensor(head)
    for start, kind in zip(range(0, nq, TILE), kinds, strict=True):
        own = rows[start : start + TILE]
        some = cols[(kind == PARTIAL)[cols // TILE]]  # the keys of this row's partial tiles
        full += int(torch.as_tensor(see(b, h, own.view(-1, 1), some)).expand(len(own), len(some)).sum())
    return full, full


def _print_drawing(kinds: list[list[int]], size: int, out: Terminal) -> None:
    """Signs with a ruler of positions: above for the keys, at the side for the queries."""
    across = max(len(kinds), len(kinds[0]))
    step = 1 if (across - 1) * size < 10 else 2 if across <= 10 and across * size < 1000 else 5
    side = len(str((len(kinds) - 1) // step * step * size))
    places = range(0, len(kinds[0]), step)
    ruler = "".join(f"{place * size:<{2 * step}}" for place in places if (across - place) * 2 > len(str(place * size)))
    out.print((f"{'':{side}}  {ruler}", "dim"))
    for number, row in enumerate(kinds):
        label = "" if number % step else str(number * size)
        out.print((f"{label:>{side}}  ", "dim"), " ".join("·▒■"[kind] for kind in row))
