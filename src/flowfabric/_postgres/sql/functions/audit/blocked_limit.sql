-- audit_blocked_limit: An execution that waits for a budget or a quota names the limit that holds it, in its position.
create or replace function flowfabric.audit_blocked_limit(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    select 'blocked_limit', b.partition, b.id, b.blocking_reason
    from flowfabric.blocked b
    left join flowfabric.execution e on e.partition = b.partition and e.id = b.id
    left join flowfabric.limit_set l on l.digest = e.limits
    where b.partition between p_low and p_high and b.blocking_reason in ('waiting_for_budget', 'waiting_for_quota')
      and not coalesce(e.state = 'rate_limited' and b.rank = flowfabric.rank_of(e.priority)
              and (b.limit_id = flowfabric.zero_uuid() or b.limit_id = any (l.budget_ids)
                    or coalesce(b.needs -> 'budgets' ? b.limit_id::text, false)
                   or (b.limit_id, b.limit_key) in (select k.id, k.key from unnest(l.quota_ids, l.quota_keys) as k (id, key))),
              false)
$$;
