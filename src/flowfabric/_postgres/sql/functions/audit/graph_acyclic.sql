-- audit_graph_acyclic: The graph of a flow has no cycle.
create or replace function flowfabric.audit_graph_acyclic(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with f as (
        select x.* from flowfabric.flow x where (x.partition, x.flow_id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'graph_acyclic', f.partition, f.flow_id, null from f
    cross join lateral (
        -- The members are numbered by sorting: joins of the members and the edges could be nested.
        with x as materialized (
            select x.upstream, x.downstream, row_number() over () as place
            from flowfabric.edge x where x.partition = f.partition and x.flow_id = f.flow_id
        )
        select array_agg(n.no order by n.place) filter (where n.is_up) as up,
               array_agg(n.no order by n.place) filter (where not n.is_up) as down, max(n.no) as nodes
        from (select e.place, e.is_up, dense_rank() over (order by e.id)::integer as no
              from (select x.place, true as is_up, x.upstream as id from x
                    union all select x.place, false, x.downstream from x) e) n) x
    where x.nodes > 0 and flowfabric.has_cycle(x.up, x.down, x.nodes)
$$;
