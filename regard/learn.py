"""Lessons: Python files in jupytext's percent format, run cell by cell, with questions whose answers are computed.

How a lesson is written is in tutorials/README.md. `regard learn` walks one in the terminal, `make docs` makes pages.
"""

from __future__ import annotations

import ast
import builtins
import dis
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby
from numbers import Integral, Real
from pathlib import Path
from textwrap import indent
from types import CodeType
from typing import Any, Literal, NamedTuple

from regard.locale import Lang, translate

__all__ = ["Cell", "Lesson", "LessonRun", "Output", "Question", "accepts", "answer_text", "lesson", "lessons", "page"]

CELL = re.compile(r"# %%(?P<markdown> \[markdown\])?(?: tags=(?P<tags>\[.*\]))?")
FILE = re.compile(r"(?P<number>\d+)_\w+\.(?P<lang>\w+)\.py")
TAGS = ("question", "answer", "why")
ASIDE = "aside"  # of a code cell that nothing later needs: a question asked alone does not run it
NUMBER = re.compile(r"(?P<value>[-+]?(?:\d[\d,_]*)?\.?\d+(?:e[-+]?\d+)?) ?(?P<unit>\D*)", re.IGNORECASE)
UNITS: dict[str, float] = {"": 1, "b": 1, "byte": 1, "bytes": 1, "바이트": 1, "개": 1, "%": 0.01} | {
    name: size for n, p in enumerate("kmg", 1) for name, size in ((f"{p}b", 1000**n), (f"{p}ib", 1024**n))
}
WHOLE, FRACTION = 0.005, 0.015  # relative tolerances: integers below 200 must be exact; 0.68 is right for 0.6769


# ------------------------------------------------------------------------------------------------------------- reading


class Cell(NamedTuple):
    """A cell of a lesson."""

    kind: Literal["markdown", "code"]
    text: str  # Markdown, or Python
    tags: tuple[str, ...]
    line: int  # of its first line in the file


class Question(NamedTuple):
    """A question or an exercise: three neighbouring cells."""

    number: int  # from 1
    title: str  # the heading of `cell`
    text: str  # what follows it
    cell: Cell
    answer: Cell  # code that sets `answer`
    why: Cell


@dataclass(frozen=True)
class Lesson:
    """A lesson in one language: its file, NUMBER_NAME.LANG.py, and its cells in reading order."""

    path: Path
    cells: tuple[Cell, ...]

    @property
    def name(self) -> str:
        """The name of its file, without language and suffix."""
        return self.path.name.partition(".")[0]

    @property
    def number(self) -> int:
        """The number that its name begins with."""
        return int(self.name.partition("_")[0])

    @property
    def lang(self) -> Lang:
        """Its language."""
        return "ko" if self.path.name.endswith(".ko.py") else "en"

    @property
    def title(self) -> str:
        """The heading of its first cell."""
        return self.cells[0].text.splitlines()[0].removeprefix("# ")

    @property
    def summary(self) -> str:
        """The paragraph below the title, as one line."""
        return " ".join(self.cells[0].text.split("\n\n")[1].split())

    @cached_property
    def questions(self) -> tuple[Question, ...]:
        """Its questions and exercises."""
        places = [n for n, cell in enumerate(self.cells) if "question" in cell.tags]
        return tuple(_question(number, *self.cells[n : n + 3]) for number, n in enumerate(places, 1))

    @property
    def steps(self) -> Iterator[Cell | Question]:
        """What a reader meets, in order: text, code, and questions instead of their cells."""
        questions = {question.cell: question for question in self.questions}
        inside = {cell for question in self.questions for cell in (question.answer, question.why)}
        return (questions.get(cell, cell) for cell in self.cells if cell not in inside)

    def before(self, question: Question) -> tuple[Cell, ...]:
        """The code cells that the answer of a question needs, for asking it alone.

        A cell is needed if it speaks of a name or a file that the answer, or a later cell that is needed, reads. Of an
        import or a function, only the cell that makes it is.
        """
        earlier = self.cells[: self.cells.index(question.cell)]
        code = [cell for cell in earlier if cell.kind == "code" and ASIDE not in cell.tags]
        fixed = {name for cell in code for name in _names(cell).fixed}
        wanted, needed = set(_names(question.answer).read), list[Cell]()
        for cell in reversed(code):
            names = _names(cell)
            if wanted & (names.fixed | names.spoken - fixed):
                wanted = wanted - names.made | names.read
                needed.append(cell)
        return tuple(reversed(needed))


class _Names(NamedTuple):
    read: frozenset[str]  # before the cell makes them; and the files that it speaks of
    made: frozenset[str]  # before they are read
    spoken: frozenset[str]  # all of them
    fixed: frozenset[str]  # imports and functions that it makes


@cache
def _names(cell: Cell) -> _Names:
    tree = ast.parse(cell.text)
    fixed = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            fixed |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    strings = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    files = {text for text in strings if re.fullmatch(r"\S+\.[a-z]\w*", text)}
    read, assigned = set[str](), set[str]()
    codes = [compile(tree, cell.text, "exec")]
    for code in codes:  # functions and comprehensions follow the cell itself
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
        for step in dis.get_instructions(code):
            if step.opname == "STORE_NAME" and step.argval not in read:
                assigned.add(step.argval)
            elif step.opname in ("LOAD_NAME", "LOAD_GLOBAL") and step.argval not in assigned | set(dir(builtins)):
                read.add(step.argval)
    return _Names(frozenset(read | files), frozenset(assigned), frozenset(read | assigned | files), frozenset(fixed))


def _question(number: int, cell: Cell, answer: Cell, why: Cell) -> Question:
    heading, _, text = cell.text.partition("\n")
    return Question(number, heading.lstrip("# "), text.strip(), cell, answer, why)


def folder() -> Path:
    """Where the lessons are: regard/tutorials of an installed copy, tutorials/ of a checkout."""
    here = Path(__file__).resolve().parent
    for place in (here / "tutorials", here.parent / "tutorials"):
        if any(place.glob("*.py")):
            return place
    raise FileNotFoundError(f"no lessons in {here / 'tutorials'} or {here.parent / 'tutorials'}: reinstall regard")


def lessons(lang: Lang = "en") -> tuple[Lesson, ...]:
    """All lessons in a language, by number."""
    names = [path for path in folder().iterdir() if (match := FILE.fullmatch(path.name)) and match["lang"] == lang]
    return tuple(sorted(map(read, names), key=lambda found: found.number))


def lesson(number: int, lang: Lang = "en") -> Lesson:
    """One lesson. Raises LookupError if there is none of this number."""
    available = {each.number: each for each in lessons(lang)}
    if number not in available:
        raise LookupError(f"there is no lesson {number}; there are {', '.join(map(str, available))}")
    return available[number]


def read(path: Path) -> Lesson:
    """Read a lesson's file.

    Raises:
        ValueError: a cell that is not in the format of tutorials/README.md; the message names its line.
    """
    cells: list[Cell] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    starts = [n for n, line in enumerate(lines) if line.startswith("# %%")]
    if not starts or "".join(lines[: starts[0]]).strip():
        raise ValueError(f"{path.name}:1: a lesson begins with '# %% [markdown]'")
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        match = CELL.fullmatch(lines[start].rstrip())
        tags = tuple(json.loads(match["tags"] or "[]")) if match else ()
        if match is None or not set(tags) <= {*TAGS, ASIDE}:
            raise ValueError(f"{path.name}:{start + 1}: not the head of a cell: {lines[start]!r}")
        kind: Literal["markdown", "code"] = "markdown" if match["markdown"] else "code"
        body = lines[start + 1 : end]
        if kind == "markdown":
            wrong = next((n for n, line in enumerate(body, start + 2) if line.strip() and line[:1] != "#"), None)
            if wrong is not None:
                raise ValueError(f"{path.name}:{wrong}: a line of text must begin with '# ', got {lines[wrong - 1]!r}")
            body = [line.removeprefix("#").removeprefix(" ") for line in body]
        cells.append(Cell(kind, "\n".join(body).strip("\n"), tags, start + 2))
    _check(path, cells)
    return Lesson(path, tuple(cells))


def _check(path: Path, cells: list[Cell]) -> None:
    first = cells[0]
    if first.kind != "markdown" or not re.match(r"# .+\n\n\S", first.text):
        raise ValueError(f"{path.name}:{first.line}: the first cell needs '# TITLE', an empty line and a summary")
    for n, cell in enumerate(cells):
        expected = "code" if {"answer", ASIDE} & {*cell.tags} else "markdown" if cell.tags else cell.kind
        if cell.kind != expected or len(cell.tags) > 1:
            raise ValueError(f"{path.name}:{cell.line}: a cell of tags {list(cell.tags)} must be {expected}")
        if "question" in cell.tags and [each.tags for each in cells[n : n + 3]] != [(tag,) for tag in TAGS]:
            raise ValueError(f"{path.name}:{cell.line}: after a question come its answer and why")
        if "question" in cell.tags and not cell.text.startswith("### "):
            raise ValueError(f"{path.name}:{cell.line}: a question begins with '### TITLE'")
    for tag, before in (("answer", "question"), ("why", "answer")):
        for previous, cell in zip([None, *cells], cells, strict=False):
            if tag in cell.tags and (previous is None or before not in previous.tags):
                raise ValueError(f"{path.name}:{cell.line}: a cell {tag!r} follows a cell {before!r}")


# ------------------------------------------------------------------------------------------------------------- running


class Output(NamedTuple):
    """What a code cell gave."""

    text: str  # what it printed, and its last expression
    html: str | None  # its last expression as HTML, which then is not in `text`
    figures: tuple[Path, ...]  # PNG
    pages: tuple[Path, ...]  # HTML files that it wrote


class LessonRun:
    """A lesson that runs, cell by cell, in one namespace and in `folder`, where its figures become figure-1.png, ….

    html: give values as HTML where they have it, for a page.
    """

    def __init__(self, lesson: Lesson, folder: Path, *, html: bool = False) -> None:
        self.lesson, self.folder, self.html = lesson, folder.resolve(), html
        self.namespace: dict[str, Any] = {"__name__": lesson.name}
        self.figures = 0

    def cell(self, cell: Cell) -> Output:
        """Run a code cell. An exception of it is raised; its traceback names the lesson's file and line."""
        tree = ast.increment_lineno(ast.parse(cell.text), cell.line - 1)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        before = {path: path.stat().st_mtime_ns for path in self.folder.glob("*.html")}
        printed, file, value = io.StringIO(), str(self.lesson.path), None
        with chdir(self.folder), redirect_stdout(printed):
            exec(compile(tree, file, "exec"), self.namespace)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), file, "eval"), self.namespace)
        drawn = [image for image in (_png(value), *_open_figures()) if image is not None]
        written = tuple(sorted(p for p in self.folder.glob("*.html") if before.get(p) != p.stat().st_mtime_ns))
        text, html = printed.getvalue(), None
        if value is not None and not drawn:
            html = value._repr_html_() if self.html and hasattr(value, "_repr_html_") else None
            text += "" if html else f"{value!r}\n"
        return Output(text.rstrip(), html, tuple(map(self._write, drawn)), written)

    def answer(self, question: Question) -> Any:
        """The computed answer of a question; the cells before it must have run."""
        self.namespace.pop("answer", None)
        self.cell(question.answer)
        if "answer" not in self.namespace:
            where = f"{self.lesson.path.name}:{question.answer.line}"
            raise ValueError(f"{where}: the cell must set `answer`")
        return self.namespace["answer"]

    def _write(self, image: bytes) -> Path:
        self.figures += 1
        path = self.folder / f"figure-{self.figures}.png"
        path.write_bytes(image)
        return path


def _png(value: object) -> bytes | None:
    """A figure of matplotlib, or any value that draws itself for notebooks, as PNG."""
    if hasattr(value, "_repr_png_"):
        image: bytes | None = value._repr_png_()
        return image
    if hasattr(value, "savefig"):
        buffer = io.BytesIO()
        value.savefig(buffer, format="png", dpi=150, metadata={"Software": None})
        return buffer.getvalue()
    return None


def _open_figures() -> Iterator[bytes | None]:
    """The figures that pyplot keeps open, if somebody uses it; they are closed."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    for number in pyplot.get_fignums() if pyplot else ():
        figure = pyplot.figure(number)  # type: ignore[union-attr]
        yield _png(figure)
        pyplot.close(figure)  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------------------------- answers


def accepts(answer: object, typed: str) -> bool:
    """Whether what a learner typed is a right answer.

    >>> accepts((3, 3), "3 x 3"), accepts(393216, "384 KiB"), accepts(0.6769, "0.68"), accepts({1, 3}, "3, 1")
    (True, True, True, True)
    >>> accepts(["softmax", "소프트맥스"], "Softmax"), accepts((3, 3), "(3, 4)"), accepts(8, "9")
    (True, False, False)

    Args:
        answer: a number (equal up to rounding; bytes may have a unit), a tuple of numbers (a shape), a word (in any
            case), a set of them (all, in any order), or a list of several answers, each of which is right.
        typed: what was typed.
    """
    text = typed.strip().rstrip(".").strip("()[]{}").strip()
    if isinstance(answer, list):
        return any(accepts(each, typed) for each in answer)
    if isinstance(answer, tuple):
        parts = re.findall(r"[^\s,;x×*]+", text)
        return len(parts) == len(answer) and all(map(accepts, answer, parts))
    if isinstance(answer, set | frozenset):
        parts = re.findall(r"[^\s,;]+", text)
        return len(parts) == len(answer) and all(any(accepts(each, part) for part in parts) for each in answer)
    if isinstance(answer, str):
        return " ".join(text.casefold().split()) == " ".join(answer.casefold().split())
    if not isinstance(answer, Real):
        raise TypeError(f"an answer is a number, a word, a tuple, a set or a list of them, got {type(answer).__name__}")
    match = NUMBER.fullmatch(text.replace("−", "-"))
    unit = UNITS.get(match["unit"].strip().casefold()) if match else None
    if match is None or unit is None:
        return False
    value, right = float(re.sub("[,_]", "", match["value"])) * unit, float(answer)
    return abs(value - right) <= (WHOLE if isinstance(answer, Integral) else FRACTION) * abs(right)


def answer_text(answer: object) -> str:
    """An answer as it is shown; of several the first.

    >>> answer_text([(3, 3)]), answer_text(393216), answer_text({3, 1}), answer_text(0.67691)
    ('(3, 3)', '393,216', '1, 3', '0.6769')
    """
    if isinstance(answer, list):
        return answer_text(answer[0])
    if isinstance(answer, tuple):
        return f"({', '.join(map(answer_text, answer))})"
    if isinstance(answer, set | frozenset):
        return ", ".join(sorted(map(answer_text, answer)))
    if isinstance(answer, Integral):
        return f"{int(answer):,}"
    return f"{float(answer):.4g}" if isinstance(answer, Real) else str(answer)


# --------------------------------------------------------------------------------------------------------------- pages


def shown_code(cell: Cell) -> str:
    """A cell's code without the lines that only notebooks need."""
    return "\n".join(line for line in cell.text.splitlines() if not line.startswith("# %")).strip("\n")


def question_command(lesson: Lesson, question: Question) -> str:
    """The command that asks a question alone."""
    return f"regard learn {lesson.number} --question {question.number}{' --lang ko' * (lesson.lang == 'ko')}"


def page(lesson: Lesson, run: LessonRun | None, link: Callable[[Path], str]) -> str:
    """The lesson as a Markdown page for mkdocs-material, with its outputs; answers are folded.

    run: runs the cells; None leaves the outputs out.  link: the address of a written file, relative to the page.
    """
    parts: list[str] = []
    for step in lesson.steps:
        if isinstance(step, Question):
            parts += _question_parts(step, run, lesson)
        elif step.kind == "markdown":
            parts.append(step.text)
        else:
            code = shown_code(step)
            parts += [_fence("python", code)] if code else []
            parts += _output_parts(run.cell(step), lesson.lang, link) if run else []
    return "\n\n".join(parts) + "\n"


def _output_parts(output: Output, lang: Lang, link: Callable[[Path], str]) -> Iterator[str]:
    if output.text:
        yield _fence(" { .text .no-copy .lesson-text }", output.text)
    if output.html:
        yield f'<div class="lesson-output">{output.html}</div>'
    for path in output.figures:
        number = path.stem.rpartition("-")[2]
        image = f"![{translate('Figure {number}', lang, number=number)}]({link(path)}){{ .lesson-figure }}"
        yield f"[{image}]({link(path)}){{ target=_blank }}"  # a tap shows it in full size
    for path in output.pages:
        title = translate("The explorer, live: choose a layer, a head and a word.", lang)
        yield f'<iframe class="lesson-page" src="{link(path)}" title="{title}" loading="lazy"></iframe>'
        yield f'<a href="{link(path)}" target="_blank">{translate("Open it in a window of its own", lang)}</a>'


def _question_parts(question: Question, run: LessonRun | None, lesson: Lesson) -> Iterator[str]:
    yield f"### {question.title}"
    yield f'!!! question "`{question_command(lesson, question)}`"\n\n{indent(question.text, "    ")}'
    answer = "" if run is None else f"**{answer_text(run.answer(question))}**\n\n"
    body = f"{answer}{question.why.text}\n\n{_fence('python', shown_code(question.answer))}"
    yield f'??? success "{translate("Answer", lesson.lang)}"\n\n{indent(body, "    ")}'


def _fence(kind: str, text: str) -> str:
    longest = max((len(list(run)) for char, run in groupby(text) if char == "`"), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{kind}\n{text}\n{fence}"
