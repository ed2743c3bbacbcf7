-- forget_waits: delete the waiter rows of these executions.
--
-- Called under their locks. Never waits: a locked row is being consumed by the end of the awaited execution.
create or replace function flowfabric.forget_waits(p_partition integer[], p_id uuid[]) returns void
language plpgsql as $$
begin
    delete from flowfabric.waiter w using (
        select l.tid from unnest(p_partition, p_id) as u (partition, id)
        cross join lateral (select x.ctid as tid from flowfabric.waiter x
                            where x.partition = u.partition and x.id = u.id
                            offset 0 for update skip locked) l) own
    where w.ctid = own.tid;
end;
$$;
