"""Real servers and who is outside of them: followers that outlive their server, a collector of traces."""

from __future__ import annotations

import asyncio
import http.server
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import flowfabric as ff
from flowfabric.middleware import Tracing
from flowfabric.values.lease import Operator
from tests.acceptance.test_server_process import PATIENCE, Follower, Site, site, until  # noqa: F401 - a fixture

pytestmark = [pytest.mark.xdist_group("server process")]


async def test_followers_of_a_killed_server_continue_at_another_and_see_every_event_once(
    site: Site,  # noqa: F811
) -> None:
    first, second = site.start(), site.start()
    urls = [await first.ready(), await second.ready()]
    followers = [Follower(lambda: urls[0]) for _ in range(4)]
    following = [asyncio.create_task(one.run()) for one in followers]
    written: list[str] = []
    async with await ff.Engine.connect(site.dsn) as engine:

        async def write(count: int) -> None:
            for _ in range(count):
                made = await engine.create_execution(execution_kind="job")
                await engine.cancel(Operator(made.execution_id), "enough")
                written.append(str(made.execution_id))

        try:
            await until(lambda: all(one.last_id for one in followers))
            await write(10)
            writing = asyncio.create_task(write(60))
            await until(lambda: all(len(one.seen) > 15 for one in followers))
            first.process.send_signal(signal.SIGKILL)
            await first.ended()
            del urls[0]
            await writing
            await write(10)
            await until(lambda: all(len(one.seen) >= len(written) for one in followers))
        finally:
            for one in following:
                one.cancel()
    for one in followers:
        assert one.losses >= 1
        assert one.seen == written
    await second.stop()


EXPORTER = """
import json, os, urllib.request
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult


class Exporter(SpanExporter):
    def export(self, spans):
        body = json.dumps([json.loads(one.to_json()) for one in spans]).encode()
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        opener.open(os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] + "/v1/traces", body, timeout=30).close()
        return SpanExportResult.SUCCESS
"""


@pytest.fixture
def exporter(tmp_path: Path) -> Path:
    """A folder with a package that offers an exporter for OTLP over HTTP, as OpenTelemetry's own package does."""
    folder = tmp_path / "installed"
    about = folder / "stand_in_exporter-1.0.dist-info"
    about.mkdir(parents=True)
    (folder / "stand_in_exporter.py").write_text(EXPORTER)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: stand-in-exporter\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[opentelemetry_traces_exporter]\notlp_proto_http = stand_in_exporter:Exporter\n"
    )
    return folder


@pytest.fixture
def collector() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The address of a collector, and the spans that it received."""
    received: list[dict[str, Any]] = []

    class Receiver(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            received.extend(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", received
        server.shutdown()
        thread.join()


async def test_the_trace_of_a_request_reaches_the_collector_and_the_handler(
    site: Site,  # noqa: F811
    exporter: Path,
    collector: tuple[str, list[dict[str, Any]]],
) -> None:
    address, received = collector
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    server = site.start(
        PYTHONPATH=str(exporter),
        OTEL_EXPORTER_OTLP_ENDPOINT=address,
        OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf",
        OTEL_SERVICE_NAME="shop",
    )
    url = await server.ready()
    spans = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    app = ff.App(dsn=site.dsn, middleware=[Tracing(tracer_provider=provider)])

    @app.task
    async def greet(name: str) -> str:
        return f"hello {name}"

    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client, app, ff.Worker(app):
        made = await client.post(
            "/v1/executions",
            json={"execution_kind": "greet", "arguments": {"name": "you"}},
            headers={"traceparent": f"00-{trace}-{parent}-01"},
        )
        where = f"{made.headers['location']}/outcome?wait=50"
        outcome = (await client.get(where)).json()
        assert outcome["is_ended"], outcome
    await server.stop()  # which sends what it has
    (request,) = (one for one in received if one["name"] == "POST /v1/executions")
    assert request["context"]["trace_id"] == f"0x{trace}"
    assert request["parent_id"] == f"0x{parent}"
    assert request["resource"]["attributes"]["service.name"] == "shop"
    (handler,) = (one for one in spans.get_finished_spans() if one.parent is not None and one.name.endswith("greet"))
    assert handler.context is not None and handler.parent is not None
    assert handler.context.trace_id == int(trace, 16)
    assert handler.parent.span_id == int(request["context"]["span_id"], 16)
