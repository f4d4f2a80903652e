"""An interruption at any line of entering or leaving `watch`, and a fork, leave torch and the model as they were.

Ctrl-C raises KeyboardInterrupt between any two instructions. Here a trace function raises it, at one event after the
other; and real signals are sent to a process of its own.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

import regard
from regard import op
from regard.lens import assembly, watch
from regard.lens.taps import calls, installation, softmax
from regard.lens.taps import functions as function_taps
from regard.lens.taps.installation import CPU_KERNELS

COVERED = [*CPU_KERNELS, *((name, "CPU") for name in ("_softmax", "_log_softmax", "bmm", "baddbmm", "mm"))]
LENS = str(Path(regard.__file__).parent / "lens")
FINALIZERS = ("__del__", "_del_library", "_clear_torch_ops_cache")  # what they raise, Python prints and ignores
BORROWED = (torch.library.__file__, warnings.__file__, op.__file__)


class Attend(nn.Module):
    """Self-attention of x (B, N, 8) by torch's kernel or by hand; it knows FlexAttention under two names."""

    flex = staticmethod(flex_attention)

    def __init__(self, how: str = "sdpa") -> None:
        super().__init__()
        self.qkv, self.how, self.other_name = nn.Linear(8, 24), how, flex_attention

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        out = (q @ k.mT).softmax(-1) @ v if self.how == "by hand" else sdpa(q, k, v)
        return out.transpose(1, 2).flatten(2)


def state(model: nn.Module) -> tuple[Any, ...]:
    """All of torch, the process and the model that watching touches."""
    kernels = [str(torch.library.get_kernel(f"aten::{name}", key)) for name, key in COVERED]
    functions = (
        flex_module.flex_attention,
        *NAMES.values(),
        vars(Attend)["flex"],
        torch.nn.functional.scaled_dot_product_attention,
    )
    functions += (torch.nn.functional.softmax, torch.Tensor.softmax, torch.softmax, torch.bmm)
    switches = (torch.backends.mha.get_fastpath_enabled(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))
    ours = (list(function_taps._bound), dict(function_taps._recorders), dict(softmax._pending), list(calls.WATCHES))
    modules = [{key: copy_of(value) for key, value in vars(m).items()} for m in model.modules()]
    return kernels, functions, switches, list(warnings.filters), op._observers, ours, modules


def copy_of(value: Any) -> Any:
    """A dict of a module as it is now, by identity of what it holds."""
    return [(key, id(item)) for key, item in value.items()] if isinstance(value, dict) else value


def watch_and_run(model: nn.Module, x: Tensor) -> list[str]:
    with regard.watch(model, measures=["entropy"]) as seen:
        model(x)
    return seen.names


def sees(model: nn.Module, x: Tensor) -> None:
    """A new watch works, and so it does in another thread."""
    assert watch_and_run(model, x) == [""]
    names: list[list[str]] = []
    thread = threading.Thread(target=lambda: names.append(watch_and_run(model, x)), daemon=True)
    thread.start()
    thread.join(30)
    assert names == [[""]]


def let_go_of_locks() -> None:
    """Let go of what an exception at the end of `with lock:` left held: a trace can raise there, a signal cannot."""
    for module in (installation, softmax, watch):
        while module._LOCK._is_owned():  # type: ignore[attr-defined]
            module._LOCK.release()


NAMES = {"flex": flex_attention, "again": flex_attention, "other": len}
"""A module of Python that has imported FlexAttention."""


@pytest.fixture
def few_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are bound here alone: a trace through those of all modules of Python takes too long."""
    monkeypatch.setattr(function_taps, "_namespaces", lambda *_: iter([(NAMES, "names")]))
    holders = [(NAMES, "names"), (Attend, "")]
    monkeypatch.setattr(function_taps, "_holders", lambda model, _: iter([*holders, (vars(model), "")]))


# -------------------------------------------------------------------------------------------------------------- tracing


class Interrupter:
    """Raises KeyboardInterrupt at an event of the traced files; without one, it notes the events that there are.

    at: (code, line or instruction, how often it has come).
    """

    def __init__(self, files: tuple[str, ...], opcodes: bool = False, at: tuple[Any, int, int] | None = None) -> None:
        self.files, self.opcodes, self.at = files, opcodes, at
        self.counts: Counter[tuple[Any, int]] = Counter()
        self.events: list[tuple[Any, int, int]] = []
        self.raised = False

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(self.files) or frame.f_code.co_name in FINALIZERS:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = self.opcodes, not self.opcodes
        if event == ("opcode" if self.opcodes else "line") and not self.raised:
            where = frame.f_code, frame.f_lasti if self.opcodes else frame.f_lineno
            self.counts[where] += 1
            now = (*where, self.counts[where])
            self.events.append(now)
            if now == self.at:
                self.raised = True
                raise KeyboardInterrupt
        return self

    def run(self, do: Callable[[], Any]) -> None:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            do()
        finally:
            sys.settrace(before)


def at_each_event(
    do: Callable[[Interrupter], Any], files: tuple[str, ...], *, opcodes: bool = False, most: int = 1
) -> Iterator[tuple[Any, int, int]]:
    """Do something once for each event in these files, interrupted there; it yields after each.

    do: given an interrupter, by whose `run` it runs what is to be interrupted.
    most: how often an event that comes again is taken, and its last time.
    """
    rehearsal = Interrupter(files, opcodes)
    do(rehearsal)
    last = {event[:2]: event[2] for event in rehearsal.events}
    for at in rehearsal.events:
        if at[2] <= most or at[2] == last[at[:2]]:
            interrupter = Interrupter(files, opcodes, at)
            with suppress(KeyboardInterrupt):
                do(interrupter)
            assert interrupter.raised, at
            let_go_of_locks()
            yield at


# ------------------------------------------------------------------------------------------- entering, leaving, running


@pytest.mark.usefixtures("few_names")
@pytest.mark.parametrize("where", ["lines", "instructions", "lines of torch and warnings"])
def test_interruption_of_entering_or_leaving_leaves_everything_as_it_was(where: str) -> None:
    model, x = Attend(), torch.randn(2, 3, 8)
    sees(model, x)
    before = state(model)

    def enter_and_leave() -> None:
        installation._warned = False  # as in a process that has not watched before
        with regard.watch(model):
            pass

    files = {"lines": (LENS,), "instructions": (installation.__file__,)}.get(where, BORROWED)
    events = at_each_event(lambda trace: trace.run(enter_and_leave), files, opcodes=where == "instructions", most=2)
    for n, at in enumerate(events):
        assert state(model) == before, at
        if n % 20 == 0:
            sees(model, x)
            assert state(model) == before, at
    sees(model, x)


@pytest.mark.usefixtures("few_names")
@pytest.mark.parametrize("how", ["sdpa", "by hand"])
def test_interruption_while_the_model_runs_leaves_everything_as_it_was(how: str) -> None:
    model, x = Attend(how), torch.randn(2, 3, 8)
    sees(model, x)
    before = state(model)
    ours = (calls, installation, softmax, watch, assembly)
    files = tuple(module.__file__ for module in ours)

    def run(trace: Interrupter) -> None:
        with regard.watch(model, measures=["entropy"], keep="qk"):
            trace.run(lambda: model(x))

    for at in at_each_event(run, files):
        assert state(model) == before, at
        assert watch_and_run(model, x) == [""], at


@pytest.mark.usefixtures("few_names")
def test_watch_that_a_traceback_holds_does_not_stop_the_next_and_ends_with_it() -> None:
    """An interruption at the first line of leaving comes before anything that could catch it."""
    model, x = Attend(), torch.randn(2, 3, 8)
    before = state(model)

    def enter_and_leave() -> None:
        with regard.watch(model):
            pass

    rehearsal = Interrupter((LENS,))
    rehearsal.run(enter_and_leave)
    at = next(event for event in rehearsal.events if event[0] is watch.WatchContext.__exit__.__code__)
    with pytest.raises(KeyboardInterrupt) as caught:
        Interrupter((LENS,), at=at).run(enter_and_leave)
    sees(model, x)
    del caught
    assert state(model) == before


def test_generators_and_tasks_that_are_left_halfway_leave_everything_as_it_was() -> None:
    model, x = Attend(), torch.randn(2, 3, 8)
    before = state(model)

    def steps() -> Iterator[Any]:
        with regard.watch(model, measures=["entropy"]) as seen:
            model(x)
            yield seen
            model(x)

    dropped, other = steps(), steps()
    assert len(next(dropped).records) == len(next(other).records) == 1
    del dropped
    assert [len(seen.records) for seen in other] == []
    assert state(model) == before

    async def task(name: int, order: list[int]) -> int:
        with regard.watch(model, measures=["entropy"]) as seen:
            for _ in range(name):
                await asyncio.sleep(0)
            model(x)
            order.append(name)
            return len(seen.records)

    async def tasks() -> list[Any]:
        order: list[int] = []
        several = [asyncio.create_task(task(name, order)) for name in (3, 1, 9)]
        await asyncio.sleep(0)
        several[2].cancel()
        return await asyncio.gather(*several, return_exceptions=True)

    first, second, cancelled = asyncio.run(tasks())
    assert (second >= 1, first >= 1, type(cancelled)) == (True, True, asyncio.CancelledError)
    assert state(model) == before


# ------------------------------------------------------------------------------------------ signals and forks, for real

SIGNALS = """
import random, signal
random.seed(0)
signal.signal(signal.SIGALRM, signal.default_int_handler)  # which raises KeyboardInterrupt, as for Ctrl-C
for n in range(150):
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 2e-3))
        for _ in range(10):  # an interruption of torch's own finalizer is printed and lost
            with regard.watch(model):
                pass
    except KeyboardInterrupt:
        pass
    assert state(model) == before, n
sees(model, x)
"""

FORKS = """
import os, signal, time
from functools import cached_property
from regard.lens.visibility import MaskSummary

torch.set_num_threads(1)
locks = [softmax._LOCK, installation._LOCK, watch._LOCK]
cached = [value for value in vars(MaskSummary).values() if isinstance(value, cached_property)]
locks += [value.lock for value in cached if hasattr(value, "lock")]


def forked(check):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        try:
            check()
            os._exit(0)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0


def as_before():
    assert state(model) == before
    sees(model, x)


# Another thread watches, and holds every lock but that of installing, which is waited for.
inside, leave = threading.Event(), threading.Event()

def watch_elsewhere():
    with regard.watch(model, measures=["entropy"]):
        model(x)
        for lock in (locks[0], *locks[2:]):
            lock.acquire()
        inside.set()
        leave.wait()
        for lock in (locks[0], *locks[2:]):
            lock.release()

thread = threading.Thread(target=watch_elsewhere)
thread.start()
inside.wait()
forked(as_before)
leave.set()
thread.join()

# Another thread is busy installing when the process forks.
def install_slowly():
    with installation._LOCK:
        inside.set()
        time.sleep(0.2)

inside.clear()
thread = threading.Thread(target=install_slowly)
thread.start()
inside.wait()
forked(as_before)
thread.join()

# The watch of the thread that forks goes on in the child.
def goes_on():
    model(x)
    assert len(seen.records) == 2

with regard.watch(model, measures=["entropy"]) as seen:
    model(x)
    forked(goes_on)
    assert len(seen.records) == 1
as_before()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork, and other signals")
def test_process_that_is_interrupted_and_forks_stays_sound() -> None:
    begin = """
from test_watch_interrupted import *
function_taps._namespaces = lambda *_: iter([(NAMES, "names")])
model, x = Attend(), torch.randn(2, 3, 8)
sees(model, x)
before = state(model)
"""
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parent.parent), *filter(None, sys.path)])
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", begin + SIGNALS + FORKS],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr
