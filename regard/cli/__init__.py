"""The command line `regard`: steps, look, serve, doctor, diff, generate, fill, embed, classify, caption and others.

It parses, calls and prints.

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

One file per command. typer and rich are imported by `main`, torch and the rest by the command that needs them, so that
`regard --help` answers at once.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence

from regard.cli.language import preferred

__all__ = ["main"]

INSTALL = "pip install 'regard[cli]'"
WRONG_INPUT, MISSING_PART, INTERRUPTED = 2, 1, 130
"""Exit codes. 1 is also an answer: the weights of `regard steps` failed their check, `regard doctor` found errors,
`regard diff` found a difference, `regard verify` a bug."""

# How the library advises to ignore keys, a list in JSON's words: in loading, and in what was loaded.
KEY = r'"(?:[^"\\]|\\(?:["\\/bfnrt]|u[0-9a-f]{4}))*"'
KEYS = rf"(\[{KEY}(?:, {KEY})*\])"
ADVICE = re.compile(rf"regard\.load\(…, ignore={KEYS}\)|\bignore={KEYS}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 1 for a missing library, 2 for a wrong input, 130 for Ctrl-C.

    A command may answer by 1 as well (steps, doctor, diff, verify), as its help says.

    >>> main(["--version"])
    regard 0.1.0
    0

    arguments: as after `regard`; by default those the process was started with.

    Raises nothing for a wrong input: the reason is one line on stderr.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal of cp949 lacks ᵀ: a ? there, not a traceback
            stream.reconfigure(errors="replace")
    try:
        import rich  # noqa: F401
        import typer.main

        from regard.cli.commands import app_in
    except ImportError as error:
        return _complain(f"the command line needs typer and rich ({error}): {INSTALL}", MISSING_PART)
    # typer exports this one child of its usage errors; where their class lives differs between versions.
    usage_error: type[Exception] = typer.BadParameter.__mro__[1]
    try:
        command = typer.main.get_command(app_in(preferred(given, os.environ)))
        return int(command.main(args=given, prog_name="regard", standalone_mode=False) or 0)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except usage_error as error:
        return _complain(_usage_message(error), WRONG_INPUT)
    except ImportError as error:
        return _complain(str(error), MISSING_PART)
    except KeyError as error:  # whose text is the quoted form of its message
        return _complain(str(error.args[0]), WRONG_INPUT)
    except (ValueError, TypeError, LookupError, OSError) as error:
        return _complain(str(error), WRONG_INPUT)


def _usage_message(error: object) -> str:
    """What typer says of options it cannot read, and where help is."""
    context = getattr(error, "ctx", None)
    path = "regard" if context is None else context.command_path
    message: str = error.format_message()  # type: ignore[attr-defined]
    return f"{message.rstrip('.')}; see '{path} --help'"


def _complain(message: str, code: int) -> int:
    """One line on stderr, whatever the message was made of."""
    print(f"regard: {_typed(' '.join(message.split()))}", file=sys.stderr)
    return code


def _typed(message: str) -> str:
    """A library's advice to ignore keys of a config file, as it is typed here: the commands that load have --ignore.

    >>> _typed('name them: regard.load(…, ignore=["a", "b"])')
    'name them: --ignore a --ignore b'
    """
    return ADVICE.sub(lambda found: _options(found[1] or found[2]), message)


def _options(keys: str) -> str:
    return " ".join(f"--ignore {shlex.quote(key)}" for key in json.loads(keys, strict=False))
