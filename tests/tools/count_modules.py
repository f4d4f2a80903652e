"""Count the modules of regard that two everyday calls run through: those in which a function was executed.

    python tests/tools/count_modules.py           # two numbers
    python tests/tools/count_modules.py --list    # and the modules' names

generate: regard.load of a tiny GPT-2, then model.generate. look: `regard look "…" --html out.html` (MiniLM, of
regard[demo]). Each runs in a process of its own. What runs while a module is imported does not count: its top level,
class bodies, and functions that these call.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = f"{ROOT / 'regard'}{os.sep}"
SENTENCE = "The animal did not cross the street because it was too tired."


def generate(folder: str) -> None:
    import regard

    regard.load(str(Path(folder, "gpt2"))).generate("The cat sat")


def look(folder: str) -> None:
    from regard.cli import main

    assert main(["look", SENTENCE, "--html", str(Path(folder, "out.html"))]) == 0


PATHS: dict[str, Callable[[str], None]] = {"generate": generate, "look": look}


@contextmanager
def counted() -> Iterator[set[str]]:
    """The files of regard whose functions run inside the block, in any thread that starts there.

    Yields:
        The set that is being filled.
    """
    files: set[str] = set()
    judged: set[CodeType] = set()  # a code object that has counted, or never will

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or code in judged:
            return
        if not code.co_filename.startswith(PACKAGE) or not code.co_flags & inspect.CO_OPTIMIZED:  # a class, a module
            judged.add(code)
        elif not _importing(frame):
            judged.add(code)
            files.add(code.co_filename)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield files
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(PACKAGE):
            return True
        frame = frame.f_back
    return False


def module_name(file: str) -> str:
    parts = Path(file).relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def trace(path: str, folder: str) -> None:
    """Run one of PATHS, and print the names of its modules as JSON."""
    sys.path.insert(0, str(ROOT))
    with redirect_stdout(sys.stderr), counted() as files:
        PATHS[path](folder)
    print(json.dumps(sorted(map(module_name, files))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the modules' names, too")
    parser.add_argument("--trace", nargs=2, metavar=("PATH", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trace:
        trace(*arguments.trace)
        return
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from speaking_twins import gpt2

    with TemporaryDirectory() as folder:
        gpt2(Path(folder, "gpt2"))
        for path in PATHS:
            command = [sys.executable, __file__, "--trace", path, folder]
            done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
            if done.returncode:
                sys.exit(done.stderr)
            modules = json.loads(done.stdout)
            print(f"{path}: {len(modules)} modules")
            if arguments.list:
                print("".join(f"  {module}\n" for module in modules), end="")


if __name__ == "__main__":
    main()
