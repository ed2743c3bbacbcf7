-- audit_step_orphan: Every step belongs to an execution and to one of its generations.
create or replace function flowfabric.audit_step_orphan(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    select 'step_orphan', s.partition, s.id, s.name from flowfabric.step s
    left join flowfabric.execution x on x.partition = s.partition and x.id = s.id
    where (s.partition, s.id) between (p_low, p_from) and (p_high, p_to) and (x.id is null or s.generation > x.generation)
$$;
