-- retention_of: how long an ended execution is kept.
create or replace function flowfabric.retention_of(p_state text, p_policy json, d flowfabric.deployment) returns interval
language sql immutable as $$
    select coalesce(flowfabric.ms((p_policy -> 'stream_policy' ->> 'retention_ttl_ms')::bigint),
                    case when p_state in ('failed', 'expired') then d.failure_retention else d.retention end)
$$;
