"""OpenTelemetry spans around submissions, executions and engine calls.

The submitter's context travels with the execution as two tags in W3C format, so that a worker's spans join the trace of
the submitter, even days later or on another machine. Spans contain ids and the class of an error, never arguments,
results or error messages. Exporting them is up to the program.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from flowfabric.errors import FlowFabricError
from flowfabric.middleware.base import Middleware, Run, Running, Submission, missing, outcome_of, type_name

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, Span, SpanKind, TracerProvider

TAGS: Final[Mapping[str, str]] = {"traceparent": "trace.parent", "tracestate": "trace.state"}


class Tracing(Middleware):
    """One span per submission, per run of a handler and per engine call.

    A run's span is a child of its submission's span. With `link` it starts its own trace with a link to the submission,
    which suits batches of thousands. `calls=False` leaves out engine calls: an idle worker makes many.
    """

    def __init__(
        self, *, tracer_provider: TracerProvider | None = None, link: bool = False, calls: bool = True
    ) -> None:
        try:
            from opentelemetry import trace  # noqa: PLC0415 - an extra
            from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415
                TraceContextTextMapPropagator,
            )
        except ImportError as error:
            raise missing("Tracing", "opentelemetry-api", "otel") from error
        self._api = trace
        self._tracer = trace.get_tracer("flowfabric", tracer_provider=tracer_provider)
        self._context = TraceContextTextMapPropagator()
        self._link = link
        if not calls:
            self.call = super().call  # type: ignore[method-assign]  # declines the hook, see `overriding`

    async def submit(self, submission: Submission, proceed: Callable[[Submission], Awaitable[Run]]) -> Run:
        with self._span("submit", submission.kind, self._api.SpanKind.PRODUCER, {}) as span:
            carrier: dict[str, str] = {}
            self._context.inject(carrier)
            if carrier:
                options = submission.options
                # Tags copied from another execution contain its context: remove all of it.
                tags = {key: value for key, value in (options.tags or {}).items() if key not in TAGS.values()}
                tags.update((TAGS[header], value) for header, value in carrier.items())
                submission = submission.replace(options=options.replace(tags=tags))
            run = await proceed(submission)
            span.set_attribute("flowfabric.execution_id", str(run.execution_id))
            span.set_attribute("flowfabric.is_new", run.is_new)
            return run

    async def execute(self, task: Running, proceed: Callable[[], Awaitable[Any]]) -> Any:
        attributes: dict[str, str | int] = {
            "flowfabric.execution_id": str(task.execution_id),
            "flowfabric.attempt": task.attempt_index + 1,
            "flowfabric.lane": task.lane_id,
        }
        context, links = self._origin(task.tags)
        with self._span("execute", task.kind, self._api.SpanKind.CONSUMER, attributes, context, links, task):
            return await proceed()

    async def call(self, method: str, proceed: Callable[[], Awaitable[Any]]) -> Any:
        with self._span("call", method, self._api.SpanKind.CLIENT, {}):
            return await proceed()

    def _origin(self, tags: Mapping[str, str]) -> tuple[Context | None, list[Link]]:
        carrier = {header: tags[tag] for header, tag in TAGS.items() if tag in tags}
        if not carrier:
            return None, []
        context = self._context.extract(carrier)
        origin = self._api.get_current_span(context).get_span_context()
        if not origin.is_valid:
            return None, []
        return (None, [self._api.Link(origin)]) if self._link else (context, [])

    @contextmanager
    def _span(
        self,
        what: str,
        name: str,
        kind: SpanKind,
        attributes: dict[str, str | int],
        context: Context | None = None,
        links: list[Link] | None = None,
        task: Running | None = None,
    ) -> Iterator[Span]:
        with self._tracer.start_as_current_span(
            f"flowfabric.{what} {name}",
            context=context,
            kind=kind,
            attributes={"flowfabric.method" if what == "call" else "flowfabric.kind": name, **attributes},
            links=links,
            # The library would record the error's message, too.
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield span
            except BaseException as error:
                self._note(span, error, task)
                raise
            span.set_attribute("flowfabric.outcome", "ok")

    def _note(self, span: Span, error: BaseException, task: Running | None) -> None:
        outcome = outcome_of(error, task)
        span.set_attribute("flowfabric.outcome", outcome)
        if outcome not in ("error", "timeout"):
            return
        name = type_name(error)
        span.set_attribute("error.type", name)
        if isinstance(error, FlowFabricError):
            span.set_attribute("flowfabric.error.kind", error.kind)
        span.add_event("exception", {"exception.type": name})
        span.set_status(self._api.StatusCode.ERROR)
