-- list_partition: executions of one partition by id.
create or replace function flowfabric.list_partition(p_partition integer, p_after uuid, p_limit integer)
returns setof flowfabric.execution_view
language sql stable security definer as $$
    select v.* from flowfabric.execution_view v
    where v.partition = p_partition and v.id >= coalesce(p_after, flowfabric.zero_uuid())
      and v.id is distinct from p_after
    order by v.id limit p_limit
$$;
