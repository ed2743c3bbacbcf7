-- closes_cycle: the index of the first new edge that closes a cycle with the stored ones and those before it.
create or replace function flowfabric.closes_cycle(
    p_partition integer, p_flow uuid, p_upstream uuid[], p_downstream uuid[]) returns integer
language plpgsql as $$
declare
    v_from integer[]; v_to integer[]; v_old integer; v_nodes integer;
    v_low integer := 1; v_high integer := cardinality(p_upstream); v_middle integer;
begin
    -- Every new cycle is within the nodes reachable from the ends of the new edges.
    with recursive reached (id) as (
        select u.id from unnest(p_downstream) u (id)
        union
        select d.downstream from reached r
        cross join lateral (select x.downstream from flowfabric.edge x
                            where x.partition = p_partition and x.upstream = r.id and x.flow_id = p_flow offset 0) d
    ), start (id) as (
        select id from reached union select u.id from unnest(p_upstream) u (id)
    ), numbered as materialized (
        select s.id, row_number() over (order by s.id)::integer as no from start s
    ), old as (
        select a.no as f, b.no as t from numbered a
        cross join lateral (select x.downstream from flowfabric.edge x
                            where x.partition = p_partition and x.upstream = a.id and x.flow_id = p_flow offset 0) x
        join numbered b on b.id = x.downstream
    ), new as (
        select a.no as f, b.no as t, n.ord from unnest(p_upstream, p_downstream) with ordinality as n (upstream, downstream, ord)
        join numbered a on a.id = n.upstream join numbered b on b.id = n.downstream
    )
    select (select coalesce(array_agg(o.f), '{}') from old o) || (select array_agg(n.f order by n.ord) from new n),
           (select coalesce(array_agg(o.t), '{}') from old o) || (select array_agg(n.t order by n.ord) from new n),
           (select count(*) from old o), (select count(*) from numbered)
    into v_from, v_to, v_old, v_nodes;
    if not flowfabric.has_cycle(v_from, v_to, v_nodes) then
        return null;
    end if;
    while v_low < v_high loop
        v_middle := (v_low + v_high) / 2;
        if flowfabric.has_cycle(v_from[:v_old + v_middle], v_to[:v_old + v_middle], v_nodes) then
            v_high := v_middle;
        else
            v_low := v_middle + 1;
        end if;
    end loop;
    return v_low;
end;
$$;
