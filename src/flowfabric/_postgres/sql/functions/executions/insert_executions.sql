-- insert_executions: the rows of new executions and their ready rows; returns how many are claimable immediately.
--
-- Unnests only arrays that every item uses: each further array would cost every row. p_limits: the limit set of each. p_deps:
-- how many edges lead to each. p_parent: the execution whose handler submits them, null for others.
create or replace function flowfabric.insert_executions(
    p_routes integer[], p_code text[], p_route_no integer[], p_partition integer[], p_id uuid[], p_namespace text[],
    p_creator text[], p_payload bytea[], p_payload_encoding text[], p_priority integer[], p_flow uuid[], p_key text[],
    p_tags text[], p_policy text[], p_limits bigint[], p_delay_until timestamptz[], p_delay_ms bigint[],
    p_deadline_at timestamptz[], p_deadline_ms bigint[], p_now timestamptz, p_node text[], p_deps integer[], p_parent uuid)
returns integer
language plpgsql as $$
declare
    v_ready integer;
    v_policy json := case when cardinality(p_policy) = 1 then p_policy[1]::json end;
begin
    if p_policy is not null then
        perform flowfabric.check_policy(u.policy::json)
        from (select distinct x.policy from unnest(p_policy) as x (policy) where x.policy is not null) u;
    end if;
    if num_nonnulls(p_tags, p_delay_until, p_delay_ms, p_deadline_at, p_deadline_ms) > 0 then
        perform flowfabric.check_given(p_tags, p_delay_until || p_deadline_at, p_delay_ms || p_deadline_ms);
    end if;
    with made as (
        insert into flowfabric.execution
            (partition, id, route, created_at, namespace, creator, flow_id, idempotency_key, payload, payload_encoding,
             policy, limits, state, blocking_reason, blocking_detail, pending, priority, tags,
             delay_until, deadline_at, transitioned_at, node, parent_id)
        select u.partition, u.id, p_routes[coalesce(p_route_no[u.ord], 1)], p_now, coalesce(p_namespace[u.ord], ''),
               coalesce(p_creator[u.ord], ''), p_flow[u.ord], p_key[u.ord], u.payload, p_payload_encoding[u.ord],
               coalesce(v_policy, p_policy[u.ord]::json), p_limits[u.ord],
               case when p_deps[u.ord] > 0 then 'waiting_children' when d.until is null then 'waiting' else 'delayed' end,
               case when p_deps[u.ord] > 0 then 'waiting_for_children'
                    when d.until is null then 'waiting_for_worker' else 'waiting_for_delay' end,
               case when p_deps[u.ord] > 0 then p_deps[u.ord] || ' dep(s) unresolved'
                    when d.until is not null
                    then 'delayed until ' || flowfabric.time_text(d.until) end,
               'first', flowfabric.priority_of(p_priority[u.ord]), p_tags[u.ord]::jsonb, d.until,
               coalesce(p_deadline_at[u.ord], p_now + flowfabric.ms(p_deadline_ms[u.ord])), p_now, p_node[u.ord],
               p_parent
        from unnest(p_partition, p_id, p_payload) with ordinality as u (partition, id, payload, ord)
        cross join lateral (
            select case when w.at > p_now then w.at end as until
            from (select coalesce(p_delay_until[u.ord], p_now + flowfabric.ms(p_delay_ms[u.ord])) as at) w) d
        where p_code is null or p_code[u.ord] is null
        returning partition, id, route, priority, created_at, state, deadline_at, limits, namespace
    )
    insert into flowfabric.ready (route, rank, created_at, id, partition, deadline_at, limits, namespace)
    select m.route, flowfabric.rank_of(m.priority), m.created_at, m.id, m.partition, m.deadline_at, m.limits,
           nullif(m.namespace, '')
    from made m where m.state = 'waiting';
    get diagnostics v_ready = row_count;
    if p_limits is not null and p_policy is not null then
        perform flowfabric.create_owned(p_partition, p_id, p_code, p_policy, p_now);
    end if;
    return v_ready;
end;
$$;
