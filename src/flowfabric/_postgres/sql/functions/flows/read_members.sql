-- read_members: the members of a flow for drawings and lists of results, in creation order.
--
-- Takes    p_after_at, p_after_id: continue after this member. p_limit: null means all.
-- Roles    read, submit, work, operate
create or replace function flowfabric.read_members(
    p_flow uuid, p_results boolean, p_after_at timestamptz, p_after_id uuid, p_limit integer)
returns table (partition integer, id uuid, node text, kind text, state text, created_at timestamptz, started_at timestamptz,
               completed_at timestamptz, failure_reason text, failure_category text, cancellation_reason text,
               result bytea, result_encoding text)
language sql stable security definer as $$
    select e.partition, e.id, e.node, r.kind, e.state, e.created_at, coalesce(e.started_at, e.attempt_started_at), e.completed_at, e.failure_reason,
           e.failure_category, e.cancellation_reason, case when p_results then e.result end, e.result_encoding
    from flowfabric.execution e
    cross join lateral (select x.kind from flowfabric.route x where x.id = e.route offset 0) r
    where e.flow_id = p_flow and (p_after_at is null or (e.created_at, e.id) > (p_after_at, p_after_id))
    order by e.created_at, e.id limit p_limit
$$;
