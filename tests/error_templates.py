"""The templates of the error messages of the package, read from its source; a command that lists untranslated ones.

    python tests/error_templates.py

A template is a message with {} for each value in it. A value that is a phrase of ours, such as a reason, has templates
of its own: those of the texts that the code may put there.
"""

from __future__ import annotations

import ast
import json
import re
import string
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "regard"
FIELD = re.compile(r"\{(\d+)(?::([^{}]*))?\}")
# Calls whose argument of this number is a message, besides classes that end in Error.
MESSAGES = {"RefusedError": 1, "HTTPException": 1, "warn": 0, "_complain": 0}
# Functions that return messages, and names under which reasons are kept for one: variables, fields and arguments.
REASONS = re.compile(r"\w*unsupported_reason|_why_nothing|_explain|misfit|how|conversion")
KEPT = re.compile(r"reasons|trouble|lacking|without_\w+|why_\w+")
DEEPEST = 4
NAMES = ("{} and {}", "{} or {}", "{} is {}", "regard", "code", "markdown", "PostScript")
COMMAND = r"pip install .+|regard (look|serve) photo.*|regard (effect|fetch korean)"
CODE = re.compile(rf"--\S+( \S+)?|{COMMAND}|\w+=\[.*|[a-z]+\.\S+\(\S*\)")


@dataclass(frozen=True)
class Field:
    """A value in a message; `options` are the phrases that the code may put there."""

    options: tuple[Message, ...] = ()


Part = str | Field
Message = tuple[Part, ...]


def template(message: Message) -> str:
    return "".join(part if isinstance(part, str) else "{}" for part in message)


def has_words(message: Message) -> bool:
    text = template(message)
    return bool(re.search("[a-z]{2}", text)) and text not in NAMES and not CODE.fullmatch(text)


def is_phrase(message: Message) -> bool:
    """Whether a text is English, not a name, a number or punctuation."""
    text = "".join(part if isinstance(part, str) else "\0" for part in message)
    return text.startswith("--") or (has_words(message) and bool(re.search(r"[A-Za-z\0)\]]\S* +\S*[a-z]|[a-z] ", text)))


@dataclass
class Source:
    """A module: its tree, with parents, and the strings that its names may stand for."""

    path: Path
    tree: ast.Module
    nodes: list[ast.AST] = field(default_factory=list)  # in the order of ast.walk
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.nodes.append(self.tree)
        for node in self.nodes:
            children = list(ast.iter_child_nodes(node))
            self.parents |= dict.fromkeys(children, node)
            self.nodes += children

    @cached_property
    def globals(self) -> dict[str, list[ast.expr]]:
        return assigned(self.tree, deep=False)

    def function(self, node: ast.AST) -> ast.FunctionDef | None:
        while node in self.parents:
            node = self.parents[node]
            if isinstance(node, ast.FunctionDef):
                return node
        return None


def assigned(scope: ast.AST, deep: bool = True) -> dict[str, list[ast.expr]]:
    """The expressions that are assigned to each name of a scope."""
    values: dict[str, list[ast.expr]] = defaultdict(list)

    def bind(target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            values[target.id].append(value)
        elif isinstance(target, ast.Tuple):
            if isinstance(value, ast.GeneratorExp):
                value = ast.copy_location(ast.Tuple([value.elt] * len(target.elts)), value)
            for choice in (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,):
                if isinstance(choice, ast.Tuple) and len(choice.elts) == len(target.elts):
                    for one, its in zip(target.elts, choice.elts, strict=True):
                        bind(one, its)

    for node in ast.walk(scope) if deep else ast.iter_child_nodes(scope):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                bind(target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            bind(node.target, node.value)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            added = ast.BinOp(node.target, ast.Add(), node.value)
            values[node.target.id].append(ast.copy_location(added, node))
    return values


class Package:
    """All modules, with what is needed to follow a name or a call from one to another."""

    def __init__(self, root: Path = PACKAGE) -> None:
        self.above = root.parent
        self.sources = [
            Source(path, ast.parse(path.read_text(encoding="utf-8"))) for path in sorted(root.rglob("*.py"))
        ]
        self.functions: dict[str, list[tuple[Source, ast.FunctionDef]]] = defaultdict(list)
        self.calls: dict[str, list[tuple[Source, ast.Call]]] = defaultdict(list)
        self.constants: dict[str, list[tuple[Source, ast.expr]]] = defaultdict(list)
        self.locals: dict[ast.AST, dict[str, list[ast.expr]]] = {}
        for source in self.sources:
            for node in source.nodes:
                if isinstance(node, ast.FunctionDef):
                    self.functions[node.name].append((source, node))
                elif isinstance(node, ast.Call):
                    self.calls[called(node)].append((source, node))
            for name, values in source.globals.items():
                if name.isupper():
                    self.constants[name] += [(source, value) for value in values]

    # ------------------------------------------------------------------------------------------------------ messages

    def messages(self) -> Iterator[tuple[str, Message]]:
        """The place and the parts of every message."""
        for source in self.sources:
            for node in source.nodes:
                for expression in self.expressions(source, node):
                    for message in self.texts(source, expression) or []:
                        if any(part.options if isinstance(part, Field) else " " in part for part in message):
                            yield f"{source.path.relative_to(self.above)}:{expression.lineno}", message

    def expressions(self, source: Source, node: ast.AST) -> Iterator[ast.expr]:
        """The expressions of the messages that a node makes."""
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and not isinstance(node.exc.func, ast.Name):
            yield from node.exc.args[:1] if called(node.exc) not in MESSAGES else ()
        if isinstance(node, ast.Call):
            name = called(node)
            raised = isinstance(source.parents[node], ast.Raise) and isinstance(node.func, ast.Name)
            if name in MESSAGES:
                yield from node.args[MESSAGES[name] :][:1]
            elif name.endswith("Error") or raised:
                yield from node.args[1:2] if len(node.args) == 3 else node.args[:1]
            elif name == "setdefault" and is_kept(node.func):
                yield from node.args[1:]
        if isinstance(node, ast.FunctionDef) and REASONS.fullmatch(node.name):
            yield from returned(node)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            value = node.value.value if isinstance(node.value, ast.DictComp) else node.value
            yield from [value] if any(map(is_kept, targets)) else []
        if isinstance(node, ast.keyword) and node.arg is not None and KEPT.fullmatch(node.arg):
            yield unnamed(node.value)

    def literals(self) -> set[str]:
        """The templates of all strings in the source: phrases that are not followed to a message are among them."""
        nodes = [node for source in self.sources for node in source.nodes]
        texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        joins = [node.values for node in nodes if isinstance(node, ast.JoinedStr)]
        return texts | {"".join(v.value if isinstance(v, ast.Constant) else "{}" for v in values) for values in joins}

    # --------------------------------------------------------------------------------------------------------- texts

    def texts(
        self, source: Source, node: ast.expr, depth: int = 0, seen: frozenset[str] = frozenset()
    ) -> list[Message] | None:
        """What a string expression may be; None if that is not known."""
        if depth > DEEPEST:
            return None
        match node:
            case ast.Constant(value=str(text)):
                return [(text,)] if text else [()]
            case ast.JoinedStr():
                parts = [self.part(source, value, depth, seen) for value in node.values]
                return [joined(parts)]
            case ast.BinOp(op=ast.Add()):
                left, right = (self.texts(source, side, depth, seen) for side in (node.left, node.right))
                if left is None and right is None:
                    return None
                return [joined(pair) for pair in product(left or [(Field(),)], right or [(Field(),)])]
            case ast.IfExp() | ast.BoolOp():
                choices = [node.body, node.orelse] if isinstance(node, ast.IfExp) else node.values
                options = [self.texts(source, choice, depth, seen) for choice in choices]
                if all(option is None for option in options):
                    return None
                return [text for option in options for text in (option or [(Field(),)])]
            case ast.Name():
                return self.named(source, node, depth, seen)
            case ast.Call():
                return self.result(source, node, depth, seen)
            case ast.Subscript():
                return self.table(source, node.value, depth, seen)
        return None

    def part(self, source: Source, node: ast.expr, depth: int, seen: frozenset[str]) -> Message:
        if isinstance(node, ast.Constant):
            return (node.value,)
        assert isinstance(node, ast.FormattedValue)
        if node.conversion == ord("r") or node.format_spec is not None:
            return (Field(),)
        return (self.field(source, node.value, depth, seen),)

    def field(self, source: Source, node: ast.expr, depth: int, seen: frozenset[str]) -> Field:
        options: list[Message] = []
        for text in self.texts(source, node, depth + 1, seen) or []:  # those of a list are what it joins
            options += text[0].options if len(text) == 1 and isinstance(text[0], Field) else [text]
        values = [node]
        if isinstance(node, ast.Name) and (function := source.function(node)) is not None:
            values = self.local(function).get(node.id, values)
        if not any(isinstance(value, ast.IfExp | ast.BoolOp) for value in values):  # there, a word alone is English
            options = [option if is_phrase(option) or option == () else (Field(),) for option in options]
        return Field(tuple(dict.fromkeys(options))) if any(has_words(o) or is_phrase(o) for o in options) else Field()

    def named(self, source: Source, node: ast.Name, depth: int, seen: frozenset[str]) -> list[Message] | None:
        """The texts of a name: of a local, a parameter, or a constant of this module or another."""
        name, function = node.id, source.function(node)
        place = f"{source.path}:{function.lineno if function else 0}:{name}"
        if place in seen:
            return None
        seen |= {place}
        while function is not None:
            values = [(source, value) for value in self.local(function).get(name, [])]
            given = list(self.arguments(source, function, name)) if name in parameters(function) else []
            if values or given:
                return self.any_of([*values, *given], depth + bool(given), seen)
            function = source.function(function)
        return self.any_of(
            [(source, value) for value in source.globals.get(name, [])] or self.constants[name], depth, seen
        )

    def local(self, function: ast.FunctionDef) -> dict[str, list[ast.expr]]:
        if function not in self.locals:
            self.locals[function] = assigned(function)
        return self.locals[function]

    def any_of(self, values: list[tuple[Source, ast.expr]], depth: int, seen: frozenset[str]) -> list[Message] | None:
        options = [self.texts(source, value, depth, seen) for source, value in values]
        texts = [text for option in options for text in (option or [])]
        if not texts:
            return None
        return list(dict.fromkeys([*texts, *([(Field(),)] if None in options else [])]))

    def arguments(self, source: Source, function: ast.FunctionDef, name: str) -> Iterator[tuple[Source, ast.expr]]:
        """What the calls of a function give for a parameter, and its default."""
        names = parameters(function)
        at = names.index(name)
        spec = function.args
        defaults = dict(zip(reversed([*spec.posonlyargs, *spec.args]), reversed(spec.defaults), strict=False))
        defaults |= {one: value for one, value in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if value}
        yield from ((source, value) for one, value in defaults.items() if one.arg == name)
        alone = len(self.functions[function.name]) == 1
        for caller, call in self.calls[function.name]:
            if not alone and caller is not source:
                continue  # another one of that name may be called
            given = [keyword.value for keyword in call.keywords if keyword.arg == name]
            if not given and at < len(call.args) and not any(isinstance(one, ast.Starred) for one in call.args):
                given = [call.args[at]]
            yield from ((caller, value) for value in given)

    def result(self, source: Source, node: ast.Call, depth: int, seen: frozenset[str]) -> list[Message] | None:
        name = called(node)
        if name == "format" and isinstance(node.func, ast.Attribute):
            return self.formatted(source, node, depth, seen)
        if name == "join" and isinstance(node.func, ast.Attribute) and node.args:
            elements = node.args[0]
            match elements:
                case ast.GeneratorExp() | ast.ListComp():
                    inner = self.texts(source, elements.elt, depth + 1, seen)
                case ast.List() | ast.Tuple():
                    inner = self.any_of([(source, one) for one in elements.elts], depth + 1, seen)
                case ast.Name():
                    inner = self.items(source, elements, depth, seen)
                case _:
                    inner = None
            return [(Field(tuple(text for text in inner if is_phrase(text))),)] if inner else None
        if name == "str" and node.args:
            return self.texts(source, node.args[0], depth, seen) if isinstance(node.args[0], ast.Name) else None
        found = self.functions.get(name, [])
        found = found if len(found) == 1 else [one for one in found if one[0] is source]
        if len(found) == 1:
            where, function = found[0]
            if f"{name}()" not in seen:
                return self.any_of([(where, value) for value in returned(function)], depth + 1, seen | {f"{name}()"})
        return None

    def items(self, source: Source, node: ast.Name, depth: int, seen: frozenset[str]) -> list[Message] | None:
        """The texts of a list that a function builds."""
        function = source.function(node)
        values: list[tuple[Source, ast.expr]] = []
        for one in ast.walk(function or source.tree):
            if isinstance(one, ast.Call) and ast.unparse(one.func) == f"{node.id}.append":
                values.append((source, one.args[0]))
        for value in assigned(function or source.tree).get(node.id, []):
            for one in ast.walk(value):
                if isinstance(one, ast.List | ast.Tuple):
                    values += [(source, element) for element in one.elts]
                elif isinstance(one, ast.ListComp | ast.GeneratorExp):
                    values.append((source, one.elt))
        return self.any_of(values, depth + 1, seen)

    def formatted(self, source: Source, node: ast.Call, depth: int, seen: frozenset[str]) -> list[Message] | None:
        assert isinstance(node.func, ast.Attribute)
        texts = self.texts(source, node.func.value, depth, seen)
        if texts is None:
            return None
        given = {keyword.arg: keyword.value for keyword in node.keywords} | dict(enumerate(node.args))
        result = []
        for text in texts:
            number, parts = 0, []
            for literal, name, spec, conversion in string.Formatter().parse(template(text)):
                parts.append((literal,) if literal else ())
                if name is None:
                    continue
                key: str | int = number if name == "" else name
                number += name == ""
                plain = key in given and not spec and not conversion and not isinstance(given[key], ast.Starred)
                parts.append((self.field(source, given[key], depth, seen) if plain else Field(),))
            result.append(joined(parts))
        return result

    def table(self, source: Source, node: ast.expr, depth: int, seen: frozenset[str]) -> list[Message] | None:
        """The values of a dict: of the module by its name, or written out."""
        if not isinstance(node, ast.Name | ast.Dict):
            return None
        values: list[ast.expr] = [node] if isinstance(node, ast.Dict) else []
        if isinstance(node, ast.Name):
            values = source.globals.get(node.id) or [value for _, value in self.constants[node.id]]
        tables = [value for value in values if isinstance(value, ast.Dict)]
        return self.any_of([(source, value) for table in tables for value in table.values], depth, seen)


def is_kept(node: ast.expr) -> bool:
    """Whether a target, or what a method is called on, keeps reasons."""
    names = [
        one.id if isinstance(one, ast.Name) else one.attr
        for one in ast.walk(node)
        if hasattr(one, "id") or hasattr(one, "attr")
    ]
    return any(KEPT.fullmatch(name) for name in names)


def unnamed(node: ast.expr) -> ast.expr:
    """An f-string or a text of `str.format` with {} for its {named} fields."""
    for one in ast.walk(node):
        if isinstance(one, ast.Constant) and isinstance(one.value, str):
            one.value = re.sub(r"\{\w+\}", "{}", one.value)
    return node


def called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def parameters(function: ast.FunctionDef) -> list[str]:
    spec = function.args
    names = [one.arg for one in (*spec.posonlyargs, *spec.args)]
    return [*(names[1:] if names[:1] in (["self"], ["cls"]) else names), *(one.arg for one in spec.kwonlyargs)]


def returned(function: ast.FunctionDef) -> list[ast.expr]:
    """What a function returns; the message, if that is an exception."""
    values = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None]
    return [
        value.args[0] if isinstance(value, ast.Call) and called(value).endswith("Error") and value.args else value
        for value in values
    ]


def joined(parts: list[Message] | tuple[Message, ...]) -> Message:
    """One message, with neighbouring texts as one."""
    message: list[Part] = []
    for one in (one for part in parts for one in part):
        if isinstance(one, str) and message and isinstance(message[-1], str):
            message[-1] += one
        else:
            message.append(one)
    return tuple(message)


# ------------------------------------------------------------------------------------------------------------- coverage


def is_ambiguous(message: Message) -> bool:
    """Whether a phrase stands beside another value, with a space at most between: where it ends is not known."""
    for before, joint, after in zip(message, message[1:], (*message[2:], ""), strict=False):
        if isinstance(before, Field) and isinstance(joint, Field) and (before.options or joint.options):
            return True
        spaced = isinstance(before, Field) and joint == " " and isinstance(after, Field)
        if spaced and any(" " in template(option) for option in before.options):
            return True
    return False


def missing(message: Message, catalogue: dict[str, str]) -> list[str]:
    """The templates that a message needs and the catalogue lacks: its own or those with its phrases written out."""
    own, lacks = template(message), [template(message)]
    if not is_ambiguous(message) and (own in catalogue or not has_words(message)):
        fields = [part for part in message if isinstance(part, Field)]
        filled = {int(match[1]) for match in FIELD.finditer(catalogue[own])} if own in catalogue else range(len(fields))
        lacks = [lack for number in filled if number < len(fields) for lack in lacking(fields[number], catalogue)]
    for at, part in enumerate(message):
        if lacks and isinstance(part, Field) and part.options:
            options = [joined([message[:at], option, message[at + 1 :]]) for option in part.options]
            written = [missing(option, catalogue) for option in options if template(option) != own]
            if not all(written):  # at least one of them is there: this is how the message was translated
                unknown = any(template(option) == own for option in options) and own not in catalogue
                lacks = [*(lack for one in written for lack in one), *([own] if unknown else [])]
    return lacks


def lacking(field: Field, catalogue: dict[str, str]) -> list[str]:
    return [lack for option in field.options for lack in missing(option, catalogue)]


def reachable(message: Message) -> Iterator[str]:
    """Every template that may stand for a message or a phrase in it."""
    yield template(message)
    for at, part in enumerate(message):
        if isinstance(part, Field):
            for option in part.options:
                yield from reachable(option)
                yield from reachable(joined([message[:at], option, message[at + 1 :]]))


if __name__ == "__main__":
    korean: dict[str, str] = {}
    for file in sorted((PACKAGE / "locale" / "ko").glob("errors_*.json")):
        korean |= json.loads(file.read_text(encoding="utf-8"))
    lacks: dict[str, str] = {}
    for place, message in Package().messages():
        for lack in missing(message, korean):
            lacks.setdefault(lack, place)
    print(json.dumps(lacks, ensure_ascii=False, indent=1))
    sys.exit(bool(lacks))
