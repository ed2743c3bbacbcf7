-- audit_step_orphan: Every step belongs to an execution and to one of its generations.
create or replace function flowfabric.audit_step_orphan(p_low integer, p_high integer) returns setof flowfabric.violation
language sql stable as $$
    select 'step_orphan', s.partition, s.id, s.name from flowfabric.step s
    left join flowfabric.execution x on x.partition = s.partition and x.id = s.id
    where s.partition between p_low and p_high and (x.id is null or s.generation > x.generation)
$$;
