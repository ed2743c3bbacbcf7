"""Submit a task or a flow through the middleware; inside a handler only once, even if it is re-run."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, ParamSpec, TypeVar, overload
from uuid import uuid5

from flowfabric.client import creating, current
from flowfabric.client.base import ClientBase
from flowfabric.client.connector import Graph
from flowfabric.client.flow_run import FlowRun
from flowfabric.client.limits import learn, learn_of_flow, may_have_limits
from flowfabric.client.run import Run
from flowfabric.client.submission import Submission, Submittable, TypedTask, check_task, new_submission
from flowfabric.errors import NotFound
from flowfabric.values.execution import Created, Duplicate, NewExecution
from flowfabric.values.ids import FlowId, fit_partition, mint_uuid, partition_of_id
from flowfabric.values.options import Options, meant

P = ParamSpec("P")
R = TypeVar("R")


class Submitting(ClientBase):
    """Submits tasks and flows."""

    @overload
    async def submit(self, task: TypedTask[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Run[R]: ...
    @overload
    async def submit(self, task: str, /, *args: Any, **kwargs: Any) -> Run[Any]: ...
    async def submit(self, task: Any, /, *args: Any, **kwargs: Any) -> Run[Any]:
        """Submit a task, by object or by name.

        Keywords that are not parameters of the task are options; `task.options(...)` gives them in a way that type
        checkers follow.
        """
        return await self.send(new_submission(self._task(task), args, kwargs))

    async def send(self, submission: Submission) -> Run[Any]:
        """Submit through the middleware."""
        scope = current.scope_of(self._connector)
        if scope is not None:
            made = await scope.submit_durably(submission, self._around)
            return self.run(made) if isinstance(made, Run) else made  # a middleware may return something else
        if not submission.options.idempotency_key:
            current.tell_forgotten(self._connector, submission.task.name)
        return await self._around(self._send)(submission)

    def _around(
        self, final: Callable[[Submission], Awaitable[Run[Any]]]
    ) -> Callable[[Submission], Awaitable[Run[Any]]]:
        return creating.around(self._connector, final)

    async def _send(self, submission: Submission) -> Run[Any]:
        if may_have_limits(submission):
            await learn(self.engine, [submission])
        return self._made(submission, await self.create(submission.item(), submission.options))

    def _made(self, submission: Submission, verdict: Created | Duplicate) -> Run[Any]:
        return creating.made(self._connector, submission, verdict)

    async def create(self, item: NewExecution, options: Options) -> Created | Duplicate:
        """Create one execution. If the idempotency key is in use, do as the option `on_duplicate` says."""
        return await creating.create(self.engine, item, options)

    async def submit_flow(self, flow: Graph, *, idempotency_key: str | None = None, detached: bool = False) -> FlowRun:
        """Submit a flow that was built with `app.flow()`, in one call. See `Flow.submit`."""
        scope = current.scope_of(self._connector)
        if scope is not None:
            return await scope.as_one_call(partial(self._submit_flow, scope, flow, idempotency_key, detached))
        return await self._submit_flow(None, flow, idempotency_key, detached)

    async def _submit_flow(
        self, scope: current.Scope | None, flow: Graph, idempotency_key: str | None, detached: bool
    ) -> FlowRun:
        if scope is not None and flow.grows is None:
            child = await scope.child_flow(flow.name)
            if child is not None:
                return await self._submit_child_flow(child, flow, idempotency_key, detached=detached)
        if scope is None and idempotency_key is None:
            current.tell_forgotten(self._connector, f"flow {flow.name}")
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
        changed = await creating.through(self._connector, flow, ids)
        await learn_of_flow(self.engine, flow, changed)
        nodes = flow.build(ids, changed)
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

    async def _submit_child_flow(
        self, child: current.ChildFlow, flow: Graph, idempotency_key: str | None, *, detached: bool
    ) -> FlowRun:
        count = self.engine.flow_partitions
        seed = child.seed if idempotency_key is None else None
        if child.flow_id is not None:
            ids = flow.ids(child.flow_id, count, seed or child.flow_id)
            run = FlowRun(child.flow_id, nodes=ids, connector=self._connector, is_new=not child.existed)
            if child.existed:
                with contextlib.suppress(NotFound):  # it is not ours, and may be deleted meanwhile
                    await run.refresh()
            return run
        if idempotency_key is not None:
            flow_id = flow.id_of(idempotency_key)
        else:
            flow_id = FlowId(uuid5(child.seed, "flow"))
            if not detached:
                flow_id = FlowId(fit_partition(flow_id, partition_of_id(child.parent_id, count), count))
        ids = flow.ids(flow_id, count, seed or flow_id)
        changed = await creating.through(self._connector, flow, ids)
        await learn_of_flow(self.engine, flow, changed)
        nodes = flow.build(ids, changed)
        made = await child.submit(
            flow_id,
            nodes,
            name=flow.name,
            namespace=flow.namespace,
            tags=dict(flow.tags),
            detached=detached,
        )
        existed = made is not None and made.existed
        run = FlowRun(flow_id, nodes=ids, connector=self._connector, is_new=not existed)
        return await run.refresh() if existed else run

    def _task(self, task: Submittable[Any] | str) -> Submittable[Any]:
        if not isinstance(task, str):
            return check_task(task)
        found = self._connector.tasks.get(task)
        if found is None:
            raise NotFound("task", task, detail=meant(task, self._connector.tasks))
        return found
