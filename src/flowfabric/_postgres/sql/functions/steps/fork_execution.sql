-- fork_execution: a new execution with the steps that another one recorded before a step; it runs the rest
--
-- The other one is not touched, and may be running. Not copied: failures, which are of their run; submissions whose result
-- is not recorded, which are made again; waits, which begin again: their signals belong to the other one; timeouts, of
-- waits and of results, which have their whole time again. Copied steps are marked as stray: code that does not ask for them
-- is not changed code. Amounts that are recorded as counted are not counted again by the new one.
-- Takes    p_name, p_n: the step, whatever its kind, or its name as lists show it (draft #2); null: every step is copied.
--          p_payload: null: that of the other one.
-- Locks    the other one, so that it is not deleted meanwhile.
-- Returns  created with the number of steps, not_found, step_not_found with the names that are recorded and not our own,
--          lane_closed, id_exists: another execution has the new id, or needs_payload: its arguments are results of the
--          nodes before it in its flow.
-- Roles    submit, work, operate
create or replace function flowfabric.fork_execution(
    p_partition integer, p_id uuid, p_new_partition integer, p_new_id uuid, p_name text, p_n integer, p_payload bytea,
    p_encoding text, p_creator text)
returns table (code text, detail text, copied integer)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_before bigint;    -- the place of the step in the order of the record
    v_limits bigint;
    v_route integer;
    e flowfabric.execution;
begin
    perform flowfabric.require_read_committed();
    if octet_length(p_payload) > 268435456 or octet_length(p_creator) > 256
       or p_new_partition <> flowfabric.partition_of(p_new_id, (select d.flow_partitions from flowfabric.deployment d)) then
        raise exception 'the payload, the creator or the partition is out of bounds' using errcode = 'invalid_parameter_value';
    end if;
    select x.* into e from flowfabric.execution x where x.partition = p_partition and x.id = p_id for key share;
    v_now := flowfabric.now();
    if p_name is not null then
        select o.place into v_before
        from (select s.name, s.n, s.kind, row_number() over (order by s.recorded_at, s.ctid) as place
              from flowfabric.step s
              where s.partition = p_partition and s.id = p_id and s.generation = e.generation) o
        where (o.name = p_name and o.n = p_n) or (p_n = 0 and o.n > 0 and o.name || ' #' || o.n + 1 = p_name)
        order by o.name <> p_name, o.kind <> 'step', o.place limit 1;
    end if;
    code := case when e.id is null or (e.payload_encoding is not distinct from 'redacted' and e.payload = '') then 'not_found'
                 when p_name is not null and v_before is null then 'step_not_found'
                 when p_payload is null and e.has_inputs then 'needs_payload'
                 when exists (select from flowfabric.route r join flowfabric.lane l on l.name = r.lane
                              where r.id = e.route and l.state in ('draining', 'disabled')) then 'lane_closed'
                 else 'created' end;
    if code <> 'created' then
        detail := case code
            when 'step_not_found' then (
                select string_agg(x.name || case when x.n > 0 then ' #' || x.n + 1 else '' end, ', ' order by x.place)
                from (select s.name, s.n, row_number() over (order by s.recorded_at, s.ctid) as place
                      from flowfabric.step s
                      where s.partition = p_partition and s.id = p_id and s.generation = e.generation
                        and not (s.kind = 'sleep' and s.name like 'timeout of %')
                        and s.name <> 'flowfabric: took another branch'
                      order by place limit 50) x)
            when 'lane_closed' then (select r.lane from flowfabric.route r where r.id = e.route) end;
        return next;
        return;
    end if;
    v_route := e.route;
    if e.limits is not null then
        -- A budget of a single run or flow is not passed on.
        select flowfabric.intern_limits(
                   array(select b.id from unnest(l.budget_ids) as b (id)
                         where not exists (select from flowfabric.budget o where o.id = b.id and o.owner_id is not null)),
                   l.quota_ids, e.tags)
        into v_limits
        from flowfabric.limit_set l where l.digest = e.limits limit 1;
        if v_limits is null then
            select (flowfabric.resolve_routes(array[r.lane], array[r.kind], array[array_to_string(r.capabilities, ',')], null,
                                              v_now))[1]
            into v_route from flowfabric.route r where r.id = e.route;
        end if;
    end if;
    insert into flowfabric.execution
        (partition, id, route, created_at, namespace, creator, payload, payload_encoding, policy, limits, state,
         blocking_reason, pending, priority, tags, transitioned_at, forked_from, forked_before)
    values
        (p_new_partition, p_new_id, v_route, v_now, e.namespace, coalesce(p_creator, ''), coalesce(p_payload, e.payload),
         case when p_payload is null then e.payload_encoding else p_encoding end, e.policy, v_limits, 'waiting',
         'waiting_for_worker', 'first', e.priority, e.tags, v_now, p_id,
         p_name || case when p_n > 0 then ' #' || p_n + 1 else '' end)
    on conflict do nothing;
    if not found then
        code := 'id_exists';
        return next;
        return;
    end if;
    with kept as materialized (
        select o.* from (select s.*, row_number() over (order by s.recorded_at, s.ctid) as nth
                         from flowfabric.step s
                         where s.partition = p_partition and s.id = p_id and s.generation = e.generation) o
        where (v_before is null or o.nth < v_before) and o.error is null
    )
    insert into flowfabric.step
        (partition, id, generation, name, n, kind, run, attempt_index, result, encoding, outcome, at, child_partition,
         child_id, flow_id, is_stray, seconds, place, recorded_at)
    select p_new_partition, p_new_id, 0, k.name, k.n, k.kind, 0, 0, k.result, k.encoding, nullif(k.outcome, 'retried'), k.at,
           k.child_partition, k.child_id, k.flow_id, true, k.seconds, k.place, k.recorded_at
    from kept k
    where k.kind in ('step', 'now', 'result', 'patch', 'usage')
       or (k.kind = 'sleep' and k.name not like 'timeout of %')
       or (k.kind = 'submit' and exists (
               select from kept r where r.kind = 'result'
               and r.name = coalesce(flowfabric.result_step(k.child_id), flowfabric.flow_result_step(k.flow_id))))
    order by k.nth;
    get diagnostics copied = row_count;
    insert into flowfabric.tag (digest, created_at, id, partition)
    select flowfabric.tag_digest(t.key, t.value), v_now, p_new_id, p_new_partition
    from jsonb_each_text(e.tags) as t (key, value);
    perform flowfabric.make_ready(array[p_new_partition], array[p_new_id], null);
    return next;
end;
$$;
