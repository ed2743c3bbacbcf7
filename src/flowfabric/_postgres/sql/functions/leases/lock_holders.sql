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
declare
    v_holds boolean;
begin
    if cardinality(p_id) = 1 then   -- as below, in a plan that starts faster
        select flowfabric.fits(e, p_lease[1], p_epoch[1], p_attempt[1], p_index[1]), array[e.ctid], e.lease_expires_at
        into v_holds, tids, until
        from flowfabric.execution e where e.partition = p_partition[1] and e.id = p_id[1]
        for no key update;
        if v_holds then
            ok := '{1}';
        else
            tids := null; until := null;
        end if;
    else
        -- Every row is locked, even those that do not pass: materialized, so that the filter stays above the locks.
        with q as materialized (
            select u.ord::integer as ord, e.ctid as tid, e.lease_expires_at,
                   flowfabric.fits(e, u.lease, u.epoch, u.attempt, u.idx) as holds
            from unnest(p_partition, p_id, p_lease, p_epoch, p_attempt, p_index) with ordinality
                 as u (partition, id, lease, epoch, attempt, idx, ord)
            join flowfabric.execution e on e.partition = u.partition and e.id = u.id
            order by e.partition, e.id
            for no key update of e
        )
        select array_agg(q.ord order by q.ord), array_agg(q.tid order by q.ord), min(q.lease_expires_at)
        into ok, tids, until
        from q where q.holds;
    end if;
    at := flowfabric.now();
    if until <= at then
        select array_agg(h.o order by h.o), array_agg(h.tid order by h.o) into ok, tids
        from unnest(ok, tids) as h (o, tid)
        join flowfabric.execution e on e.ctid = h.tid and e.lease_expires_at > at;
    end if;
    ok := coalesce(ok, '{}');
end;
$$;

-- fits: whether a fence is that of the live lease of an execution; whether the lease expired is not asked.
create or replace function flowfabric.fits(
    e flowfabric.execution, p_lease uuid, p_epoch bigint, p_attempt uuid, p_index integer) returns boolean
language sql immutable as $$
    select e.state = 'active' and e.lease_lost is null
           and e.lease_id = p_lease and e.epoch = p_epoch and e.attempt_id = p_attempt
           and (p_index is null or p_index = e.attempt_index)
$$;
