"""What the server takes and gives beside the protocol's answers: lists, jobs, refusals. It does not know routes."""

from __future__ import annotations

from typing import NotRequired

# pydantic reads these for OpenAPI, and before Python 3.12 it reads typing_extensions' alone, which torch brings along
from typing_extensions import TypedDict

from regard.explorer.jobs import State

__all__ = ["Asked", "JobLine", "ModelLine", "ModelList", "Opened", "Refused", "SessionLine", "SessionList", "Started"]


class SessionLine(TypedDict):
    """One session that can be looked at. picture: the name of the one it shows, null without."""

    id: str
    name: str
    text: str | None
    length: int
    picture: str | None


class ModelLine(TypedDict):
    """One model that may read. pictures: does it look at them; null while nobody can tell, as before a download."""

    id: str
    name: str
    default: bool
    pictures: bool | None


class SessionList(TypedDict):
    """All sessions, the oldest first."""

    sessions: list[SessionLine]


class ModelList(TypedDict):
    """All models, the default first."""

    models: list[ModelLine]


class Asked(TypedDict):
    """A text to be read, by a model or by the default. truncate: cut it where it is longer than the model takes."""

    text: str
    model: NotRequired[str | None]
    truncate: NotRequired[bool]


class Started(TypedDict):
    """A job that was started."""

    job: str


class Opened(TypedDict):
    """A session that was made."""

    session: str


class JobLine(TypedDict):
    """How far a job is. progress: in a few words.  session: of one that is done.  error: of one that failed."""

    state: State
    progress: str
    session: str | None
    error: str | None


class Refused(TypedDict):
    """Why something was not answered."""

    error: str
