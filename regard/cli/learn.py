"""`regard learn`: the lessons in the terminal, step by step, with their questions."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from regard.cli.commands import LearnOptions
from regard.cli.outputs import Terminal, print_json
from regard.learn import (
    Cell,
    Lesson,
    LessonRun,
    Output,
    Question,
    accepts,
    answer_text,
    lesson,
    lessons,
    shown_code,
)
from regard.tables import pad, width

INTERRUPTED = 130
QUIT = "q"


def learn(options: LearnOptions) -> int:
    """List the lessons, or walk one; 130 if it was ended by Ctrl-C."""
    out = Terminal(options.lang)
    if options.number is None:
        if options.question is not None:
            raise ValueError(f"--question {options.question} needs the number of a lesson: regard learn 4 --question 1")
        _list(out, options)
        return 0
    chosen = lesson(options.number, options.lang)
    count = len(chosen.questions)
    if options.question is not None and not 1 <= options.question <= count:
        raise ValueError(f"lesson {chosen.number} has questions 1 to {count}, got --question {options.question}")
    if options.json:
        print_json(_described(chosen))
        return 0
    try:
        walk = _Walk(chosen, out, options.out)
        if options.question is None:
            walk.lesson_through()
        else:
            question = chosen.questions[options.question - 1]
            walk.ask(question, before=chosen.before(question))
    except (KeyboardInterrupt, EOFError):
        out.print()
        again = f"regard learn {chosen.number}" + (f" --question {options.question}" if options.question else "")
        out.print((out.say("Ended. It starts again with: {command}", command=again), "dim"))
        return INTERRUPTED
    return 0


def _described(chosen: Lesson) -> dict[str, Any]:
    return {
        "number": chosen.number,
        "title": chosen.title,
        "summary": chosen.summary,
        "questions": [question.title for question in chosen.questions],
        "file": chosen.path,
    }


def _list(out: Terminal, options: LearnOptions) -> None:
    available = lessons(options.lang)
    if options.json:
        print_json([_described(each) for each in available])
        return
    wide = max(width(each.title) for each in available)
    for each in available:
        count = out.say("{count} questions", count=len(each.questions))
        out.print(
            (f"{each.number}  ", "bold"), (pad(each.title, wide), "bold"), f"  {each.summary}", (f"  {count}", "dim")
        )
    out.print()
    example = available[0].number
    out.print(out.say("regard learn {number} starts a lesson; --question N asks one question.", number=example))


class _Walk:
    """A lesson on its way through the terminal. Where standard input is no terminal, nothing waits."""

    def __init__(self, chosen: Lesson, out: Terminal, folder: Path | None) -> None:
        self.lesson, self.out, self.asks = chosen, out, sys.stdin.isatty()
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix=f"regard-learn-{chosen.number}-"))
        folder.mkdir(parents=True, exist_ok=True)
        self.run = LessonRun(chosen, folder)

    def lesson_through(self) -> None:
        for step in self.lesson.steps:
            if isinstance(step, Question):
                self.ask(step)
            elif step.kind == "markdown":
                self._show_text(step.text)
            else:
                self._show_code(step)
                self._show_output(self.run.cell(step))
                if step is not self.lesson.cells[-1]:
                    self._typed(self.out.say("[Enter] next  [q] end"))

    def ask(self, question: Question, before: tuple[Cell, ...] = ()) -> None:
        """Ask; the cells `before`, which the answer needs, run once something is typed."""
        self._show_text(f"### {question.title}\n\n{question.text}")
        typed = self._typed(self.out.say("Answer (Enter shows it):"))
        if self.asks and before:
            self.out.print((self.out.say("Computing the answer …"), "dim"))
        for cell in before:
            self.run.cell(cell)
        answer = self.run.answer(question)
        while typed and not accepts(answer, typed):
            self.out.print((self.out.say("Not quite. Try again, or Enter to see the answer."), "yellow"))
            typed = self._typed(self.out.say("Answer (Enter shows it):"))
        if typed:
            self.out.print((self.out.say("Right."), "bold green"))
        self.out.print((self.out.say("Answer: {answer}", answer=answer_text(answer)), "bold"))
        self.out.print()
        self._show_text(question.why.text)
        self._show_code(question.answer)

    def _typed(self, prompt: str) -> str:
        if not self.asks:
            return ""
        self.out.write((f"{prompt} ", "dim"))
        sys.stdout.flush()
        typed = input().strip()
        if typed.casefold() == QUIT:
            raise KeyboardInterrupt
        return typed

    def _show_text(self, text: str) -> None:
        if self.out.room is None:
            self.out.print(text)
            self.out.print()
            return
        from rich.markdown import Markdown

        self.out.render(Markdown(text, justify="left"))
        self.out.print()

    def _show_code(self, cell: Cell) -> None:
        code = shown_code(cell)
        if self.out.room is None:
            self.out.print("\n".join(f"    {line}" for line in code.splitlines()))
        elif code:
            from rich.syntax import Syntax

            self.out.render(Syntax(code, "python", theme="ansi_dark", background_color="default", word_wrap=True))
        self.out.print()

    def _show_output(self, output: Output) -> None:
        if output.text:
            self.out.print(output.text)
        for path in output.figures:
            self.out.print((self.out.say("Figure: {path}", path=path), "cyan"))
        for path in output.pages:
            self.out.print((self.out.say("Page: {path}", path=path), "cyan"))
        if any(output):
            self.out.print()
