-- release_members: waiting_children -> waiting (resumable after a suspension, delayed while a delay lasts, held back
-- again if it was held back before).
--
-- Called under the locks of the executions. Members in another state, and parked ones, are left alone.
create or replace function flowfabric.release_members(p_partition integer[], p_id uuid[], p_now timestamptz) returns void
language plpgsql as $$
declare
    v_routes integer[]; v_ranks integer[]; v_created timestamptz[]; v_ids uuid[];
    v_late_partitions integer[]; v_late_ids uuid[]; v_late_due timestamptz[];
    v_held_partitions integer[]; v_held_ids uuid[]; v_reasons text[];
begin
    with released as (
        update flowfabric.execution e
        set state = case when e.delay_until > p_now then 'delayed' when e.resume_pending then 'resumable' else 'waiting' end,
            blocking_reason = case when e.delay_until > p_now and e.pending = 'retry' then 'waiting_for_retry_backoff'
                                   when e.delay_until > p_now and e.resume_pending then 'waiting_for_resume_delay'
                                   when e.delay_until > p_now then 'waiting_for_delay' else 'waiting_for_worker' end,
            blocking_detail = case when e.delay_until > p_now then 'delayed until '
                || flowfabric.time_text(e.delay_until) end,
            delay_until = case when e.delay_until > p_now then e.delay_until end,
            transitioned_at = p_now, mutated_at = null
        from unnest(p_partition, p_id) as u (partition, id)
        where e.partition = u.partition and e.id = u.id and e.state = 'waiting_children' and not e.is_parked
        returning e.partition, e.id, flowfabric.ready_route(e) as route, e.priority, e.created_at, e.deadline_at, e.delay_until, e.flow_id, e.held_back,
                  e.limits, e.namespace
    ), offered as (
        insert into flowfabric.ready (route, rank, created_at, id, partition, deadline_at, limits, namespace)
        select r.route, flowfabric.rank_of(r.priority), r.created_at, r.id, r.partition, r.deadline_at, r.limits,
               nullif(r.namespace, '')
        from released r where r.delay_until is null
    ), touched as (
        insert into flowfabric.flow_touched select distinct r.partition, r.flow_id from released r
    )
    select array_agg(r.route) filter (where r.delay_until is null),
           array_agg(flowfabric.rank_of(r.priority)) filter (where r.delay_until is null),
           array_agg(r.created_at) filter (where r.delay_until is null), array_agg(r.id) filter (where r.delay_until is null),
           array_agg(r.partition) filter (where r.delay_until is not null),
           array_agg(r.id) filter (where r.delay_until is not null),
           array_agg(r.delay_until) filter (where r.delay_until is not null),
           array_agg(r.partition) filter (where r.held_back is not null),
           array_agg(r.id) filter (where r.held_back is not null), array_agg(r.held_back) filter (where r.held_back is not null)
    into v_routes, v_ranks, v_created, v_ids, v_late_partitions, v_late_ids, v_late_due, v_held_partitions, v_held_ids, v_reasons
    from released r;
    if v_ids is not null then
        perform flowfabric.cover_ready(v_routes, v_ranks, v_created, v_ids);
        perform flowfabric.wake_workers(v_routes);
    end if;
    perform flowfabric.set_timers('delay', v_late_partitions, v_late_ids, v_late_due);
    -- An earlier blocking reason applies again.
    for i in 1 .. coalesce(cardinality(v_held_ids), 0) loop
        perform flowfabric.block(v_held_partitions[i], v_held_ids[i], v_reasons[i], null);
        update flowfabric.execution e set held_back = null where e.partition = v_held_partitions[i] and e.id = v_held_ids[i];
    end loop;
end;
$$;
