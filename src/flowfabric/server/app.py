"""The ASGI application: the table of operations behind HTTP."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Router

from flowfabric.engine import Engine
from flowfabric.server import dispatch
from flowfabric.server.compression import compressing
from flowfabric.server.dispatch import ASGIScope, Endpoint, Receive, Send
from flowfabric.server.operation import Operation
from flowfabric.server.operations import OPERATIONS
from flowfabric.server.problems import Problem
from flowfabric.server.service import Keys, Service

if TYPE_CHECKING:
    from flowfabric.app.app import App

_UNKNOWN_PATH: Final = "there is nothing at this path; GET /openapi.json lists all operations"


class Branch:
    """One segment of the paths: what follows it, and the operations that end here, by method."""

    __slots__ = ("ends", "named", "words")

    def __init__(self) -> None:
        self.words: dict[str, Branch] = {}
        self.named: Branch | None = None
        self.ends: dict[str, Endpoint] = {}


class Routes:
    """The operations by path. A word of a template wins over a parameter in its place."""

    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        self._root = Branch()
        for one in endpoints:
            here = self._root
            for segment in one.operation.path.split("/")[1:]:
                if segment.startswith("{"):
                    here.named = here.named or Branch()
                    here = here.named
                else:
                    here = here.words.setdefault(segment, Branch())
            here.ends[one.operation.method] = one

    def find(self, segments: list[str]) -> tuple[Branch, list[str]] | None:
        """The branch where a path ends, and the values of its parameters."""
        return _find(self._root, segments, 0)

    async def answer(self, scope: ASGIScope, receive: Receive, send: Send) -> bool:
        """Answer a request; returns False if the table has nothing at its path."""
        found = self.find(_segments(scope))
        if found is None:
            return False
        branch, values = found
        method = scope["method"]
        endpoint = branch.ends.get("GET" if method == "HEAD" else method)
        if endpoint is not None:
            await endpoint(scope, receive, send, values)
            return True
        allowed = sorted({*branch.ends, *(("HEAD",) if "GET" in branch.ends else ())})
        problem = Problem(
            405, "method_not_allowed", f"this path has no {method}", headers={"Allow": ", ".join(allowed)}
        )
        await dispatch.respond(scope, send, dispatch.refused(problem, scope))
        return True


def _find(here: Branch, segments: list[str], place: int) -> tuple[Branch, list[str]] | None:
    if place == len(segments):
        return (here, []) if here.ends else None
    segment = segments[place]
    if (word := here.words.get(segment)) is not None and (found := _find(word, segments, place + 1)) is not None:
        return found
    if here.named is not None and segment and (found := _find(here.named, segments, place + 1)) is not None:
        found[1].insert(0, segment)
        return found
    return None


class TableRouter(Router):
    """Starlette's router, which asks the table first: pages and apps may be added to it beside the operations."""

    def __init__(self, routes: Routes, **options: Any) -> None:
        super().__init__(**options)
        self._table = routes

    async def app(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not await self._table.answer(scope, receive, send):
            await super().app(scope, receive, send)


class TableApp(Starlette):
    """Starlette, whose own layers only see requests for something beside the operations.

    Operations answer their errors themselves. With middleware, which sees all requests, the router asks the table.
    """

    def __init__(self, routes: Routes, *, lifespan: Any = None, **options: Any) -> None:
        super().__init__(**options)
        self.router = TableRouter(routes, lifespan=lifespan)
        self._table = routes

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self.user_middleware:
            scope["app"] = self
            if await self._table.answer(scope, receive, send):
                return
        await compressing(super().__call__, scope)(scope, receive, send)


def _segments(scope: ASGIScope) -> list[str]:
    """The segments of the path below the one where the app is mounted; an encoded slash is a part of its segment."""
    skipped = 1 + str(scope.get("root_path", "")).rstrip("/").count("/")
    raw = scope.get("raw_path")
    if raw is None or b"%" not in raw:
        return str(scope["path"]).split("/")[skipped:]
    return [unquote(one) for one in raw.decode("ascii", "replace").split("/")[skipped:]]


def create_app(
    engine: Engine,
    *,
    app: App | None = None,
    keys: Keys | None = None,
    service: Service | None = None,
    operations: Iterable[Operation] = OPERATIONS,
    lifespan: Any = None,
    middleware: Sequence[Middleware] = (),
) -> Starlette:
    """The whole engine as an ASGI application, to serve or to mount inside a program of your own.

    `app`: whose tasks check arguments, and whose codecs read and write payloads. `keys`: where API keys are looked up.
    `service` is shared with what else the process runs; `lifespan` and `middleware` are Starlette's.
    """
    service = service or Service(engine, app=app, keys=keys)
    routes = Routes(Endpoint(one, service) for one in operations)
    made = TableApp(
        routes,
        lifespan=lifespan,
        middleware=middleware,
        exception_handlers={HTTPException: _http_problem, Exception: _problem},
    )
    made.state.service = service
    return made


async def _http_problem(request: Request, error: Exception) -> Response:
    """What Starlette refuses, as a problem."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return _response(request, Problem(404, "not_found", _UNKNOWN_PATH))
    if error.status_code == 405:
        return _response(
            request,
            Problem(405, "method_not_allowed", "this path has no such method", headers=dict(error.headers or {})),
        )
    return _response(request, Problem(error.status_code, "bad_request", error.detail))


async def _problem(request: Request, error: Exception) -> Response:
    return _response(request, error)


def _response(request: Request, error: Exception) -> Response:
    finished = dispatch.refused(error, request.scope)
    response = Response(finished.body, finished.status)
    response.raw_headers = [*finished.headers, (b"x-request-id", dispatch.request_id(request.scope).encode()),
                            (b"content-length", str(len(finished.body)).encode())]  # fmt: skip
    return response
