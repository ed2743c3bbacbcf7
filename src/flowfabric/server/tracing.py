"""OpenTelemetry: the trace of a request continues in what it submits, and in the handler that runs it.

The header `traceparent` of a request becomes the parent of the server's span; `with_trace` puts the current span into
the tags of a submission, where the middleware `Tracing` of a worker finds it. Without `opentelemetry-api` the header is
passed on as it is. Spans have the template of the path, never the path, which may contain a link.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from flowfabric.errors import InvalidInput
from flowfabric.middleware.tracing import TAGS

_HEADERS: Final = {b"traceparent": "traceparent", b"tracestate": "tracestate"}
_TRACEPARENT: Final = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_TAG_LIMIT: Final = 256
_incoming: ContextVar[Mapping[str, str] | None] = ContextVar("flowfabric_trace", default=None)
_EXPORTERS: Final = "opentelemetry_traces_exporter"
_ASKS: Final = ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_OTLP: Final = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}


class Span:
    """The span of one request."""

    def __init__(self, span: Any, method: str, error: Any) -> None:
        self._span = span
        self._method = method
        self._error = error

    def ended(self, route: str, status: int) -> None:
        """Name the span by what the request was."""
        if self._span is None:
            return
        self._span.update_name(f"{self._method} {route}")
        self._span.set_attribute("http.route", route)
        self._span.set_attribute("http.response.status_code", status)
        if status >= 500:
            self._span.set_status(self._error)


class RequestTraces:
    """Spans of requests, if `opentelemetry-api` is installed; else only the header is passed on."""

    def __init__(self, tracer_provider: Any = None) -> None:
        self._tracer: Any = None
        self._has_provider = tracer_provider is not None
        try:
            from opentelemetry import trace  # noqa: PLC0415 - an extra
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415
        except ImportError:
            return
        self._api = trace
        self._context = TraceContextTextMapPropagator()
        self._tracer = trace.get_tracer("flowfabric.server", tracer_provider=tracer_provider)

    def concern(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether there is anything to do for a request: spans are recorded, or it has a context to pass on."""
        return self._records() or any(name in _HEADERS for name, _ in headers)

    def _records(self) -> bool:
        if self._tracer is None:
            return False
        return self._has_provider or not isinstance(self._api.get_tracer_provider(), self._api.ProxyTracerProvider)

    @contextmanager
    def request(self, method: str, headers: Iterable[tuple[bytes, bytes]]) -> Iterator[Span]:
        """The span around one request."""
        carrier = {
            _HEADERS[name]: value.decode("latin-1") for name, value in headers if name in _HEADERS and len(value) <= 512
        }
        if "traceparent" in carrier and not _TRACEPARENT.fullmatch(carrier["traceparent"]):
            carrier.clear()
        if self._tracer is None:
            token = _incoming.set(carrier or None)
            try:
                yield Span(None, method, None)
            finally:
                _incoming.reset(token)
            return
        with self._tracer.start_as_current_span(
            method,
            context=self._context.extract(carrier),
            kind=self._api.SpanKind.SERVER,
            attributes={"http.request.method": method},
            record_exception=False,  # the message of an error may contain a value
            set_status_on_exception=False,
        ) as span:
            token = _incoming.set(self._current())
            try:
                yield Span(span, method, self._api.StatusCode.ERROR)
            finally:
                _incoming.reset(token)

    def _current(self) -> Mapping[str, str] | None:
        carrier: dict[str, str] = {}
        self._context.inject(carrier)
        return carrier or None


def with_trace(tags: Mapping[str, str] | None) -> Mapping[str, str] | None:
    """The tags of a submission with the context of the request that makes it; those given win."""
    context = _incoming.get()
    if not context or "traceparent" not in context:
        return tags
    added = {TAGS[name]: value for name, value in context.items() if value and len(value) <= _TAG_LIMIT}
    return {**added, **(tags or {})} if TAGS["traceparent"] not in (tags or {}) else tags


def set_up_export(environ: Mapping[str, str] | None = None) -> Any:
    """Export spans as the standard variables `OTEL_*` say; returns the provider, None if they ask for nothing.

    `OTEL_TRACES_EXPORTER` (`otlp`, `console`, `none`), `OTEL_EXPORTER_OTLP_ENDPOINT` and `_PROTOCOL`,
    `OTEL_SERVICE_NAME`, `OTEL_TRACES_SAMPLER` and the others are read by OpenTelemetry's own packages.
    """
    env = os.environ if environ is None else environ
    if not any(env.get(name) for name in _ASKS) or env.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    name = env.get("OTEL_TRACES_EXPORTER", "") or "otlp"
    if name == "none":
        return None
    try:
        from opentelemetry import trace  # noqa: PLC0415
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError:
        raise InvalidInput(
            "opentelemetry-sdk is not installed", field="OTEL_TRACES_EXPORTER", allowed="pip install opentelemetry-sdk"
        ) from None
    service = {} if env.get("OTEL_SERVICE_NAME") else {"service.name": "flowfabric-server"}
    provider = TracerProvider(resource=Resource.create(service))
    provider.add_span_processor(BatchSpanProcessor(_exporter(name, env)))
    trace.set_tracer_provider(provider)
    return provider


def _exporter(name: str, env: Mapping[str, str]) -> Any:
    wanted = name
    if name == "otlp":
        protocol = env.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or env.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "grpc"
        wanted = _OTLP.get(protocol, "otlp_proto_http")
    found = list(importlib.metadata.entry_points(group=_EXPORTERS, name=wanted))
    if not found:
        known = sorted({one.name for one in importlib.metadata.entry_points(group=_EXPORTERS)})
        raise InvalidInput(
            f"no exporter {wanted} is installed",
            field="OTEL_TRACES_EXPORTER",
            allowed=f"pip install opentelemetry-exporter-otlp, or one of: {', '.join(known) or 'none'}",
        )
    return found[0].load()()
