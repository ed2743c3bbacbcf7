-- The ordered lease check that every call of a lease holder passes, and the marks of a lost lease.

-- lock_holders: lock the executions of a call and return which items hold a live lease.
--
-- Takes    per item the fence (lease, epoch, attempt) and optionally the attempt index.
-- Locks    the executions, by partition and id.
-- Returns  the time, read once all locks are held, and the ordinals that pass with the tids of their rows, in the
--          order of the ordinals. refuse_holders handles the others. And when the first lease ends: a caller that waits for
--          other locks asks again after that.
create or replace function flowfabric.lock_holders(
    p_partition integer[], p_id uuid[], p_lease uuid[], p_epoch bigint[], p_attempt uuid[], p_index integer[],
    out at timestamptz, out ok integer[], out tids tid[], out until timestamptz)
language plpgsql as $$
begin
    -- Every row is locked, even those that do not pass: materialized, so that the filter stays above the locks.
    with q as materialized (
        select u.ord::integer as ord, e.ctid as tid, e.lease_expires_at,
               e.state = 'active' and e.lease_lost is null
               and e.lease_id = u.lease and e.epoch = u.epoch and e.attempt_id = u.attempt
               and (u.idx is null or u.idx = e.attempt_index) as holds
        from unnest(p_partition, p_id, p_lease, p_epoch, p_attempt, p_index) with ordinality
             as u (partition, id, lease, epoch, attempt, idx, ord)
        join flowfabric.execution e on e.partition = u.partition and e.id = u.id
        order by e.partition, e.id
        for no key update of e
    )
    select array_agg(q.ord order by q.ord), array_agg(q.tid order by q.ord), min(q.lease_expires_at)
    into ok, tids, until
    from q where q.holds;
    at := flowfabric.now();
    if until <= at then
        select array_agg(h.o order by h.o), array_agg(h.tid order by h.o) into ok, tids
        from unnest(ok, tids) as h (o, tid)
        join flowfabric.execution e on e.ctid = h.tid and e.lease_expires_at > at;
    end if;
    ok := coalesce(ok, '{}');
end;
$$;
