-- list_partition: executions of one partition by id.
--
-- Roles    read, operate
create or replace function flowfabric.list_partition(p_partition integer, p_after uuid, p_limit integer)
returns setof flowfabric.execution_view
language plpgsql stable security definer as $$
declare
    v_row flowfabric.execution_view;
begin
    for v_row in
        select v.* from flowfabric.execution_view v
        where v.partition = p_partition and v.id >= coalesce(p_after, flowfabric.zero_uuid())
          and v.id is distinct from p_after
        order by v.id limit p_limit
    loop
        v_row.lease_id := null;   -- the right to report; see may_operate
        return next v_row;
    end loop;
end;
$$;
