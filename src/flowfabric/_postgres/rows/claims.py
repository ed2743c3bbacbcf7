"""Claims: the lease that a worker receives."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from flowfabric._postgres.rows.values import DECODER
from flowfabric.values.attempt import AttemptType, Claimed, Passed, Started
from flowfabric.values.lease import Handle, HandleKind
from flowfabric.values.state import State

_HANDLE_KINDS = {kind.value: kind for kind in HandleKind}
_ATTEMPT_TYPES = {kind.value: kind for kind in AttemptType}


def claimed(row: Iterable[Any], ttl: timedelta, instance: str) -> Claimed:
    """A lease from the columns `statements.CLAIMED`, in that order: unpacked by position: this is the hot path."""
    (
        partition, uuid, handle_kind, attempt_index, attempt_id, attempt_type, lease_id, lease_epoch, lease_expires_at,
        lane, kind, namespace, flow_id, priority, created_at, payload, payload_encoding, tags, deadline_at,
        attempt_timeout_at, retries, reclaims, replays, upstreams, states, results, encodings, durability, has_steps,
    ) = row  # fmt: skip
    return Claimed(
        handle=Handle(
            partition=partition,
            uuid=uuid,
            attempt_index=attempt_index,
            attempt_id=attempt_id,
            lease_id=lease_id,
            lease_epoch=lease_epoch,
            lease_ttl=ttl,
            lane_id=lane,
            worker_instance_id=instance,
            kind=_HANDLE_KINDS[handle_kind],
        ),
        lease_expires_at=lease_expires_at,
        attempt_type=_ATTEMPT_TYPES[attempt_type],
        execution_kind=kind,
        namespace=namespace,
        flow_id=flow_id,
        priority=priority,
        created_at=created_at,
        input_payload=payload,
        payload_encoding=payload_encoding,
        tags={} if tags is None else DECODER.decode(tags),
        deadline_at=deadline_at,
        attempt_timeout_at=attempt_timeout_at,
        retry_count=retries,
        reclaim_count=reclaims,
        replay_count=replays,
        durability_mode=durability or "buffered",
        has_steps=has_steps,
        inputs=None
        if upstreams is None
        else {
            upstream: Passed(State(state), result, encoding)
            for upstream, state, result, encoding in zip(
                upstreams, states or (), results or (), encodings or (), strict=True
            )
        },
    )


def started(row: Iterable[Any]) -> Started:
    """Return an execution as a claim would, with its version; it has no lease."""
    *columns, version = row
    return Started(claimed(columns, timedelta(), ""), version)
