-- drop_frames: delete the streams and the summary documents of executions.
create or replace function flowfabric.drop_frames(p_partition integer[], p_id uuid[]) returns void
language plpgsql as $$
begin
    -- By key, whatever the statistics say: all frames may be of one stream.
    if exists (select from unnest(p_partition, p_id) as u (partition, id)
               cross join lateral (select from flowfabric.frame f
                                   where f.partition = u.partition and f.id = u.id and f.has_live limit 1) l) then
        delete from flowfabric.live_frame f using (
            select l.slot, l.tid from unnest(p_partition, p_id) as u (partition, id)
            cross join lateral (select x.slot, x.ctid as tid from flowfabric.live_frame x
                                where x.partition = u.partition and x.id = u.id offset 0) l) d
        where f.slot = d.slot and f.ctid = d.tid;
    end if;
    delete from flowfabric.frame f using (
        select l.tid from unnest(p_partition, p_id) as u (partition, id)
        cross join lateral (select x.ctid as tid from flowfabric.frame x
                            where x.partition = u.partition and x.id = u.id offset 0) l) d
    where f.ctid = d.tid;
    delete from flowfabric.summary s using (
        select l.tid from unnest(p_partition, p_id) as u (partition, id)
        cross join lateral (select x.ctid as tid from flowfabric.summary x
                            where x.partition = u.partition and x.id = u.id offset 0) l) d
    where s.ctid = d.tid;
end;
$$;
