-- audit_graph_acyclic: The graph of a flow has no cycle.
create or replace function flowfabric.audit_graph_acyclic(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with f as (
        select x.* from flowfabric.flow x where (x.partition, x.flow_id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'graph_acyclic', f.partition, f.flow_id, null from f
    cross join lateral (
        with x as materialized (
            select x.upstream, x.downstream from flowfabric.edge x where x.partition = f.partition and x.flow_id = f.flow_id
        ), n as materialized (
            select u.id, row_number() over ()::integer as no
            from (select x.upstream as id from x union select x.downstream from x) u
        )
        select array_agg(a.no) as up, array_agg(b.no) as down, (select count(*)::integer from n) as nodes
        from x join n a on a.id = x.upstream join n b on b.id = x.downstream) x
    where x.nodes > 0 and flowfabric.has_cycle(x.up, x.down, x.nodes)
$$;
