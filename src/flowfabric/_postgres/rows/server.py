"""API keys, the audit log, bulk jobs, groups of failures."""

from __future__ import annotations

from flowfabric._postgres.rows.values import Row, json_of, one_of, readable
from flowfabric.values.api_key import ApiKey, Scope, StoredApiKey, stored_digests
from flowfabric.values.bulk import BulkJob, BulkOperation, BulkRefusal, BulkState, ExecutionFilter
from flowfabric.values.failure import FailureGroup
from flowfabric.values.ids import ExecutionId, parse_execution_id
from flowfabric.values.operator_audit import AuditEntry
from flowfabric.values.state import State


@readable
def api_key(row: Row) -> ApiKey:
    return ApiKey(
        key_id=row["id"],
        name=row["name"],
        scopes=tuple(Scope(word) for word in row["scopes"]),
        namespaces=None if row["namespaces"] is None else tuple(row["namespaces"]),
        hides_payloads=row["hides_payloads"],
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        revoked_at=row["revoked_at"],
        last_used_at=row["last_used_at"],
    )


@readable
def stored_api_key(row: Row) -> StoredApiKey:
    return StoredApiKey(
        api_key=None if row["id"] is None else api_key(row),
        is_usable=row["is_usable"],
        digests=stored_digests(row["digest"], row["old_digest"]),
        read_at=row["now"],
    )


@readable
def audit_entry(row: Row) -> AuditEntry:
    return AuditEntry(**{name: row[name] for name in AuditEntry.__struct_fields__})


@readable
def bulk_job(row: Row) -> BulkJob:
    return BulkJob(
        bulk_id=row["id"],
        operation=one_of(BulkOperation, row, "operation"),
        state=one_of(BulkState, row, "state"),
        filter=ExecutionFilter(
            namespace=row["namespace"],
            lane_ids=None if row["lanes"] is None else tuple(row["lanes"]),
            kinds=None if row["kinds"] is None else tuple(row["kinds"]),
            states=tuple(State(word) for word in row["states"]),
            tag=None if row["tag_key"] is None else (row["tag_key"], row["tag_value"]),
            flow_id=row["flow_id"],
            parent_id=row["parent_id"],
            created_from=row["created_from"],
            created_before=row["created_before"],
        ),
        reason=row["reason"],
        actor=row["actor"],
        key_id=row["key_id"],
        created_at=row["created_at"],
        ended_at=row["ended_at"],
        changed=row["changed"],
        unchanged=row["unchanged"],
        refused=row["refused"],
        refusals=tuple(
            BulkRefusal(parse_execution_id(one["execution_id"]), one["code"]) for one in json_of(row, "refusals")
        ),
        failure=row["failure"],
    )


@readable
def failure_group(row: Row) -> FailureGroup:
    return FailureGroup(
        execution_kind=row["kind"],
        public_state=one_of(State, row, "state"),
        error_type=row["error_type"],
        message=row["message"],
        count=row["n"],
        last_ended_at=row["last_ended_at"],
        last_execution_id=ExecutionId(row["last_id"]),
        last_text=row["last_text"] or "",
    )
