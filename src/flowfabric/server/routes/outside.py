"""Outside `/v1`: probes, metrics, the document of the API, and what each code of a problem means."""

from __future__ import annotations

import asyncio
import logging
from functools import lru_cache
from typing import Any, Final

from msgspec import Struct

from flowfabric.contracts import json_form
from flowfabric.engine.service import check_schema
from flowfabric.errors import FlowFabricError, NotFound
from flowfabric.server import problems
from flowfabric.server.call import Answer, Call
from flowfabric.server.metrics import MEDIA as METRICS_MEDIA
from flowfabric.server.openapi import document
from flowfabric.server.operation import Operation, Scope, Within
from flowfabric.server.problems import Problem
from flowfabric.server.service import Service

log = logging.getLogger("flowfabric.server")
_PATIENCE: Final = 2.0  # seconds for the database to answer a probe


class Health(Struct, frozen=True, kw_only=True):
    """The server answers, its database does, and the server works with this version of the schema."""

    schema_version: int
    database: str = "ok"


class ProblemPage(Struct, frozen=True, kw_only=True):
    """The meaning of a problem's code."""

    code: str
    title: str
    detail: str


async def livez(call: Call) -> Answer:
    """Say that the process runs.

    It asks nothing of the database: a server whose database is away is not helped by a restart.
    """
    return Answer(body=b"ok\n", media="text/plain; charset=utf-8")


async def readyz(call: Call) -> Answer:
    """Say whether the server should get requests: its database answers, the schema fits, and it is not stopping."""
    await _check(call.service)
    return Answer(body=b"ok\n", media="text/plain; charset=utf-8")


async def healthz(call: Call) -> Health:
    """Ask the database, and report the version of its schema."""
    return Health(schema_version=await _check(call.service))


async def _check(service: Service) -> int:
    """Return the version of the schema; refuse if the server could not answer requests now."""
    if service.draining.is_set():
        raise Problem(503, "draining", "the server is shutting down")
    try:
        async with asyncio.timeout(_PATIENCE):
            return await check_schema(service.engine)
    except (FlowFabricError, TimeoutError) as error:
        if isinstance(error, FlowFabricError) and not service.engine.outage.covers(error):
            log.warning("the server is not ready: %s", error)
        words = "the database does not answer, or its schema is not one that this server works with"
        raise Problem(503, "unavailable", words, retryable=True) from None


async def metrics(call: Call) -> Answer:
    """Return all series in the text format of Prometheus.

    They concern all namespaces, so that a key with namespaces is refused.
    """
    service = call.service
    if service.telemetry is None or service.gauges is None:
        raise Problem(503, "unavailable", "an app that is mounted in another program has no metrics of its own")
    stored = await service.gauges.read()
    text = await asyncio.to_thread(service.telemetry.metrics.text, stored)
    return Answer(body=text, media=METRICS_MEDIA)


async def problem(call: Call) -> ProblemPage:
    """Explain a code of a problem: its `type` is the address of this page."""
    code = call.path["code"]
    text = problems.codes().get(code)
    if text is None:
        raise NotFound("problem", code)
    return ProblemPage(code=code, title=problems.title(code), detail=text)


async def openapi(call: Call) -> Answer:
    """Return the OpenAPI document of this server."""
    return Answer(body=_document(call.scope.get("root_path", "")), media="application/json")


@lru_cache(maxsize=8)  # by where the app is mounted; anyone may ask, and writing it takes longer than sending it
def _document(base: str) -> bytes:
    from flowfabric.server.operations import OPERATIONS as TABLE  # noqa: PLC0415 - the table has this module in it

    return json_form.encode(document(TABLE, base))


def _probe(path: str, handler: object, **more: object) -> Operation:
    return Operation(method="GET", path=path, handler=handler, scope=None, within=Within.NONE, no_store=True, **more)  # type: ignore[arg-type]


OPERATIONS = (
    _probe("/livez", livez, answers={200: bytes}, media="text/plain"),
    _probe("/readyz", readyz, answers={200: bytes}, media="text/plain"),
    _probe("/healthz", healthz, answers={200: Health}),
    Operation(
        method="GET",
        path="/metrics",
        handler=metrics,
        scope=Scope.READ,
        within=Within.EVERY,
        answers={200: bytes},
        media=METRICS_MEDIA,
        no_store=True,
    ),
    Operation(
        method="GET",
        path="/openapi.json",
        handler=openapi,
        scope=None,
        within=Within.NONE,
        answers={200: dict[str, Any]},
        etag=True,
    ),
    Operation(
        method="GET",
        path="/problems/{code}",
        handler=problem,
        scope=None,
        within=Within.NONE,
        answers={200: ProblemPage},
        etag=True,
    ),
)
