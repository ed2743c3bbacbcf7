-- reaches: whether a path of edges leads from one member of a flow to another.
create or replace function flowfabric.reaches(p_partition integer, p_flow uuid, p_from uuid, p_to uuid) returns boolean
language plpgsql as $$
begin
    -- Two cases need no walk: a node at the end of the graph, or one at its beginning.
    if not exists (select from flowfabric.edge d where d.partition = p_partition and d.upstream = p_from
                                                        and d.flow_id is not distinct from p_flow)
       or not exists (select from flowfabric.edge d where d.partition = p_partition and d.downstream = p_to
                                                           and d.flow_id is not distinct from p_flow) then
        return false;
    end if;
    return exists (
        with recursive reached (id) as (
            select p_from
            union
            select d.downstream from reached r
            cross join lateral (select x.downstream from flowfabric.edge x
                                where x.partition = p_partition and x.upstream = r.id and x.flow_id = p_flow offset 0) d
        )
        select from reached r where r.id = p_to);
end;
$$;
