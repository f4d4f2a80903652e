"""The boundary around borrowed parsers, and reading of bounded size."""

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from speaking_twins import wordpiece

from regard.data.tokenizer import Tokenizer
from regard.formats import MOST_JSON, parsing, read_bounded, read_json, read_stream


class PanicException(BaseException):
    """As pyo3 makes one for each extension."""


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError(), OSError("cut"), RecursionError(), AssertionError()])
def test_whatever_a_parser_raises_is_a_value_error_that_names_the_file(error):
    with pytest.raises(ValueError, match=rf"a.bin.*({type(error).__name__}|cut)"), parsing("a.bin"):
        raise error


def test_a_panic_is_a_value_error_too():
    with (
        pytest.raises(ValueError, match=r"a\.bin.*Panic"),
        parsing("a.bin", "is broken"),
    ):
        raise PanicException("no such id")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit(), ImportError("pip install it")])
def test_interrupts_exits_and_missing_libraries_pass(error):
    with pytest.raises(type(error)) as caught, parsing("a.bin"):
        raise error
    assert caught.value is error


def test_lack_of_memory_stays_that_and_says_for_which_file():
    with pytest.raises(MemoryError, match=r"a\.bin"), parsing("a.bin"):
        raise MemoryError


def test_errors_of_the_system_and_errors_that_name_the_file_pass():
    with pytest.raises(FileNotFoundError), parsing("a.bin"):
        open("no/such/file")  # noqa: SIM115
    with pytest.raises(ValueError, match=r"a\.bin.*3"), parsing("a.bin"):
        raise ValueError("a.bin has 3 axes")


def test_a_long_message_is_cut():
    with pytest.raises(ValueError, match=r"…$") as caught, parsing("a.bin"):
        raise ValueError("x" * 10_000)
    assert len(str(caught.value)) < 400


def test_a_tokenizer_that_makes_rust_panic_is_refused_when_a_text_is_cut(tmp_path):
    """[SEP] is in the template and not among the special tokens: it shows only when a text is framed."""
    text = wordpiece()[0].to_str()
    (tmp_path / "tokenizer.json").write_text(text.replace('"[SEP]":{"id":"[SEP]"', '"[SAP]":{"id":"[SEP]"'))
    with pytest.raises(ValueError, match=str(tmp_path)):
        Tokenizer.open(tmp_path).encode("the cat")


@pytest.mark.parametrize("name", ["/dev/zero", "pipe", "folder"])
def test_what_is_no_file_is_refused_without_waiting_for_it(tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match=f"{name}'"):
        read_bounded(tmp_path / name, 100)


def test_a_pipe_that_is_open_already_is_read():
    code = (
        "from pathlib import Path; from regard.formats import read_bounded; print(read_bounded(Path('/dev/stdin'), 9))"
    )
    asked = {"input": "abc", "text": True, "capture_output": True, "check": True}
    assert subprocess.run([sys.executable, "-c", code], **asked).stdout == "b'abc'\n"


def test_more_bytes_than_are_read_are_refused(tmp_path):
    (tmp_path / "a").write_bytes(bytes(11))
    assert read_bounded(tmp_path / "a", 11) == bytes(11)
    with pytest.raises(ValueError, match=r"10.*bytes"):
        read_bounded(tmp_path / "a", 10)
    with pytest.raises(ValueError, match=r"10.*bytes"):
        read_stream(io.BytesIO(bytes(11)), 10, "input")


def test_a_json_file_that_is_too_large_is_refused_before_it_is_parsed(tmp_path):
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(MOST_JSON + 1)
    with pytest.raises(ValueError, match=rf"{MOST_JSON:,}.*bytes"):
        read_json(tmp_path / "config.json")


def test_a_key_with_two_values_is_refused_and_one_written_twice_is_not(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"a": {"n_head": 12, "n_head": 12}}')
    assert read_json(path) == {"a": {"n_head": 12}}
    path.write_text('{"a": {"n_head": 12, "n_head": 6}}')
    with pytest.raises(ValueError, match=r"'n_head'.*12.*6"):
        read_json(path)


# ------------------------------------------------------------------------------------------------ the command's streams


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `regard …` in a shell, which closes streams or sends them somewhere. `regard cost` needs no torch."""
    environment = {**os.environ, "LANG": "C.UTF-8", "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    line = command.replace("regard", f"{shutil.which(sys.executable)} -m regard", 1)
    asked = {"cwd": folder, "env": environment, "capture_output": True, "text": True, "timeout": 120, "check": False}
    return subprocess.run(["bash", "-c", line], **asked)


def test_a_complaint_with_stderr_closed_goes_nowhere_and_not_to_the_answer(tmp_path):
    ended = shell("regard cost --n 0 --d-model 8 2>&-", tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", "")
    ended = shell("regard cost --n 0 --d-model 8 2>/dev/full", tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")


def test_a_command_answers_with_stderr_and_stdin_closed(tmp_path):
    ended = shell("regard cost --n 7 --d-model 8 <&- 2>&-", tmp_path)
    assert ended.returncode == 0
    assert "d_model" in ended.stdout


def test_files_opened_later_do_not_get_the_numbers_of_closed_streams(tmp_path):
    code = "import regard.cli; regard.cli.main(['--version']); print(open('answer', 'w').fileno() > 2)"
    line = ["bash", "-c", f'{sys.executable} -c "{code}" <&- 2>&-']
    ended = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout.split()[-1] == "True"


@pytest.mark.parametrize("command", ["regard cost --n 7 --d-model 8 >&-", "regard embed - <&-", "regard look - <&-"])
def test_a_closed_stream_that_is_needed_is_told_in_one_line(tmp_path, command):
    ended = shell(command, tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.startswith("regard: ")
    assert ended.stderr.count("\n") == 1
    assert "closed" in ended.stderr


@pytest.mark.parametrize("name", ["/dev/zero", "pipe", "folder"])
@pytest.mark.parametrize("command", ["embed --file", "look --file", "steps --input"])
def test_what_is_no_file_is_told_in_one_line(tmp_path, command, name, fail, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo(tmp_path / "pipe.npy")
    (tmp_path / "folder.npy").mkdir()
    (tmp_path / "zero.npy").symlink_to("/dev/zero")
    name = {"/dev/zero": "zero.npy"}.get(name, f"{name}.npy")
    assert f"'{name}'" in fail(*command.split(), name)
