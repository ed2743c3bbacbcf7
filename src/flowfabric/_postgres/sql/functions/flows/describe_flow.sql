-- Reading flows: headers, groups, edges, lists, tags, and the counted summary.

-- describe_flow: the header of a flow, and as columns its groups: one per member with a staged edge into it, by id.
--
-- Roles    read, submit, work, operate
create or replace function flowfabric.describe_flow(p_partition integer, p_flow uuid)
returns table (flow_id uuid, flow_kind text, namespace text, state text, node_count integer, edge_count integer,
               created_at timestamptz, last_mutation_at timestamptz, cancelled_at timestamptz, cancel_reason text,
               cancellation_policy text, tags jsonb, downstreams uuid[], policies text[], ks integer[],
               cancel_rests boolean[], ns integer[], succeededs integer[], faileds integer[], skippeds integer[],
               states text[], satisfied_ats timestamptz[], parent_id uuid)
language sql stable security definer as $$
    select f.flow_id, f.flow_kind, f.namespace, f.state, f.node_count, f.edge_count, f.created_at, f.last_mutation_at,
           f.cancelled_at, f.cancel_reason, f.cancellation_policy, f.tags, g.*, f.parent_id
    from flowfabric.flow f
    cross join lateral (
        select array_agg(d.downstream order by d.downstream), array_agg(coalesce(g.policy, 'all_of') order by d.downstream),
               array_agg(g.k order by d.downstream), array_agg(coalesce(g.cancel_rest, false) order by d.downstream),
               array_agg(coalesce(g.n, 0) order by d.downstream), array_agg(coalesce(g.succeeded, 0) order by d.downstream),
               array_agg(coalesce(g.failed, 0) order by d.downstream), array_agg(coalesce(g.skipped, 0) order by d.downstream),
               array_agg(coalesce(g.state, 'pending') order by d.downstream), array_agg(g.satisfied_at order by d.downstream)
        from (select distinct x.downstream from flowfabric.edge x where x.partition = p_partition and x.flow_id = p_flow) d
        left join lateral (select x.* from flowfabric.edge_group x where x.partition = p_partition and x.flow_id = p_flow
                           and x.downstream = d.downstream offset 0) g on true) g
    where f.partition = p_partition and f.flow_id = p_flow
$$;
