-- count_emitted: what the current attempt has emitted, so that a re-run of its handler leaves it out
--
-- Called by a worker that continues an attempt, before its handler's first frame.
-- Returns  per mode and type how many frames with a type mark the stream has, and the last mark of all.
-- Roles    work, operate
create or replace function flowfabric.count_emitted(p_partition integer, p_id uuid, p_attempt integer)
returns table (mode text, frame_type text, type_marks integer, marks integer)
language sql stable security definer as $$
    select f.mode, f.frame_type, max(f.type_marks), max(max(f.marks)) over ()
    from flowfabric.frame f
    where f.partition = p_partition and f.id = p_id and f.attempt_index = p_attempt
    group by f.mode, f.frame_type
$$;
