-- audit_ready_orphan: Every ready row belongs to an execution.
create or replace function flowfabric.audit_ready_orphan(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    select 'ready_orphan', r.partition, r.id, null from flowfabric.ready r
    where r.partition between p_low and p_high
      and not exists (select from flowfabric.execution x where x.partition = r.partition and x.id = r.id)
$$;
