-- list_quota_policies: policies by id, or one, with who holds and who waits for them
--
-- Takes    p_id, p_name: this one. p_prefix: of the name. p_after: those after this id.
-- Returns  per policy: its numbers; how many slots are held, how many admissions its windows have and how many executions
--          it holds back, over all keys (waiting: counted up to 10,000); when the first window that is full has room again.
-- Roles    read, submit, work, operate
create or replace function flowfabric.list_quota_policies(
    p_id uuid, p_name text, p_prefix text, p_after uuid, p_limit integer)
returns table (
    id uuid, name text, key text, window_seconds bigint, max_requests bigint, max_concurrent bigint, jitter_ms bigint,
    created_at timestamptz, updated_at timestamptz, active bigint, admitted bigint, waiting bigint, next_free_at timestamptz)
language sql stable security definer as $$
    select p.id, p.name, p.key, p.window_seconds, p.max_requests, p.max_concurrent, p.jitter_ms, p.created_at, p.updated_at,
           (select count(*) from flowfabric.quota_slot s where s.policy_id = p.id and flowfabric.is_live(s, c.now)),
           coalesce(k.admitted, 0)::bigint,
           (select count(*) from (select from flowfabric.blocked b where b.limit_id = p.id limit 10000) w),
           k.next_free_at
    from (select flowfabric.now() as now) c
    cross join lateral (
        select x.* from flowfabric.quota_policy x
        where (p_id is null or x.id = p_id) and (p_name is null or x.name = p_name)
          and (p_prefix is null or starts_with(x.name, p_prefix)) and (p_after is null or x.id > p_after)
        order by x.id limit p_limit) p
    cross join lateral (
        select sum(g.n) as admitted, min(g.free_at) as next_free_at
        from (select count(*) as n,
                     case when p.max_requests > 0 and count(*) >= p.max_requests
                          then min(e.admitted_at) + flowfabric.window_of(p.window_seconds) end as free_at
              from flowfabric.quota_entry e
              where e.policy_id = p.id and e.admitted_at > c.now - flowfabric.window_of(p.window_seconds)
              group by e.key) g) k
    order by p.id
$$;
