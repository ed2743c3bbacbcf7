"""Submit a task or a flow through the middleware; inside a handler only once, even if it is re-run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar, overload
from uuid import uuid5

from flowfabric.client import current
from flowfabric.client.base import ClientBase
from flowfabric.client.connector import Graph
from flowfabric.client.flow_run import FlowRun
from flowfabric.client.run import Run
from flowfabric.client.submission import Submission, Submittable, check_task, new_submission
from flowfabric.errors import Conflict, FlowFabricError, InvalidInput, NotFound
from flowfabric.middleware import chain_submit, overriding
from flowfabric.values.execution import Created, Duplicate, NewExecution
from flowfabric.values.ids import ExecutionId, FlowId, mint_uuid
from flowfabric.values.options import Options, meant

R = TypeVar("R")


class Submitting(ClientBase):
    """Submits tasks and flows."""

    @overload
    async def submit(self, task: Submittable[R], /, *args: Any, **kwargs: Any) -> Run[R]: ...
    @overload
    async def submit(self, task: str, /, *args: Any, **kwargs: Any) -> Run[Any]: ...
    async def submit(self, task: Submittable[Any] | str, /, *args: Any, **kwargs: Any) -> Run[Any]:
        """Submit a task, by object or by name. Keywords that are not parameters of the task are options."""
        return await self.send(new_submission(self._task(task), args, kwargs))

    async def send(self, submission: Submission) -> Run[Any]:
        """Submit through the middleware."""
        scope = current.scope_of(self._connector)
        if scope is not None:
            made = await scope.submit_durably(submission, self._around)
            return self.run(made) if isinstance(made, Run) else made  # a middleware may return something else
        return await self._around(self._send)(submission)

    def _around(
        self, final: Callable[[Submission], Awaitable[Run[Any]]]
    ) -> Callable[[Submission], Awaitable[Run[Any]]]:
        return chain_submit(self._connector.middleware, final)

    async def _send(self, submission: Submission) -> Run[Any]:
        return self._made(submission, await self.create(submission.item(self.engine), submission.options))

    def _made(self, submission: Submission, verdict: Created | Duplicate) -> Run[Any]:
        is_new = isinstance(verdict, Created)
        return Run(verdict.execution_id, kind=submission.kind, connector=self._connector, is_new=is_new)

    async def create(self, item: NewExecution, options: Options) -> Created | Duplicate:
        """Create one execution. If the idempotency key is in use, do as the option `on_duplicate` says."""
        while True:
            verdict = (await self.engine.create_many([item]))[0]
            if isinstance(verdict, FlowFabricError):
                raise verdict
            if isinstance(verdict, Created):
                return verdict
            await self._check_kind(verdict, item.execution_kind)
            if not await self._is_free(verdict, item, options):
                return verdict

    async def _check_kind(self, existing: Duplicate, kind: str) -> None:
        # Keys belong to a namespace, not to a task: an execution of another task is not the one the caller wants.
        found = await self.engine.read_execution_info(existing.execution_id)
        if found is not None and found.execution_kind != kind:
            raise _key_is_known(existing, f" of {found.execution_kind}")

    async def _is_free(self, existing: Duplicate, item: NewExecution, options: Options) -> bool:
        """Whether the key may be reused: only if its execution did not succeed."""
        if options.on_duplicate == "raise":
            raise _key_is_known(existing)
        if options.on_duplicate != "replace" or item.idempotency_key is None:
            return False
        return await self.engine.free_key(
            existing.execution_id, item.idempotency_key, namespace=item.namespace or "", flow_id=item.flow_id
        )

    async def submit_flow(self, flow: Graph, *, idempotency_key: str | None = None) -> FlowRun:
        """Submit a flow that was built with `app.flow()`, in one call. See `Flow.submit`."""
        scope = current.scope_of(self._connector)
        seed = None if scope is None else await scope.flow_seed(flow.name)
        engine = self.engine
        if flow.grows is not None:
            flow_id = flow.grows
        elif idempotency_key is not None:
            flow_id = flow.id_of(idempotency_key)
        else:
            flow_id = FlowId(mint_uuid() if seed is None else uuid5(seed, "flow"))
        # With a key the ids are derived from it, so that concurrent submitters agree on them.
        ids = flow.ids(flow_id, engine.flow_partitions, seed if idempotency_key is None else flow_id)
        nodes = flow.build(ids, await self._through(flow, ids))
        if flow.grows is not None:
            if not nodes:
                return self.flow(flow.grows)
            made = await engine.extend_flow(flow_id, nodes)
        else:
            made = await engine.submit_flow(
                nodes, flow_kind=flow.name, namespace=flow.namespace, flow_id=flow_id, tags=dict(flow.tags)
            )
        # A flow created by an earlier run of this handler still counts as new.
        is_new = not made.existed or (seed is not None and idempotency_key is None)
        run = FlowRun(made.flow_id, nodes=ids, connector=self._connector, is_new=is_new)
        return run if is_new else await run.refresh()

    async def _through(self, flow: Graph, ids: Mapping[str, ExecutionId]) -> dict[str, Submission] | None:
        """The submissions of a flow's nodes as the middleware changed them; it sees all before any is stored."""
        if not overriding(self._connector.middleware, "submit"):
            return None
        changed: dict[str, Submission] = {}
        for name, submission in flow.submissions().items():

            async def final(seen: Submission, name: str = name) -> Run[Any]:
                changed[name] = seen
                return Run(ids[name], kind=seen.kind, connector=self._connector)

            await self._around(final)(submission)
            if name not in changed:
                raise InvalidInput(f"a middleware did not submit node {name!r}", field="middleware", allowed="proceed")
        return changed

    def _task(self, task: Submittable[Any] | str) -> Submittable[Any]:
        if not isinstance(task, str):
            return check_task(task)
        found = self._connector.tasks.get(task)
        if found is None:
            raise NotFound("task", task, detail=meant(task, self._connector.tasks))
        return found


def _key_is_known(existing: Duplicate, of: str = "") -> Conflict:
    found = existing.execution_id
    detail = f"the idempotency key is in use: execution {found}{of}"
    return Conflict("duplicate_submission", detail, existing=found, execution_id=found)
