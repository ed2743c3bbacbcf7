"""Traces: from the request through the submission to the handler; the exporter by the standard variables."""

from __future__ import annotations

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import flowfabric as ff
from flowfabric.errors import InvalidInput
from flowfabric.middleware import Tracing, chain_execute
from flowfabric.server import tracing
from flowfabric.server.metrics import ServerMetrics
from flowfabric.server.options import load_options
from flowfabric.server.service import NoKeys, Service
from flowfabric.server.stack import stack
from flowfabric.server.telemetry import Telemetry
from flowfabric.server.tracing import RequestTraces, set_up_export, with_trace
from flowfabric.values.ids import parse_execution_id
from tests.unit.test_middleware import Task, answering

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


def client_of(engine: ff.Engine, traces: RequestTraces) -> httpx.AsyncClient:
    service = Service(engine, keys=NoKeys())
    app = stack(service, load_options({"auth": "none"}, {}), Telemetry(ServerMetrics(), traces))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


async def test_one_trace_joins_the_request_its_submission_and_the_handler(plain_engine: ff.Engine) -> None:
    spans = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    async with client_of(plain_engine, RequestTraces(provider)) as client:
        made = await client.post(
            "/v1/executions", json={"execution_kind": "send", "tags": {"a.b": "c"}}, headers={"traceparent": PARENT}
        )
        await client.get("/nope/secret-link")
    execution = await plain_engine.read_execution(parse_execution_id(made.json()["execution_id"]))
    assert execution is not None
    assert execution.tags["a.b"] == "c"
    task = Task(execution.execution_id, tags=execution.tags)
    await chain_execute([Tracing(tracer_provider=provider)], task, answering(1))()
    request, unknown, handler = spans.get_finished_spans()
    assert request.name == "POST /v1/executions"
    assert request.attributes is not None
    assert request.attributes["http.response.status_code"] == 201
    assert request.parent is not None
    assert request.parent.span_id == 0x00F067AA0BA902B7
    assert request.context is not None
    assert handler.context is not None
    assert handler.parent is not None
    assert handler.parent.span_id == request.context.span_id
    assert handler.context.trace_id == request.context.trace_id == int(TRACE, 16)
    assert unknown.name == "GET unknown"
    assert "secret-link" not in repr([dict(span.attributes or {}) for span in spans.get_finished_spans()])


async def test_without_a_recorder_the_context_of_the_caller_is_passed_on(
    plain_engine: ff.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for traces in (RequestTraces(), _without_library(monkeypatch)):
        async with client_of(plain_engine, traces) as client:
            for given, passed in ((PARENT, True), ("garbage", False), (f"00-{'0' * 32}-00f067aa0ba902b7-01", False)):
                made = await client.post(
                    "/v1/executions", json={"execution_kind": "send"}, headers={"traceparent": given}
                )
                execution = await plain_engine.read_execution(parse_execution_id(made.json()["execution_id"]))
                assert execution is not None
                assert execution.tags == ({"trace.parent": PARENT} if passed else {}), given


def _without_library(monkeypatch: pytest.MonkeyPatch) -> RequestTraces:
    with monkeypatch.context() as patch:
        patch.setitem(__import__("sys").modules, "opentelemetry", None)
        return RequestTraces()


def test_tags_that_name_a_trace_win() -> None:
    token = tracing._incoming.set({"traceparent": PARENT})
    try:
        assert with_trace(None) == {"trace.parent": PARENT}
        assert with_trace({"trace.parent": "mine"}) == {"trace.parent": "mine"}
    finally:
        tracing._incoming.reset(token)
    assert with_trace(None) is None


def test_nothing_is_exported_unless_the_environment_asks() -> None:
    for env in ({}, {"OTEL_TRACES_EXPORTER": "none"}, {"OTEL_TRACES_EXPORTER": "console", "OTEL_SDK_DISABLED": "true"}):
        assert set_up_export(env) is None
    with pytest.raises(InvalidInput) as refused:
        set_up_export({"OTEL_TRACES_EXPORTER": "no_such"})
    assert refused.value.field == "OTEL_TRACES_EXPORTER"
