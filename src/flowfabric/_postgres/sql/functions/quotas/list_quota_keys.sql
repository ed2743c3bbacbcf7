-- list_quota_keys: the values of a policy's key that hold slots, have admissions in their window, or hold executions back
--
-- Returns  per value, in order: the same numbers.
-- Roles    read, submit, work, operate
create or replace function flowfabric.list_quota_keys(p_id uuid, p_after text, p_limit integer)
returns table (key text, active bigint, admitted bigint, waiting bigint, next_free_at timestamptz)
language sql stable security definer as $$
    select n.key, n.active, n.admitted, n.waiting, n.free_at
    from (select h.key,
                 (select count(*) from flowfabric.quota_slot s
                  where s.policy_id = p.id and s.key = h.key and flowfabric.is_live(s, c.now)) as active, e.admitted,
                 (select count(*) from (select from flowfabric.blocked b
                                        where b.limit_id = p.id and b.limit_key = h.key limit 10000) w) as waiting,
                 case when p.max_requests > 0 and e.admitted >= p.max_requests
                      then e.oldest + flowfabric.window_of(p.window_seconds) end as free_at
          from (select flowfabric.now() as now) c, flowfabric.quota_policy p
          join flowfabric.quota_head h on h.policy_id = p.id and (p_after is null or h.key > p_after)
          cross join lateral (
              select count(*) as admitted, min(x.admitted_at) as oldest from flowfabric.quota_entry x
              where x.policy_id = p.id and x.key = h.key
                and x.admitted_at > c.now - flowfabric.window_of(p.window_seconds)) e
          where p.id = p_id) n
    where n.active + n.admitted + n.waiting > 0
    order by n.key limit p_limit
$$;
