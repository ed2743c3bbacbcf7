-- audit_signal_order: The signals of an execution are numbered without gaps.
create or replace function flowfabric.audit_signal_order(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    select 'signal_order', g.partition, g.id, count(*)::text from flowfabric.signal g
    where (g.partition, g.id) between (p_low, p_from) and (p_high, p_to)
    group by g.partition, g.id
    having count(*) <> max(g.ordinal) or min(g.ordinal) <> 1
        or not exists (select from flowfabric.execution x where x.partition = g.partition and x.id = g.id)
$$;
