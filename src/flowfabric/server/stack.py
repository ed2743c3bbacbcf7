"""The app inside the layers between it and the network."""

from __future__ import annotations

from functools import partial
from typing import Any

from flowfabric.server.app import create_app
from flowfabric.server.cors import Cors
from flowfabric.server.front import Front
from flowfabric.server.local import check_local
from flowfabric.server.options import Options
from flowfabric.server.proxies import TrustedProxies
from flowfabric.server.service import Service
from flowfabric.server.telemetry import Telemetry


def stack(service: Service, options: Options, telemetry: Telemetry) -> Any:
    """The ASGI application that `flowfabric server` serves."""
    return around(create_app(service.engine, service=service), service, options, telemetry)


def around(app: Any, service: Service, options: Options, telemetry: Telemetry) -> Front:
    """An application inside everything else."""
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
