-- read_summary: the members of a flow, as last counted, or counted now without storing the count.
--
-- Roles    read, submit, work, operate
create or replace function flowfabric.read_summary(p_partition integer, p_flow uuid, p_now boolean)
returns setof flowfabric.flow_summary
language plpgsql volatile security definer as $$
begin
    if p_now then
        return query
        select c.* from flowfabric.flow f cross join lateral flowfabric.count_members(f) c
        where f.partition = p_partition and f.flow_id = p_flow;
    else
        return query
        select s.* from flowfabric.flow_summary s where s.partition = p_partition and s.flow_id = p_flow;
    end if;
end;
$$;
