"""The app inside everything that stands between it and the network."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.middleware.gzip import GZipMiddleware

from flowfabric.server.app import create_app
from flowfabric.server.cors import Cors
from flowfabric.server.front import Front
from flowfabric.server.local import check_local
from flowfabric.server.options import Options
from flowfabric.server.proxies import TrustedProxies
from flowfabric.server.service import Service
from flowfabric.server.telemetry import Telemetry

_WORTH_IT = 1024  # bytes; shorter answers are not compressed


def stack(service: Service, options: Options, telemetry: Telemetry) -> Any:
    """The ASGI application that `flowfabric server` serves."""
    return around(create_app(service.engine, service=service), service, options, telemetry)


def around(app: Any, service: Service, options: Options, telemetry: Telemetry) -> Front:
    """An application inside everything else."""
    app = GZipMiddleware(app, minimum_size=_WORTH_IT, compresslevel=5)  # leaves server-sent events as they are
    if options.cors_origins:
        app = Cors(app, options.cors_origins)
    return Front(
        app,
        limits=service.limits,
        proxies=TrustedProxies(options.trusted_proxies),
        telemetry=telemetry,
        is_draining=service.draining.is_set,
        logs_access=options.access_log,
        check=partial(check_local, origins=options.cors_origins) if options.auth == "none" else None,
    )
