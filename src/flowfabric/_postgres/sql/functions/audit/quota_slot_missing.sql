-- audit_quota_slot_missing: An active execution holds a slot of each policy that limited it when it was claimed.
create or replace function flowfabric.audit_quota_slot_missing(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with e as materialized (   -- first: from the limit sets, each would read all executions of the range
        select x.* from flowfabric.execution x
        where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to) and x.state = 'active' and x.limits is not null
    )
    select 'quota_slot_missing', e.partition, e.id, p.id::text
    from e
    cross join lateral (select x.quota_ids, x.quota_keys from flowfabric.limit_set x where x.digest = e.limits offset 0) l
    cross join lateral unnest(l.quota_ids, l.quota_keys) as k (id, key)
    join flowfabric.quota_policy p on p.id = k.id
    where (p.max_requests > 0 or p.max_concurrent > 0)
      and p.updated_at < coalesce(e.attempt_resumed_at, e.attempt_started_at)
      and not exists (select from (select x.* from flowfabric.quota_slot x
                                   where x.id = e.id and x.partition = e.partition offset 0) s
                      where s.policy_id = k.id and s.key = k.key and s.until is null)
$$;
