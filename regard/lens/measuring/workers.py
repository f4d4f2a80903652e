"""Threads that share out a pass on a CPU, each of whose torch operations runs on one core.

torch splits every operation among its threads, and all of them wait for the last. A tile is a dozen short operations,
and where other processes keep the cores busy each may wait for a time slice: a pass took 10 to 40 times as long. Here
a thread has whole heads to itself, and waits for the others once, at the end.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

import torch

__all__ = ["available", "share_out"]

T = TypeVar("T")


def available() -> int:
    """How many threads a pass on this thread may use: as many as torch would.

    >>> available() <= torch.get_num_threads()
    True
    """
    return torch.get_num_threads() if _by_openmp() else 1


@cache
def _by_openmp() -> bool:
    """Does torch keep the number of its threads for each thread apart? Where it has a pool of its own it does not."""
    return "ATen parallel backend: OpenMP" in torch.__config__.parallel_info()


def share_out(units: Iterable[T], begin: Callable[[], Callable[[T], None]], threads: int) -> None:
    """Work off all units on so many threads, each of which takes the next one that is left.

    >>> found: list[int] = []
    >>> share_out([3, 1, 2], lambda: found.append, threads=2)
    >>> sorted(found)
    [1, 2, 3]

    begin: called once on each thread; gives what is called with each of its units. Both run without gradient, in
        inference mode if the caller is.
    Raises what one of them raises, when all threads have stopped.
    """
    left, inference = deque(units), torch.is_inference_mode_enabled()

    def work() -> None:
        with torch.inference_mode(inference), torch.no_grad():
            step = begin()
            while left:
                try:
                    unit = left.popleft()
                except IndexError:  # another thread took the last one
                    return
                step(unit)

    running = _THREADS.start(work, threads)
    try:
        for each in running:
            each.result()
    except BaseException:
        left.clear()
        wait(running)
        raise


class _Threads:
    """The threads there are. They are kept: a new one costs as much as a small tile does."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew, as a forked process must, which has none of them."""
        self.lock, self.setting, self.count = threading.Lock(), threading.Lock(), 0
        self.pool: ThreadPoolExecutor | None = None

    def start(self, work: Callable[[], None], count: int) -> list[Future[None]]:
        """Run `work` on so many threads."""
        with self.lock:
            if self.count < count:
                if self.pool is not None:
                    self.pool.shutdown(wait=False)  # its threads end when they have done what they were given
                self.pool, self.count = ThreadPoolExecutor(count, "regard", _run_on_one_core), count
            assert self.pool is not None
            return [self.pool.submit(work) for _ in range(count)]


_THREADS = _Threads()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_THREADS.forget)


def _run_on_one_core() -> None:
    """Let the operations of this thread, which is new, not be split.

    torch keeps the number for each thread and, beside it, the last number that was set, with which new threads begin:
    another thread puts that back at once.
    """
    with _THREADS.setting:
        before = torch.get_num_threads()
        ready, done = threading.Event(), threading.Event()

        def put_back() -> None:
            ready.set()
            done.wait()
            torch.set_num_threads(before)

        other = threading.Thread(target=put_back)
        other.start()
        ready.wait()
        torch.set_num_threads(1)
        done.set()
        other.join()
