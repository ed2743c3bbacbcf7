-- Reads see committed state and take no lock that a writer waits for.

-- read_execution: one execution as readers see it; no row for an unknown id.
create or replace function flowfabric.read_execution(p_partition integer, p_id uuid)
returns setof flowfabric.execution_view
language sql stable security definer as $$
    select v.* from flowfabric.execution_view v where v.partition = p_partition and v.id = p_id
$$;
