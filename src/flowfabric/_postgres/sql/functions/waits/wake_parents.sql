-- wake_parents: executions ended; the executions parked until then continue.
--
-- Called by end_executions, under its locks. Never waits: a parked execution that is locked gets a timer. Every other removal of waiter rows holds the lock of the execution that waits, so a row
-- that is locked belongs to an execution that is locked too.
create or replace function flowfabric.wake_parents(p_partition integer[], p_id uuid[], p_now timestamptz) returns void
language plpgsql as $$
declare
    v_partitions integer[]; v_ids uuid[];
    v_free_partitions integer[]; v_free_ids uuid[];
begin
    select array_agg(d.partition), array_agg(d.id) into v_partitions, v_ids
    from (select distinct w.partition, w.id from unnest(p_partition, p_id) as u (partition, id)
          cross join lateral (select x.partition, x.id from flowfabric.waiter x
                              where x.awaited_partition = u.partition and x.awaited_id = u.id offset 0) w) d;
    if v_ids is null then
        return;
    end if;
    delete from flowfabric.waiter w using (
        select l.tid from unnest(p_partition, p_id) as u (partition, id)
        cross join lateral (select x.ctid as tid from flowfabric.waiter x
                            where x.awaited_partition = u.partition and x.awaited_id = u.id
                            offset 0 for update skip locked) l) consumed
    where w.ctid = consumed.tid;
    select array_agg(h.partition), array_agg(h.id) into v_free_partitions, v_free_ids
    from (select e.partition, e.id
          from unnest(v_partitions, v_ids) as u (partition, id)
          join flowfabric.execution e on e.partition = u.partition and e.id = u.id
          where e.is_parked
          order by e.partition, e.id for no key update of e skip locked) h;
    if v_free_ids is not null then
        perform flowfabric.promote(v_free_partitions, v_free_ids, p_now);
    end if;
    -- The duty checks the locked ones again. An execution that continues already, or waits for a retry, needs nothing.
    perform flowfabric.set_timers('parked', array_agg(u.partition), array_agg(u.id), array_agg(p_now))
    from unnest(v_partitions, v_ids) as u (partition, id)
    join flowfabric.execution e on e.partition = u.partition and e.id = u.id
    where e.is_parked and (v_free_ids is null or u.id <> all (v_free_ids))
    having count(*) > 0;
    -- A claim that came while one was locked here passed it over.
    perform flowfabric.wake_for(v_partitions, v_ids);
end;
$$;
