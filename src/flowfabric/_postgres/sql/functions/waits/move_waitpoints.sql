-- move_waitpoints: move waitpoints that outlive an attempt to the next one; the others are already closed.
create or replace function flowfabric.move_waitpoints(p_tids tid[], p_now timestamptz) returns void
language plpgsql as $$
declare
    v_partitions integer[]; v_ids uuid[];
begin
    select array_agg(e.partition), array_agg(e.id) into v_partitions, v_ids
    from unnest(p_tids) as u (tid) join flowfabric.execution e on e.ctid = u.tid
    where e.has_waitpoints and (e.pending <> 'interrupted' or e.lease_lost is not null);
    if v_ids is not null then
        perform flowfabric.end_waits(v_partitions, v_ids, array_fill(null::text, array[cardinality(v_ids)]), p_now);
        update flowfabric.waitpoint w set attempt_index = e.attempts
        from unnest(v_partitions, v_ids) as u (partition, id)
        join flowfabric.execution e on e.partition = u.partition and e.id = u.id
        cross join lateral (select x.ctid as tid, x.state from flowfabric.waitpoint x
                            where x.partition = u.partition and x.id = u.id offset 0) f
        where w.ctid = f.tid and f.state = 'pending';
    end if;
end;
$$;
