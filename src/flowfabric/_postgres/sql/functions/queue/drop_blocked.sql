-- drop_blocked: remove executions from the lists of blocked ones, if they are in one.
--
-- Called before their blocking reason changes, under their locks.
create or replace function flowfabric.drop_blocked(p_partition integer[], p_id uuid[]) returns void
language plpgsql as $$
begin
    delete from flowfabric.blocked b where b.ctid = any (array(   -- by position: as in drop_ready
        select f.tid from unnest(p_partition, p_id) as u (partition, id)
        join flowfabric.execution e on e.partition = u.partition and e.id = u.id
        cross join lateral (select x.ctid as tid from flowfabric.blocked x
                            where x.blocking_reason = e.blocking_reason and x.created_at = e.created_at and x.id = e.id
                              and x.partition = e.partition offset 0) f));
end;
$$;
