"""Masks as one types them: `causal & padding([3, 5])`, read without running anything but the functions of regard.masks.

    >>> read_mask("window(2, 0) | globals([0])")
    window(2, 0) | globals([0])
    >>> read_mask("~prefix(3)") == ~masks.prefix(3)
    True

The language: the names below, called with literals (integers, True, False, None, "left", lists of them) and keyword
arguments; `&`, `|`, `~` and parentheses; a name alone where no argument is needed. Nothing else is read: no attribute,
no other name, no arithmetic. This file does not know sizes: whether a mask fits is said where it is used.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from inspect import Parameter, signature
from operator import and_, or_
from typing import Any

from regard import masks
from regard.masks import Mask

__all__ = ["KNOWN", "read_mask"]

KNOWN: dict[str, Callable[..., Mask]] = {
    "causal": masks.causal,
    "window": masks.window,
    "dilated": masks.dilated,
    "prefix": masks.prefix,
    "padding": masks.padding,
    "documents": masks.documents,
    "globals": masks.globals,
    "queries": masks.queries,
    "blocks": masks.blocks,
    "random_blocks": masks.random_blocks,
    "dense": masks.dense,
}
"""The names of the language."""

LONGEST = 20_000  # signs; Python's own parser needs memory in proportion
DEEPEST = 32  # levels; a mask is evaluated and printed by recursion, and every & or | is a level
LARGEST = 2**24  # more positions than are ever drawn; a document that long still fits the memory
_PAIRS = {ast.BitAnd: and_, ast.BitOr: or_}


def read_mask(text: str) -> Mask:
    """The mask that a text describes.

    >>> print(read_mask("causal").draw(2))
    ■ ·
    ■ ■

    text: an expression such as `causal & window(2, 1)`.

    Raises ValueError that shows the part that was not understood, and the names there are.
    """
    if len(text) > LONGEST:
        raise ValueError(f"mask of {len(text):,} signs: at most {LONGEST:,} are read")
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
            return self.made(node, _PAIRS[type(node.op)], [left, right], {})
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
            return ~self.mask(node.operand, levels - 1)
        if isinstance(node, ast.Name):
            return self.made(node, self.function(node), [], {})
        if isinstance(node, ast.Call):
            return self.called(node)
        raise self.unknown(node, "&, | and ~ combine masks, not and, or and not" if _is_worded(node) else "")

    def called(self, node: ast.Call) -> Mask:
        function = self.function(node.func)
        arguments = [self.literal(argument) for argument in node.args]
        if any(keyword.arg is None for keyword in node.keywords):
            raise self.unknown(node, "arguments are written out, not unpacked by **")
        named = {str(keyword.arg): self.literal(keyword.value) for keyword in node.keywords}
        return self.made(node, function, arguments, named)

    def function(self, node: ast.AST) -> Callable[..., Mask]:
        if not isinstance(node, ast.Name) or node.id not in KNOWN:
            raise self.unknown(node)
        return KNOWN[node.id]

    def made(self, node: ast.AST, make: Callable[..., Mask], arguments: list[Any], named: dict[str, Any]) -> Mask:
        try:
            mask = make(*arguments, **named)
            _ = mask.leading  # parts that disagree on batch or heads are told here, not where they are drawn
            return mask
        # RuntimeError, OverflowError: what torch says of a list that is no tensor, or of one that memory cannot hold.
        except (TypeError, ValueError, RuntimeError, OverflowError, MemoryError) as error:
            how = f"; write {_usage(make)}" if isinstance(error, TypeError) and make in KNOWN.values() else ""
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


def _is_worded(node: ast.AST) -> bool:
    return isinstance(node, ast.BoolOp) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))


def _usage(make: Callable[..., Mask]) -> str:
    """How a function is called: its name and arguments, without types."""
    plain = signature(make)
    bare = [p.replace(annotation=Parameter.empty) for p in plain.parameters.values()]
    return f"{make.__name__}{plain.replace(parameters=bare, return_annotation=Parameter.empty)}"


def _short(text: str) -> str:
    """A text in quotes, on one line, its middle left out where it is long."""
    return repr(text if len(text) <= 60 else f"{text[:40]} … {text[-15:]}")
