-- reconcile_edges: scan the groups in order for cascades that were missed, and run them.
--
-- Finds nothing unless there is a defect. Takes the position to continue after and returns the last one it checked,
-- null at the end. Groups with many edges make a page shorter: no more of them begin once it has ten for each of p_limit.
-- Roles    work, operate
create or replace function flowfabric.reconcile_edges(
    p_partition integer, p_flow uuid, p_downstream uuid, p_limit integer, p_namespace text, p_tag_key text, p_tag_value text)
returns table (scanned integer, reconciled integer, partition integer, flow_id uuid, downstream uuid)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz := flowfabric.now();
    v_partition integer[]; v_flow uuid[]; v_downstream uuid[]; v_state text[];
    v_edges uuid[]; v_edge_partition integer[]; v_edge_flow uuid[]; v_edge_downstream uuid[]; v_outcome text[];
    v_left integer[] := '{}';
    v_found integer;
begin
    perform flowfabric.require_read_committed();
    reconciled := 0;
    select array_agg(g.partition) filter (where g.before < 10 * p_limit), array_agg(g.flow_id) filter (where g.before < 10 * p_limit),
           array_agg(g.downstream) filter (where g.before < 10 * p_limit), array_agg(g.state) filter (where g.before < 10 * p_limit),
           count(*)
    into v_partition, v_flow, v_downstream, v_state, v_found
    from (select y.*, sum(y.n) over (order by y.partition, y.flow_id, y.downstream) - y.n as before
          from (select x.* from flowfabric.edge_group x
                where (x.partition, x.flow_id, x.downstream) > (
                    coalesce(p_partition, -1), coalesce(p_flow, flowfabric.zero_uuid()),
                    coalesce(p_downstream, flowfabric.zero_uuid()))
                order by x.partition, x.flow_id, x.downstream limit p_limit) y) g;
    scanned := coalesce(cardinality(v_flow), 0);
    if scanned = p_limit or scanned < v_found then
        partition := v_partition[scanned]; flow_id := v_flow[scanned]; downstream := v_downstream[scanned];
    end if;
    -- Applied and unresolved, though the upstream has ended in a run that counts, and no pending row will count it.
    select array_agg(d.edge_id), array_agg(d.partition), array_agg(d.flow_id), array_agg(d.downstream),
           array_agg(flowfabric.outcome_of(up.state))
    into v_edges, v_edge_partition, v_edge_flow, v_edge_downstream, v_outcome
    from unnest(v_partition, v_flow, v_downstream) as u (partition, flow, downstream)
    join flowfabric.edge d on d.partition = u.partition and d.downstream = u.downstream
                          and d.flow_id is not distinct from u.flow
    cross join lateral (select x.* from flowfabric.execution x
                        where x.partition = d.partition and x.id = d.upstream offset 0) up   -- by key
    where d.applied_at is not null and d.outcome is null and up.completed_at is not null and d.from_run <= up.replays
      and (p_namespace is null or up.namespace = p_namespace)
      and (p_tag_key is null or coalesce(up.tags ->> p_tag_key = p_tag_value, false))
      -- Not a join, whose plan could read all of them.
      and (select true from flowfabric.pending_cascade p
           where p.partition = d.partition and p.flow_id = d.flow_id and p.id = up.id limit 1) is null;
    if v_edges is not null then
        v_left := flowfabric.resolve_edges(
            v_edge_partition, v_edge_flow, v_edges, v_edge_downstream, v_outcome,
            array_fill(null::bigint, array[cardinality(v_edges)]), v_now);
        reconciled := cardinality(v_edges) - cardinality(v_left);
    end if;
    -- In waiting_children, though nothing blocks it.
    for v_no in 1 .. scanned loop
        if v_state[v_no] = 'satisfied' and exists (
                select from flowfabric.execution e where e.partition = v_partition[v_no] and e.id = v_downstream[v_no]
                  and e.state = 'waiting_children' and not e.is_parked and e.flow_id = v_flow[v_no]
                  and (p_namespace is null or e.namespace = p_namespace)
                  and (p_tag_key is null or coalesce(e.tags ->> p_tag_key = p_tag_value, false)))
           and flowfabric.promote_blocked(v_partition[v_no], v_downstream[v_no]) = 'ok' then
            reconciled := reconciled + 1;
        end if;
    end loop;
    return next;
end;
$$;
