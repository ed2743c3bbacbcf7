-- list_expired_leases: active executions whose lease had expired at a time, marked or not; without revoked ones.
--
-- Returns  the ids of leases only to operators (may_operate).
-- Roles    read, operate
create or replace function flowfabric.list_expired_leases(
    p_as_of timestamptz, p_after_at timestamptz, p_after_id uuid, p_limit integer, p_namespace text)
returns table (partition integer, id uuid, lease_id uuid, epoch bigint, worker_instance_id text,
               lease_expires_at timestamptz, attempt_index integer)
language sql stable security definer as $$
    select e.partition, e.id, case when flowfabric.may_operate() then e.lease_id end, e.epoch, w.worker_instance_id, e.lease_expires_at, e.attempt_index
    from (select u.partition, u.id from flowfabric.timer t
          cross join lateral unnest(t.partitions, t.ids) as u (partition, id)
          where t.kind = 'lease' and t.due_at <= p_as_of
          union
          select r.partition, r.id from flowfabric.ready r where r.available_at is not null) c
    cross join lateral (select x.* from flowfabric.execution x where x.partition = c.partition and x.id = c.id offset 0) e
    left join lateral (select x.worker_instance_id from flowfabric.worker x where x.id = e.worker offset 0) w on true
    where e.state = 'active' and e.lease_lost is distinct from 'revoked' and e.lease_expires_at <= p_as_of
      and (p_namespace is null or e.namespace = p_namespace)
      and (p_after_at is null or (e.lease_expires_at, e.id) > (p_after_at, p_after_id))
    order by e.lease_expires_at, e.id limit p_limit
$$;
