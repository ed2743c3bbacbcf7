-- flow_progress: whether every member of a flow has ended, and the state of the flow; no row for an unknown flow.
--
-- Roles    read, submit, work, operate
create or replace function flowfabric.flow_progress(p_partition integer, p_flow uuid)
returns table (members integer, live integer, state text)
language sql stable security definer as $$
    select f.node_count, (select count(*)::integer from flowfabric.execution e where e.flow_id = p_flow and e.completed_at is null),
           f.state
    from flowfabric.flow f where f.partition = p_partition and f.flow_id = p_flow
$$;
