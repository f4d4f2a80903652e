"""Times `import regard` and `regard --help` of two source trees, in turns. Prints a table.

    python benchmarks/import_time.py ../before .          # some 20 seconds
    python benchmarks/import_time.py ../before . --rounds 50

Every start is a new process, with bytecode in place; the trees take turns, and the best of all rounds counts. `python
alone` is the same in both: how far its ratio is from 1 is the noise of this machine.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

STARTS = {
    "import regard": ["-c", "import regard"],
    "regard --help": ["-m", "regard", "--help"],
    "python alone": ["-c", "pass"],
}


def seconds(tree: Path, arguments: list[str]) -> float:
    """How long a process with the tree's regard takes."""
    environment = os.environ | {"PYTHONPATH": str(tree)}
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], env=environment, cwd=tree, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="a source tree, which holds regard/")
    parser.add_argument("new", type=Path, help="another one")
    parser.add_argument("--rounds", type=int, default=20, help="how often each is started (default: 20)")
    arguments = parser.parse_args()
    trees = [arguments.old.resolve(), arguments.new.resolve()]
    for tree in trees:
        if not (tree / "regard" / "__init__.py").is_file():
            sys.exit(f"{tree} holds no regard/")
    if arguments.rounds < 1:
        sys.exit(f"--rounds must be at least 1, got {arguments.rounds}")
    print(f"{'':15}{'old':>9}{'new':>9}{'new ÷ old':>12}")
    for name, command in STARTS.items():
        for tree in trees:  # writes the bytecode, and reads the files into memory
            seconds(tree, command)
        times: list[list[float]] = [[], []]
        for round_ in range(arguments.rounds):
            for n in (0, 1) if round_ % 2 else (1, 0):
                times[n].append(seconds(trees[n], command))
        old, new = map(min, times)
        print(f"{name:15}{old:8.3f}s{new:8.3f}s{new / old:12.2f}", flush=True)


if __name__ == "__main__":
    main()
