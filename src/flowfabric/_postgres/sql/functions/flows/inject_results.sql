-- inject_results: results of upstreams become the input of their downstreams, if an edge asks for it.
--
-- Called under the locks of the groups, after these edges were resolved. all_of and all_settled: the last success that counts; any_of
-- and quorum: the one that decided the group.
create or replace function flowfabric.inject_results(
    p_partition integer[], p_flow uuid[], p_edge uuid[], p_now timestamptz) returns void
language sql volatile as $$
    with injected as (
    insert into flowfabric.injected_input as i (partition, id, upstream, payload, encoding, injected_at)
    select distinct on (c.partition, c.downstream) c.partition, c.downstream, c.upstream, up.result, up.result_encoding, p_now
    from (select d.*, g.policy, g.k, g.satisfied_at, u.ord,
                 g.succeeded - count(*) filter (where d.outcome = 'success')
                     over (partition by d.partition, d.flow_id, d.downstream)
                 + row_number() over (partition by d.partition, d.flow_id, d.downstream, d.outcome = 'success' order by u.ord) as nth
          from unnest(p_partition, p_flow, p_edge) with ordinality as u (partition, flow, edge, ord)
          join flowfabric.edge d on d.partition = u.partition and d.flow_id = u.flow and d.edge_id = u.edge
               and d.resolved_at = p_now
          join flowfabric.edge_group g on g.partition = d.partition and g.flow_id = d.flow_id and g.downstream = d.downstream) c
    join flowfabric.execution up on up.partition = c.partition and up.id = c.upstream and up.result is not null
    join flowfabric.execution x on x.partition = c.partition and x.id = c.downstream and x.completed_at is null
    where c.outcome = 'success' and c.data_passing_ref is not null
      and (c.policy in ('all_of', 'all_settled') or (c.nth = c.k and c.satisfied_at = p_now))
    order by c.partition, c.downstream, c.ord desc
    on conflict (partition, id) do update
        set upstream = excluded.upstream, payload = excluded.payload, encoding = excluded.encoding,
            injected_at = excluded.injected_at
    returning i.partition, i.id
    )
    update flowfabric.execution e set has_inputs = true from injected i
    where e.partition = i.partition and e.id = i.id and not e.has_inputs
$$;
