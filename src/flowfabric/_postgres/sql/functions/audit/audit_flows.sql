-- audit_flows: the part of the audit that is about flows
--
-- What may lag for a while (cascades, cancels, summaries) is excused by the row that says it is still to be done.
-- Answers  id: the execution, or the flow where the rule is about one.
create or replace function flowfabric.audit_flows(p_partition integer, p_events boolean)
returns table (rule text, partition integer, id uuid, detail text)
language plpgsql stable as $$
#variable_conflict use_column
begin
    return query
    with f as (
        select x.* from flowfabric.flow x where p_partition is null or x.partition = p_partition
    ), d as (
        select x.* from flowfabric.edge x where p_partition is null or x.partition = p_partition
    ), g as (
        select x.* from flowfabric.edge_group x where p_partition is null or x.partition = p_partition
    ), c as (
        select x.* from flowfabric.cancel_member x where p_partition is null or x.partition = p_partition
    ), owed as materialized (
        select x.* from flowfabric.pending_cascade x where p_partition is null or x.partition = p_partition
    ), touched as materialized (
        select distinct x.partition, x.flow_id from flowfabric.flow_touched x where p_partition is null or x.partition = p_partition
    ), wrong as (
        -- the header counts its members and edges, and is closed only by a cancellation
        select 'flow_counts' as rule, f.partition, f.flow_id as id, f.node_count || ' ' || f.edge_count as detail from f
        where f.node_count <> (select count(*) from flowfabric.execution e where e.flow_id = f.flow_id and e.partition = f.partition)
           or f.edge_count <> (select count(*) from flowfabric.edge x where x.partition = f.partition and x.flow_id = f.flow_id)
        union all
        select 'flow_header', f.partition, f.flow_id, f.state from f
        where f.last_mutation_at < f.created_at or not coalesce(case f.state
            when 'open' then num_nonnulls(f.cancelled_at, f.cancel_reason, f.cancellation_policy) = 0
            when 'cancelled' then f.cancelled_at between f.created_at and f.last_mutation_at and f.cancel_reason is not null
                 and f.cancellation_policy in ('cancel_all', 'cancel_pending', 'flow_only') end, false)
        union all
        select 'flow_grew_closed', f.partition, f.flow_id, f.cancelled_at::text from f
        where f.cancelled_at is not null
          and (exists (select from flowfabric.edge x where x.partition = f.partition and x.flow_id = f.flow_id
                       and (x.created_at > f.cancelled_at or x.applied_at > f.cancelled_at))
               or exists (select from flowfabric.execution e where e.flow_id = f.flow_id and e.created_at > f.cancelled_at))
        union all
        select 'flow_missing', e.partition, e.id, e.flow_id::text from flowfabric.execution e
        where e.flow_id is not null and (p_partition is null or e.partition = p_partition)
          and not exists (select from flowfabric.flow x where x.partition = e.partition and x.flow_id = e.flow_id)
        union all
        select 'flow_missing', o.partition, o.id, o.what
        from (select d.partition, d.edge_id as id, d.flow_id, 'edge' as what from d
              union all select g.partition, g.downstream, g.flow_id, 'edge_group' from g
              union all select c.partition, c.id, c.flow_id, 'cancel_member' from c
              union all select o.partition, o.id, o.flow_id, 'pending_cascade' from owed o
              union all select x.partition, x.downstream, x.flow_id, 'sibling_cancel' from flowfabric.sibling_cancel x
              where p_partition is null or x.partition = p_partition
              union all select x.partition, x.flow_id, x.flow_id, 'cancel_backlog' from flowfabric.cancel_backlog x
              where p_partition is null or x.partition = p_partition
              union all select x.partition, x.flow_id, x.flow_id, 'flow_summary' from flowfabric.flow_summary x
              where p_partition is null or x.partition = p_partition) o
        where not exists (select from flowfabric.flow x where x.partition = o.partition and x.flow_id = o.flow_id)
        -- edges: between members, without a cycle, resolved at most once and only after they were applied
        union all
        select 'edge_ends', d.partition, d.edge_id, null from d
        left join flowfabric.execution up on up.partition = d.partition and up.id = d.upstream
        left join flowfabric.execution down on down.partition = d.partition and down.id = d.downstream
        where d.upstream = d.downstream or (up.flow_id = d.flow_id and down.flow_id = d.flow_id) is not true
        union all
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
        union all
        select 'edge_facts', d.partition, d.edge_id, concat_ws(' ', d.outcome, d.applied_at, d.resolved_at) from d
        where d.outcome not in ('success', 'failed', 'cancelled', 'expired', 'skipped') or d.data_passing_ref = ''
           or (d.outcome is null) <> (d.resolved_at is null) or (d.outcome is null and d.resolved_event is not null)
           or d.applied_at < d.created_at or d.resolved_at < d.applied_at or (d.applied_at is null and d.outcome is not null)
        union all
        select 'edge_without_group', d.partition, d.edge_id, d.downstream::text from d
        where d.applied_at is not null and not exists (
            select from flowfabric.edge_group x where x.partition = d.partition and x.flow_id = d.flow_id and x.downstream = d.downstream)
        -- groups: the counters count edges, the state is what they come to
        union all
        select 'group_counts', g.partition, g.downstream, concat_ws(' ', g.n, g.succeeded, g.failed, g.skipped) from g
        where (g.n, g.succeeded, g.failed, g.skipped) <> (
            select count(*), count(*) filter (where x.outcome = 'success'),
                   count(*) filter (where x.outcome in ('failed', 'cancelled', 'expired')),
                   count(*) filter (where x.outcome = 'skipped')
            from flowfabric.edge x where x.partition = g.partition and x.downstream = g.downstream and x.flow_id = g.flow_id
              and x.applied_at is not null)
        union all
        select 'group_policy', g.partition, g.downstream, concat_ws(' ', g.policy, g.k, g.cancel_rest) from g
        where not coalesce(case g.policy when 'all_of' then g.k is null and not g.cancel_rest
                                         when 'any_of' then g.k = 1 when 'quorum' then g.k >= 1 end, false)
        union all
        select 'group_decision', g.partition, g.downstream, g.state from g
        where not coalesce(case
            when g.policy = 'all_of' or g.state = 'pending' then
                g.state = flowfabric.decide(g.policy, g.k, g.n, g.succeeded, g.failed + g.skipped, 'pending')
            when g.state = 'satisfied' then g.succeeded >= g.k
            when g.state = 'impossible' then g.failed + g.skipped > 0 and g.n >= g.k end, false)
        union all
        select 'group_satisfied_at', g.partition, g.downstream, g.state from g
        where (g.satisfied_at is not null) <> (g.state = 'satisfied')
        -- the downstream is where its group wants it
        union all
        select 'held_back', e.partition, e.id, e.state || ' ' || coalesce(g.state, 'no group')
        from flowfabric.execution e
        left join flowfabric.edge_group g on g.partition = e.partition and g.flow_id = e.flow_id and g.downstream = e.id and g.n > 0
        where (p_partition is null or e.partition = p_partition) and e.completed_at is null
          and (e.flow_id is not null or e.state = 'waiting_children') and e.state not in ('active', 'suspended')
          and e.blocking_reason is distinct from 'paused_by_flow_cancel'
          and (e.state = 'waiting_children') <> coalesce(g.state = 'pending', false)
        union all
        select 'impossible_alive', g.partition, g.downstream, e.state from g
        join flowfabric.execution e on e.partition = g.partition and e.id = g.downstream and e.completed_at is null
        where g.state = 'impossible'
          and not exists (select from flowfabric.cancel_member x where x.partition = e.partition and x.id = e.id)
        union all
        select 'skipped_group', e.partition, e.id, g.state from flowfabric.execution e
        left join flowfabric.edge_group g on g.partition = e.partition and g.flow_id = e.flow_id and g.downstream = e.id
        where (p_partition is null or e.partition = p_partition) and e.state = 'skipped' and g.state is distinct from 'impossible'
        union all
        select 'input_row', i.partition, i.id, i.upstream::text from flowfabric.injected_input i
        where (p_partition is null or i.partition = p_partition)
          and not exists (select from flowfabric.execution e join flowfabric.edge x on x.partition = e.partition
                              and x.downstream = e.id and x.upstream = i.upstream and x.data_passing_ref is not null
                          where e.partition = i.partition and e.id = i.id and e.has_inputs)
        union all
        select 'input_row', d.partition, d.edge_id, d.downstream::text from d
        join flowfabric.execution e on e.partition = d.partition and e.id = d.downstream
        where d.passes and not e.has_inputs
        -- the cascade: an end that counts is counted, or a row says that it will be
        union all
        select 'edge_forgotten', d.partition, d.edge_id, up.state from d
        join flowfabric.execution up on up.partition = d.partition and up.id = d.upstream
        where d.applied_at is not null and d.outcome is null
          and d.from_run < up.replays + case when up.completed_at is null then 0 else 1 end
          and not exists (select from owed o where o.partition = d.partition and o.id = d.upstream and o.run >= d.from_run
                          and (o.after is null or o.after <= d.downstream))
        union all
        select 'edge_ahead', d.partition, d.edge_id, d.from_run::text from d
        join flowfabric.execution up on up.partition = d.partition and up.id = d.upstream
        where d.from_run > up.replays + case when up.completed_at is null then 0 else 1 end
        union all
        select 'cascade_row', o.partition, o.id, o.seq::text from owed o
        left join flowfabric.execution e on e.partition = o.partition and e.id = o.id and e.flow_id = o.flow_id
        where e.id is null or o.outcome not in ('success', 'failed', 'cancelled', 'expired', 'skipped')
           or o.run >= e.replays + case when e.completed_at is null then 0 else 1 end
           or (o.run = e.replays and o.outcome <> flowfabric.outcome_of(e.state))
        -- races: siblings are cancelled for a decided group that asks for it, and then all of them
        union all
        select 'sibling_row', s.partition, s.downstream, g.state from flowfabric.sibling_cancel s
        left join flowfabric.edge_group g on g.partition = s.partition and g.flow_id = s.flow_id and g.downstream = s.downstream
        where (p_partition is null or s.partition = p_partition) and g.cancel_siblings_pending is not true
        union all
        select 'sibling_flag', g.partition, g.downstream, concat_ws(' ', g.state, g.cancel_siblings_reason) from g
        where (g.cancel_siblings_pending and not exists (
                   select from flowfabric.sibling_cancel s
                   where s.partition = g.partition and s.flow_id = g.flow_id and s.downstream = g.downstream))
           or ((g.cancel_siblings_pending or g.cancel_siblings_reason is not null)
               and not (g.policy <> 'all_of' and g.cancel_rest and g.state <> 'pending'))
           or g.cancel_siblings_reason is distinct from case when g.policy <> 'all_of' and g.cancel_rest then
                  case g.state when 'satisfied' then 'sibling_quorum_satisfied' when 'impossible' then 'sibling_quorum_impossible' end end
        union all
        select 'sibling_forgotten', g.partition, g.downstream, e.id::text from g
        join flowfabric.edge x on x.partition = g.partition and x.downstream = g.downstream and x.flow_id = g.flow_id
        join flowfabric.execution e on e.partition = x.partition and e.id = x.upstream
        where g.policy <> 'all_of' and g.cancel_rest and g.state <> 'pending' and x.applied_at is not null
          and e.completed_at is null and e.replays = 0
          and not exists (select from flowfabric.sibling_cancel s where s.partition = g.partition and s.flow_id = g.flow_id
                          and s.downstream = g.downstream and e.id = any (s.siblings))
        -- cancelled flows: who is owed a cancel is held back, and nobody else
        union all
        select 'cancel_owed', c.partition, c.id, concat_ws(' ', e.state, e.blocking_reason) from c
        left join flowfabric.execution e on e.partition = c.partition and e.id = c.id and e.flow_id = c.flow_id
        where e.id is null
           or not exists (select from flowfabric.cancel_backlog b where b.partition = c.partition and b.flow_id = c.flow_id)
           or (e.completed_at is null and e.state not in ('active', 'suspended')
               and e.blocking_reason is distinct from 'paused_by_flow_cancel')
        union all
        select 'cancel_backlog', b.partition, b.flow_id, b.cancellation_policy from flowfabric.cancel_backlog b
        left join flowfabric.flow x on x.partition = b.partition and x.flow_id = b.flow_id
        where (p_partition is null or b.partition = p_partition)
          and (x.state is distinct from 'cancelled' or x.cancellation_policy is distinct from b.cancellation_policy
               or x.cancel_reason is distinct from b.reason or b.cancellation_policy not in ('cancel_all', 'cancel_pending')
               or not exists (select from flowfabric.cancel_member m where m.partition = b.partition and m.flow_id = b.flow_id))
        union all
        select 'cancel_forgotten', e.partition, e.id, e.state from f
        join flowfabric.execution e on e.flow_id = f.flow_id and e.partition = f.partition and e.completed_at is null
        where ((f.cancellation_policy = 'cancel_all' and e.replays = 0) or e.blocking_reason = 'paused_by_flow_cancel')
          and not exists (select from flowfabric.cancel_member m where m.partition = e.partition and m.id = e.id)
        -- the summary of a flow that is not marked for counting is what counting gives
        union all
        select 'flow_summary', f.partition, f.flow_id, concat_ws(' ', s.state, n.state) from f
        left join flowfabric.flow_summary s on s.partition = f.partition and s.flow_id = f.flow_id
        left join lateral flowfabric.count_members(f) n on true
        where (to_jsonb(s) - 'updated_at') is distinct from (to_jsonb(n) - 'updated_at')
          and not exists (select from touched t where t.partition = f.partition and t.flow_id = f.flow_id)
    )
    select w.rule, w.partition, w.id, w.detail from wrong w;

    if p_events then
        return query
        select 'edge_event', d.partition, d.edge_id, d.outcome from flowfabric.edge d
        where (p_partition is null or d.partition = p_partition) and d.resolved_event is not null
          and not exists (select from flowfabric.event v where v.seq = d.resolved_event and v.partition = d.partition
                          and v.id = d.upstream and v.outcome = d.outcome)
        union all
        select 'cascade_event', o.partition, o.id, o.outcome from flowfabric.pending_cascade o
        where (p_partition is null or o.partition = p_partition)
          and not exists (select from flowfabric.event v where v.seq = o.seq and v.partition = o.partition
                          and v.id = o.id and v.outcome = o.outcome)
        union all
        select 'cancel_requested_event', f.partition, f.flow_id, count(v.seq)::text from flowfabric.flow f
        left join flowfabric.event v on v.flow_id = f.flow_id and v.operator_type = 'flow_cancel_requested'
        where (p_partition is null or f.partition = p_partition)
        group by f.partition, f.flow_id, f.state
        having count(v.seq) <> case f.state when 'cancelled' then 1 else 0 end;
    end if;
end;
$$;
