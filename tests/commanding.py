"""The command line in tests: run, asserted to go well or to fail in one line; in English, in a folder of its own.

A pytest plugin, named in conftest.py. It does not know any command.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

ENVIRONMENT = (
    "LC_ALL",
    "LC_MESSAGES",
    "LANG",
    "LANGUAGE",
    "FORCE_COLOR",
    "TTY_COMPATIBLE",
    "NO_COLOR",
    "COLUMNS",
    "COLORFGBG",
)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """English, no terminal, and a folder of its own."""
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the command line; give back what it printed after asserting that it went well."""
    from regard.cli import main

    def run(*arguments: str) -> str:
        code = main(arguments)
        out, err = capsys.readouterr()
        assert (code, err) == (0, "")
        return out

    return run


@pytest.fixture
def fail(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the command line; give back the one line of its complaint after asserting that nothing else was printed."""
    from regard.cli import main

    def fail(*arguments: str, code: int = 2) -> str:
        assert main(arguments) == code
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("regard: ")
        assert err.count("\n") == 1
        return err

    return fail
