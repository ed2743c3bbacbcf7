"""Children: the tasks and flows that handlers submit. List them, submit flows, cancel them with their parent."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from msgspec import Struct

from flowfabric._postgres import rows, statements
from flowfabric.engine.batch import raised
from flowfabric.engine.checks import check_batch, check_int, check_low_water
from flowfabric.engine.flows import Flows
from flowfabric.engine.steps import step_name
from flowfabric.values.child import Child
from flowfabric.values.graph import FlowSubmitted, NewNode
from flowfabric.values.ids import ExecutionId, FlowId, parse_execution_id, parse_flow_id, parse_uuid
from flowfabric.values.lease import Fence, Handle

_CHUNK = 500  # executions cancelled in a transaction


class ChildPass(Struct, frozen=True, kw_only=True):
    """One chunk of cancelled children: their parent (None: there was nothing to do), and whether there is more."""

    parent_id: ExecutionId | None
    cancelled: int
    failed: int
    message: str | None
    more: bool


class Children(Flows):
    """submit_child_flow, list_children, cancel_children."""

    async def submit_child_flow(
        self,
        authority: Handle | Fence,
        name: str,
        n: int,
        nodes: Sequence[NewNode],
        *,
        flow_id: FlowId,
        seed: UUID,
        flow_kind: str = "",
        namespace: str = "",
        tags: dict[str, str] | None = None,
        detached: bool = False,
    ) -> FlowSubmitted | None:
        """Store a whole graph and record it as a step of its parent, in one transaction.

        A known flow id is recorded, and returns `existed`. `seed` is recorded too: the ids of the graph were made from
        it. None if a flow is already recorded under the name and number. If the lease is lost, nothing is stored.
        """
        fences = self._fences([authority])
        uuid = parse_flow_id(flow_id)
        call = self._new_flow(uuid, nodes, flow_kind, namespace, tags)
        step = (step_name(name), check_int(n, "n", 0, 2**31 - 1))
        # A stored flow is not created again, so a call whose response was lost can be repeated.
        found = await self._fetch(
            statements.SUBMIT_CHILD_FLOW,
            *call.args,
            *fences.first,
            *step,
            parse_uuid(seed, "seed").bytes,
            bool(detached),
            repeatable=True,
        )
        if not found:
            row = await self._row(statements.PROGRESS, *fences.first, None, None, repeatable=True)
            if row["code"] != "ok":
                raise raised(row, fences.execution_id(0))
            return None
        return await self._grown(uuid, call, found[0], repeated=False, connection=None)

    async def list_children(
        self, execution_ids: ExecutionId | Sequence[ExecutionId], *, deep: bool = False, limit: int = 1000
    ) -> list[Child]:
        """The tasks and flows that the handlers of up to 1,000 executions submitted, in the order of creation.

        `deep`: the whole tree, level by level: members of flows below their flow, and their children below them. Known
        idempotency keys and detached submissions make no children.
        """
        given = [execution_ids] if isinstance(execution_ids, UUID | str) else execution_ids
        check_batch(given, "execution_ids")
        found = await self._fetch(
            statements.LIST_CHILDREN,
            [parse_execution_id(one) for one in given],
            bool(deep),
            check_int(limit, "limit", 1, 10_000),
            repeatable=True,
        )
        return [rows.child(row) for row in found]

    async def cancel_children(
        self, of: ExecutionId | None = None, *, limit: int = _CHUNK, low_water: datetime | None = None
    ) -> ChildPass:
        """Cancel one chunk of what a cancelled or expired execution submitted.

        `of`: only in the partition of this execution, where its children and theirs are, and in the minute after it was
        cancelled. A duty does this too. `low_water`: from `look_for_due`; parents from before it are passed over.
        """
        row = await self._row(
            statements.CANCEL_CHILDREN,
            None if of is None else self._home(parse_execution_id(of, "of")),
            check_int(limit, "limit", 1, 10_000),
            check_low_water(low_water),
        )
        return ChildPass(
            parent_id=None if row["parent"] is None else ExecutionId(row["parent"]),
            cancelled=row["cancelled"],
            failed=row["failed"],
            message=row["message"],
            more=row["more"],
        )
