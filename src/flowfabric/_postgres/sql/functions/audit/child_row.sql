-- audit_child_row: Only children of executions that were cancelled or expired, and not without them, have to be cancelled.
create or replace function flowfabric.audit_child_row(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    select 'child_row', c.partition, c.id, p.state
    from flowfabric.child_cancel c
    join flowfabric.execution p on p.partition = c.partition and p.id = c.id
    where (c.partition, c.id) between (p_low, p_from) and (p_high, p_to)
      and (p.state not in ('cancelled', 'expired') or p.keeps_children)
$$;
