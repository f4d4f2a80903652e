"""The explorer's HTTP server."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypeVar

from typing_extensions import TypedDict

from regard import __version__
from regard.explorer import answers
from regard.explorer.export import PAGE, html, with_catalogues
from regard.explorer.jobs import BusyError, Jobs, LinkRequest, ModelShelf, SessionShelf, State, no_images
from regard.explorer.security import Gate, error_language, without_folders
from regard.lens.measures.weights import ComputedWeights
from regard.locale import Lang, translate_error
from regard.session import protocol
from regard.session.session import Session, open_file, writes_answers

try:
    from fastapi import FastAPI, HTTPException, Query, Request, Response
    from fastapi.concurrency import run_in_threadpool
    from fastapi.exceptions import RequestValidationError
    from fastapi.middleware.gzip import GZipMiddleware
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException as StarletteHTTPException
    from starlette.requests import ClientDisconnect
except ImportError as error:
    raise ImportError(f"the server needs fastapi and uvicorn ({error}): pip install 'regard[explorer]'") from None

KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
}
LONGEST_TEXT = 1 << 20  # bytes of UTF-8
LARGEST_JSON = 6 * LONGEST_TEXT + 4096  # where each byte is written as \\u0000
LARGEST_FILE = 64 << 20
LARGEST_IMAGE = 32 << 20
LONGEST_VIEW = 2048  # characters of an address's state
LONGEST_QUESTION = 4096  # characters of a text beside an image, which stands in the address
AT_ONCE = 4  # answers that are computed; more wait
MOST_FOR_A_MODEL = 8  # requests that wait for a running model; the server has 40 threads for everything
ERRORS: dict[int | str, str] = {
    400: "the question cannot be answered",
    403: "the token is missing or wrong, or the request comes from another site's page",
    404: "not found",
    408: "the request came too slowly",
    413: "the body is too large",
    421: "the Host is not this server's",
    422: "a parameter or the body is invalid",
    429: "too many jobs wait, or too many requests wait for a model",
    503: "too many bodies are being sent, or too many connections are open",
}

# ---------------------------------------------------------------------------------------------------- types for OpenAPI

T = TypeVar("T")
Count = Annotated[int, Query(ge=0)]
HeadsText = Annotated[
    str, Query(pattern=r"^(\d{1,4}\.\d{1,4}(,\d{1,4}\.\d{1,4})*)?$", max_length=8192, description="layer.head,…")
]
SpanText = Annotated[str, Query(pattern=r"^\d{1,12},\d{1,12}$", description="first,end")]


class SessionJSON(TypedDict):
    """One session. image: the name of the image it shows, or null."""

    id: str
    name: str
    text: str | None
    length: int
    image: str | None


class ModelJSON(TypedDict):
    """One model.

    images: whether it takes images; null if unknown, as before a download.  decoder: whether it is an encoder–decoder.
    """

    id: str
    name: str
    default: bool
    images: bool | None
    decoder: bool | None


class SessionsAnswer(TypedDict):
    """All sessions, the oldest first."""

    sessions: list[SessionJSON]


class ModelsAnswer(TypedDict):
    """All models, the default first."""

    models: list[ModelJSON]


class LookRequest(TypedDict):
    """A text for a model, or for the default. truncate: cut it if it is longer than the model takes."""

    text: str
    model: NotRequired[str | None]
    truncate: NotRequired[bool]


class SwapRequest(TypedDict):
    """Another word in place of the one that a token belongs to."""

    token: int
    word: str


class StartedJSON(TypedDict):
    """A job that was started."""

    job: str


class OpenedJSON(TypedDict):
    """A new session."""

    session: str


class ModelRequest(TypedDict):
    """A model to open. where: a directory with a config.json, or an id of the hub."""

    where: str


class JobJSON(TypedDict):
    """How far a job is. progress: in a few words.  session: if it is done.  error: if it failed.

    model: the id of the model that was opened, of a job that opens one.
    """

    state: State
    progress: str
    session: str | None
    error: str | None
    model: NotRequired[str]


class ErrorJSON(TypedDict):
    """Why a request failed."""

    error: str


# --------------------------------------------------------------------------------------------------------------- server


@dataclass(frozen=True, eq=False)
class ServerState:
    """The state that the routes share."""

    sessions: SessionShelf
    models: ModelShelf
    jobs: Jobs
    turns: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(AT_ONCE))
    waiting: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(MOST_FOR_A_MODEL))

    def answer(self, name: str, question: Callable[..., T], *args: object) -> T:
        """Answer a question of `answers.py` in turn: each answer holds some megabytes while it is computed."""
        session = self.sessions.get(name)
        with self.turns:
            return question(session, *args)

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """Exclusive use of a session's model. A request that waits for it holds a thread of the server."""
        if not self.waiting.acquire(blocking=False):
            raise BusyError("the model is reading a text, and others wait for it too: try again once it has read")
        try:
            with self.models.running(self.sessions.get(name)):
                yield
        finally:
            self.waiting.release()


def app(
    sessions: Sequence[Session] = (), models: ModelShelf | None = None, *, port: int, token: str, page: Path = PAGE
) -> FastAPI:
    """A server of these sessions, to be run by `http_server` or by a test client.

    sessions: the first sessions; at most 8 are kept.  models: for new texts; default the demo package's model, if it is
    installed.  port: which Host and Origin must name.  token: which every request must carry; see `Gate`.
    page: the folder of the page's files.
    """
    shelf, offered = SessionShelf(), ModelShelf() if models is None else models
    for session in sessions:
        shelf.add(session)
    state = ServerState(shelf, offered, Jobs(shelf, offered))

    @asynccontextmanager
    async def lifespan(server: FastAPI) -> AsyncIterator[None]:
        yield
        state.jobs.close()

    server = FastAPI(
        title="regard explorer",
        version=__version__,
        docs_url=None,  # FastAPI's own pages load scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
        responses={status: {"model": ErrorJSON, "description": why} for status, why in ERRORS.items()},
    )
    _add_errors(server)
    _add_questions(server, state)
    _add_files(server, state)
    _add_jobs(server, state)

    @server.get("/page/{name:path}", include_in_schema=False)
    async def file(name: str) -> Response:
        for path in page.rglob("*"):  # only files found by listing the folder, and no symlinks
            wanted = path.relative_to(page).as_posix() == name and path.suffix in KINDS
            if wanted and path.is_file() and not path.is_symlink():
                return Response(path.read_bytes(), media_type=KINDS[path.suffix], headers={"cache-control": "no-cache"})
        raise LookupError(f"the page has no file {name[:80]!r}")

    @server.get("/", include_in_schema=False)
    async def index() -> Response:
        text = with_catalogues((page / "index.html").read_text(encoding="utf-8"))
        return Response(text, media_type=KINDS[".html"], headers={"cache-control": "no-cache"})

    server.add_middleware(GZipMiddleware, minimum_size=1024, compresslevel=1)
    limits = {"/api/look": LARGEST_JSON, "/api/open": LARGEST_FILE, "/api/look_at_image": LARGEST_IMAGE}
    server.add_middleware(Gate, port=port, token=token, limits=limits)
    return server


def _add_errors(server: FastAPI) -> None:
    """Every error as {"error"} in the page's language: a wrong value 400, what is not there 404."""

    def reply(request: Request, status: int, message: str, **headers: str) -> JSONResponse:
        words = translate_error(message, error_language(request.scope))
        return JSONResponse({"error": words.encode(errors="replace").decode()}, status, headers)

    @server.exception_handler(ValueError)
    @server.exception_handler(TypeError)
    async def wrong(request: Request, error: Exception) -> JSONResponse:
        return reply(request, 400, without_folders(str(error)))

    @server.exception_handler(ImportError)  # the default model is a package
    @server.exception_handler(LookupError)
    async def missing(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, KeyError):  # our own mistake, which the gate answers
            raise error
        return reply(request, 404, without_folders(str(error)))

    @server.exception_handler(BusyError)
    async def busy(request: Request, error: Exception) -> JSONResponse:
        return reply(request, 429, str(error), **{"retry-after": "2"})

    @server.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        messages = []
        for problem in error.errors()[:3]:
            if problem["type"] == "json_invalid":
                place = problem["loc"][-1]
                messages.append(f"the body is not JSON: {problem['ctx']['error']} at character {place}")
            else:
                where = problem["loc"][1:] or problem["loc"]  # of ("query", "layer") the second
                messages.append(f"{'.'.join(str(part) for part in where)[:80]}: {problem['msg']}")
        return reply(request, 422, "; ".join(messages))

    @server.exception_handler(StarletteHTTPException)
    async def http(request: Request, error: StarletteHTTPException) -> JSONResponse:
        known = {404: f"there is nothing at {request.url.path[:80]!r}", 405: f"{request.method[:20]} is not taken here"}
        return reply(
            request, error.status_code, known.get(error.status_code, str(error.detail)), **(error.headers or {})
        )

    @server.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: Exception) -> JSONResponse:
        return reply(request, 400, "the body is incomplete")  # the client is gone; this avoids a traceback


def _add_questions(server: FastAPI, state: ServerState) -> None:
    """The questions of `answers.py` about a session."""

    @server.get("/api/sessions")
    def list_sessions() -> SessionsAnswer:
        """All sessions."""
        return {
            "sessions": [
                {
                    "id": name,
                    "name": session.name,
                    "text": None if session.text is None else session.text[:200],
                    "length": len(session.tokens),
                    "image": session.images[0].name if session.images else None,
                }
                for name, session in state.sessions.all().items()
            ]
        }

    @server.get("/api/session/{session}/overview")
    def ask_overview(session: str, lang: Lang = "en") -> protocol.OverviewAnswer:
        """All heads at a glance."""
        return state.answer(session, answers.overview, lang)

    @server.get("/api/session/{session}/tokens")
    def ask_tokens(session: str, start: Count = 0, stop: Count | None = None) -> protocol.TokensAnswer:
        """The labels of a range of tokens."""
        return state.answer(session, answers.tokens, start, stop)

    @server.get("/api/session/{session}/head")
    def ask_head(session: str, layer: Count, head: Count, lang: Lang = "en") -> protocol.HeadAnswer:
        """The card of a head."""
        return state.answer(session, answers.head, layer, head, lang)

    @server.get("/api/session/{session}/links")
    def ask_links(
        session: str, layer: Count, head: Count, many: Annotated[int, Query(ge=1, le=64)] = 12
    ) -> protocol.LinksAnswer:
        """The strongest links of a head."""
        return state.answer(session, answers.links, layer, head, many)

    @server.get("/api/session/{session}/ranked")
    def ask_ranked(session: str, count: Annotated[int, Query(ge=1, le=64)] = 8) -> protocol.RankedAnswer:
        """The strongest links of the session across all heads."""
        return state.answer(session, answers.ranked, count)

    @server.get("/api/session/{session}/thumbnails")
    def ask_thumbnails(session: str) -> protocol.ThumbnailsAnswer:
        """Small maps of all heads."""
        return state.answer(session, answers.thumbnails)

    @server.get("/api/session/{session}/rows_of_token")
    def ask_rows_of_token(
        session: str, token: Count, layer: Count = 0, width: Annotated[int, Query(ge=1, le=1024)] = 64
    ) -> protocol.TokenRowsAnswer:
        """One query's row in every head."""
        return state.answer(session, answers.rows_of_token, token, layer, width)

    @server.get("/api/session/{session}/link_in_heads")
    def ask_link_in_heads(session: str, token: Count, key: Count, layer: Count = 0) -> protocol.LinkHeadsAnswer:
        """The weight of one link in every head, and its effects where they were measured."""
        return state.answer(session, answers.link_in_heads, token, key, layer)

    @server.get("/api/session/{session}/row")
    def ask_row(
        session: str, layer: Count, head: Count, token: Count, start: Count = 0, stop: Count | None = None
    ) -> protocol.RowAnswer:
        """The exact weights of one query."""
        return state.answer(session, answers.row, layer, head, token, start, stop)

    @server.get("/api/session/{session}/tile")
    def ask_tile(
        session: str,
        layer: Count,
        head: Count,
        rows: SpanText,
        cols: SpanText,
        size: Annotated[int, Query(ge=1, le=256)] = 128,
    ) -> protocol.TileAnswer:
        """A part of the map."""
        (a, b), (c, d) = (map(int, span.split(",")) for span in (rows, cols))
        return state.answer(session, answers.tile, layer, head, (a, b), (c, d), size)

    @server.get("/api/session/{session}/steps")
    def ask_steps(session: str, layer: Count, head: Count, token: Count, key: Count) -> protocol.StepsAnswer:
        """The steps of one query with their numbers."""
        with state.running(session):
            return state.answer(session, answers.steps, layer, head, token, key)

    @server.get("/api/session/{session}/predictions")
    def ask_predictions(session: str, without: HeadsText = "") -> protocol.PredictionsAnswer:
        """What the model predicts, with some heads switched off if asked."""
        heads = [[int(n) for n in place.split(".")] for place in without.split(",") if place]
        with state.running(session):
            return state.answer(session, answers.predictions, heads)

    @server.get("/api/session/{session}/changes")
    def ask_changes(session: str, other: str, count: Annotated[int, Query(ge=1, le=64)] = 12) -> protocol.ChangesAnswer:
        """The heads that changed most from this session to another one of the same model."""
        return state.answer(session, answers.changes, state.sessions.get(other), count)

    @server.get("/api/session/{session}/effects")
    def ask_effects(session: str, token: Count, key: Count) -> protocol.EffectsAnswer:
        """What was measured of a link so far."""
        return state.answer(session, answers.effects, token, key)

    @server.get(
        "/api/session/{session}/image/{number}",
        response_class=Response,
        responses={200: {"content": {"image/jpeg": {}, "image/png": {}}}},
    )
    def ask_image(session: str, number: int) -> Response:
        """An image that the model was given, of at most 1,600 pixels a side."""
        photo = answers.find_image(state.sessions.get(session), number)
        return Response(photo.data, media_type=photo.kind)


def _add_files(server: FastAPI, state: ServerState) -> None:
    """A session as a file, for the page to hand to its reader."""

    @server.get("/api/session/{session}/page", response_class=Response, responses={200: {"content": {"text/html": {}}}})
    def export_page(
        session: str, lang: Lang = "en", view: Annotated[str, Query(max_length=LONGEST_VIEW)] = ""
    ) -> Response:
        """The session as one HTML file that opens offline, in a view as the page's address tells it."""
        with state.running(session):  # for values and predictions
            text = state.answer(session, html, lang, view)
        return Response(text.encode(), media_type=KINDS[".html"], headers={"content-disposition": "attachment"})

    @server.get(
        "/api/session/{session}/capture",
        response_class=Response,
        responses={200: {"content": {"application/octet-stream": {}}}},
    )
    def export_capture(session: str) -> Response:
        """The session's capture as a .regard file."""
        body = state.answer(session, _capture_bytes)
        headers = {"content-disposition": "attachment"}
        return Response(body, media_type="application/octet-stream", headers=headers)


def _add_jobs(server: FastAPI, state: ServerState) -> None:
    """New sessions: from a text or an image, which takes a job, and from a capture file."""
    body: dict[str, Any] = {"requestBody": {"content": {"application/octet-stream": {}}}}

    @server.get("/api/models")
    def list_models() -> ModelsAnswer:
        """The models for new texts and images."""
        return {
            "models": [
                {
                    "id": model.id,
                    "name": model.name,
                    "default": n == 0,
                    "images": state.models.sees(model),
                    "decoder": writes_answers(model.where),
                }
                for n, model in enumerate(state.models.offered)
            ]
        }

    @server.post("/api/models")
    def open_model(request: ModelRequest) -> StartedJSON:
        """Start a job that loads a model by its directory or hub id, and offers it for new texts."""
        return {"job": state.jobs.open(request["where"])}

    @server.post("/api/look")
    def look(request: LookRequest) -> StartedJSON:
        """Start a job that reads a text."""
        text = request["text"]
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise ValueError("the text holds half a character (a lone surrogate), which no tokenizer reads")
        if (size := len(text.encode())) > LONGEST_TEXT:
            raise HTTPException(413, f"the text has {size:,} bytes, and at most {LONGEST_TEXT:,} are read")
        return {"job": state.jobs.start(text, request.get("model"), truncate=request.get("truncate", False))}

    @server.post("/api/look_at_image", openapi_extra=body)
    async def look_at_image(
        request: Request,
        name: str = "",
        model: str | None = None,
        text: Annotated[str, Query(max_length=LONGEST_QUESTION)] = "",
    ) -> StartedJSON:
        """Start a job that looks at an image, sent as the bytes of its file."""
        offered = state.models.find(model)
        if await run_in_threadpool(state.models.sees, offered) is False:  # before a byte of the body is read
            raise ValueError(no_images(offered))
        return {"job": state.jobs.start(text, model, image=(await request.body(), base_name(name, "image")))}

    @server.post("/api/session/{session}/effects")
    def measure(session: str, request: LinkRequest) -> StartedJSON:
        """Start a job that measures what a link does; `effects` then has it."""
        return {"job": state.jobs.measure(session, request)}

    @server.post("/api/session/{session}/swap")
    def swap(session: str, request: SwapRequest) -> StartedJSON:
        """Start a job that reads the text with another word in a token's place; `changes` then compares."""
        return {"job": state.jobs.swap(session, request["token"], request["word"])}

    @server.get("/api/job/{job}")
    def ask_job(request: Request, job: str) -> JobJSON:
        """How far a job is."""
        status = state.jobs.get(job)
        line: JobJSON = {
            "state": status.state,
            "progress": status.progress,
            "session": status.session,
            "error": status.error and translate_error(status.error, error_language(request.scope)),
        }
        if status.opened is not None:
            line["model"] = status.opened
        return line

    @server.delete("/api/job/{job}")
    def cancel_job(request: Request, job: str) -> JobJSON:
        """Cancel a job."""
        state.jobs.cancel(job)
        return ask_job(request, job)

    @server.post("/api/open", openapi_extra=body)
    async def open_body(request: Request, name: str = "") -> OpenedJSON:
        """Open a capture, sent as the bytes of its .regard file."""
        session = await run_in_threadpool(_open_bytes, await request.body(), base_name(name, "capture.regard"))
        return {"session": state.sessions.add(session)}


def base_name(name: str, default: str) -> str:
    """The name of a file without folders and unprintable characters; `default` if nothing is left."""
    last = name.replace("\\", "/").rpartition("/")[2]
    return "".join(letter for letter in last if letter.isprintable())[:60].strip(" .") or default


def _capture_bytes(session: Session) -> bytes:
    """The capture file of a session, if `/api/open` would take it."""
    held = [value for layer in session.layers for value in layer.view.held.values()]
    calls = [view.weights.call for layer in session.layers if isinstance((view := layer.view).weights, ComputedWeights)]
    size = sum(value.nbytes for value in [*held, *(part for call in calls for part in (call.q, call.k))])
    if size > LARGEST_FILE:
        raise ValueError(
            f"the capture has about {size >> 20:,} MiB, and the page gives out at most {LARGEST_FILE >> 20}: "
            "capture.save(…) in Python and `regard look … --save` write it"
        )
    with tempfile.TemporaryDirectory(prefix="regard-") as folder:
        path = Path(folder, "capture.regard")
        session.capture.save(path, photos=bool(session.images))
        return path.read_bytes()


def _open_bytes(body: bytes, name: str) -> Session:
    """A session from the bytes of a capture file; safetensors opens files only."""
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
