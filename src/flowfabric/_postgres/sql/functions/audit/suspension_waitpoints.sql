-- audit_suspension_waitpoints: The waitpoints of a suspension are its own, and active exactly while it is open. One of several
-- waits gives them back, and a task's wait that asks again takes them along.
create or replace function flowfabric.audit_suspension_waitpoints(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    select 'suspension_waitpoints', s.partition, s.id, s.suspension_id::text from flowfabric.suspension s
    where (s.partition, s.id) between (p_low, p_from) and (p_high, p_to) and (s.closed_at is null or not s.keeps_waitpoints)
      and (select coalesce(array_agg(w.waitpoint_id order by u.place), '{}')
           from unnest(s.waitpoint_ids) with ordinality as u (waitpoint_id, place)
           join flowfabric.waitpoint w on w.partition = s.partition and w.waitpoint_id = u.waitpoint_id and w.id = s.id
                and (w.suspension_id = s.suspension_id
                     and w.state = case when s.closed_at is null then 'active' else 'closed' end
                     or s.closed_at is not null and w.outlives_attempt
                        and w.suspension_id is distinct from s.suspension_id)) <> s.waitpoint_ids
$$;
