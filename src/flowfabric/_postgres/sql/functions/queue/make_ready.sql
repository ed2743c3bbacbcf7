-- make_ready: insert the ready rows of executions that may be claimed again, in their old position.
--
-- Members of flows that may not be claimed are held back instead (see gate).
create or replace function flowfabric.make_ready(p_partition integer[], p_id uuid[], p_available_at timestamptz)
returns void
language plpgsql as $$
declare
    v_routes integer[]; v_ranks integer[]; v_created timestamptz[]; v_ids uuid[];
begin
    select g.partitions, g.ids into p_partition, p_id from flowfabric.gate(p_partition, p_id) g;
    select array_agg(flowfabric.ready_route(e)), array_agg(flowfabric.rank_of(e.priority)), array_agg(e.created_at), array_agg(e.id)
    into v_routes, v_ranks, v_created, v_ids
    from unnest(p_partition, p_id) as u (partition, id)
    join flowfabric.execution e on e.partition = u.partition and e.id = u.id;
    if v_routes is null then
        return;
    end if;
    insert into flowfabric.ready (route, rank, created_at, id, partition, deadline_at, available_at, limits, namespace)
    select flowfabric.ready_route(e), flowfabric.rank_of(e.priority), e.created_at, e.id, e.partition, e.deadline_at, p_available_at,
           e.limits, nullif(e.namespace, '')
    from unnest(p_partition, p_id) as u (partition, id)
    join flowfabric.execution e on e.partition = u.partition and e.id = u.id;
    perform flowfabric.cover_ready(v_routes, v_ranks, v_created, v_ids);
    perform flowfabric.wake_workers(v_routes);
end;
$$;
