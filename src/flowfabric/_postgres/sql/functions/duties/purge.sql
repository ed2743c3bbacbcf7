-- purge: delete ended executions past their retention. A flow is deleted as a whole, when all its members are past
-- theirs. Children that a parent still needs (needed_by), and members of a flow that is not yet due, are checked again later.
create or replace function flowfabric.purge(p_partition integer[], p_id uuid[], p_now timestamptz) returns void
language plpgsql as $$
declare
    v_partitions integer[]; v_flows uuid[]; v_due timestamptz[]; v_again timestamptz[];
    v_kept uuid[] := '{}';
    v_needed_partitions integer[]; v_needed uuid[]; v_needed_again timestamptz[];
begin
    -- When a flow may be deleted: null while a member has not ended, work for the flow is pending, or a parent needs it.
    select array_agg(f.partition), array_agg(f.flow_id), array_agg(f.due), array_agg(f.again)
    into v_partitions, v_flows, v_due, v_again
    from (select w.partition, w.flow_id,
                 case when not m.live and n.id is null
                       and (select true from flowfabric.pending_cascade p
                            where p.partition = w.partition and p.flow_id = w.flow_id limit 1) is null
                      then m.due end as due,
                 flowfabric.check_again(case when n.id is not null then m.due end, p_now) as again
          from (select distinct e.partition, e.flow_id from unnest(p_partition, p_id) as u (partition, id)
                join flowfabric.execution e on e.partition = u.partition and e.id = u.id where e.flow_id is not null) w
          cross join lateral (
              select bool_or(e.completed_at is null) as live, max(flowfabric.own_time('retention', e, d)) as due
              from flowfabric.execution e, flowfabric.deployment d where e.flow_id = w.flow_id offset 0) m
          left join lateral (select x.parent_id from flowfabric.flow x
                             where x.partition = w.partition and x.flow_id = w.flow_id offset 0) h on true
          left join lateral flowfabric.needed_by(h.parent_id, flowfabric.flow_result_step(w.flow_id)) n on true) f;
    if v_flows is not null then
        select coalesce(array_agg(e.id), '{}') into v_kept
        from unnest(p_partition, p_id) as u (partition, id)
        join flowfabric.execution e on e.partition = u.partition and e.id = u.id where e.flow_id is not null;
        perform flowfabric.set_timers(
            'retention', array_agg(e.partition), array_agg(e.id),
            array_agg(coalesce(nullif(greatest(f.due, p_now), p_now), f.again)))
        from unnest(p_partition, p_id) as u (partition, id)
        join flowfabric.execution e on e.partition = u.partition and e.id = u.id
        join unnest(v_flows, v_due, v_again) as f (flow_id, due, again) on f.flow_id = e.flow_id
        where f.due is null or f.due > p_now having count(*) > 0;
        for v_no in 1 .. cardinality(v_flows) loop
            continue when v_due[v_no] is null or v_due[v_no] > p_now;
            if flowfabric.forget_flow(v_partitions[v_no], v_flows[v_no]) <> 'ok' then
                perform flowfabric.set_timers('retention', array_agg(e.partition), array_agg(e.id), array_agg(p_now + interval '1 minute'))
                from unnest(p_partition, p_id) as u (partition, id)
                join flowfabric.execution e on e.partition = u.partition and e.id = u.id and e.flow_id = v_flows[v_no];
            end if;
        end loop;
    end if;
    select array_agg(e.partition), array_agg(e.id), array_agg(flowfabric.check_again(e.completed_at, p_now))
    into v_needed_partitions, v_needed, v_needed_again
    from unnest(p_partition, p_id) as u (partition, id)
    cross join lateral (select x.partition, x.id, x.parent_id, x.completed_at, x.flow_id from flowfabric.execution x
                        where x.partition = u.partition and x.id = u.id offset 0) e
    cross join lateral flowfabric.needed_by(e.parent_id, flowfabric.result_step(e.id)) n
    where e.parent_id is not null and e.flow_id is null and n.id is not null;
    if v_needed is not null then
        v_kept := v_kept || v_needed;
        perform flowfabric.set_timers('retention', v_needed_partitions, v_needed, v_needed_again);
    end if;
    perform flowfabric.purge_rows(array_agg(u.partition), array_agg(u.id))
    from unnest(p_partition, p_id) as u (partition, id) where u.id <> all (v_kept) having count(*) > 0;
end;
$$;

-- check_again: when to check something again that is kept longer: the longer ago p_since is, the later; in an hour (also
-- without p_since) to a day.
create or replace function flowfabric.check_again(p_since timestamptz, p_now timestamptz) returns timestamptz
language sql immutable as $$
    select p_now + least(greatest(coalesce(p_now - p_since, interval '1 hour'), interval '1 hour'), interval '1 day')
$$;
