-- list_waits: the open waitpoints of all executions, the longest waiting first.
--
-- Roles    read, operate
create or replace function flowfabric.list_waits(
    p_after_at timestamptz, p_after_id uuid, p_limit integer, p_lane text, p_namespace text, p_key text)
returns table (partition integer, id uuid, kind text, lane text, namespace text, waitpoint_id uuid, waitpoint_key text,
               state text, reason_code text, created_at timestamptz, timeout_at timestamptz, timeout_behavior text,
               required_signal_names text[], signal_count integer, refused_signal_count integer)
language sql stable security definer as $$
    select w.partition, w.id, r.kind, r.lane, e.namespace, w.waitpoint_id, w.waitpoint_key, w.state, s.reason_code,
           w.created_at, case when w.state = 'active' then s.timeout_at else nullif(w.expires_at, flowfabric.far_date()) end,
           s.timeout_behavior, w.required_signal_names, w.signal_count, w.refused_signal_count
    from flowfabric.waitpoint w
    cross join lateral (select x.route, x.namespace from flowfabric.execution x
                        where x.partition = w.partition and x.id = w.id offset 0) e
    cross join lateral (select x.kind, x.lane from flowfabric.route x where x.id = e.route offset 0) r
    left join lateral (select x.reason_code, x.timeout_at, x.timeout_behavior from flowfabric.suspension x
                       where x.partition = w.partition and x.id = w.id and x.closed_at is null and w.state = 'active'
                       offset 0) s on true
    where w.state in ('pending', 'active') and (w.state = 'active' or w.expires_at > flowfabric.now())
      and (p_after_at is null or (w.created_at, w.waitpoint_id) > (p_after_at, p_after_id))
      and (p_lane is null or r.lane = p_lane) and (p_namespace is null or e.namespace = p_namespace)
      and (p_key is null or w.waitpoint_key = p_key)
    order by w.created_at, w.waitpoint_id limit p_limit + 1
$$;
