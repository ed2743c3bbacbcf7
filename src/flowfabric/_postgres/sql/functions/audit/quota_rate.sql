-- audit_quota_rate: No window has more admissions than its policy allows, unless the policy was changed since.
create or replace function flowfabric.audit_quota_rate(
    p_low integer, p_high integer, p_from uuid, p_to uuid, p_now timestamptz) returns setof flowfabric.violation
language sql stable as $$
    select 'quota_rate', null::integer, p.id, e.key || ': ' || count(*) || '/' || p.max_requests
    from flowfabric.quota_policy p join flowfabric.quota_entry e on e.policy_id = p.id
    where p.max_requests > 0 and e.admitted_at > p.updated_at and e.admitted_at > p_now - flowfabric.window_of(p.window_seconds)
      -- The fence (offset 0) keeps the plan on the key: the index of numbers has every slot of a policy.
      and not exists (select from (select x.policy_id, x.origin from flowfabric.quota_slot x
                                   where x.id = e.id and x.partition = e.partition offset 0) s
                      where s.policy_id = p.id and s.origin = 'direct')
    group by p.id, e.key, p.max_requests having count(*) > p.max_requests
$$;
