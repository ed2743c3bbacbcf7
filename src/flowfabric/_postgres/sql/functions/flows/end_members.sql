-- end_members: cancel those of these executions that have not ended. Called under their locks.
create or replace function flowfabric.end_members(
    p_partition integer, p_id uuid[], p_reason text, p_cancelled_by text, p_now timestamptz)
returns void
language plpgsql as $$
begin
    perform flowfabric.end_executions(
        array_agg(e.partition), array_agg(e.id), null, 'cancelled', 'cancelled', null, null, null, null,
        coalesce(nullif(p_reason, ''), 'flow_cancelled'), p_cancelled_by, 'cancelled', 'operator', false, p_now)
    from unnest(p_id) u (id)
    cross join lateral (select x.partition, x.id from flowfabric.execution x
                        where x.partition = p_partition and x.id = u.id and x.completed_at is null offset 0) e
    having count(*) > 0;
end;
$$;
