-- read_cancel_backlog: the members of a cancelled flow that still have to be cancelled.
--
-- Roles    read, submit, work, operate
create or replace function flowfabric.read_cancel_backlog(p_partition integer, p_flow uuid)
returns table (requested_at timestamptz, requester text, reason text, cancellation_policy text, grace_until timestamptz,
               owed uuid[])
language sql stable security definer as $$
    select b.requested_at, b.requester, b.reason, b.cancellation_policy, b.grace_until,
           (select coalesce(array_agg(m.id order by m.id), '{}') from flowfabric.cancel_member m
            where m.partition = b.partition and m.flow_id = b.flow_id)
    from flowfabric.cancel_backlog b where b.partition = p_partition and b.flow_id = p_flow
$$;
