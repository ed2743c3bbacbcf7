-- audit_attempt_orphan: Every attempt belongs to an execution.
create or replace function flowfabric.audit_attempt_orphan(p_low integer, p_high integer) returns setof flowfabric.violation
language sql stable as $$
    select 'attempt_orphan', a.partition, a.id, a.attempt_index::text from flowfabric.attempt a
    where a.partition between p_low and p_high
      and not exists (select from flowfabric.execution x where x.partition = a.partition and x.id = a.id)
$$;
