-- resume: suspended -> resumable, or delayed first; its suspension is already closed.
create or replace function flowfabric.resume(p_partition integer, p_id uuid, p_delay_ms bigint, p_now timestamptz) returns void
language plpgsql as $$
declare
    v_until timestamptz := case when p_delay_ms > 0 then p_now + flowfabric.ms(p_delay_ms) end;
    v_route integer; v_rank integer; v_created timestamptz; v_deadline timestamptz;
    v_flow uuid;
    v_namespace text;
    v_limits bigint;
begin
    update flowfabric.execution e
    set state = case when v_until is null then 'resumable' else 'delayed' end, resume_pending = true, delay_until = v_until,
        suspension_timeout_at = null,
        blocking_reason = case when v_until is null then 'waiting_for_worker' else 'waiting_for_resume_delay' end,
        blocking_detail = 'resumes at ' || flowfabric.time_text(v_until),
        transitioned_at = p_now, mutated_at = null
    where e.partition = p_partition and e.id = p_id
    returning flowfabric.ready_route(e), flowfabric.rank_of(e.priority), e.created_at, e.deadline_at, e.flow_id,
              e.limits, e.namespace
    into v_route, v_rank, v_created, v_deadline, v_flow, v_limits, v_namespace;
    if v_until is not null then
        perform flowfabric.set_timers('delay', array[p_partition], array[p_id], array[v_until]);
        if v_flow is not null then
            perform flowfabric.gate(array[p_partition], array[p_id]);
        end if;
        return;
    end if;
    -- A member of a flow may have to be held back.
    if v_flow is not null then
        perform flowfabric.make_ready(array[p_partition], array[p_id], null);
        return;
    end if;
    -- As make_ready does, for one.
    insert into flowfabric.ready (route, rank, created_at, id, partition, deadline_at, limits, namespace)
    values (v_route, v_rank, v_created, p_id, p_partition, v_deadline, v_limits, nullif(v_namespace, ''));
    if flowfabric.cover_one(v_route, v_rank, v_created, p_id, p_now) then
        perform flowfabric.wake_route(v_route, 1);
    end if;
end;
$$;
