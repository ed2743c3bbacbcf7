-- list_suspended: executions with an open suspension, oldest first.
--
-- Roles    read, operate
create or replace function flowfabric.list_suspended(
    p_partition integer, p_after_at timestamptz, p_after_id uuid, p_limit integer)
returns table (id uuid, suspended_at timestamptz, reason_code text, timeout_at timestamptz)
language sql stable security definer as $$
    select s.id, s.suspended_at, s.reason_code, s.timeout_at from flowfabric.suspension s
    where s.partition = p_partition and s.closed_at is null
      and (p_after_at is null or (s.suspended_at, s.id) > (p_after_at, p_after_id))
    order by s.suspended_at, s.id limit p_limit + 1
$$;
