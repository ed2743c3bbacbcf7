"""One process of the server: it connects, serves, and stops in order.

The first SIGTERM or SIGINT makes it not ready, answers waiting polls, ends streams with `bye`, lets requests finish
within the grace, stops the duties, and exits with 0. A second one exits at once with 128 and its number. uvicorn's own
handling of signals is not used: it would wait for open streams and exit by the signal.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import uvicorn

from flowfabric._duties import ALL, Duties
from flowfabric.engine import Engine
from flowfabric.engine.service import connects_as_owner
from flowfabric.errors import InvalidInput, TimedOut
from flowfabric.middleware import DutyHooks, Metrics, Tracing, layer
from flowfabric.server.keys import ApiKeyCache
from flowfabric.server.limits import Limits
from flowfabric.server.metrics import SHUTDOWN_TIMEOUTS, SSE_CLIENTS, ServerMetrics, StoredGauges
from flowfabric.server.options import Options
from flowfabric.server.protocol import HEAD_BYTES, protocol_class
from flowfabric.server.service import NoKeys, Service
from flowfabric.server.stack import stack
from flowfabric.server.telemetry import Telemetry
from flowfabric.server.tracing import RequestTraces, set_up_export
from flowfabric.worker.schedules import ScheduleDuty

if TYPE_CHECKING:
    from flowfabric.app.app import App
    from flowfabric.middleware import Middleware

log = logging.getLogger("flowfabric.server")
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_KEEP_ALIVE = 75  # seconds: longer than proxies keep theirs, so that they close them first
_BACKLOG = 2048
_LAST_ROUND = timedelta(seconds=2)  # for a duty to finish its round
_AFTER_GRACE = 15.0  # seconds for duties and connections to close, each with its own limit
_STREAM_OPS = 4096
_COLLECT_AFTER = (20_000, 20, 20)  # new objects until the garbage collector looks for cycles


def bind(options: Options) -> socket.socket:
    """The listening socket, which any number of processes may share."""
    try:
        family, *_, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        words = f"{options.host!r} is not an address of this machine ({error})"
        raise InvalidInput(words, field="--listen", allowed="HOST:PORT") from None
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        words = f"cannot listen on {options.host}:{options.port} ({error.strerror or error})"
        raise InvalidInput(words, field="--listen", allowed="a free port of this machine") from None
    return sock


def check_tls(options: Options) -> None:
    """Refuse a certificate or a key that cannot be read, before anything starts."""
    if options.tls_certificate is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.tls_certificate, options.tls_key)
    except (OSError, ssl.SSLError) as error:
        words = f"cannot be used with its key ({error.strerror or error})"
        raise InvalidInput(words, field="--tls-certificate", allowed="a certificate chain and its key in PEM") from None


def run(
    options: Options,
    dsn: str,
    sock: socket.socket,
    *,
    app: App | None = None,
    is_embedded: bool = False,
    on_ready: Callable[[], None] | None = None,
    follow: int | None = None,
) -> None:
    """Serve until a signal. `follow`: a descriptor at whose end the process that started this one has died."""
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # the lines of this module say the same

    def ready() -> None:
        _collect_rarely()
        if on_ready is not None:
            on_ready()

    process = ServerProcess(options, dsn, sock, app, is_embedded=is_embedded, on_ready=ready)
    before = {number: signal.signal(number, process.on_signal) for number in _SIGNALS}
    if follow is not None:
        threading.Thread(target=_follow, args=(follow,), name="flowfabric parent", daemon=True).start()
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(process.serve())
    finally:
        process.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # noqa: PLC0415 - faster if installed
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _follow(descriptor: int) -> None:
    while os.read(descriptor, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


class _Uvicorn(uvicorn.Server):
    """Leaves the signals to the process."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()


class ServerProcess:
    """One process: what it serves, and how it stops."""

    def __init__(
        self,
        options: Options,
        dsn: str,
        sock: socket.socket,
        app: App | None = None,
        *,
        is_embedded: bool = False,
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        self._is_embedded = is_embedded
        self._options = options
        self._dsn = dsn
        self._sock = sock
        self._app = app
        self._on_ready = on_ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: _Uvicorn | None = None
        self._service: Service | None = None
        self._received: int | None = None
        self._must_end_at = 0.0
        self._timer: threading.Timer | None = None

    # Signals: not the loop's own handlers, so that they also run while something blocks the loop

    def on_signal(self, number: int, _frame: Any) -> None:
        if self._received is not None:
            _exit_now(128 + number)
        self._received = number
        self._must_end_at = time.monotonic() + self._options.grace
        self._timer = threading.Timer(self._options.grace + _AFTER_GRACE, _exit_late, (128 + number,))
        self._timer.daemon = True
        self._timer.start()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop)

    def cancel(self) -> None:
        """The process exits normally."""
        if self._timer is not None:
            self._timer.cancel()

    def _stop(self) -> None:
        """Be not ready, let polls and streams end, and close the doors."""
        if self._service is not None and self._server is not None and not self._server.should_exit:
            log.info("the server stops: requests may finish within %g s", self._options.grace)
            self._service.draining.set()
            self._server.should_exit = True

    # Life

    async def serve(self) -> None:
        """Connect, serve until a signal, and stop."""
        self._loop = asyncio.get_running_loop()
        if self._received is not None:
            return
        options = self._options
        async with contextlib.AsyncExitStack() as life:
            exporting = set_up_export()
            if exporting is not None:
                life.callback(exporting.shutdown)
            metrics = ServerMetrics()
            middlewares: list[Middleware] = [Metrics(metrics)]
            if exporting is not None:
                middlewares.append(Tracing())
            engine = await Engine.connect(self._dsn, max_size=options.connections, stream_ops=_STREAM_OPS)
            life.push_async_callback(engine.close)
            await self._check_rights(engine)
            service = await self._make_service(life, layer(engine, middlewares))
            telemetry = Telemetry(metrics, RequestTraces())
            service.telemetry = telemetry
            service.clients.on_change = lambda by: metrics.change(SSE_CLIENTS, by, {})
            service.gauges = StoredGauges(engine)
            if options.duties:
                await self._start_duties(life, middlewares)
            self._service = service
            config = self._config(stack(service, options, telemetry), metrics)
            server = self._server = _Uvicorn(config, self._started)
            service.limits.is_full = lambda: len(server.server_state.connections) > options.max_connections
            if self._received is not None:
                self._stop()
            await server.serve([self._sock])
            if server.force_exit or time.monotonic() > self._must_end_at > 0:
                metrics.count(SHUTDOWN_TIMEOUTS, {})
            with contextlib.suppress(TimedOut):
                await engine.shutdown_prepare(_LAST_ROUND)
        log.info("the server has stopped")

    def _started(self) -> None:
        assert self._service is not None
        url = self._options.url(self._sock.getsockname()[1])
        log.info("serving %s, process %d, database %s", url, os.getpid(), self._service.engine.target)
        if self._on_ready is not None:
            self._on_ready()

    async def _make_service(self, life: contextlib.AsyncExitStack, engine: Engine) -> Service:
        options = self._options
        owner = None
        if options.owner_dsn is not None:
            owner = await Engine.connect(options.owner_dsn, min_size=0, max_size=1, notifications=False)
            life.push_async_callback(owner.close)
        keys = NoKeys() if options.auth == "none" else ApiKeyCache(engine)
        service = Service(engine, app=self._app, keys=keys, owner=owner)
        life.push_async_callback(service.close)
        service.limits = Limits(options)
        return service

    async def _check_rights(self, engine: Engine) -> None:
        options = self._options
        if options.auth == "keys" and not (await engine.list_api_keys(usable=True, limit=1)).items:
            command = "flowfabric api-keys create NAME --scope admin"
            if not options.is_loopback:
                raise InvalidInput(
                    f"there is no API key, so every request would be refused; create one with `{command}`",
                    field="--listen",
                    allowed="a public address once there is a key",
                )
            log.warning("there is no API key, so every request is refused; create one with `%s`", command)
        if not self._is_embedded and await connects_as_owner(engine):  # the embedded server has no other user
            words = "the database user owns the schema: connect with one that has the role operate"
            if not options.is_loopback:
                raise InvalidInput(words, field="--dsn", allowed="a user named in `flowfabric migrate --operate-role`")
            log.warning("%s", words)

    async def _start_duties(self, life: contextlib.AsyncExitStack, middlewares: Sequence[Middleware]) -> None:
        # Connections of their own: a burst of requests does not delay what is due, nor the other way round.
        engine = await Engine.connect(self._dsn, max_size=4, reconnect_for=timedelta(0))
        life.push_async_callback(engine.close)
        measured = layer(engine, [one for one in middlewares if isinstance(one, Metrics)])  # no span for every poll
        duties = Duties(measured, (*ALL, ScheduleDuty), watcher=DutyHooks(middlewares))
        await life.enter_async_context(duties)
        life.push_async_callback(duties.stop, _LAST_ROUND)

    def _config(self, app: Any, metrics: ServerMetrics) -> uvicorn.Config:
        options = self._options
        return uvicorn.Config(
            app,
            http=protocol_class(metrics, most=options.max_connections),
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            h11_max_incomplete_event_size=2 * HEAD_BYTES,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=options.grace,  # type: ignore[arg-type]  # any number of seconds
            ssl_certfile=options.tls_certificate,
            ssl_keyfile=options.tls_key,
        )


def _collect_rarely() -> None:
    """Let the garbage collector stop requests less often: beside a thousand clients it stopped them for 70 ms.

    Requests leave almost no cycles behind, and nothing that exists now is looked at again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)


def _exit_now(code: int) -> None:
    _flush()
    os._exit(code)


def _exit_late(code: int) -> None:
    log.warning("the server did not stop in time; forcing exit")
    _exit_now(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
