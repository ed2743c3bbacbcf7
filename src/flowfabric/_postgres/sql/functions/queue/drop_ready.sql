-- drop_ready: remove the ready rows of executions, if they have one, and their grants.
create or replace function flowfabric.drop_ready(p_partition integer[], p_id uuid[]) returns void
language plpgsql as $$
begin
    delete from flowfabric.ready r
    using unnest(p_partition, p_id) as u (partition, id)
    join flowfabric.execution e on e.partition = u.partition and e.id = u.id
    where r.route = e.route and r.rank = flowfabric.rank_of(e.priority) and r.created_at = e.created_at and r.id = e.id
      and r.partition = e.partition;
    delete from flowfabric.claim_grant g
    using unnest(p_partition, p_id) as u (partition, id)
    where g.partition = u.partition and g.id = u.id;
end;
$$;
