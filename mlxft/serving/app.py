"""The HTTP server's paths, what each may answer, and the form of its errors."""

import asyncio
import logging
import time
from typing import Any, Optional

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest

import mlxft
from mlxft.errors import InputError
from mlxft.serving import anthropic_api, openai_api, wire
from mlxft.serving.answers import ClientLeft
from mlxft.serving.guards import ANTHROPIC_PATH, Guards, error_for
from mlxft.serving.metrics import Metrics
from mlxft.serving.requests import Refused
from mlxft.serving.served import Served

log = logging.getLogger("mlxft")

_MEANINGS = {
    400: "the request is wrong",
    401: "no API key, or a wrong one",
    404: "no such thing",
    409: "the name is taken",
    413: "the body is too large",
    429: "all places are taken",
    500: "a fault of the server",
    503: "the server is shutting down",
}


# One of a stream's events.
_EVENT = {"type": "object", "required": ["data"],
          "properties": {"event": {"type": "string"}, "data": {"type": "string"}}}  # fmt: skip


def make_app(served: Served, api_key: Optional[str] = None, may_mount: bool = True) -> FastAPI:
    """Returns the ASGI application. may_mount: whether clients may mount and unmount adapters."""
    app = FastAPI(
        title="mlxft",
        version=mlxft.__version__,
        docs_url=None,
        redoc_url=None,
        description="OpenAI's and Anthropic's APIs on one model, with adapters by name.",
    )
    metrics = Metrics(served.engine)
    _add_answers(app, served)
    _add_lists(app, served)
    if may_mount:
        _add_mounting(app, served)
    _add_state(app, served, metrics)
    _add_errors(app)
    app.openapi = lambda: _document(app)
    app.add_middleware(Guards, api_key=api_key, body_bytes=served.bounds.body_bytes)
    app.add_middleware(Timed, metrics=metrics)
    return app


def _answers(model: Any, *statuses: int, streams: bool = False, error: Any = wire.ErrorAnswer) -> dict:
    good: dict[str, Any] = {"model": model, "description": "done"}
    if streams:
        good["content"] = {"text/event-stream": {"schema": _EVENT}}
    bad = {status: {"model": error, "description": _MEANINGS[status]} for status in statuses}
    return {200: good, **bad}


def _add_answers(app: FastAPI, served: Served) -> None:
    every = (400, 401, 404, 413, 429, 500, 503)

    @app.post(
        "/v1/chat/completions",
        response_model=None,
        responses=_answers(wire.ChatCompletion, *every, streams=True),
    )
    async def chat_completions(wanted: wire.ChatRequest, http: HttpRequest) -> Response:
        return await openai_api.answer_chat(served, wanted, http)

    @app.post(
        "/v1/completions", response_model=None, responses=_answers(wire.Completion, *every, streams=True)
    )
    async def completions(wanted: wire.CompletionRequest, http: HttpRequest) -> Response:
        return await openai_api.answer_completion(served, wanted, http)

    answers = _answers(anthropic_api.MessageAnswer, *every, streams=True, error=anthropic_api.AnthropicError)

    @app.post(ANTHROPIC_PATH, response_model=None, responses=answers)
    async def messages(wanted: anthropic_api.MessagesRequest, http: HttpRequest) -> Response:
        return await anthropic_api.answer_messages(served, wanted, http)


def _add_lists(app: FastAPI, served: Served) -> None:
    @app.get("/v1/models", responses=_answers(wire.ModelList, 401, 413))
    async def models() -> wire.ModelList:
        return wire.ModelList(object="list", data=served.entries())

    # A path: names of models on the hub have slashes.
    @app.get("/v1/models/{name:path}", responses=_answers(wire.ModelEntry, 400, 401, 404, 413))
    async def model(name: str) -> wire.ModelEntry:
        adapter = served.adapter_of(name, None)
        entries = {entry["id"]: entry for entry in served.entries()}
        return wire.ModelEntry(**entries[name if adapter == name else served.name])

    @app.get("/v1/adapters", responses=_answers(wire.AdapterList, 401, 413))
    async def adapters() -> wire.AdapterList:
        listed = [resident.described() for resident in served.engine.residents.listed()]
        return wire.AdapterList(object="list", data=listed, default=served.default_adapter)


def _add_mounting(app: FastAPI, served: Served) -> None:
    @app.post("/v1/adapters", responses=_answers(wire.AdapterEntry, 400, 401, 409, 413, 503))
    async def mount(wanted: wire.MountRequest) -> wire.AdapterEntry:
        if served.engine.residents.get(wanted.id) is not None:
            raise Refused(f"{wanted.id} is mounted already; unmount it first", "adapter_exists", 409, "id")
        _check_path(wanted.path)
        try:
            resident = await asyncio.to_thread(served.engine.mount, wanted.id, [wanted.path])
        except OSError as error:
            raise Refused(f"path cannot be read: {error.strerror}", "bad_path", 400, "path") from None
        return wire.AdapterEntry(**resident.described())

    @app.delete("/v1/adapters/{name}", responses=_answers(wire.Unmounted, 400, 401, 404, 413, 503))
    async def unmount(name: str) -> wire.Unmounted:
        if not await asyncio.to_thread(served.engine.unmount, name):
            raise Refused(f"there is no adapter {name!r}", "adapter_not_found", 404)
        if served.default_adapter == name:
            served.default_adapter = None
        return wire.Unmounted(id=name, object="adapter", deleted=True)


def _check_path(path: str) -> None:
    """Raises Refused for what cannot be a folder's path, or means somebody's home."""
    if "\0" in path or path.startswith("~") or any("\ud800" <= each <= "\udfff" for each in path):
        raise Refused(f"{path!r} is not the path of a folder", "bad_path", 400, "path")


def _add_state(app: FastAPI, served: Served, metrics: Metrics) -> None:
    @app.get(
        "/health",
        responses={
            200: {"model": wire.Health},
            413: {"model": wire.ErrorAnswer},
            503: {"model": wire.Health, "description": "the engine has ended"},
        },
    )
    async def health() -> Response:
        engine = served.engine
        draining = engine.is_draining or not engine.is_alive
        body = {
            "status": "draining" if draining else "ok",
            "active": engine.num_active,
            "waiting": engine.num_waiting,
        }
        return JSONResponse(body, 503 if draining else 200)

    text = {"content": {"text/plain": {"schema": {"type": "string"}}}}
    errors = _answers(wire.ErrorAnswer, 401, 413)
    del errors[200]

    @app.get("/metrics", response_class=PlainTextResponse, responses={200: text, **errors})
    async def prometheus() -> Response:
        return PlainTextResponse(metrics.text())


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(Refused)
    async def refused(http: HttpRequest, error: Refused) -> Response:
        headers = {"retry-after": "1"} if error.status in (429, 503) else None
        body = error_for(http.url.path, str(error), error.code, error.status, error.param)
        return JSONResponse(body, error.status, headers)

    @app.exception_handler(InputError)
    async def wrong_input(http: HttpRequest, error: InputError) -> Response:
        return JSONResponse(error_for(http.url.path, str(error), "bad_input", 400), 400)

    @app.exception_handler(RequestValidationError)
    async def invalid(http: HttpRequest, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        message = f"{where}: {first['msg']}" if where else str(first["msg"])
        return JSONResponse(error_for(http.url.path, message, "invalid_request", 400, where or None), 400)

    @app.exception_handler(HTTPException)
    async def http_error(http: HttpRequest, error: HTTPException) -> Response:
        what = f"{http.method} {http.url.path}: {error.detail}"
        body = error_for(http.url.path, what, None, error.status_code)
        return JSONResponse(body, error.status_code, error.headers)

    @app.exception_handler(ClientLeft)
    async def left(http: HttpRequest, error: ClientLeft) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(Exception)
    async def fault(http: HttpRequest, error: Exception) -> Response:
        log.error("a fault of mlxft in %s %s", http.method, http.url.path, exc_info=error)
        body = error_for(http.url.path, "a fault of the server; its log has the details", "fault", 500)
        return JSONResponse(body, 500)


def _document(app: FastAPI) -> dict[str, Any]:
    """Returns the OpenAPI document; FastAPI adds 422 to all that has parameters, and here that is 400."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        app.openapi_schema = document
    return app.openapi_schema


class Timed:
    """ASGI middleware that measures each request, by the path that answered it."""

    def __init__(self, app: Any, metrics: Metrics):
        self.app, self._metrics = app, metrics

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        began, status = time.perf_counter(), "none"

        async def counted(message: dict) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self.app(scope, receive, counted)
        finally:
            route = scope.get("route")
            path = getattr(route, "path", "other")
            self._metrics.seconds.labels(path, status).observe(time.perf_counter() - began)
