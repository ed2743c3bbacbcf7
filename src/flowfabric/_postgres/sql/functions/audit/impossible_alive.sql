-- audit_impossible_alive: The execution of an impossible group has ended, or is marked to be cancelled.
create or replace function flowfabric.audit_impossible_alive(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with g as (
        select x.* from flowfabric.edge_group x where (x.partition, x.flow_id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'impossible_alive', g.partition, g.downstream, e.state from g
    join flowfabric.execution e on e.partition = g.partition and e.id = g.downstream and e.completed_at is null
    where g.state = 'impossible'
      and not exists (select from flowfabric.cancel_member x where x.partition = e.partition and x.id = e.id offset 0)
$$;
