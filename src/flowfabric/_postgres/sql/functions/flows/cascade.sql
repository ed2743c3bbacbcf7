-- The cascade: from the end of an execution to the executions that wait for it. One hop per transaction.

-- cascade: resolve the outgoing edges of ended executions, at most p_limit of them.
--
-- Takes    per end: the execution, which run of it ended, how, the event, and where to continue (null: from the start).
-- Returns  per end, in order: how many edges were seen, whether all of them were resolved, and if not, the first
--          downstream that remains.
create or replace function flowfabric.cascade(
    p_partition integer[], p_id uuid[], p_run integer[], p_outcome text[], p_event bigint[], p_after uuid[],
    p_limit integer, p_now timestamptz, out resolved integer[], out done boolean[], out next uuid[])
language plpgsql as $$
declare
    v_ord integer[]; v_partition integer[]; v_flow uuid[]; v_edge uuid[]; v_downstream uuid[]; v_outcome text[];
    v_event bigint[];
    v_left integer[] := '{}';
    v_last integer;          -- the last end whose edges were read, if the limit was reached
    v_next uuid;
    v_no integer; v_place integer;
begin
    select array_agg(c.ord), array_agg(c.partition), array_agg(c.flow_id), array_agg(c.edge_id),
           array_agg(c.downstream), array_agg(c.outcome), array_agg(c.event)
    into v_ord, v_partition, v_flow, v_edge, v_downstream, v_outcome, v_event
    from (select u.ord::integer as ord, u.partition, d.flow_id, d.edge_id, d.downstream, u.outcome, u.event
          from unnest(p_partition, p_id, p_run, p_outcome, p_event, p_after)
               with ordinality as u (partition, id, run, outcome, event, after, ord)
          cross join lateral (
              select x.flow_id, x.edge_id, x.downstream from flowfabric.edge x
              where x.partition = u.partition and x.upstream = u.id
                and x.downstream >= coalesce(u.after, flowfabric.zero_uuid())
                and x.applied_at is not null and x.outcome is null and x.from_run <= u.run
              order by x.downstream limit p_limit + 1) d
          limit p_limit + 1) c;
    if v_ord is null then
        select array_agg(0), array_agg(true), array_agg(null::uuid) into resolved, done, next from unnest(p_id);
        return;
    end if;
    if cardinality(v_ord) > p_limit then
        -- One more than allowed: it is where the next call continues.
        v_last := v_ord[p_limit + 1];
        v_next := v_downstream[p_limit + 1];
        v_ord := v_ord[:p_limit]; v_partition := v_partition[:p_limit]; v_flow := v_flow[:p_limit];
        v_edge := v_edge[:p_limit]; v_downstream := v_downstream[:p_limit]; v_outcome := v_outcome[:p_limit];
        v_event := v_event[:p_limit];
    end if;
    v_left := flowfabric.resolve_edges(v_partition, v_flow, v_edge, v_downstream, v_outcome, v_event, p_now);
    resolved := array_fill(0, array[cardinality(p_id)]);
    done := array_fill(true, array[cardinality(p_id)]);
    next := array_fill(null::uuid, array[cardinality(p_id)]);
    foreach v_no in array v_ord loop
        resolved[v_no] := resolved[v_no] + 1;
    end loop;
    for i in coalesce(v_last, cardinality(p_id) + 1) .. cardinality(p_id) loop
        done[i] := false;
    end loop;
    if v_last is not null then
        next[v_last] := v_next;
    end if;
    foreach v_place in array v_left loop
        v_no := v_ord[v_place];
        resolved[v_no] := resolved[v_no] - 1;
        done[v_no] := false;
        next[v_no] := least(next[v_no], v_downstream[v_place]);
    end loop;
end;
$$;
