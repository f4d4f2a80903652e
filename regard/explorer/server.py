"""The explorer's HTTP server."""

import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NotRequired

from typing_extensions import TypedDict

from regard import __version__
from regard.explorer import answers
from regard.explorer.answers import find_image
from regard.explorer.jobs import BusyError, Jobs, ModelShelf, SessionShelf, State, no_images
from regard.explorer.security import without_folders
from regard.session.protocol import (
    HeadAnswer,
    LinksAnswer,
    OverviewAnswer,
    RowAnswer,
    StepsAnswer,
    TileAnswer,
    TokensAnswer,
)
from regard.session.session import Session, open_file
from regard.stages import Lang

if TYPE_CHECKING:
    from fastapi import FastAPI

# pydantic reads these for OpenAPI, and before Python 3.12 it reads typing_extensions' alone, which torch brings along


class SessionJSON(TypedDict):
    """One session that can be looked at. picture: the name of the one it shows, null without."""

    id: str
    name: str
    text: str | None
    length: int
    picture: str | None


class ModelJSON(TypedDict):
    """One model that may read. pictures: does it look at them; null while nobody can tell, as before a download."""

    id: str
    name: str
    default: bool
    pictures: bool | None


class SessionsAnswer(TypedDict):
    """All sessions, the oldest first."""

    sessions: list[SessionJSON]


class ModelsAnswer(TypedDict):
    """All models, the default first."""

    models: list[ModelJSON]


class LookRequest(TypedDict):
    """A text to be read, by a model or by the default. truncate: cut it where it is longer than the model takes."""

    text: str
    model: NotRequired[str | None]
    truncate: NotRequired[bool]


class StartedJSON(TypedDict):
    """A job that was started."""

    job: str


class OpenedJSON(TypedDict):
    """A session that was made."""

    session: str


class JobJSON(TypedDict):
    """How far a job is. progress: in a few words.  session: of one that is done.  error: of one that failed."""

    state: State
    progress: str
    session: str | None
    error: str | None


class ErrorJSON(TypedDict):
    """Why something was not answered."""

    error: str


PAGE = Path(__file__).parent / "page"
INDEX = "index.html"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
}


def page_file(name: str, folder: Path = PAGE) -> tuple[bytes, str]:
    """The bytes and the media type of a file of the page.

    >>> page_file("../server.py")
    Traceback (most recent call last):
        ...
    LookupError: the page has no file '../server.py'

    name: its path in the folder, with slashes.  Raises LookupError for what is not there.
    """
    there = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if _ours(path)}
    if name not in there:
        raise LookupError(f"the page has no file {name[:80]!r}")
    path = there[name]
    return path.read_bytes(), KINDS[path.suffix]


def _ours(path: Path) -> bool:
    return path.suffix in KINDS and path.is_file() and not path.is_symlink()


# No `from __future__ import annotations`: FastAPI reads the annotations of routes, which name what the factory makes.


INSTALL = "pip install 'regard[explorer]'"
LONGEST_TEXT = 1 << 20  # bytes of UTF-8
LARGEST_JSON = 6 * LONGEST_TEXT + 4096  # where each byte is written as \\u0000
LARGEST_FILE = 64 << 20
LARGEST_PICTURE = 32 << 20
LONGEST_QUESTION = 4096  # characters of a text beside a picture, which stands in the address
AT_ONCE = 4  # answers that are computed; more wait
MOST_FOR_A_MODEL = 8  # who wait for one that is reading; of 40 threads, which answer everything else


@dataclass(frozen=True, eq=False)
class ServerState:
    """What the routes share."""

    sessions: SessionShelf
    models: ModelShelf
    jobs: Jobs
    turns: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(AT_ONCE))
    waiting: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(MOST_FOR_A_MODEL))

    @contextmanager
    def asked(self, name: str) -> Iterator[Session]:
        """A session, and a turn to compute: each answer holds some megabytes while it is made."""
        session = self.sessions.get(name)
        with self.turns:
            yield session

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """While the model of a session runs again. Each who waits for it holds a thread of the server."""
        if not self.waiting.acquire(blocking=False):
            raise BusyError("the model is reading a text, and others wait for it too: ask again once it has read")
        try:
            with self.models.running(self.sessions.get(name)):
                yield
        finally:
            self.waiting.release()


def app(
    sessions: Sequence[Session] = (), models: ModelShelf | None = None, *, port: int, token: str, page: Path = PAGE
) -> "FastAPI":
    """A server of these sessions, to be run by `http_server` of `connections.py` or by a test client.

    >>> http_server(app(port=8000, token=secrets.token_hex(16))).run([listening])     # doctest: +SKIP

    sessions: what can be looked at from the beginning; at most 8 are kept.
    models: who may read new texts; default the demo package's model, if it is installed.
    port: the one it will be reached by, which Host and Origin must name.
    token: what every request must have; see `Gate`.  page: the folder of the page's files.

    Raises ImportError without FastAPI.
    """
    try:
        from fastapi import FastAPI
        from fastapi.middleware.gzip import GZipMiddleware
    except ImportError as error:
        raise ImportError(f"the server needs fastapi and uvicorn ({error}): {INSTALL}") from None
    from regard.explorer.security import Gate

    shelf, offered = SessionShelf(), ModelShelf() if models is None else models
    for session in sessions:
        shelf.add(session)
    kept = ServerState(shelf, offered, Jobs(shelf, offered))

    @asynccontextmanager
    async def living(server: "FastAPI") -> AsyncIterator[None]:
        yield
        kept.jobs.close()

    errors = {status: {"model": ErrorJSON, "description": why} for status, why in ERRORS.items()}
    server = FastAPI(
        title="regard explorer",
        version=__version__,
        docs_url=None,  # FastAPI's own pages load scripts from elsewhere
        redoc_url=None,
        lifespan=living,
        responses=errors,
    )
    _add_errors(server)
    _add_answers(server, kept)
    _add_pictures(server, kept)
    _add_jobs(server, kept)
    _add_page(server, page)
    server.add_middleware(GZipMiddleware, minimum_size=1024, compresslevel=1)
    limits = {"/api/look": LARGEST_JSON, "/api/open": LARGEST_FILE, "/api/look_at_picture": LARGEST_PICTURE}
    server.add_middleware(Gate, port=port, token=token, limits=limits)
    return server


ERRORS: dict[int | str, str] = {
    400: "what was asked cannot be answered",
    403: "the token is missing or wrong, or another site's page asked",
    404: "it is not there",
    408: "the request came too slowly",
    413: "the body is too large",
    421: "the Host is not this server's",
    422: "a parameter or the body is not what it must be",
    429: "too many jobs wait to be done, or too many wait for a model",
    503: "too many bodies are being sent, or too many connections are open",
}


def _add_errors(server: "FastAPI") -> None:
    """Every error as {"error"}: a wrong value 400, what is not there 404."""
    from fastapi import Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect

    def refuse(status: int, words: str, **headers: str) -> JSONResponse:
        return JSONResponse({"error": words.encode(errors="replace").decode()}, status, headers)

    @server.exception_handler(ValueError)
    @server.exception_handler(TypeError)
    async def wrong(request: Request, error: Exception) -> JSONResponse:
        return refuse(400, without_folders(str(error)))

    @server.exception_handler(ImportError)  # the default model is a package
    @server.exception_handler(LookupError)
    async def missing(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, KeyError):  # ours, never the user's: the gate answers it
            raise error
        return refuse(404, without_folders(str(error)))

    @server.exception_handler(BusyError)
    async def busy(request: Request, error: Exception) -> JSONResponse:
        return refuse(429, str(error), **{"retry-after": "2"})

    @server.exception_handler(RequestValidationError)
    async def unread(request: Request, error: RequestValidationError) -> JSONResponse:
        return refuse(422, "; ".join(_misread(one) for one in error.errors()[:3]))

    @server.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        said = {404: f"there is nothing at {request.url.path[:80]!r}", 405: f"{request.method[:20]} is not taken here"}
        return refuse(error.status_code, said.get(error.status_code, str(error.detail)), **(error.headers or {}))

    @server.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: Exception) -> JSONResponse:
        return refuse(400, "the body ended before its end")  # which nobody reads, but no terminal shows it either


def _misread(problem: Mapping[str, Any]) -> str:
    """What FastAPI says of a parameter or a body that it cannot read."""
    if problem["type"] == "json_invalid":
        return f"the body is not JSON: {problem['ctx']['error']} at character {problem['loc'][-1]}"
    where = problem["loc"][1:] or problem["loc"]  # of ("query", "layer") the second
    return f"{'.'.join(str(part) for part in where)[:80]}: {problem['msg']}"


def _add_answers(server: "FastAPI", kept: ServerState) -> None:
    """The questions about a session."""
    from fastapi import Query

    count = Annotated[int, Query(ge=0)]
    span = Annotated[str, Query(pattern=r"^\d{1,12},\d{1,12}$", description="first,end")]

    @server.get("/api/sessions")
    def list_sessions() -> SessionsAnswer:
        """What can be looked at."""
        found = kept.sessions.all().items()
        return {"sessions": [_line(name, session) for name, session in found]}

    @server.get("/api/session/{session}/overview")
    def ask_overview(session: str, lang: Lang = "en") -> OverviewAnswer:
        """All heads at a glance."""
        with kept.asked(session) as found:
            return answers.overview(found, lang)

    @server.get("/api/session/{session}/tokens")
    def ask_tokens(session: str, start: count = 0, stop: count | None = None) -> TokensAnswer:
        """The labels of a stretch of tokens."""
        with kept.asked(session) as found:
            return answers.tokens(found, start, stop)

    @server.get("/api/session/{session}/head")
    def ask_head(session: str, layer: count, head: count, lang: Lang = "en") -> HeadAnswer:
        """The card of a head."""
        with kept.asked(session) as found:
            return answers.head(found, layer, head, lang)

    @server.get("/api/session/{session}/links")
    def ask_links(
        session: str, layer: count, head: count, many: Annotated[int, Query(ge=1, le=64)] = 12
    ) -> LinksAnswer:
        """The strongest links of a head."""
        with kept.asked(session) as found:
            return answers.links(found, layer, head, many)

    @server.get("/api/session/{session}/row")
    def ask_row(
        session: str, layer: count, head: count, token: count, start: count = 0, stop: count | None = None
    ) -> RowAnswer:
        """The exact weights of one query."""
        with kept.asked(session) as found:
            return answers.row(found, layer, head, token, start, stop)

    @server.get("/api/session/{session}/tile")
    def ask_tile(
        session: str, layer: count, head: count, rows: span, cols: span, size: Annotated[int, Query(ge=1, le=256)] = 128
    ) -> TileAnswer:
        """A part of the map."""
        with kept.asked(session) as found:
            return answers.tile(found, layer, head, _span(rows), _span(cols), size)

    @server.get("/api/session/{session}/steps")
    def ask_steps(session: str, layer: count, head: count, token: count, key: count) -> StepsAnswer:
        """The steps of one query with their numbers."""
        with kept.running(session), kept.asked(session) as found:
            return answers.steps(found, layer, head, token, key)


def _add_pictures(server: "FastAPI", kept: ServerState) -> None:
    """Pictures out and in."""
    from fastapi import Query, Request, Response
    from fastapi.concurrency import run_in_threadpool

    bytes_out: dict[int | str, dict[str, Any]] = {200: {"content": {"image/jpeg": {}, "image/png": {}}}}
    bytes_in: dict[str, Any] = {"requestBody": {"content": {"application/octet-stream": {}}}}

    @server.get("/api/session/{session}/picture/{number}", response_class=Response, responses=bytes_out)
    def ask_picture(session: str, number: int) -> Response:
        """A picture that the model looked at, at most 1,600 pixels long."""
        found = find_image(kept.sessions.get(session), number)
        return Response(found.data, media_type=found.kind)

    @server.post("/api/look_at_picture", openapi_extra=bytes_in)
    async def look_at_picture(
        request: Request,
        name: str = "",
        model: str | None = None,
        text: Annotated[str, Query(max_length=LONGEST_QUESTION)] = "",
    ) -> StartedJSON:
        """Have a picture looked at, sent as the bytes of its file; the job says when its session is there."""
        reader = kept.models.find(model)
        if await run_in_threadpool(kept.models.sees, reader) is False:  # before a byte of the body is read
            raise ValueError(no_images(reader))
        return {"job": kept.jobs.start_picture(await request.body(), _base_name(name, "picture"), text, model)}


def _line(name: str, session: Session) -> SessionJSON:
    text = session.text
    return {
        "id": name,
        "name": session.name,
        "text": None if text is None else text[:200],
        "length": len(session.tokens),
        "picture": session.pictures[0].name if session.pictures else None,
    }


def _model_line(models: ModelShelf, number: int) -> ModelJSON:
    found = models.offered[number]
    return {"id": found.id, "name": found.name, "default": number == 0, "pictures": models.sees(found)}


def _span(text: str) -> tuple[int, int]:
    first, _, end = text.partition(",")
    return int(first), int(end)


def _add_jobs(server: "FastAPI", kept: ServerState) -> None:
    """New sessions: from a text, which takes a job, and from a file."""
    from fastapi import Request
    from fastapi.concurrency import run_in_threadpool

    @server.get("/api/models")
    def list_models() -> ModelsAnswer:
        """Who may read texts, and look at pictures."""
        return {"models": [_model_line(kept.models, number) for number in range(len(kept.models.offered))]}

    @server.post("/api/look")
    def look(asked: LookRequest) -> StartedJSON:
        """Have a text read; the job says when its session is there."""
        text = asked["text"]
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise ValueError("the text holds half a character (a lone surrogate), which no tokenizer reads")
        if len(text.encode()) > LONGEST_TEXT:
            raise _too_large(f"the text has {len(text.encode()):,} bytes, and at most {LONGEST_TEXT:,} are read")
        return {"job": kept.jobs.start(text, asked.get("model"), asked.get("truncate", False))}

    @server.get("/api/job/{job}")
    def ask_job(job: str) -> JobJSON:
        """How far a job is."""
        return _job_line(kept, job)

    @server.delete("/api/job/{job}")
    def cancel_job(job: str) -> JobJSON:
        """Let a job end."""
        kept.jobs.cancel(job)
        return _job_line(kept, job)

    @server.post("/api/open", openapi_extra={"requestBody": {"content": {"application/octet-stream": {}}}})
    async def open_body(request: Request, name: str = "") -> OpenedJSON:
        """Look at a capture, sent as the bytes of its .regard file."""
        body = await request.body()
        session = await run_in_threadpool(_open_bytes, body, _base_name(name))
        return {"session": kept.sessions.add(session)}


def _too_large(words: str) -> Exception:
    from fastapi import HTTPException

    return HTTPException(413, words)


def _job_line(kept: ServerState, name: str) -> JobJSON:
    job = kept.jobs.get(name)
    return {"state": job.state, "progress": job.progress, "session": job.session, "error": job.error}


def _base_name(name: str, instead: str = "capture.regard") -> str:
    """What a file is called, without folders and what no file system takes; `instead` where nothing is left."""
    last = name.replace("\\", "/").rpartition("/")[2]
    return "".join(letter for letter in last if letter.isprintable())[:60].strip(" .") or instead


def _open_bytes(body: bytes, name: str) -> Session:
    """A session from the bytes of a capture file, which is written down for the reading of it."""
    with tempfile.TemporaryDirectory(prefix="regard-") as folder:
        path = Path(folder, "capture.regard")
        path.write_bytes(body)
        try:
            session = open_file(path)
        except (ValueError, OSError) as error:
            raise ValueError(str(error).replace(str(path), name)) from None
    if not session.layers:
        raise ValueError(f"{name!r} holds no attention: nothing was seen when it was recorded")
    return replace(session, name=name)


def _add_page(server: "FastAPI", folder: Path) -> None:
    """The page and its files."""
    from fastapi import Response

    def give(name: str) -> Response:
        content, kind = page_file(name, folder)
        return Response(content, media_type=kind, headers={"cache-control": "no-cache"})

    @server.get("/", include_in_schema=False)
    async def index() -> Response:
        return give(INDEX)

    @server.get("/page/{name:path}", include_in_schema=False)
    async def file(name: str) -> Response:
        return give(name)
