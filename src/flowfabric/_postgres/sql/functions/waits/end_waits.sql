-- end_waits: close the open suspensions and waitpoints of executions whose attempt ends; with p_reason null (another
-- attempt follows) pending waitpoints that outlive an attempt stay.
create or replace function flowfabric.end_waits(p_partition integer[], p_id uuid[], p_reason text[], p_now timestamptz)
returns void
language plpgsql as $$
begin
    update flowfabric.suspension s set closed_at = p_now, close_reason = u.reason
    from unnest(p_partition, p_id, p_reason) as u (partition, id, reason)
    cross join lateral (select x.ctid as tid, x.closed_at from flowfabric.suspension x
                        where x.partition = u.partition and x.id = u.id offset 0) f
    where s.ctid = f.tid and f.closed_at is null;
    update flowfabric.waitpoint w
    set state = 'closed', closed_at = p_now,
        close_reason = case when w.state = 'active' then u.reason else 'attempt_ended' end
    from unnest(p_partition, p_id, p_reason) as u (partition, id, reason)
    cross join lateral (select x.ctid as tid, x.state, x.outlives_attempt from flowfabric.waitpoint x
                        where x.partition = u.partition and x.id = u.id offset 0) f
    where w.ctid = f.tid and f.state in ('pending', 'active') and (u.reason is not null or not f.outlives_attempt);
end;
$$;
