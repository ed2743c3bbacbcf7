"""Bulk jobs: cancel or replay everything that matches a filter, in chunks that any process may run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any
from uuid import UUID

from flowfabric._postgres import rows, statements
from flowfabric.engine.checks import check_int, check_list, check_tag
from flowfabric.engine.reads import FIND_BUDGET, Place, Reads
from flowfabric.errors import InvalidInput, NotFound
from flowfabric.values.api_key import check_key_id, check_namespaces
from flowfabric.values.bulk import BulkJob, BulkOperation, BulkPreview, BulkState, ExecutionFilter
from flowfabric.values.checks import check_lane, check_text, escape_text, moment
from flowfabric.values.ids import mint_uuid, parse_execution_id, parse_flow_id, parse_uuid
from flowfabric.values.state import State

CHUNK = 200
_COUNTED = 10_000
_SAMPLE = 10
# The states of a job whose filter names none. Cancelled executions were cancelled on purpose.
_STATES = {
    BulkOperation.CANCEL: tuple(state for state in State if not state.is_terminal),
    BulkOperation.REPLAY: (State.FAILED, State.EXPIRED),
}
_REPLAYABLE = frozenset(state for state in State if state.is_terminal)


class Bulk(Reads):
    """preview_bulk, create_bulk, read_bulk, list_running_bulk, run_bulk, stop_bulk."""

    async def preview_bulk(
        self,
        operation: BulkOperation | str,
        filter: ExecutionFilter,  # noqa: A002 - the contract's word
    ) -> BulkPreview:
        """Count the executions that a bulk job would change, up to 10,000, without changing anything."""
        what = _operation(operation)
        wanted = _checked(what, filter)
        sample: list[Any] = []
        count = 0
        cursor: Place | None = None
        while True:
            page = await self.find_executions(**_arguments(wanted), cursor=cursor, limit=1000)
            sample += [one.execution_id for one in page.items[: _SAMPLE - len(sample)]]
            count += len(page.items)
            cursor = page.next_cursor
            if cursor is None or count >= _COUNTED:
                return BulkPreview(
                    count=min(count, _COUNTED), is_exact=cursor is None and count <= _COUNTED, sample=tuple(sample)
                )

    async def create_bulk(
        self,
        operation: BulkOperation | str,
        filter: ExecutionFilter,  # noqa: A002 - the contract's word
        *,
        actor: str,
        reason: str | None = None,
        key_id: str | None = None,
        bulk_id: UUID | None = None,
    ) -> UUID:
        """Begin to cancel or replay everything that matches; returns the id of the job. Safe to repeat with `bulk_id`.

        Executions created later are left out. The duty `bulk_work` of any server or worker runs it.
        """
        what = _operation(operation)
        chosen = mint_uuid() if bulk_id is None else parse_uuid(bulk_id, "bulk_id")
        wanted = _checked(what, filter)
        await self._row(
            statements.CREATE_BULK,
            chosen,
            what.value,
            None if reason is None else escape_text(reason, 4096),
            check_text(actor, "actor"),
            None if key_id is None else check_key_id(key_id),
            wanted.namespace,
            _list(wanted.lane_ids),
            _list(wanted.kinds),
            [State(state).value for state in wanted.states or ()],
            *check_tag(wanted.tag, "filter.tag"),
            wanted.flow_id,
            wanted.parent_id,
            wanted.created_from,
            wanted.created_before,
            repeatable=True,
        )
        return chosen

    async def read_bulk(self, bulk_id: UUID, *, namespaces: Collection[str] | None = None) -> BulkJob | None:
        """A bulk job; None for an unknown id. `namespaces`: only if it is about one of these."""
        only = check_namespaces(namespaces)
        found = await self._fetch(statements.LIST_BULK, parse_uuid(bulk_id, "bulk_id"), only, 1, repeatable=True)
        return rows.bulk_job(found[0]) if found else None

    async def list_running_bulk(self, *, limit: int = 100) -> list[BulkJob]:
        """Bulk jobs that are not finished, oldest first."""
        size = check_int(limit, "limit", 1, 1000)
        return [
            rows.bulk_job(row) for row in await self._fetch(statements.LIST_BULK, None, None, size, repeatable=True)
        ]

    async def run_bulk(self, bulk_id: UUID, *, limit: int = CHUNK) -> tuple[BulkState | None, int]:
        """Run the next chunk of a job; returns its state afterwards and how many executions the chunk was about.

        The state is None if another process runs a chunk of it now, or if it has ended.
        """
        row = await self._row(
            statements.RUN_BULK,
            parse_uuid(bulk_id, "bulk_id"),
            check_int(limit, "limit", 1, 1000),
            FIND_BUDGET,
        )
        return (None if row["state"] is None else BulkState(row["state"])), row["handled"] or 0

    async def stop_bulk(
        self, bulk_id: UUID, *, namespaces: Collection[str] | None = None, failure: str | None = None
    ) -> BulkState:
        """Stop a job after the chunk that runs; returns its state: one that has ended stays as it is.

        `failure` is why it cannot continue; the job has then failed.
        """
        row = await self._row(
            statements.STOP_BULK,
            parse_uuid(bulk_id, "bulk_id"),
            check_namespaces(namespaces),
            None if failure is None else escape_text(failure, 4096),
            repeatable=True,
        )
        if row["state"] is None:
            raise NotFound("bulk job", bulk_id)
        return BulkState(row["state"])


def _operation(value: object) -> BulkOperation:
    try:
        return BulkOperation(value)  # type: ignore[arg-type]  # it is checked here
    except ValueError:
        raise InvalidInput(f"got {value!r}", field="operation", allowed=", ".join(BulkOperation)) from None


def _checked(operation: BulkOperation, given: object) -> ExecutionFilter:
    """The filter with every field checked, and with states."""
    if not isinstance(given, ExecutionFilter):
        raise InvalidInput(f"got {type(given).__name__}", field="filter", allowed="an ExecutionFilter")
    if given == ExecutionFilter():
        raise InvalidInput("matches everything", field="filter", allowed="at least one of its fields")
    states = _STATES[operation]
    if given.states is not None:
        allowed = _REPLAYABLE if operation is BulkOperation.REPLAY else frozenset(_STATES[operation])
        for state in check_list(given.states, "filter.states"):
            if state not in allowed:
                raise InvalidInput(f"got {state!r}", field="filter.states", allowed=", ".join(sorted(allowed)))
        states = tuple(State(state) for state in given.states)
    check_tag(given.tag, "filter.tag")
    return ExecutionFilter(
        namespace=None if given.namespace is None else check_text(given.namespace, "filter.namespace"),
        lane_ids=None
        if given.lane_ids is None
        else tuple(check_lane(one, "filter.lane_ids") for one in check_list(given.lane_ids, "filter.lane_ids")),
        kinds=None
        if given.kinds is None
        else tuple(check_text(one, "filter.kinds") for one in check_list(given.kinds, "filter.kinds")),
        states=states,
        tag=given.tag,
        flow_id=None if given.flow_id is None else parse_flow_id(given.flow_id, "filter.flow_id"),
        parent_id=None if given.parent_id is None else parse_execution_id(given.parent_id, "filter.parent_id"),
        created_from=None if given.created_from is None else moment(given.created_from, "filter.created_from"),
        created_before=None if given.created_before is None else moment(given.created_before, "filter.created_before"),
    )


def _arguments(wanted: ExecutionFilter) -> dict[str, Any]:
    return {name: getattr(wanted, name) for name in ExecutionFilter.__struct_fields__}


def _list(values: Sequence[str] | None) -> list[str] | None:
    return None if values is None else list(values)
