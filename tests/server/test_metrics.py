"""`/metrics` and the probes: what they say, who may read it, and what it costs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import asyncpg
import httpx
import pytest

import flowfabric as ff
from flowfabric._postgres.migrate import SCHEMA_VERSION
from flowfabric.middleware import METRICS, Metrics, layer
from flowfabric.server.metrics import SERVER_METRICS, STORED_METRICS, ServerMetrics, StoredGauges
from flowfabric.server.operation import Scope
from flowfabric.server.service import Service
from flowfabric.server.telemetry import Telemetry
from tests.databases import fresh_database
from tests.proxy import proxies
from tests.server.conftest import MakeClient, Submit
from tests.support import claim_one

LINE = re.compile(r"([a-z_]+)(?:\{(.*)\})? (\S+)$")


@pytest.fixture
def measured(service: Service, plain_engine: ff.Engine) -> Iterator[ServerMetrics]:
    """The service with metrics, as the process makes it."""
    metrics = ServerMetrics()
    service.telemetry = Telemetry(metrics)
    service.gauges = StoredGauges(plain_engine, kept=0)
    service.engine = layer(plain_engine, [Metrics(metrics)])
    yield metrics


async def test_the_gauges_of_the_database_and_the_calls_are_in_the_text(
    client: httpx.AsyncClient, measured: ServerMetrics, submit: Submit, plain_engine: ff.Engine
) -> None:
    await submit("a")
    await submit("b", lane_id="mail")
    await claim_one(plain_engine, lane_id="mail")
    answer = await client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert answer.headers["cache-control"] == "no-store"
    lines = answer.text.splitlines()
    for line in (
        "flowfabric_database_up 1.0",
        'flowfabric_lane_depth{lane="default"} 1.0',
        'flowfabric_lane_depth{lane="mail"} 0.0',
        'flowfabric_stored_executions{state="waiting"} 1.0',
        'flowfabric_stored_executions{state="active"} 1.0',
        "flowfabric_workers 0.0",
        "flowfabric_cancel_backlog_depth 0.0",
        'flowfabric_claims_denied_total{dimension="",reason="rate"} 0.0',
    ):
        assert line in lines, line
    assert not [line for line in lines if "_created" in line]
    assert len([1 for bound in set(re.findall(r'_bucket{.*le="([0-9.e-]+)"', answer.text)) if float(bound) < 0.001]) > 1
    named = {re.sub(r"_(bucket|count|sum)$", "", found[1]) for line in lines if (found := LINE.match(line))}
    assert named <= {*METRICS, *SERVER_METRICS, *STORED_METRICS}
    assert set(STORED_METRICS) - {"flowfabric_blocked"} <= named


async def test_a_key_with_namespaces_may_not_read_what_concerns_all(
    client_of: MakeClient, measured: ServerMetrics
) -> None:
    assert (await client_of(Scope.READ).get("/metrics")).status_code == 200
    assert (await client_of(Scope.SUBMIT).get("/metrics")).status_code == 403
    assert (await client_of(Scope.READ, namespaces=("a",)).get("/metrics")).status_code == 403
    assert (await client_of().get("/metrics")).status_code == 401


async def test_scrapes_share_one_query(client: httpx.AsyncClient, measured: ServerMetrics, service: Service) -> None:
    asked = 0

    class Counted(ff.Engine):
        async def read_gauges(self, **options: Any) -> Any:
            nonlocal asked
            asked += 1
            return await super().read_gauges(**options)

    counted = Counted.__new__(Counted)
    counted.__dict__ = service.engine.__dict__
    service.gauges = StoredGauges(counted, kept=3600)
    for _ in range(5):
        assert "flowfabric_database_up 1.0" in (await client.get("/metrics")).text
    assert asked == 1


async def test_without_its_database_a_server_is_alive_not_ready_and_measured(
    client: httpx.AsyncClient, measured: ServerMetrics, service: Service, database: str
) -> None:
    async with (
        proxies(database) as (dsn, [proxy]),
        await ff.Engine.connect(dsn, reconnect_for=timedelta(0), notifications=False) as engine,
    ):
        service.gauges, service.engine = StoredGauges(engine, kept=0), engine
        assert (await client.get("/readyz")).status_code == 200
        await proxy.close()
        assert (await client.get("/livez")).status_code == 200
        for path in ("/readyz", "/healthz"):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()["retryable"]) == (503, True)
            assert answer.headers["retry-after"]
            assert str(proxy.port) not in answer.text
        text = (await client.get("/metrics")).text
        assert "flowfabric_database_up 0.0" in text
        assert "flowfabric_lane_depth{" not in text
        await proxy.open()
        assert (await client.get("/readyz")).status_code == 200


async def test_a_server_is_ready_only_with_a_schema_that_it_works_with(
    client_of: MakeClient, service: Service, server: str
) -> None:
    nobody = client_of()
    async with fresh_database(server) as dsn, await ff.Engine.connect(dsn, notifications=False) as engine:
        service.engine = engine
        assert (await nobody.get("/healthz")).json()["schema_version"] == SCHEMA_VERSION
        sql = await asyncpg.connect(dsn)
        for change, text in (
            (
                "update flowfabric.build set version = 99, oldest = 99",
                "functions that do not serve this release",
            ),
            ("drop schema flowfabric cascade", "no schema"),
        ):
            await sql.execute(change)
            assert (await nobody.get("/livez")).status_code == 200
            for path in ("/readyz", "/healthz"):
                answer = await nobody.get(path)
                assert (answer.status_code, answer.json()["code"]) == (503, "unavailable"), text
                assert answer.headers["retry-after"]
        await sql.close()


async def test_a_stopping_server_is_alive_and_not_ready(client_of: MakeClient, service: Service) -> None:
    nobody = client_of()
    for path in ("/livez", "/readyz", "/healthz"):
        assert (await nobody.get(path)).status_code == 200
    assert (await nobody.get("/healthz")).json()["schema_version"] >= 1
    service.draining.set()
    assert (await nobody.get("/livez")).status_code == 200
    for path in ("/readyz", "/healthz"):
        answer = await nobody.get(path)
        assert (answer.status_code, answer.json()["code"]) == (503, "draining")


async def test_every_code_of_a_problem_has_a_page(client_of: MakeClient) -> None:
    nobody = client_of()
    unknown = await nobody.get("/nope")
    page = await nobody.get(unknown.json()["type"])
    assert page.status_code == 200
    assert page.json()["code"] == "not_found"
    assert page.json()["detail"]
    assert (await nobody.get("/problems/nothing")).status_code == 404
