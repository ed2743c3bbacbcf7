-- drop_blocked: remove executions from the lists of blocked ones, if they are in one.
--
-- Called before their blocking reason changes, under their locks.
create or replace function flowfabric.drop_blocked(p_partition integer[], p_id uuid[]) returns void
language plpgsql as $$
begin
    delete from flowfabric.blocked b
    using unnest(p_partition, p_id) as u (partition, id)
    join flowfabric.execution e on e.partition = u.partition and e.id = u.id
    where b.blocking_reason = e.blocking_reason and b.created_at = e.created_at and b.id = e.id and b.partition = e.partition;
end;
$$;
