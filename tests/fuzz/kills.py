"""Kill writers with SIGKILL and look at what they leave: the old file or the new one, whole, never neither.

    python tests/fuzz/kills.py --kills 100 --seed 0

Each kill is of a forked child that replaces a capture, a page or a model. Half of them are at counted steps: before or
after one of the write's calls of the operating system, spread over all of them, and every third close to the one that
replaces the target. The others are at random times. Every fifth kill begins where nothing is. After each kill the next
write must succeed and sweep what is left.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, FrameType
from typing import Any

import torch

import regard
from regard import files
from regard.explorer import export
from regard.lens.files.container import read
from regard.models.families.transformer import TransformerSize, transformer
from regard.session.session import Session

OF_THE_SYSTEM = {"posix", "_io", "fcntl"}
Snapshot = dict[str, bytes] | None  # content by path; None where nothing is


@dataclass(frozen=True)
class Writer:
    """Something that can be written in two versions, 0 and 1.

    write: a version to a path.  version: which of the two a path holds, raising for anything else.  renames: it renames
    the old one away before the new one comes, so that only the next load or save may put it back.
    """

    name: str
    write: Callable[[int, Path], None]
    version: Callable[[Path], int]
    renames: bool = False


# ------------------------------------------------------------------------------------------------------------- writers


def seen(version: int) -> regard.lens.capture.Capture:  # type: ignore[name-defined]
    torch.manual_seed(version)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True).eval()
    with torch.no_grad(), regard.watch(layer, keep="qk") as capture:
        layer(torch.randn(1, 199, 16))
    return capture


def captures() -> Writer:
    made = [seen(0), seen(1)]

    def version(path: Path) -> int:
        regard.open(path)
        tensors = read(path)[1]
        (match,) = (n for n, one in enumerate(expected) if one.keys() == tensors.keys() and equal(one, tensors))
        return match

    def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
        return all(torch.equal(one[name], other[name]) for name in one)

    with tempfile.TemporaryDirectory() as folder:
        for n, capture in enumerate(made):
            capture.save(f"{folder}/{n}.regard")
        expected = [read(f"{folder}/{n}.regard")[1] for n in (0, 1)]
    return Writer("capture save", lambda n, path: made[n].save(path), version)


def pages() -> Writer:
    """The page's text is made once: the kills are for its writing."""
    sessions = [Session(f"page {n}", seen(n), tuple(map(str, range(199)))) for n in (0, 1)]
    texts = {session.name: export.html(session) for session in sessions}
    export.html = lambda session, lang="en", view="": texts[session.name]  # type: ignore[assignment]

    def version(path: Path) -> int:
        return [text.encode() for text in texts.values()].index(path.read_bytes())

    return Writer("HTML export", lambda n, path: export.write_html(sessions[n], path), version)


def models(folder: Path) -> Writer:
    """Each version has a side file that the other lacks; a note and a .git are beside the model."""
    made = []
    for n, side in enumerate(["generation_config.json", "modules.json"]):
        torch.manual_seed(n)
        tiny = transformer(499, TransformerSize(d_model=32, num_heads=2, layers=1, d_ff=64), start=1, end=2, pad=0)
        tiny.save(folder / str(n))
        (folder / str(n) / side).write_text("{}" if n == 0 else "[]")
        made.append(regard.load(folder / str(n)))
    expected = [snapshot(folder / "0"), snapshot(folder / "1")]

    def write(n: int, path: Path) -> None:
        made[n].save(path)

    def version(path: Path) -> int:
        found = snapshot(path)
        assert found is not None
        notes = {name: found.pop(name) for name in ("notes.md", ".git/HEAD") if name in found}
        assert all(content == b"mine" for content in notes.values())
        match = expected.index(found)
        assert torch.equal(next(regard.load(path).parameters()), next(made[match].parameters()))
        return match

    return Writer("model.save", write, version)


def snapshot(path: Path) -> Snapshot:
    if path.is_file():
        return {"": path.read_bytes()}
    if not path.exists():
        return None
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


# --------------------------------------------------------------------------------------------------------------- kills


def steps_of(write: Callable[[int, Path], None], target: Path, stop: int | None) -> tuple[int, int]:
    """Write version 1 and count the events before and after calls of the system; die at the one numbered `stop`.

    Returns how many there are, and at which the target was found replaced (or gone).
    """
    count, replaced, before = 0, 0, identity(target)

    def hook(frame: FrameType, event: str, called: Any) -> None:
        nonlocal count, replaced
        if event in ("c_call", "c_return") and isinstance(called, BuiltinFunctionType):
            module = called.__module__ or type(called.__self__).__module__
            if module in OF_THE_SYSTEM:
                if count == stop:
                    os.kill(os.getpid(), signal.SIGKILL)
                if stop is None and not replaced and identity(target) != before:
                    replaced = count
                count += 1

    sys.setprofile(hook)
    try:
        write(1, target)
    finally:
        sys.setprofile(None)
    return count, replaced


def identity(path: Path) -> int | None:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return None


def killed(work: Callable[[], object], after: float | None) -> bool:
    """Fork a child that works, kill it after some seconds, and say whether it was killed before its end."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), f"the writer failed by itself: {status}"
    return status != 0


def attack(writer: Writer, target: Path, kills: int, rng: random.Random, only_steps: bool) -> Iterator[str]:
    """Kill so many writes, and yield what each left: old, new, or nothing where nothing was."""
    writer.write(0, target)
    if target.is_dir():
        (target / ".git").mkdir()
        for name in ("notes.md", ".git/HEAD"):
            (target / name).write_bytes(b"mine")
    full = shutil.copytree(target, target.parent.parent / "full") if target.is_dir() else None
    steps, replaced = steps_of(writer.write, target, None)
    start = time.perf_counter()
    writer.write(0, target)
    seconds = time.perf_counter() - start
    counted = kills if only_steps else kills // 2
    spread = [int((n + rng.random()) * steps / counted) for n in range(counted)]
    points = [replaced + rng.randint(-8, 8) if n % 3 == 0 else point for n, point in enumerate(spread)]
    yield f"{steps} steps, replaced at {replaced}; {seconds * 1e3:.1f} ms"
    done = 0
    while done < kills:
        empty = done % 5 == 4
        if empty:
            shutil.rmtree(target) if target.is_dir() else target.unlink()
        before = snapshot(target)
        if done < counted:
            point = rng.randrange(points[done]) if empty else min(points[done], steps - 1)  # fewer where nothing is
            died = killed(partial(steps_of, writer.write, target, point), None)
        else:
            died = killed(partial(writer.write, 1, target), rng.uniform(0, 1.2 * seconds))
        gone = not empty and not target.exists()
        if gone:
            assert writer.renames, "neither the old one nor the new one"
            files.recover(target)  # as load does
        now = snapshot(target)
        if now == before:
            what = "nothing, as before" if empty else "old, put back" if gone else "old"
        else:
            assert now is not None, "neither the old one nor the new one"
            assert writer.version(target) == 1
            what = "new"
        if now is not None and before is not None and target.is_dir():
            assert (now["notes.md"], now[".git/HEAD"]) == (b"mine", b"mine")
        writer.write(0, target)  # sweeps
        assert writer.version(target) == 0
        assert os.listdir(target.parent) == [target.name], os.listdir(target.parent)
        if full is not None and empty:
            shutil.rmtree(target)
            shutil.copytree(full, target)
        if died:
            done += 1
            yield what


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="of each writer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only-steps", action="store_true", help="no kills at random times")
    asked = parser.parse_args()
    torch.set_num_threads(1)  # a process with threads cannot be forked safely
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = models(folder)
        renamed = Writer("model.save, where directories cannot be exchanged", model.write, model.version, renames=True)
        cases = [(captures(), "run.regard"), (pages(), "page.html"), (model, "model"), (renamed, "model")]
        for n, (writer, target) in enumerate(cases):
            if writer is renamed:
                files._exchange = lambda one, other: False
            (folder / f"case {n}" / "place").mkdir(parents=True)
            place = folder / f"case {n}" / "place" / target
            outcomes = attack(writer, place, asked.kills, random.Random(asked.seed), asked.only_steps)
            size = next(outcomes)
            counts = Counter(outcomes)
            print(f"{writer.name} ({size}): {sum(counts.values())} kills: {dict(sorted(counts.items()))}", flush=True)


if __name__ == "__main__":
    main()
