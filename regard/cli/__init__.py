"""The command line `regard`. `commands.py` lists its commands, `app.py` makes the command line, one module runs each.

typer and rich are imported by `main`, torch and the rest by the command that needs them, so that `regard --help`
answers at once.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import FrameType
from typing import Any, TextIO, get_args

from regard.locale import Lang, translate_error

__all__ = ["main"]

INSTALL = "pip install 'regard[cli]'"
WRONG_INPUT, MISSING_PART, INTERRUPTED, PIPE_CLOSED = 2, 1, 130, 141
"""Exit codes. 1 is also an answer: the weights of `regard steps` failed their check, `regard doctor` found errors,
`regard diff` found a difference, `regard verify` a bug. 141 is a shell's code for a write to a closed pipe."""

SPACED = {"WHAT", "TEXT", "SPEC", "QUESTION", "PROMPT"}  # arguments that may contain a space

# The library's advice to ignore config keys, a JSON list: in loading, and in what was loaded.
KEY = r'"(?:[^"\\]|\\(?:["\\/bfnrt]|u[0-9a-f]{4}))*"'
KEYS = rf"(\[{KEY}(?:, {KEY})*\])"
ADVICE = re.compile(rf"regard\.load\(…, ignore={KEYS}\)|\bignore={KEYS}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Errors are one line on stderr, in the language of the command.

    >>> main(["mask", "window(1, 0)", "--queries", "3", "--lang", "en"])
    window(1, 0)   3 queries × 3 keys
    <BLANKLINE>
       0 1 2
    0  ■ · ·
    1  ■ ■ ·
    2  · ■ ■
    <BLANKLINE>
    ■ may look   · hidden
    visible: 5 of 9 cells (55.6%)
    tiles of 128 × 128: 0 empty, 1 partial, 0 full
    0

    Args:
        arguments: as after `regard`; by default those of the process.

    Returns:
        The exit code: 0, 1 for a missing library, 2 for a wrong input, 130 for Ctrl-C, 141 if the reader left, as in
        `regard steps | head -1`. Some commands (steps, doctor, diff, verify) return 1 as an answer; see their help.
    """
    typed = sys.argv[1:] if arguments is None else list(arguments)
    lang = preferred_language(typed, os.environ)
    _replace_closed_streams()
    if sys.stdout is None:
        return _complain("standard output is closed: send the answer to a file, or to /dev/null", WRONG_INPUT, lang)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal of cp949 lacks ᵀ: a ? there, not a traceback
            stream.reconfigure(errors="replace")
    code = 0
    try:
        with _stoppable_imports(), _warnings_in(lang):
            code = _answer(typed, lang)
        sys.stdout.flush()  # here, where a closed pipe and an error can still be distinguished
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _write_nowhere(sys.stdout)
        return PIPE_CLOSED
    except OSError as error:  # of the flush: a full disk, which may have been reported already
        _write_nowhere(sys.stdout)
        if code == WRONG_INPUT:
            return code
        return _complain(f"cannot write the answer: {error.strerror or error}", WRONG_INPUT, lang)


def preferred_language(arguments: Sequence[str], environment: Mapping[str, str]) -> Lang:
    """The language of `--lang` where it is given, otherwise that of the locale. Help needs it before options are read.

    The first of LC_ALL, LC_MESSAGES and LANG that is set names the locale; LANGUAGE lists preferred languages, between
    colons, and is ignored in the C locale, as GNU gettext does.
    """

    def language(locale: str) -> str:
        return re.split("[_.@]", locale)[0].lower()

    pairs = pairwise(["", *arguments])
    typed = [this.removeprefix("--lang=") for before, this in pairs if before == "--lang" or this.startswith("--lang=")]
    typed = [name for name in typed if name in get_args(Lang)]  # the error about another one is in the locale's
    own = language(next((environment[n] for n in ("LC_ALL", "LC_MESSAGES", "LANG") if environment.get(n)), ""))
    listed = [] if own in ("", "c", "posix") else [language(n) for n in environment.get("LANGUAGE", "").split(":")]
    spoken = [name for name in (listed if any(listed) else [own]) if name in get_args(Lang)]
    return "ko" if [*typed[-1:], *spoken, "en"][0] == "ko" else "en"


def _answer(typed: list[str], lang: Lang) -> int:
    """Run a command line; print its answer, or its error; return the exit code."""
    try:
        import rich  # noqa: F401
        import typer

        from regard.cli.app import group_in
    except ImportError as error:
        return _complain(f"the command line needs typer and rich ({error}): {INSTALL}", MISSING_PART, lang)
    # typer exports this one child of its usage errors; where their class lives differs between versions.
    usage_error: type[Exception] = typer.BadParameter.__mro__[1]
    try:
        group = group_in(lang)
        # Its own main() ends the process with 1 where a pipe is closed.
        with group.make_context("regard", list(typed)) as context:
            group.invoke(context)
        return 0
    except typer.Exit as ended:
        return int(ended.exit_code)
    except typer.Abort:
        return INTERRUPTED
    except usage_error as error:
        return _complain(_usage_message(error, typed), WRONG_INPUT, lang)
    except BrokenPipeError:
        raise
    except ImportError as error:
        return _complain(str(error), MISSING_PART, lang)
    except KeyError as error:  # whose text is the quoted form of its message
        return _complain(str(error.args[0]), WRONG_INPUT, lang)
    except (ValueError, TypeError, LookupError, OSError, EOFError, FloatingPointError) as error:
        return _complain(str(error), WRONG_INPUT, lang)
    except MemoryError as error:
        return _complain(str(error) or "there is not enough memory for it", WRONG_INPUT, lang)


def _replace_closed_streams() -> None:
    """Where a shell closed a stream (`2>&-`), the next file to be opened would get its number and its output."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: this one
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # for as long as the process lives


def _write_nowhere(stream: TextIO) -> None:
    """Send a stream nowhere: Python writes what is left at its end, and would complain."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except OSError:  # no file, as in a test
        return


def _usage_message(error: object, typed: Sequence[str]) -> str:
    """typer's message, with the value that was typed and where help is."""
    context = getattr(error, "ctx", None)
    path = "regard" if context is None else context.command_path
    message: str = error.format_message()  # type: ignore[attr-defined]
    text = re.sub(r", unable to parse .*", "", message.rstrip("."))
    value, options = None, getattr(getattr(error, "param", None), "opts", ())
    for before, this in pairwise(["", *typed]):  # the last one counts: --n 3, or --n=3
        name, sign, after = this.partition("=")
        if sign and name in options:
            value = after
        elif before in options:
            value = this
    if value is not None and repr(value) not in text:
        text += f", got {value!r}"
    names = set() if context is None else {parameter.metavar for parameter in context.command.params}
    if "unexpected extra argument" in text and names & SPACED:
        text += "; put a text with spaces in quotes"
    return f"{text}; see '{path} --help'"


@contextmanager
def _stoppable_imports() -> Iterator[None]:
    """Let Ctrl-C end the process while it imports: extension modules swallow a KeyboardInterrupt, or break by it."""

    def stop(number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                if os.isatty(2):
                    os.write(2, b"\x1b[?25h")  # a progress bar hides the cursor, and cannot show it again
                os._exit(INTERRUPTED)
            frame = frame.f_back
        raise KeyboardInterrupt

    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _warnings_in(lang: Lang) -> Iterator[None]:
    if lang == "en":
        yield
        return

    def show(message: Warning | str, *where: Any, **more: Any) -> None:
        shown(translate_error(str(message), lang), *where, **more)

    shown, warnings.showwarning = warnings.showwarning, show
    try:
        yield
    finally:
        warnings.showwarning = shown


def _complain(message: str, code: int, lang: Lang) -> int:
    """Print the message as one line on stderr, with the library's advice to ignore config keys as options."""

    def options(match: re.Match[str]) -> str:
        keys = json.loads(match[1] or match[2], strict=False)
        return " ".join(f"--ignore {shlex.quote(key)}" for key in keys)

    try:
        text = " ".join(translate_error(message, lang).split())
        print(f"regard: {ADVICE.sub(options, text)}", file=sys.stderr, flush=True)
    except OSError:
        _write_nowhere(sys.stderr)
    return code
