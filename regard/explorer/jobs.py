"""Reading takes its time: one thread does it, job after job, and says how far it is. A job can be cancelled.

    loading → reading → done, or failed, or cancelled

A job that is cancelled ends before the next tensor that is loaded or the next layer that is computed, and leaves
nothing behind, no more than one that fails.

It does not know who asks.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from queue import SimpleQueue
from typing import Any, Literal

from regard.backends.call import Call
from regard.explorer.picture_reading import look_at_picture
from regard.explorer.sessions import Session, look_at
from regard.explorer.shelves import ModelShelf, Offered, SessionShelf
from regard.models.images.pictures import Picture
from regard.models.model import Model
from regard.op import observe, unobserve

__all__ = ["BusyError", "Job", "Jobs", "State"]

State = Literal["loading", "reading", "done", "failed", "cancelled"]
ENDED = ("done", "failed", "cancelled")
MOST_WAITING = 8
MOST_REMEMBERED = 64  # jobs that ended


class BusyError(RuntimeError):
    """Too many jobs are waiting."""


class CancelledError(Exception):
    """Raised inside a job that nobody wants any more."""


@dataclass
class Job:
    """One text to be read, or a picture to be looked at, with the text that is read beside it, if any.

    state, progress: where it is, and in a few words.  session: the id of what it made.  error: why it failed.
    """

    text: str
    model: Offered
    truncate: bool
    picture: Picture | None = None
    state: State = "loading"
    progress: str = "waiting"
    session: str | None = None
    error: str | None = None
    stop: threading.Event = field(default_factory=threading.Event)

    def go_on(self, state: State, progress: str) -> None:
        """Say what comes now. Raises CancelledError where nobody wants it."""
        if self.stop.is_set():
            raise CancelledError
        self.state, self.progress = state, progress


class Jobs:
    """Jobs by id, "1", "2" and so on, and the thread that does them; it starts with the first.

    sessions: where what is read goes.  models: who reads.
    """

    def __init__(self, sessions: SessionShelf, models: ModelShelf) -> None:
        self._sessions, self._models = sessions, models
        self._ids, self._lock = count(1), threading.Lock()
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._worker: threading.Thread | None = None

    def start(self, text: str, model: str | None = None, truncate: bool = False) -> str:
        """Have a text read, and return the job's id.

        model: by its id; default the first.  truncate: cut a text that is longer than the model takes.
        Raises ValueError for an empty text, LookupError for a model that is not there, BusyError where 8 jobs wait.
        """
        if not text.strip():
            raise ValueError("there is nothing to look at: the text is empty")
        return self._start(Job(text, self._models.find(model), truncate))

    def start_picture(self, picture: Picture, text: str = "", model: str | None = None) -> str:
        """Have a picture looked at, with a text beside it or "" for none, and return the job's id.

        model: by its id; default the first. Raises LookupError for a model that is not there, BusyError where 8 jobs
        wait.
        """
        return self._start(Job(text, self._models.find(model), False, picture))

    def _start(self, job: Job) -> str:
        with self._lock:
            if sum(job.state not in ENDED for job in self._jobs.values()) >= MOST_WAITING:
                raise BusyError(f"{MOST_WAITING} jobs are waiting to be done: wait for one of them, or cancel it")
            name = str(next(self._ids))
            self._jobs[name] = job
            self._forget()
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="regard jobs", daemon=True)
                self._worker.start()
        self._queue.put(job)
        return name

    def get(self, name: str) -> Job:
        """A job by its id. Raises LookupError for one that is not there."""
        with self._lock:
            if name in self._jobs:
                return self._jobs[name]
        raise LookupError(f"there is no job {name[:40]!r}: it ended long ago, or never was")

    def cancel(self, name: str) -> Job:
        """Let a job end soon; one that has ended stays as it is. Raises LookupError for one that is not there."""
        job = self.get(name)
        job.stop.set()
        return job

    def close(self, seconds: float = 5.0) -> None:
        """Cancel everything and wait for the thread, not for ever."""
        with self._lock:
            for job in self._jobs.values():
                job.stop.set()
            worker = self._worker
        if worker is not None:
            self._queue.put(None)
            worker.join(seconds)

    def _forget(self) -> None:
        ended = [name for name, job in self._jobs.items() if job.state in ENDED]
        for name in ended[: max(0, len(ended) - MOST_REMEMBERED)]:
            del self._jobs[name]

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                self._do(job)
            except CancelledError:
                job.state, job.progress = "cancelled", ""
            except (ValueError, TypeError, LookupError, OSError, ImportError) as error:  # said for people
                job.state, job.progress, job.error = "failed", "", _said(error)
            except Exception as error:  # one text must not stop the others
                said = f"{type(error).__name__}: {error}".splitlines()[0]
                job.state, job.progress, job.error = "failed", "", f"reading failed: {said}"
            job.text, job.picture = "", None  # jobs are remembered; texts and pictures may be large
            del job

    def _do(self, job: Job) -> None:
        job.go_on("loading", "loading")

        def loaded(done: int, total: int) -> None:
            job.go_on("loading", f"{done / 1e6:.0f} of {total / 1e6:.0f} MB")

        with self._models.using(job.model, loaded) as model, _stoppable(job):
            session = _read(job, model)
        job.go_on("reading", "measuring")
        _ = session.numbers  # so that the first answer comes at once
        job.go_on("reading", "measured")
        job.session = self._sessions.add(session)
        job.state, job.progress = "done", ""


def _read(job: Job, model: Model) -> Session:
    def tell(said: str) -> None:
        job.go_on("reading", said)

    if job.picture is not None:
        return look_at_picture(job.picture, model, text=job.text or None, progress=tell)
    return look_at(job.text, model, truncate=job.truncate, progress=tell)


def _said(error: Exception) -> str:
    return str(error.args[0]) if isinstance(error, KeyError) else str(error)  # whose own text is quoted


@contextmanager
def _stoppable(job: Job) -> Iterator[None]:
    """Inside, the attention of this thread asks whether the job is wanted, layer by layer, and says how far it is."""
    thread, layers = threading.get_ident(), count(1)

    def ask(call: Call, backend: str, output: Any) -> None:
        if threading.get_ident() == thread:
            job.go_on("reading", f"layer {next(layers)}")

    observe(ask)
    try:
        yield
    finally:
        unobserve(ask)
