-- audit_attempt_orphan: Every attempt belongs to an execution.
create or replace function flowfabric.audit_attempt_orphan(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    select 'attempt_orphan', a.partition, a.id, a.attempt_index::text from flowfabric.attempt a
    where (a.partition, a.id) between (p_low, p_from) and (p_high, p_to)
      and not exists (select from flowfabric.execution x where x.partition = a.partition and x.id = a.id)
$$;
