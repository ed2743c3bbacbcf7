-- read_started: unfinished executions that some attempt has started, as a worker would receive them, without claiming
-- them
--
-- Called to compare code with what executions recorded. No worker holds the lease: the nil id and epoch 0.
-- Returns  one row per execution that exists, has not ended and has started: the columns of `claimed`, and the version in
--          which it began.
-- Roles    read, work, operate
create or replace function flowfabric.read_started(p_partition integer[], p_id uuid[])
returns table (
    partition integer, id uuid, handle_kind text, attempt_index integer, attempt_id uuid, attempt_type text,
    lease_id uuid, lease_epoch bigint, lease_expires_at timestamptz, lane text, kind text, namespace text,
    flow_id uuid, priority integer, created_at timestamptz, payload bytea, payload_encoding text, tags jsonb,
    deadline_at timestamptz, attempt_timeout_at timestamptz, retries integer, reclaims integer, replays integer,
    upstreams uuid[], upstream_states text[], upstream_results bytea[], upstream_encodings text[], durability_mode text,
    version integer)
language sql stable security definer as $$
    select e.partition, e.id, 'resumed', e.attempt_index, e.attempt_id, coalesce(e.attempt_type, 'initial'),
           flowfabric.zero_uuid(), 0::bigint, flowfabric.now(), r.lane, r.kind, e.namespace,
           e.flow_id, e.priority, e.created_at, coalesce((e.i).payload, e.payload),
           case when (e.i).payload is null then e.payload_encoding else (e.i).encoding end, e.tags, e.deadline_at,
           null::timestamptz, e.retries, e.reclaims, e.replays, (e.i).upstreams, (e.i).states, (e.i).results,
           (e.i).encodings, flowfabric.durability_of(e.policy), (select q.version from flowfabric.route q where q.id = e.pinned)
    from (select x.*, case when x.has_inputs then flowfabric.inputs_of(x.partition, x.id) end as i
          from unnest(p_partition, p_id) as u (partition, id)
          join flowfabric.execution x on x.partition = u.partition and x.id = u.id
          where x.attempt_index is not null and x.completed_at is null offset 0) e
    join flowfabric.route r on r.id = e.route
$$;
