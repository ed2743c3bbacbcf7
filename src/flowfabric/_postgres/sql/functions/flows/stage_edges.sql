-- stage_edges: add edges to the graph of a flow; they block nothing until they are applied
--
-- Called with one edge, or with many and p_apply: then all or none are staged and applied.
-- Locks    the flow; with p_apply also the groups, then all executions concerned, by id.
-- Returns  one row: ok with the revision now; or why not, with the index of the first refused edge.
-- Roles    operate
create or replace function flowfabric.stage_edges(
    p_partition integer, p_flow uuid, p_edge uuid[], p_upstream uuid[], p_downstream uuid[], p_ref text[],
    p_revision bigint, p_apply boolean)
returns table (code text, place integer, revision bigint)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_n integer := cardinality(p_edge);
begin
    perform flowfabric.require_read_committed();
    code := flowfabric.open_flow(p_partition, p_flow, true);
    select f.node_count + f.edge_count into revision from flowfabric.flow f
    where f.partition = p_partition and f.flow_id = p_flow;
    if code is null and revision <> p_revision then
        code := 'stale_graph_revision';
    end if;
    if code is null then
        select 'execution_not_in_flow', u.ord::integer into code, place
        from unnest(p_upstream, p_downstream) with ordinality as u (upstream, downstream, ord)
        left join lateral (select x.* from flowfabric.execution x where x.partition = p_partition and x.id = u.upstream offset 0) a on true
        left join lateral (select x.* from flowfabric.execution x where x.partition = p_partition and x.id = u.downstream offset 0) b on true
        where (a.flow_id = p_flow and b.flow_id = p_flow) is not true
        order by u.ord limit 1;
    end if;
    if code is null then
        if v_n = 1 then
            place := case when flowfabric.reaches(p_partition, p_flow, p_downstream[1], p_upstream[1]) then 1 end;
        else
            place := flowfabric.closes_cycle(p_partition, p_flow, p_upstream, p_downstream);
        end if;
        code := case when place is not null then 'cycle_detected' end;
    end if;
    if code is null then
        select 'dependency_already_exists', u.ord::integer into code, place
        from (select e.*, row_number() over (partition by e.id order by e.ord) as nth
              from unnest(p_edge) with ordinality as e (id, ord)) u
        left join lateral (select x.* from flowfabric.edge x
                           where x.partition = p_partition and x.flow_id = p_flow and x.edge_id = u.id offset 0) d on true
        where d.edge_id is not null or u.nth > 1
        order by u.ord limit 1;
    end if;
    if code is null then
        v_now := flowfabric.now();
        insert into flowfabric.edge (partition, flow_id, edge_id, upstream, downstream, data_passing_ref, created_at)
        select p_partition, p_flow, u.edge, u.upstream, u.downstream, u.ref, v_now
        from unnest(p_edge, p_upstream, p_downstream, p_ref) as u (edge, upstream, downstream, ref);
        update flowfabric.flow f set edge_count = f.edge_count + v_n, last_mutation_at = v_now
        where f.partition = p_partition and f.flow_id = p_flow;
        if p_apply then
            perform flowfabric.apply_edges(p_partition, p_flow, p_edge);
        end if;
        code := 'ok'; place := null; revision := revision + v_n;
    end if;
    return next;
end;
$$;
