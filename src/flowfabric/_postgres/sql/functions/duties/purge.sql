-- purge: delete ended executions past their retention. A flow is deleted as a whole, when all its members are past
-- theirs; until then its members are checked again later.
create or replace function flowfabric.purge(p_partition integer[], p_id uuid[], p_now timestamptz) returns void
language plpgsql as $$
declare
    v_partitions integer[]; v_flows uuid[]; v_due timestamptz[];
    v_kept uuid[] := '{}';
begin
    -- When a flow may be deleted: null while a member has not ended or work for the flow is pending.
    select array_agg(f.partition), array_agg(f.flow_id), array_agg(f.due) into v_partitions, v_flows, v_due
    from (select w.partition, w.flow_id,
                 case when not m.live and not exists (select from flowfabric.pending_cascade p where p.flow_id = w.flow_id)
                      then m.due end as due
          from (select distinct e.partition, e.flow_id from unnest(p_partition, p_id) as u (partition, id)
                join flowfabric.execution e on e.partition = u.partition and e.id = u.id where e.flow_id is not null) w
          cross join lateral (
              select bool_or(e.completed_at is null) as live, max(flowfabric.own_time('retention', e, d)) as due
              from flowfabric.execution e, flowfabric.deployment d where e.flow_id = w.flow_id offset 0) m) f;
    if v_flows is not null then
        select coalesce(array_agg(e.id), '{}') into v_kept
        from unnest(p_partition, p_id) as u (partition, id)
        join flowfabric.execution e on e.partition = u.partition and e.id = u.id where e.flow_id is not null;
        perform flowfabric.set_timers(
            'retention', array_agg(e.partition), array_agg(e.id),
            array_agg(coalesce(nullif(greatest(f.due, p_now), p_now), p_now + interval '1 hour')))
        from unnest(p_partition, p_id) as u (partition, id)
        join flowfabric.execution e on e.partition = u.partition and e.id = u.id
        join unnest(v_flows, v_due) as f (flow_id, due) on f.flow_id = e.flow_id
        where f.due is null or f.due > p_now having count(*) > 0;
        for v_no in 1 .. cardinality(v_flows) loop
            if v_due[v_no] <= p_now and flowfabric.forget_flow(v_partitions[v_no], v_flows[v_no]) <> 'ok' then
                perform flowfabric.set_timers('retention', array_agg(e.partition), array_agg(e.id), array_agg(p_now + interval '1 minute'))
                from unnest(p_partition, p_id) as u (partition, id)
                join flowfabric.execution e on e.partition = u.partition and e.id = u.id and e.flow_id = v_flows[v_no];
            end if;
        end loop;
    end if;
    perform flowfabric.purge_rows(array_agg(u.partition), array_agg(u.id))
    from unnest(p_partition, p_id) as u (partition, id) where u.id <> all (v_kept) having count(*) > 0;
end;
$$;
