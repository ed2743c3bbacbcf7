"""`/livez`, `/readyz` and `/metrics` of a worker, over HTTP and with the standard library alone.

A thread of its own answers from what the worker knows anyway: neither a handler that blocks nor a database that does
not respond delays an answer.
"""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from flowfabric.errors import InvalidInput
from flowfabric.middleware.metrics import Metrics
from flowfabric.middleware.series import Metric
from flowfabric.middleware.sinks import MemorySink
from flowfabric.values.durations import counted

if TYPE_CHECKING:
    from flowfabric.app.app import App
    from flowfabric.worker.worker import Worker

log = logging.getLogger("flowfabric.worker")
_SLOWEST_CLIENT = 5.0  # seconds
_TEXT = "text/plain; charset=utf-8"
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
WORKER_METRICS = {
    "flowfabric_worker_ready": Metric("gauge", (), "1 while the worker is ready, as /readyz says."),
    "flowfabric_worker_slots": Metric("gauge", (), "How many handlers may run at the same time."),
    "flowfabric_worker_running": Metric("gauge", (), "How many handlers run."),
}


def measured(app: App) -> MemorySink:
    """The totals that `/metrics` serves: those of the app's own `Metrics` if it keeps them in memory, else new ones."""
    for one in app.middleware:
        if isinstance(one, Metrics) and isinstance(one.sink, MemorySink):
            return one.sink
    sink = MemorySink()
    app.middleware = (*app.middleware, Metrics(sink))
    return sink


def why_not_ready(worker: Worker) -> str:
    """Why this worker would not run an execution submitted now; empty if it would. Any thread may call it."""
    if worker.stopping.is_set():
        return "the worker is stopping"
    if not worker.is_started:
        return "the worker is starting"
    if not worker.second_thread.is_alive():
        return "the worker's second thread has failed"
    outage = worker.engine.outage
    if outage.is_on:
        return f"the database {worker.engine.target} {outage.words}"
    silent = worker.registration.silent_for()
    if silent > worker.registration.ttl.total_seconds():
        return f"the database {worker.engine.target} has not taken a heartbeat for {counted(round(silent), 'second')}"
    return ""


class HealthServer:
    """Serves the health of a worker while the block runs: `with HealthServer(worker, sink, host, port): ...`."""

    def __init__(self, worker: Worker, sink: MemorySink, host: str = "127.0.0.1", port: int = 0) -> None:
        """Bind to the address; `InvalidInput` if that is not possible. Port 0 is any free one."""
        if not 0 <= port <= 65_535:
            raise InvalidInput(f"got {port}", field="--health-port", allowed="1..65535, or 0 for any free port")
        self._worker = worker
        self._sink = sink
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        except (OSError, UnicodeError) as error:
            words = f"{host!r} is not an address of this machine ({error})"
            raise InvalidInput(words, field="--health-host", allowed="a host name or address") from None
        try:
            self._server = _server(family, address[:2], self)
        except OSError as error:
            words = f"cannot listen on {host}:{port} ({error.strerror or error})"
            raise InvalidInput(words, field="--health-port", allowed="a free port") from None
        self.host = host
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.2,), name="flowfabric health", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        where = f"[{self.host}]" if ":" in self.host else self.host
        log.info("health of the worker: http://%s:%d/livez, /readyz, /metrics", where, self.port)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(1.0)

    def answer(self, path: str) -> tuple[HTTPStatus, str, str]:
        """Status, type and text for a path."""
        match path.partition("?")[0]:
            case "/livez":
                return HTTPStatus.OK, _TEXT, "ok\n"
            case "/readyz":
                reason = why_not_ready(self._worker)
                return HTTPStatus.SERVICE_UNAVAILABLE if reason else HTTPStatus.OK, _TEXT, f"{reason or 'ok'}\n"
            case "/metrics":
                return HTTPStatus.OK, _PROMETHEUS, self._metrics()
            case _:
                return HTTPStatus.NOT_FOUND, _TEXT, "there are /livez, /readyz and /metrics\n"

    def _metrics(self) -> str:
        worker = self._worker
        values = (not why_not_ready(worker), worker.concurrency, len(worker.handlers.running))
        lines = [self._sink.prometheus_text()]
        for (name, metric), value in zip(WORKER_METRICS.items(), values, strict=True):
            lines.append(f"# HELP {name} {metric.text}\n# TYPE {name} {metric.type}\n{name} {int(value)}\n")
        return "".join(lines)


def _server(family: socket.AddressFamily, address: Any, health: HealthServer) -> ThreadingHTTPServer:
    class Server(ThreadingHTTPServer):
        address_family = family
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            log.debug("the health server failed to answer %s", client_address, exc_info=True)

    class Handler(BaseHTTPRequestHandler):
        timeout = _SLOWEST_CLIENT
        server_version = "flowfabric"
        sys_version = ""

        def do_GET(self) -> None:
            status, kind, text = health.answer(self.path)
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            if self.command != "HEAD":
                with suppress(OSError):  # the client left
                    self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815 - the name that the base class looks for

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in the base class
            log.debug("health: " + format, *args)

    return Server(address, Handler)
