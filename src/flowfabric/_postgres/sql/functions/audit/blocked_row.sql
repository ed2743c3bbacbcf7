-- audit_blocked_row: An execution held back for a listed reason is in that list once.
create or replace function flowfabric.audit_blocked_row(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with e as (
        select x.* from flowfabric.execution x where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'blocked_row', e.partition, e.id, e.blocking_reason from e
    where (select count(*) from flowfabric.blocked b
           where b.partition = e.partition and b.id = e.id and b.created_at = e.created_at
             and b.blocking_reason = e.blocking_reason)
        <> case when e.state not in ('active', 'suspended') and e.blocking_reason in ('waiting_for_budget', 'waiting_for_quota',
                     'waiting_for_capable_worker', 'paused_by_operator', 'paused_by_policy') then 1 else 0 end
$$;
