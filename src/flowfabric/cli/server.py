"""`flowfabric server`: the whole engine behind HTTP."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from flowfabric import settings
from flowfabric.cli._database import address, embedded_server, is_embedded
from flowfabric.cli._loading import load_app
from flowfabric.cli._options import Dsn, OfEnvironment, Parent
from flowfabric.cli.dev import migrate_embedded
from flowfabric.cli.worker import follow, set_up_logging

if TYPE_CHECKING:
    from flowfabric.app.app import App


def _option(name: str, metavar: str, text: str) -> object:
    return typer.Option(name, metavar=metavar, help=text, show_default=False)


def server(
    listen: Annotated[
        str | None,
        _option("--listen", "HOST:PORT", "Where to listen. Default: 127.0.0.1:8484; port 0 is any free one."),
    ] = None,
    processes: Annotated[
        str | None,
        _option("--processes", "N", "How many processes share the address. Default: 1; one per core is good."),
    ] = None,
    app: Annotated[
        str | None,
        _option(
            "--app", "PKG.MOD:APP", "An app whose tasks check arguments, and whose codecs read and write payloads."
        ),
    ] = None,
    auth: Annotated[
        str | None,
        _option("--auth", "keys|none", "Ask for API keys (default), or for nothing, on a loopback address only."),
    ] = None,
    duties: Annotated[
        bool | None,
        typer.Option("--duties/--no-duties", help="Also run timers and schedules. Default: on.", show_default=False),
    ] = None,
    grace: Annotated[
        str | None,
        _option(
            "--grace", "DURATION", "How long requests may take to finish after the first stop signal. Default: 30s."
        ),
    ] = None,
    connections: Annotated[
        str | None, _option("--connections", "N", "Connections to the database of each process. Default: 10.")
    ] = None,
    owner_dsn: Annotated[
        str | None,
        _option("--owner-dsn", "URL", "An address of the database's owner, for what only the owner may do."),
    ] = None,
    tls_certificate: Annotated[
        str | None, _option("--tls-certificate", "FILE", "Serve HTTPS with this certificate chain, in PEM.")
    ] = None,
    tls_key: Annotated[str | None, _option("--tls-key", "FILE", "The key of the certificate, in PEM.")] = None,
    cors_origins: Annotated[
        str | None, _option("--cors-origins", "URL,...", "Web pages of exactly these origins may call. Default: none.")
    ] = None,
    trusted_proxies: Annotated[
        str | None,
        _option(
            "--trusted-proxies", "NETWORK,...", "Proxies whose X-Forwarded-For and -Proto say who calls. Default: none."
        ),
    ] = None,
    large_body: Annotated[
        str | None, _option("--large-body", "SIZE", "Longest body of submissions. Default: 1MiB.")
    ] = None,
    medium_body: Annotated[
        str | None, _option("--medium-body", "SIZE", "Longest body of signals and links. Default: 256KiB.")
    ] = None,
    control_body: Annotated[
        str | None, _option("--control-body", "SIZE", "Longest body of everything else. Default: 64KiB.")
    ] = None,
    key_rate: Annotated[
        str | None,
        _option("--key-rate", "RATE", "Requests of one API key, such as '100/s burst 200', per process. Default: off."),
    ] = None,
    address_rate: Annotated[
        str | None, _option("--address-rate", "RATE", "Requests of one address, per process. Default: off.")
    ] = None,
    link_rate: Annotated[
        str | None,
        _option("--link-rate", "RATE", "Links that one address opens, per process. Default: 5/s burst 30."),
    ] = None,
    request_timeout: Annotated[
        str | None,
        _option(
            "--request-timeout", "DURATION", "How long a request may take; a wait it asks for is added. Default: 30s."
        ),
    ] = None,
    max_connections: Annotated[
        str | None, _option("--max-connections", "N", "Connections of clients to each process. Default: 2000.")
    ] = None,
    log_level: Annotated[
        str | None, _option("--log-level", "LEVEL", "debug, info, warning or error. Default: info.")
    ] = None,
    access_log: Annotated[
        bool | None,
        typer.Option("--access-log/--no-access-log", help="Log every request. Default: on.", show_default=False),
    ] = None,
    log_json: Annotated[
        bool | None, typer.Option("--json/--no-json", help="Log as JSON, one object per line.", show_default=False)
    ] = None,
    parent: Parent = None,
    of_environment: OfEnvironment = False,
    fd: Annotated[int | None, typer.Option("--socket", hidden=True)] = None,
    tells: Annotated[int | None, typer.Option("--tells", hidden=True)] = None,
    dsn: Dsn = None,
) -> None:
    """Serve the engine over HTTP until SIGTERM or Ctrl-C. Requests under way may finish within --grace.

    Every option has a variable FLOWFABRIC_*. A second signal stops immediately.
    """
    from flowfabric.server import process, supervisor  # noqa: PLC0415
    from flowfabric.server.options import load_options  # noqa: PLC0415

    if fd is not None:
        _serve_for_parent(fd, tells)
        return
    options = load_options(
        {
            "listen": listen,
            "processes": processes,
            "app": app,
            "auth": auth,
            "duties": duties,
            "grace": grace,
            "connections": connections,
            "owner_dsn": owner_dsn,
            "tls_certificate": tls_certificate,
            "tls_key": tls_key,
            "cors_origins": cors_origins,
            "trusted_proxies": trusted_proxies,
            "large_body": large_body,
            "medium_body": medium_body,
            "control_body": control_body,
            "key_rate": key_rate,
            "address_rate": address_rate,
            "link_rate": link_rate,
            "request_timeout": request_timeout,
            "max_connections": max_connections,
            "log_level": log_level,
            "access_log": access_log,
            "log_json": log_json,
        }
    )
    set_up_logging(options.log_level, as_json=options.log_json)
    process.check_tls(options)
    if parent is not None:
        threading.Thread(target=follow, args=(parent,), name="flowfabric parent", daemon=True).start()
    loaded = load_app(options.app) if options.app else None
    given = settings.load().dsn if of_environment else dsn
    with process.bind(options) as sock, _database(given, loaded) as (chosen, is_own):
        if is_own:
            migrate_embedded(chosen)
        if options.processes > 1:
            raise typer.Exit(supervisor.Supervisor(options, chosen, sock, is_embedded=is_own).run())
        process.run(options, chosen, sock, app=loaded, is_embedded=is_own)


@contextlib.contextmanager
def _database(dsn: str | None, app: App | None) -> Iterator[tuple[str, bool]]:
    """The address of the database, and whether it is the embedded one: the one given, the app's, the environment's."""
    of_code, data_dir = (None, None) if app is None or dsn else app.address
    if data_dir is not None:
        with embedded_server(Path(data_dir)) as chosen:
            yield chosen, True
        return
    with address(dsn or of_code) as chosen:
        yield chosen, is_embedded(dsn or of_code)


def _serve_for_parent(fd: int, tells: int | None) -> None:
    """Serve as one of several processes."""
    from flowfabric.server import process, supervisor  # noqa: PLC0415

    orders = msgspec.json.decode(sys.stdin.buffer.readline(), type=supervisor.Orders)
    options = orders.options
    set_up_logging(options.log_level, as_json=options.log_json)

    def on_ready() -> None:
        if tells is not None:
            with contextlib.suppress(BrokenPipeError):  # the parent has died: this process is about to stop
                os.write(tells, b"1")
            os.close(tells)

    with socket.socket(fileno=fd) as sock:
        sock.setblocking(False)
        app = load_app(options.app) if options.app else None
        process.run(
            options,
            orders.dsn,
            sock,
            app=app,
            is_embedded=orders.is_embedded,
            on_ready=on_ready,
            follow=sys.stdin.fileno(),
        )
