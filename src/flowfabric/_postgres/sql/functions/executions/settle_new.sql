-- settle_new: store what new executions need beside their rows: floors, a wake-up, timers, tags.
--
-- p_code: items with one were not created. p_ready: how many are claimable immediately.
create or replace function flowfabric.settle_new(
    p_routes integer[], p_code text[], p_route_no integer[], p_partition integer[], p_id uuid[], p_priority integer[],
    p_tags text[], p_delays boolean, p_deadlines boolean, p_ready integer, p_now timestamptz)
returns void
language plpgsql as $$
begin
    if p_ready > 0 then
        if p_priority is null and cardinality(p_routes) = 1 then
            perform flowfabric.cover_ready(p_routes, array[flowfabric.rank_of(0)], array[p_now], array[flowfabric.zero_uuid()]);
        else
            perform flowfabric.cover_ready(
                array_agg(p_routes[coalesce(u.no, 1)]), array_agg(flowfabric.rank_of(flowfabric.priority_of(u.priority))),
                array_agg(p_now), array_agg(u.id))
            from unnest(p_route_no, p_priority, p_id) with ordinality as u (no, priority, id, ord)
            where p_code is null or p_code[u.ord] is null;
        end if;
        perform flowfabric.wake_workers(array_agg(p_routes[coalesce(u.no, 1)]))
        from unnest(p_route_no, p_id) with ordinality as u (no, id, ord)
        where p_code is null or p_code[u.ord] is null;
    end if;
    if p_delays then
        perform flowfabric.set_timers('delay', array_agg(e.partition), array_agg(e.id), array_agg(e.delay_until))
        from unnest(p_partition, p_id) with ordinality as u (partition, id, ord)
        join flowfabric.execution e on e.partition = u.partition and e.id = u.id and e.state = 'delayed'
        where p_code is null or p_code[u.ord] is null;
    end if;
    if p_deadlines then
        perform flowfabric.set_timers('deadline', array_agg(e.partition), array_agg(e.id), array_agg(e.deadline_at))
        from unnest(p_partition, p_id) with ordinality as u (partition, id, ord)
        join flowfabric.execution e on e.partition = u.partition and e.id = u.id and e.deadline_at is not null
        where p_code is null or p_code[u.ord] is null;
    end if;
    if p_tags is not null then
        insert into flowfabric.tag (digest, created_at, id, partition)
        select flowfabric.tag_digest(t.key, t.value), p_now, u.id, u.partition
        from unnest(p_partition, p_id, p_tags) with ordinality as u (partition, id, tags, ord)
        cross join lateral jsonb_each_text(u.tags::jsonb) as t (key, value)
        where u.tags is not null and (p_code is null or p_code[u.ord] is null);
    end if;
end;
$$;
