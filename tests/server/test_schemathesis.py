"""Requests made from the OpenAPI document: nothing fails, and nothing answers otherwise than the document says.

Every operation gets a request that the document allows and one that it does not, with a key of every scope; all
examples, and sequences along the links of the document, with `--full`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar
from uuid import UUID

import asyncpg
import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.core.transport import Response
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

import flowfabric as ff
from flowfabric.server.app import create_app
from flowfabric.server.call import Caller
from flowfabric.server.openapi import document
from flowfabric.server.operation import Operation, Scope
from flowfabric.server.operations import BY_NAME, OPERATIONS
from flowfabric.server.service import Service
from tests import sampling
from tests.each import Rows
from tests.server.conftest import TableOfKeys
from tests.server.examples import UNAVAILABLE, required
from tests.server.leaving import leaving
from tests.support import Wipe

T = TypeVar("T")
CHECKS = (
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
)
# Refused although the document allows the request: what they say depends on what is stored, or on the deployment.
REFUSALS = (400, 403, 404, 409, 410, 412, 422, 429, 503)


class Served:
    """The app in an event loop of its own, as schemathesis is not asynchronous."""

    def __init__(self, dsn: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._dsn = dsn
        self.keys = TableOfKeys()
        for scope in Scope:
            self.keys.callers[f"ffk_{scope}"] = Caller(name=scope, key_id=str(scope), scopes=frozenset((scope,)))
        self.run(self._open)

    async def _open(self) -> None:
        self._sql = await asyncpg.connect(self._dsn)
        self._wipe = await Wipe.of(self._sql)
        self.engine = await ff.Engine.connect(self._dsn)
        self.service = Service(self.engine, keys=self.keys)
        app = leaving(create_app(self.engine, service=self.service))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://server")
        self.known: list[UUID] = []
        for kind in ("one", "two", "three"):
            made = await self.engine.create_execution(execution_kind=kind)
            self.known.append(made.execution_id)

    def wipe(self) -> None:
        """Begin again with an empty database."""
        self.run(self._wipe)

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return asyncio.run_coroutine_threadsafe(work(), self._loop).result(60)

    def send(self, case: Any, scope: Scope) -> httpx.Response:
        how = case.as_transport_kwargs(base_url="http://server")
        if isinstance(how.get("data"), bytes | str):
            how["content"] = how.pop("data")
        shown = {**how.get("headers", {}), "Authorization": f"Bearer ffk_{scope}"}
        how["headers"] = [(name.encode(), value.encode("latin-1", "replace")) for name, value in shown.items()]
        how.pop("cookies", None)
        return self.run(lambda: self._client.request(**how))

    def close(self) -> None:
        async def end() -> None:
            await self.service.close()
            await self._client.aclose()
            await self.engine.close()
            await self._sql.close()

        self.run(end)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def served(database: str) -> Iterator[Served]:
    made = Served(database)
    yield made
    made.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["allowed", "refused"])
def test_every_operation_answers_as_its_document_says(served: Served, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_dict(document(OPERATIONS))
    rows = Rows()
    count = 0
    for found in schema.get_all_operations():
        operation = found.ok()
        name = operation.definition.raw["operationId"]
        count += 1
        with rows.row(name), contextlib.suppress(Unsatisfiable):  # an operation without parameters cannot be misused
            _play(served, operation, mode)
    rows.tell()
    assert count > 20


def _play(served: Served, operation: Any, mode: GenerationMode) -> None:
    row = BY_NAME[operation.definition.raw["operationId"]]

    @seed(1)
    @settings(
        max_examples=sampling.examples(12, 1),
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode), known=st.booleans(), data=st.data())
    def play(case: Any, known: bool, data: Any) -> None:
        if known and "execution_id" in (case.path_parameters or {}):
            case.path_parameters["execution_id"] = str(data.draw(st.sampled_from(served.known)))
        for scope in Scope:
            answer = served.send(case, scope)
            _check(case, answer, row)
            if answer.status_code >= 400:
                assert answer.status_code in REFUSALS or mode is GenerationMode.NEGATIVE, answer.text
            if row.scope is not None and scope not in (row.scope, Scope.ADMIN):
                assert answer.status_code == 403

    play()


def _check(case: Any, answer: httpx.Response, row: Operation) -> None:
    """It is an answer that the document has, and a refusal is a problem."""
    if answer.status_code >= 500:
        assert row.name in UNAVAILABLE, answer.text
        assert (answer.status_code, answer.json()["code"]) == (503, "unavailable"), answer.text
    try:
        case.validate_response(answer, checks=list(CHECKS))
    except BaseExceptionGroup as group:  # not an `Exception`, which would end the loop over the operations
        raise AssertionError(str(group)) from None
    if answer.status_code >= 400:
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["status"] == answer.status_code
        # A repeated request gets the answer of the first; of a link, every refusal is the same.
        if "Idempotency-Key" not in (case.headers or {}) and row.scope is not None:
            assert answer.json()["instance"] == answer.headers["x-request-id"]


@pytest.mark.timeout(600)
def test_sequences_along_the_links_of_the_document_answer_as_it_says(served: Served) -> None:
    """What one operation made is given to those that take its id: read, changed, ended and deleted in any order."""
    schema = schemathesis.openapi.from_dict(document(OPERATIONS))
    schema.config.generation.update(modes=[GenerationMode.POSITIVE])
    followed: Counter[str] = Counter()

    class Sequences(schema.as_state_machine()):  # type: ignore[misc]  # made by schemathesis
        def setup(self) -> None:
            served.wipe()  # what is left of the sequence before would decide which links this one can follow

        def call(self, case: Any, **_: Any) -> Response:
            row = BY_NAME[case.operation.definition.raw["operationId"]]
            answer = served.send(case, Scope.ADMIN)
            _check(case, answer, row)
            if answer.status_code >= 400 and "{" not in row.path and row.body is not None:
                # Few bodies at random make something: without one that does there is nothing to continue with.
                case.body, case.query = required(row.body), {}
                case.headers.clear()
                answer = served.send(case, Scope.ADMIN)
                _check(case, answer, row)
            assert answer.status_code < 400 or answer.status_code in REFUSALS, answer.text
            return Response.from_any(answer)

        def step(self, input: Any) -> Any:  # noqa: A002 - the name that schemathesis gives it
            if input.transition is not None and input.is_applied:
                followed[input.case.operation.definition.raw["operationId"]] += 1
            return super().step(input)

        def validate_response(self, *_: Any, **__: Any) -> None:
            """`call` has done it."""

    Sequences.run(
        settings=settings(
            max_examples=sampling.examples(60, 3),
            stateful_step_count=sampling.examples(20, 8),
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
    )
    assert sum(followed.values()) >= sampling.examples(50, 0), followed
