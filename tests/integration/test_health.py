"""The health port of a worker, asked over HTTP."""

from __future__ import annotations

import asyncio
import http.client
import re
import socket
import threading
from collections.abc import AsyncIterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

import flowfabric as ff
from flowfabric.errors import InvalidInput
from flowfabric.middleware import METRICS, MemorySink, Metrics
from flowfabric.worker.health import WORKER_METRICS, HealthServer, measured
from tests.integration.test_cli import run_here
from tests.proxy import Proxy, proxies

PATIENCE = 60.0


@pytest.fixture
async def behind(database: str) -> AsyncIterator[tuple[ff.App, Proxy]]:
    async with proxies(database) as (dsn, (proxy,)):
        app = ff.App(dsn)
        yield app, proxy
        await app.close()


class Asked:
    def __init__(self, port: int) -> None:
        self._port = port

    def now(self, path: str, method: str = "GET") -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    async def __call__(self, path: str, method: str = "GET") -> tuple[int, str]:
        return await asyncio.to_thread(self.now, path, method)

    async def until_ready(self, status: int) -> str:
        async with asyncio.timeout(PATIENCE):
            while (answer := await self("/readyz"))[0] != status:
                await asyncio.sleep(0.02)
        return answer[1]


async def test_a_worker_is_ready_while_it_runs_and_its_database_is_there(behind: tuple[ff.App, Proxy]) -> None:
    app, proxy = behind

    @app.task
    async def job(number: int) -> int:
        return number

    sink = measured(app)
    worker = ff.Worker(app, grace=1)
    with HealthServer(worker, sink) as health:
        ask = Asked(health.port)
        assert await ask("/readyz") == (503, "the worker is starting\n")
        assert await ask("/livez") == (200, "ok\n")
        async with worker:
            assert await ask("/readyz") == (200, "ok\n")
            assert await ask("/readyz?verbose", "HEAD") == (200, "")
            assert await ask("/health") == (404, "there are /livez, /readyz and /metrics\n")
            assert (await ask("/livez", "POST"))[0] == 501
            await proxy.close()
            reason = await ask.until_ready(503)
            assert re.fullmatch(
                rf"the database 127\.0\.0\.1:{proxy.port}/\w+ has been away for \d+ m?s: .*connection.*\n", reason
            )
            assert await ask("/livez") == (200, "ok\n")
            assert "flowfabric_worker_ready 0" in (await ask("/metrics"))[1].splitlines()
            await proxy.open()
            assert await ask.until_ready(200) == "ok\n"
            assert await (await job.submit(7)).result(PATIENCE) == 7
            worker.stop()
            assert await ask("/readyz") == (503, "the worker is stopping\n")


async def test_a_handler_that_blocks_the_loop_does_not_delay_an_answer(database: str) -> None:
    app = ff.App(database)
    blocks, free = threading.Event(), threading.Event()

    @app.task
    async def block() -> None:
        blocks.set()
        free.wait(PATIENCE)

    worker = ff.Worker(app, grace=1)
    answers: list[tuple[int, str]] = []

    def ask() -> None:
        blocks.wait(PATIENCE)
        answers.extend(asked.now(path) for path in ("/livez", "/readyz"))
        free.set()

    with HealthServer(worker, measured(app)) as health:
        asked = Asked(health.port)
        asking = threading.Thread(target=ask)
        asking.start()
        async with worker:
            await (await block.submit()).result(PATIENCE)
        asking.join()
    assert answers == [(200, "ok\n")] * 2
    await app.close()


async def test_metrics_are_what_prometheus_reads(database: str) -> None:
    app = ff.App(database)

    @app.task(name='a "b" \\ c')
    async def job() -> None: ...

    sink = measured(app)
    worker = ff.Worker(app, grace=1, concurrency=3)
    with HealthServer(worker, sink) as health:
        async with worker:
            for _ in range(2):
                await (await job.submit()).result(PATIENCE)
            status, text = await Asked(health.port)("/metrics")
    await app.close()
    assert status == 200
    families = {one.name: one for one in text_string_to_metric_families(text)}
    types = {**METRICS, **WORKER_METRICS}
    assert {f"{name}_total" if one.type == "counter" else name for name, one in families.items()} <= types.keys()
    assert all(
        one.type == types[f"{name}_total" if one.type == "counter" else name].type for name, one in families.items()
    )
    values = {
        (one.name, *sorted(one.labels.values())): one.value for family in families.values() for one in family.samples
    }
    name = 'a "b" \\ c'
    assert values["flowfabric_executions_total", name, "ok"] == 2
    assert values["flowfabric_execution_seconds_count", name] == 2
    assert values["flowfabric_execution_seconds_bucket", "+Inf", name] == 2
    assert values["flowfabric_submitted_total", name] == 2
    assert values["flowfabric_worker_ready",] == 1
    assert values["flowfabric_worker_slots",] == 3
    assert values["flowfabric_worker_running",] == 0


def test_the_metrics_of_the_app_are_served_if_it_keeps_them_in_memory() -> None:
    sink = MemorySink()
    own = ff.App(middleware=[Metrics(sink)])
    assert measured(own) is sink
    assert len(own.middleware) == 1
    other = ff.App()
    assert measured(other) is measured(other)
    assert len(other.middleware) == 1


def test_ports_and_hosts_that_cannot_be_served_are_refused() -> None:
    worker = ff.Worker(ff.App())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for host, given, words in (
            ("127.0.0.1", -1, "--health-port: got -1; allowed: 1..65535, or 0 for any free port"),
            ("127.0.0.1", 65_536, "--health-port: got 65536; allowed: 1..65535, or 0 for any free port"),
            ("127.0.0.1", port, f"--health-port: cannot listen on 127.0.0.1:{port} ("),
            ("no such host", 0, "--health-host: 'no such host' is not an address of this machine ("),
        ):
            with pytest.raises(InvalidInput, match=re.escape(words)):
                HealthServer(worker, MemorySink(), host, given)
    assert run_here("worker", "shop:app", "--health-port", "70000").returncode == 2
