-- audit_blocked_orphan: Every row of a list of blocked executions belongs to an execution blocked for that reason.
create or replace function flowfabric.audit_blocked_orphan(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    select 'blocked_orphan', b.partition, b.id, b.blocking_reason from flowfabric.blocked b
    where b.partition between p_low and p_high
      and not exists (select from flowfabric.execution x where x.partition = b.partition and x.id = b.id
                      and x.blocking_reason = b.blocking_reason)
$$;
