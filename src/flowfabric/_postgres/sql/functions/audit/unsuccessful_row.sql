-- audit_unsuccessful_row: Executions that failed, expired, or were cancelled or skipped are in that list once, by when they
-- were created and ended; others are not.
create or replace function flowfabric.audit_unsuccessful_row(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with e as (
        select x.* from flowfabric.execution x where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'unsuccessful_row', e.partition, e.id, e.state from e
    where (select count(*) + count(*) filter (where w.ended_at is distinct from e.completed_at) from flowfabric.unsuccessful w
           where w.state in ('failed', 'cancelled', 'expired', 'skipped') and w.created_at = e.created_at
             and w.id = e.id and w.partition = e.partition)
        <> case when e.state in ('failed', 'cancelled', 'expired', 'skipped') then 1 else 0 end
$$;
