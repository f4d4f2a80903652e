"""What a server keeps at hand: a few sessions, of which the oldest go first, and the models that may read texts.

It does not know who asks.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from regard.explorer.seeing_models import takes_pictures
from regard.explorer.sessions import Session, default_model, name_of
from regard.models.checkpoint.finding import find
from regard.models.loading import load
from regard.models.model import Model

__all__ = ["MOST_SESSIONS", "ModelShelf", "Offered", "SessionShelf"]

MOST_SESSIONS = 8
MOST_MODELS = 2  # in memory; a session holds its own besides


class SessionShelf:
    """Sessions by id, "1", "2" and so on, which are never given again.

    >>> from regard.lens.capture import Capture
    >>> shelf = SessionShelf(most=1)
    >>> shelf.add(Session("a", Capture(), ())), shelf.add(Session("b", Capture(), ()))
    ('1', '2')
    >>> list(shelf.all())
    ['2']

    most: how many are kept.
    """

    def __init__(self, most: int = MOST_SESSIONS) -> None:
        self._most, self._ids = most, count(1)
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, session: Session) -> str:
        """Keep a session; the oldest goes where there are too many."""
        with self._lock:
            name = str(next(self._ids))
            self._sessions[name] = session
            while len(self._sessions) > self._most:
                self._sessions.popitem(last=False)
            return name

    def get(self, name: str) -> Session:
        """A session by its id. Raises LookupError for one that is not there."""
        with self._lock:
            found = self._sessions.get(name)
            there = ", ".join(self._sessions) or "none"
        if found is None:
            raise LookupError(f"there is no session {name[:40]!r}: there are {there}; the oldest go when new ones come")
        return found

    def all(self) -> dict[str, Session]:
        """All sessions by id, the oldest first."""
        with self._lock:
            return dict(self._sessions)


@dataclass(frozen=True)
class Offered:
    """A model that may be asked for. id: how it is asked for.  name: for people.  where: what `regard.load` takes."""

    id: str
    name: str
    where: str


class ModelShelf:
    """Models that may read texts, loaded when they are first asked for; those used last stay in memory.

    >>> [model.name for model in ModelShelf(["models/gpt2"], demo=False).offered]
    ['gpt2']

    where: directories or hub ids, the first of them the default.  demo: offer the demo package's model too, if it is
    installed.  ignore: keys of their files to go on without.
    """

    def __init__(self, where: Iterable[str] = (), *, demo: bool = True, ignore: Iterable[str] = ()) -> None:
        self.ignore = tuple(ignore)
        places = [str(place) for place in where]
        self.offered = [Offered(str(n), name_of(Path(place)), place) for n, place in enumerate(dict.fromkeys(places))]
        if demo:
            self.offered += [Offered("demo", name_of(place), str(place)) for place in _demo()]
        self._seeing: dict[str, bool] = {}
        self._loaded: OrderedDict[str, Model] = OrderedDict()
        self._locks = {offered.id: threading.Lock() for offered in self.offered}

    def find(self, name: str | None) -> Offered:
        """The model of an id, or the default. Raises LookupError with those there are."""
        if name is None and not self.offered:
            return Offered("demo", "", str(default_model()))  # which says how to install it
        for offered in self.offered:
            if name is None or offered.id == name:
                return offered
        there = ", ".join(f"{offered.id} ({offered.name})" for offered in self.offered) or "none"
        raise LookupError(
            f"there is no model {str(name)[:40]!r}: there are {there}; `regard serve --model DIR` adds one"
        )

    def sees(self, offered: Offered) -> bool | None:
        """Does a model look at pictures? None while that cannot be told: it is still to be downloaded, or is refused.

        >>> shelf = ModelShelf(["nowhere/at/all"], demo=False)
        >>> shelf.sees(shelf.offered[0]) is None
        True
        """
        if offered.id not in self._seeing:
            found = takes_pictures(offered.where)
            if found is None:  # not kept: it may be downloaded meanwhile
                return None
            self._seeing[offered.id] = found
        return self._seeing[offered.id]

    @contextmanager
    def using(self, offered: Offered, progress: Callable[[int, int], None]) -> Iterator[Model]:
        """A model that nobody else runs meanwhile: who watches it would see their calls too.

        progress: told after each tensor that is loaded. Raises as `regard.load` does.
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
        """While a session's own model runs: nobody else runs it."""
        held = [name for name, model in list(self._loaded.items()) if model is session.model]
        if not held:
            yield
            return
        with self._locks[held[0]]:
            yield


def _demo() -> list[Path]:
    try:
        return [default_model()]
    except ImportError:
        return []
