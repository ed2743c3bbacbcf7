-- sweep_limit_sets: remove limit sets that are stored twice, and those that no execution has
--
-- A set that no execution has is marked first: submissions then store it again. It is removed a day later, when every
-- transaction that may have found it before has ended.
-- Returns  how many were removed.
create or replace function flowfabric.sweep_limit_sets(p_now timestamptz, p_limit integer) returns integer
language plpgsql as $$
declare
    v_n integer;
begin
    with page as (
        select x.ctid as tid, x.digest, x.unused_since, x.unused_xid from flowfabric.limit_set x
        where x.checked_at <= p_now - interval '1 hour'
        order by x.checked_at limit p_limit for update skip locked
    ), judged as (
        select g.*,
               -- Fences (limit, offset 0) keep these on the index of the number.
               (select true from flowfabric.execution e where e.limits = g.digest order by e.created_at limit 1)
                   is not null as used,
               exists (select from (select x.ctid as tid, x.unused_since from flowfabric.limit_set x
                                    where x.digest = g.digest offset 0) y
                       where y.unused_since is null and y.tid < g.tid) as doubled
        from page g
    ), kept as (
        update flowfabric.limit_set l
        set checked_at = p_now, unused_since = case when not j.used then coalesce(j.unused_since, p_now) end,
            unused_xid = case when not j.used then coalesce(j.unused_xid, pg_current_xact_id()) end
        from judged j
        where l.ctid = j.tid and not j.doubled and (j.used or j.unused_since is null or j.unused_since > p_now - interval '1 day'
              or j.unused_xid >= pg_snapshot_xmin(pg_current_snapshot()))
    )
    delete from flowfabric.limit_set l using judged j
    where l.ctid = j.tid and (j.doubled or (not j.used and j.unused_since <= p_now - interval '1 day'
                                            and j.unused_xid < pg_snapshot_xmin(pg_current_snapshot())));
    get diagnostics v_n = row_count;
    return v_n;
end;
$$;
