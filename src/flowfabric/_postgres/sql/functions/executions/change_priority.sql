-- change_priority: change the rank of a claimable execution
--
-- Called by operators. A live grant is not touched.
-- Takes    p_mutated_at: when the execution was last changed as the caller read it; stale if it was changed since.
-- Locks    the execution.
-- Roles    operate
create or replace function flowfabric.change_priority(
    p_partition integer, p_id uuid, p_priority integer, p_lane text,
    p_mutated_at timestamptz)
returns setof flowfabric.verdict
language plpgsql security definer as $$
declare
    v_now timestamptz;
    v_new integer := flowfabric.priority_of(p_priority);
    v_slot smallint;
    v_code text;
    e flowfabric.execution;
begin
    e := flowfabric.lock_execution(p_partition, p_id);
    v_now := flowfabric.now();
    v_code := case
        when e.id is null then 'not_found'
        when p_mutated_at is not null and p_mutated_at <> e.mutated_at then 'stale'
        when p_lane is not null and p_lane <> (select r.lane from flowfabric.route r where r.id = e.route)
            then 'invalid_input'
        when e.state not in ('waiting', 'resumable') or e.blocking_reason <> 'waiting_for_worker'
             or flowfabric.is_uncovered(e, v_now)
            then 'execution_not_eligible'
        else 'ok' end;
    if v_code = 'ok' then
        v_slot := flowfabric.open_log(v_now);
        update flowfabric.ready r set rank = flowfabric.rank_of(v_new)
        where r.route = flowfabric.ready_route(e) and r.rank = flowfabric.rank_of(e.priority) and r.created_at = e.created_at and r.id = e.id
          and r.partition = e.partition;
        perform flowfabric.cover_ready(array[flowfabric.ready_route(e)], array[flowfabric.rank_of(v_new)], array[e.created_at], array[e.id]);
        update flowfabric.execution x set priority = v_new, mutated_at = v_now
        where x.partition = p_partition and x.id = p_id;
        insert into flowfabric.event
            (slot, route, occurred_at, partition, id, flow_id, namespace, tags, operator_type, details)
        values (v_slot, e.route, v_now, e.partition, e.id, e.flow_id, e.namespace, e.tags,
                'priority_changed', jsonb_build_object('old_priority', e.priority, 'new_priority', v_new));
    end if;
    return query select 1, v_code, case when v_code = 'invalid_input' then 'lane_id' end, e.state, null::bigint,
                        null::uuid, v_now;
end;
$$;
