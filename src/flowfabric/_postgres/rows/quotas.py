"""Quota policies."""

from __future__ import annotations

from flowfabric._postgres.rows.values import Row, readable
from flowfabric.values.quota import QuotaKey, QuotaLimits, QuotaPolicy


@readable
def quota_policy(row: Row) -> QuotaPolicy:
    return QuotaPolicy(
        quota_policy_id=row["id"],
        name=row["name"],
        key=row["key"],
        limits=QuotaLimits(
            max_requests_per_window=row["max_requests"],
            requests_per_window_seconds=row["window_seconds"],
            active_concurrency_cap=row["max_concurrent"],
            jitter_ms=row["jitter_ms"],
        ),
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        active=row["active"],
        admitted=row["admitted"],
        waiting=row["waiting"],
        next_free_at=row["next_free_at"],
    )


@readable
def quota_key(row: Row) -> QuotaKey:
    """The figures of one value of a policy's key."""
    return QuotaKey(
        key=row["key"],
        active=row["active"],
        admitted=row["admitted"],
        waiting=row["waiting"],
        next_free_at=row["next_free_at"],
    )
