-- audit_quota_cap: Claims do not pass a cap: no policy has more slots that were asked for than its cap, unless it was changed since.
create or replace function flowfabric.audit_quota_cap(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    select 'quota_cap', null::integer, p.id, s.key || ': ' || count(*) || '/' || p.max_concurrent
    from flowfabric.quota_policy p join flowfabric.quota_slot s on s.policy_id = p.id
    where p.max_concurrent > 0 and s.origin = 'scheduler' and s.until is null and s.admitted_at > p.updated_at
    group by p.id, s.key, p.max_concurrent having count(*) > p.max_concurrent
$$;
