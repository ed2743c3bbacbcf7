-- trim_frames: remove the oldest rows of a stream that are beyond its caps.
--
-- It reads the oldest rows only: as many as can be removed, and those that it leaves before them. These are the newest row
-- of each of up to 100 types, which says how many frames of the type a re-run of the handler leaves out, and the window of
-- summary deltas.
-- Called under the lock of the execution.
-- Takes    the number of the last durable frame to remove, how many these are at most, and the last delta to remove.
create or replace function flowfabric.trim_frames(
    p_partition integer, p_id uuid, p_attempt integer, p_durable integer, p_count integer, p_version integer) returns void
language sql volatile as $$
    delete from flowfabric.frame f where f.ctid = any (array(
        select r.tid
        from (select q.*, row_number() over (order by q.is_last desc, q.ms desc, q.n desc) as nth
              from (select x.*, x.type_marks is not null
                           and row_number() over (partition by x.mode, x.frame_type, x.type_marks is null
                                                  order by x.ms desc, x.n desc) = 1 as is_last
                    from (select z.ctid as tid, z.ms, z.n, z.mode, z.durable, z.version, z.frame_type, z.type_marks
                          from flowfabric.frame z
                          where z.partition = p_partition and z.id = p_id and z.attempt_index = p_attempt
                          order by z.ms, z.n limit p_count + 300) x
                    where case x.mode when 'durable' then x.durable <= p_durable else x.version <= p_version end) q) r
        where not r.is_last or r.nth > 100 or r.mode = 'summary'))
$$;
