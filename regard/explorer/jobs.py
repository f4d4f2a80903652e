"""Background jobs of the server, and the sessions and models it keeps."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from typing import Any, Literal, NotRequired
from weakref import WeakKeyDictionary

from typing_extensions import TypedDict

from regard.backends.call import Call
from regard.data.images import OpenedImage, open_image
from regard.explorer.security import report, without_folders
from regard.models.loading import ID, LONGEST_ID, find, load
from regard.models.model import Model
from regard.op import observe, unobserve
from regard.session.default_models import KOREAN, default_model, is_korean, name_of
from regard.session.effects import check_link, measure_heads, measure_link, swap_word, swapped_text
from regard.session.session import Session, look_at, look_at_image, takes_images
from regard.tasks.inputs import has_vision

MOST_SESSIONS = 8
MOST_MODELS = 2  # in memory; a session holds its own besides
MOST_OFFERED = 64
MOST_WAITING = 8
LONGEST_PLACE = 1024  # characters of a directory or hub id
MOST_BYTES = 64 << 20  # of the images that wait
MOST_REMEMBERED = 64  # jobs that ended
UNASKED_SECONDS = 120.0  # after which a job's page is taken to be closed, and a new job may replace it

State = Literal["loading", "reading", "measuring", "done", "failed", "cancelled"]
ENDED = ("done", "failed", "cancelled")


class SessionShelf:
    """Sessions by id: "1", "2", …, each used once. The least recently used are dropped first."""

    def __init__(self, most: int = MOST_SESSIONS) -> None:
        self._most, self._ids = most, count(1)
        self._sessions: OrderedDict[str, Session] = OrderedDict()  # in order of use
        self._lock = threading.Lock()

    def add(self, session: Session) -> str:
        """Keep a session, and return its id."""
        with self._lock:
            name = str(next(self._ids))
            self._sessions[name] = session
            while len(self._sessions) > self._most:
                self._sessions.popitem(last=False)
            return name

    def get(self, name: str) -> Session:
        """A session by its id. Raises LookupError if there is none."""
        with self._lock:
            if name in self._sessions:
                self._sessions.move_to_end(name)
                return self._sessions[name]
            ids = ", ".join(sorted(self._sessions, key=int)) or "none"
        raise LookupError(f"there is no session {name[:40]!r}: there are {ids}; unused ones go when new ones come")

    def all(self) -> dict[str, Session]:
        """All sessions by id, the oldest first."""
        with self._lock:
            return dict(sorted(self._sessions.items(), key=lambda item: int(item[0])))


@dataclass(frozen=True)
class OfferedModel:
    """A model that may be requested by its id. name: for people.  where: what `regard.load` takes."""

    id: str
    name: str
    where: str


class ModelShelf:
    """Models for new sessions, loaded at first use; those used last stay in memory.

    where: directories or hub ids; the first is the default.  demo: offer the demo package's model too, if it is
    installed, and the Korean one, if it was fetched.  ignore: as in `regard.load`.
    """

    def __init__(self, where: Iterable[str] = (), *, demo: bool = True, ignore: Iterable[str] = ()) -> None:
        self.ignore, self._demo = tuple(ignore), demo
        places: dict[str, str] = {}
        for place in map(str, where):
            places.setdefault(resolved(place), place)
        self.offered = [OfferedModel(str(n), name_of(Path(place)), place) for n, place in enumerate(places.values())]
        if demo:
            with suppress(ImportError):  # not installed
                if resolved(str(default_model())) not in places:
                    self.offered.append(OfferedModel("demo", name_of(default_model()), str(default_model())))
        self._ids = count(len(places))
        self._seeing: dict[str, bool] = {}
        self._loaded: OrderedDict[str, Model] = OrderedDict()
        self._locks = {offered.id: threading.Lock() for offered in self.offered}
        self._offer_korean()
        self._others: WeakKeyDictionary[Model, threading.Lock] = WeakKeyDictionary()  # of sessions' own models

    def _offer_korean(self) -> None:
        """It may be fetched while the server runs."""
        if self._demo and "korean" not in self._locks and KOREAN.is_fetched:
            self._locks["korean"] = threading.Lock()
            self.add(OfferedModel("korean", KOREAN.name, str(KOREAN.directory)))

    def find(self, name: str | None, text: str = "") -> OfferedModel:
        """The model of an id; by default the first, or the Korean one for a Korean text instead of the demo's.

        Raises LookupError if there is none.
        """
        self._offer_korean()
        if name is None and not self.offered:
            default_model(text)  # raises with how to install it
        if name is None and self.offered[0].id == "demo" and is_korean(text):
            return next((offered for offered in self.offered if offered.id == "korean"), self.offered[0])
        for offered in self.offered:
            if name is None or offered.id == name:
                return offered
        names = ", ".join(f"{offered.id} ({offered.name})" for offered in self.offered) or "none"
        raise LookupError(
            f"there is no model {str(name)[:40]!r}: there are {names}; `regard serve --model DIR` adds one"
        )

    def propose(self, where: str) -> OfferedModel:
        """The model of a directory or hub id: one that is offered already, or one to `add`.

        Raises ValueError for what is neither a directory with a config.json nor an id.
        """
        place = where.strip()
        if not 0 < len(place) <= LONGEST_PLACE or not place.isprintable():
            raise ValueError(f"a model is a directory or a hub id of 1 to {LONGEST_PLACE} characters, got {len(place)}")
        folder = Path(os.path.expanduser(place))
        if folder.is_dir():
            if not (folder / "config.json").is_file():
                raise ValueError(f"{folder.name!r} has no config.json: give the directory of a model")
        elif place.startswith((".", "/", "~", "\\")) or not ID.fullmatch(place) or len(place) > LONGEST_ID:
            raise ValueError(f"there is no directory {folder.name!r}; a model of the hub is called 'owner/name'")
        for offered in self.offered:
            if resolved(offered.where) == resolved(place):
                return offered
        if len(self.offered) >= MOST_OFFERED:
            raise ValueError(f"{MOST_OFFERED} models are offered already: start the server again with fewer")
        fresh = OfferedModel(str(next(self._ids)), name_of(folder), place)
        self._locks[fresh.id] = threading.Lock()
        return fresh

    def add(self, offered: OfferedModel) -> OfferedModel:
        """Offer a proposed model from now on; one that is offered under the same place already wins."""
        for other in self.offered:
            if resolved(other.where) == resolved(offered.where):
                return other
        self.offered.append(offered)
        return offered

    def sees(self, offered: OfferedModel) -> bool | None:
        """Whether a model takes images; None if that is unknown: before a download, or if `regard.load` refuses it."""
        if offered.id not in self._seeing:
            images = takes_images(offered.where)
            if images is None:  # not kept: it may be downloaded meanwhile
                return None
            self._seeing[offered.id] = images
        return self._seeing[offered.id]

    @contextmanager
    def using(self, offered: OfferedModel, progress: Callable[[int, int], None]) -> Iterator[Model]:
        """Exclusive use of a model: `watch` would also see the calls of other threads.

        progress: called after each tensor that is loaded. Raises as `regard.load` does.
        """
        with self._locks[offered.id]:
            if offered.id not in self._loaded:
                model = load(find(offered.where), ignore=self.ignore, progress=progress)
                self._loaded[offered.id] = model
                while len(self._loaded) > MOST_MODELS:
                    self._loaded.popitem(last=False)
            self._loaded.move_to_end(offered.id)
            yield self._loaded[offered.id]

    @contextmanager
    def running(self, session: Session) -> Iterator[None]:
        """The model of a session to oneself."""
        if session.model is None:
            yield
            return
        held = [self._locks[name] for name, model in list(self._loaded.items()) if model is session.model]
        with held[0] if held else self._others.setdefault(session.model, threading.Lock()):
            yield


def resolved(where: str) -> str:
    """The identity of a model's name: the real path of a directory, or the id."""
    place = os.path.expanduser(where)
    return os.path.realpath(place) if os.path.isdir(place) else where


class BusyError(RuntimeError):
    """Too many jobs are waiting."""


class CancelledError(Exception):
    """Raised inside a job that was cancelled."""


class LinkRequest(TypedDict):
    """A link from a query to a key, in one head, or without layer and head in every head by itself."""

    token: int
    key: int
    layer: NotRequired[int | None]
    head: NotRequired[int | None]


@dataclass
class Job:
    """Work for the thread of `Jobs`.

    work: does it, calling `go_on`.  model: which it loads.  size: bytes of the image that it waits with.
    doing: for the message of an unexpected error.  progress: of the state, in a few words.
    session, opened: the id of the session, or of the model, that it made.  error: why it failed.
    asked: when its state was last requested.
    """

    work: Callable[[Job], None] | None
    model: OfferedModel | None = None
    size: int = 0
    doing: str = "reading"
    state: State = "loading"
    progress: str = "waiting"
    session: str | None = None
    opened: str | None = None
    error: str | None = None
    asked: float = field(default_factory=monotonic)
    stop: threading.Event = field(default_factory=threading.Event)

    def go_on(self, state: State, progress: str) -> None:
        """Enter a state. Raises CancelledError if the job was cancelled."""
        if self.stop.is_set():
            raise CancelledError
        self.state, self.progress = state, progress

    def loaded(self, done: int, total: int) -> None:
        """Say how many bytes of the model are loaded. Raises CancelledError."""
        self.go_on("loading", f"{done / 1e6:.0f} of {total / 1e6:.0f} MB")

    def fail(self, error: str) -> None:
        """End with an error."""
        self.state, self.progress, self.error = "failed", "", error


class Jobs:
    """Jobs by id, "1", "2", …, and the thread that runs them; it starts with the first job.

    sessions: where results go.  models: which models there are.
    """

    def __init__(self, sessions: SessionShelf, models: ModelShelf) -> None:
        self._sessions, self._models = sessions, models
        self._ids, self._lock = count(1), threading.Lock()
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._worker: threading.Thread | None = None

    def start(
        self, text: str, model: str | None = None, *, truncate: bool = False, image: tuple[bytes, str] | None = None
    ) -> str:
        """Start reading a text or an image, and return the job's id.

        text: may be "" beside an image.  model: by its id; default as in `ModelShelf.find`.  truncate: cut a text that
        is longer than the model takes.  image: the bytes of its file, and its name.

        Raises ValueError for an empty text, LookupError if there is no such model, BusyError if 8 jobs or 64 MiB of
        images wait.
        """
        if image is None and not text.strip():
            raise ValueError("there is nothing to look at: the text is empty")
        offered, size = self._models.find(model, text), 0 if image is None else len(image[0])
        return self._queued(Job(lambda job: self._read(job, text, offered, truncate, image), offered, size))

    def measure(self, session: str, link: LinkRequest) -> str:
        """Start measuring a link of a session, and return the job's id. Raises as `check_link`, and BusyError."""
        check_link(self._sessions.get(session), **link)
        return self._queued(Job(lambda job: self._measure(job, session, link), doing="measuring"))

    def open(self, where: str) -> str:
        """Start loading a model by its directory or hub id, and return the job's id. Raises as `ModelShelf.propose`."""
        offered = self._models.propose(where)
        return self._queued(Job(lambda job: self._open(job, offered), offered))

    def swap(self, session: str, token: int, word: str) -> str:
        """Start reading a session's text with another word. Raises as `swapped_text`, and BusyError."""
        swapped_text(self._sessions.get(session), token, word)
        return self._queued(Job(lambda job: self._swap(job, session, token, word)))

    def _queued(self, job: Job) -> str:
        with self._lock:
            waiting = [one for one in self._jobs.values() if one.state not in ENDED]
            for one in waiting:
                if monotonic() - one.asked > UNASKED_SECONDS:
                    one.stop.set()
            if len(waiting) >= MOST_WAITING:
                raise BusyError(f"{MOST_WAITING} jobs are waiting to be done: wait for one of them, or cancel it")
            if job.size and sum(one.size for one in waiting) + job.size > MOST_BYTES:
                raise BusyError(f"{MOST_BYTES >> 20} MiB of images are waiting to be looked at: wait for one of them")
            name = str(next(self._ids))
            self._jobs[name] = job
            ended = [other for other in self._jobs if self._jobs[other].state in ENDED]
            for other in ended[: max(0, len(ended) - MOST_REMEMBERED)]:
                del self._jobs[other]
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="regard jobs", daemon=True)
                self._worker.start()
            self._queue.put(job)
        return name

    def get(self, name: str) -> Job:
        """A job by its id. Raises LookupError if there is none."""
        with self._lock:
            if name in self._jobs:
                self._jobs[name].asked = monotonic()
                return self._jobs[name]
        raise LookupError(f"there is no job {name[:40]!r}: it ended long ago, or never was")

    def cancel(self, name: str) -> Job:
        """Cancel a job that has not ended. Raises LookupError if there is none."""
        job = self.get(name)
        job.stop.set()
        return job

    def close(self, seconds: float = 5.0) -> None:
        """Cancel everything and wait for the thread, at most so long."""
        with self._lock:
            for job in self._jobs.values():
                job.stop.set()
            worker = self._worker
        if worker is not None:
            self._queue.put(None)
            worker.join(seconds)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                self._run(job)
            except BaseException as error:  # one text must not stop the others; a panic of Rust is no Exception
                job.fail(f"{job.doing} failed: {report(error)}")
            job.work, job.size = None, 0  # jobs are remembered; texts and images may be large
            del job

    def _run(self, job: Job) -> None:
        try:
            assert job.work is not None
            job.work(job)
        except CancelledError:
            job.state, job.progress = "cancelled", ""
        except (ValueError, TypeError, LookupError, OSError, ImportError) as error:  # messages for users
            message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
            if job.model is not None and Path(job.model.where).is_absolute():  # a folder of this machine
                message = message.replace(job.model.where, job.model.name)
            job.fail(without_folders(message))

    def _measure(self, job: Job, name: str, link: LinkRequest) -> None:
        job.go_on("measuring", "")
        session, layer, head = self._sessions.get(name), link.get("layer"), link.get("head")
        if layer is not None and head is not None:
            with self._models.running(session), _stoppable(job, "measuring", ""):
                measure_link(session, (layer, head, link["token"], link["key"]))
        else:
            heads = measure_heads(session, link["token"], link["key"])
            while True:
                with self._models.running(session):  # one head at a time: others wait for the model too
                    done = next(heads, None)
                if done is None:
                    break
                job.go_on("measuring", f"{done[0]} / {done[1]}")
        job.session, job.state, job.progress = name, "done", ""

    def _open(self, job: Job, model: OfferedModel) -> None:
        job.go_on("loading", "loading" if os.path.isdir(os.path.expanduser(model.where)) else "downloading")
        with self._models.using(model, job.loaded):
            job.opened = self._models.add(model).id
        job.state, job.progress = "done", ""

    def _swap(self, job: Job, name: str, token: int, word: str) -> None:
        job.go_on("reading", "reading")
        session = self._sessions.get(name)
        with self._models.running(session), _stoppable(job, "reading", "layer {}"):
            changed = swap_word(session, token, word)
        self._keep(job, changed)

    def _read(
        self, job: Job, text: str, offered: OfferedModel, truncate: bool, image: tuple[bytes, str] | None
    ) -> None:
        job.go_on("loading", "loading")

        def tell(stage: str) -> None:
            job.go_on("reading", stage)

        with self._models.using(offered, job.loaded) as model, _stoppable(job, "reading", "layer {}"):
            if image is None:
                session = look_at(text, model, truncate=truncate, progress=tell)
            elif not has_vision(model):
                raise ValueError(no_images(offered))
            else:
                data, name = image
                try:
                    opened = OpenedImage(open_image(data).image, name)
                except ValueError as error:
                    raise ValueError(str(error).replace("the data", repr(name), 1)) from None
                session = look_at_image(opened, model, text=text or None, progress=tell)
        self._keep(job, session)

    def _keep(self, job: Job, session: Session) -> None:
        job.go_on("reading", "measuring")
        _ = session.numbers  # so that the first answer comes at once
        job.go_on("reading", "measured")
        job.session = self._sessions.add(session)
        job.state, job.progress = "done", ""


def no_images(model: OfferedModel) -> str:
    """The message for an image sent to a model of texts."""
    return f"{model.name} takes no images: choose a model that does"


@contextmanager
def _stoppable(job: Job, state: State, progress: str) -> Iterator[None]:
    """Inside, each attention call of this thread reports progress and raises if the job was cancelled."""
    thread, layers = threading.get_ident(), count(1)

    def ask(call: Call, backend: str, output: Any) -> None:
        if threading.get_ident() == thread:
            job.go_on(state, progress.format(next(layers)))

    observe(ask)
    try:
        yield
    finally:
        unobserve(ask)
