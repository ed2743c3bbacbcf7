-- renew: extend leases, many in one call
--
-- Called by the worker that holds the leases; operators cannot.
-- Takes    p_waits: whether to wait for executions that another transaction has locked.
-- Locks    the executions, by partition and id.
-- Returns  one verdict per item: ok with the new expiry, or the reason it was refused; execution_locked if the call does
--          not wait.
-- Roles    work, operate
create or replace function flowfabric.renew(
    p_partition integer[], p_id uuid[], p_lease uuid[], p_epoch bigint[], p_attempt uuid[], p_index integer[],
    p_ttl_ms bigint[], p_waits boolean)
returns setof flowfabric.verdict
language plpgsql security definer as $$
declare
    v_now timestamptz;
    v_slot smallint;
    v_logged boolean;
    v_ok integer[];
    v_tids tid[];
    v_locked integer[] := '{}';
    v_ord integer;
begin
    perform flowfabric.require_read_committed();
    if not p_waits then
        v_locked := flowfabric.lock_free(p_partition, p_id);
        foreach v_ord in array v_locked loop
            p_id[v_ord] := null;   -- the rest of the call does not touch it
        end loop;
    end if;
    select l.at, l.ok, l.tids into v_now, v_ok, v_tids
    from flowfabric.lock_holders(p_partition, p_id, p_lease, p_epoch, p_attempt, p_index) l;
    select d.event_heartbeats into v_logged from flowfabric.deployment d;
    if v_logged then
        v_slot := flowfabric.open_log(v_now);
    end if;
    -- A shortened lease may expire before its timer.
    perform flowfabric.set_timers('lease', array_agg(e.partition), array_agg(e.id),
                                  array_agg(v_now + coalesce(flowfabric.ms(p_ttl_ms[o]), flowfabric.lease_ttl(e))))
    from unnest(v_ok) o
    join flowfabric.execution e on e.partition = p_partition[o] and e.id = p_id[o]
    where v_now + coalesce(flowfabric.ms(p_ttl_ms[o]), flowfabric.lease_ttl(e)) < e.lease_expires_at
    having count(*) > 0;
    -- The lease timer has the earlier expiry; when it is due, it finds the new one and is set again.
    with renewed as (
        update flowfabric.execution e
        set lease_renewed_at = v_now,
            lease_expires_at = v_now + coalesce(flowfabric.ms(p_ttl_ms[u.o]), flowfabric.lease_ttl(e))
        from unnest(v_ok, v_tids) as u (o, tid)
        where e.ctid = u.tid
        returning e.*
    )
    insert into flowfabric.event
        (slot, route, occurred_at, partition, id, flow_id, namespace, tags, lease_type, lease_id, lease_epoch, attempt_id,
         attempt_index, worker)
    select v_slot, r.route, v_now, r.partition, r.id, r.flow_id, r.namespace, r.tags, 'renewed', r.lease_id, r.epoch,
           r.attempt_id, r.attempt_index, r.worker
    from renewed r where v_logged;
    return query
    select v.o, 'ok', null::text, 'active', e.epoch, e.attempt_id, e.lease_expires_at
    from unnest(v_ok) as v (o)
    join flowfabric.execution e on e.partition = p_partition[v.o] and e.id = p_id[v.o];
    return query
    select u.o, 'execution_locked', null::text, null::text, null::bigint, null::uuid, null::timestamptz
    from unnest(v_locked) as u (o);
    if cardinality(v_ok) + cardinality(v_locked) < cardinality(p_id) then
        return query select * from flowfabric.refuse_holders(
            p_partition, p_id, p_lease, p_epoch, p_attempt, p_index, null, v_ok || v_locked, v_now);
    end if;
end;
$$;

-- lock_free: lock the executions that no other transaction has locked, by partition and id, without waiting; returns the
-- ordinals of the others.
create or replace function flowfabric.lock_free(p_partition integer[], p_id uuid[]) returns integer[]
language plpgsql as $$
declare
    v_free integer[];
    v_others integer[];
begin
    with free as materialized (
        select u.ord::integer as ord
        from unnest(p_partition, p_id) with ordinality as u (partition, id, ord)
        join flowfabric.execution e on e.partition = u.partition and e.id = u.id
        order by e.partition, e.id
        for no key update of e skip locked
    )
    select array_agg(f.ord) into v_free from free f;
    if cardinality(v_free) = cardinality(p_id) then
        return '{}';
    end if;
    -- Those that do not exist are not locked.
    select array_agg(o.ord) into v_others
    from (select generate_subscripts(p_id, 1) as ord except select unnest(v_free)) o
    join flowfabric.execution e on e.partition = p_partition[o.ord] and e.id = p_id[o.ord];
    return coalesce(v_others, '{}');
end;
$$;

-- lease_ttl: how long the latest lease of an execution was granted for, from its acquisition or its last renewal on.
create or replace function flowfabric.lease_ttl(e flowfabric.execution) returns interval
language sql immutable as $$
    select e.lease_expires_at - coalesce(e.lease_renewed_at, e.attempt_resumed_at, e.attempt_started_at)
$$;
