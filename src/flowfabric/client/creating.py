"""Create an execution, and do as the option `on_duplicate` says if its idempotency key is in use."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from flowfabric.client.connector import Connector, Graph
from flowfabric.client.run import Run
from flowfabric.client.submission import Submission
from flowfabric.errors import Conflict, FlowFabricError, InvalidInput
from flowfabric.middleware import chain_submit, overriding
from flowfabric.values.execution import Created, Duplicate, NewExecution
from flowfabric.values.ids import ExecutionId, FlowId
from flowfabric.values.options import Options


class _OfKind(Protocol):
    @property
    def execution_kind(self) -> str: ...


class Creating(Protocol):
    """Creates executions: the engine, or the caller's transaction (`bridges`)."""

    async def create_many(
        self, items: Sequence[NewExecution], /
    ) -> Sequence[Created | Duplicate | FlowFabricError]: ...

    async def read_execution_info(self, execution_id: ExecutionId, /) -> _OfKind | None: ...

    async def free_key(
        self, execution_id: ExecutionId, idempotency_key: str, /, *, namespace: str, flow_id: FlowId | None
    ) -> bool: ...


async def create(engine: Creating, item: NewExecution, options: Options) -> Created | Duplicate:
    """Create one execution. If the idempotency key is in use, do as the option `on_duplicate` says."""
    while True:
        verdict = (await engine.create_many([item]))[0]
        if isinstance(verdict, FlowFabricError):
            raise verdict
        if isinstance(verdict, Created):
            return verdict
        await check_kind(engine, verdict, item.execution_kind)
        if not await is_free(engine, verdict, item, options):
            return verdict


async def check_kind(engine: Creating, existing: Duplicate, kind: str) -> None:
    # Keys belong to a namespace, not to a task: an execution of another task is not the one the caller wants.
    found = await engine.read_execution_info(existing.execution_id)
    if found is not None and found.execution_kind != kind:
        raise _key_is_known(existing, f" of {found.execution_kind}")


async def is_free(engine: Creating, existing: Duplicate, item: NewExecution, options: Options) -> bool:
    """Whether the key may be reused: only if its execution did not succeed."""
    if options.on_duplicate == "raise":
        raise _key_is_known(existing)
    if options.on_duplicate != "replace" or item.idempotency_key is None:
        return False
    return await engine.free_key(
        existing.execution_id, item.idempotency_key, namespace=item.namespace or "", flow_id=item.flow_id
    )


def _key_is_known(existing: Duplicate, of: str = "") -> Conflict:
    found = existing.execution_id
    detail = f"the idempotency key is in use: execution {found}{of}"
    return Conflict("duplicate_submission", detail, existing=found, execution_id=found)


def made(app: Connector, submission: Submission, verdict: Created | Duplicate) -> Run[Any]:
    """The handle on what was submitted."""
    return Run(verdict.execution_id, kind=submission.kind, connector=app, is_new=isinstance(verdict, Created))


def around(
    app: Connector, final: Callable[[Submission], Awaitable[Run[Any]]]
) -> Callable[[Submission], Awaitable[Run[Any]]]:
    """`final` inside the app's middleware around submissions."""
    return chain_submit(app.middleware, final)


async def through(app: Connector, flow: Graph, ids: Mapping[str, ExecutionId]) -> dict[str, Submission] | None:
    """The submissions of a flow's nodes as the middleware changed them; it sees all before any is stored."""
    if not overriding(app.middleware, "submit"):
        return None
    changed: dict[str, Submission] = {}
    for name, submission in flow.submissions().items():

        async def final(seen: Submission, name: str = name) -> Run[Any]:
            changed[name] = seen
            return Run(ids[name], kind=seen.kind, connector=app)

        await around(app, final)(submission)
        if name not in changed:
            raise InvalidInput(f"a middleware did not submit node {name!r}", field="middleware", allowed="proceed")
    return changed
