-- forget_workers: remove the numbers of workers that nothing refers to any more; returns how many
--
-- A number is given to claims for one day. If every execution was created later than two days after it, none has it, and
-- none will: from then on (unused_since) only events have it, until the log begins a day later than that. The second day
-- is for a claim that lasts, the third for events whose order is not that of their times.
create or replace function flowfabric.forget_workers(p_now timestamptz, p_limit integer) returns integer
language plpgsql as $$
declare
    v_day constant interval := '1 day';
    v_created_at timestamptz;    -- of the oldest execution
    v_occurred_at timestamptz;   -- of the oldest event
    v_n integer;
begin
    if not exists (select from flowfabric.worker w where w.numbered_at < p_now - v_day) then
        return 0;
    end if;
    select min(f.created_at) into v_created_at
    from flowfabric.route r
    cross join lateral (select e.created_at from flowfabric.execution e where e.route = r.id
                        order by e.created_at limit 1) f;
    update flowfabric.worker w set unused_since = p_now
    where w.unused_since is null and w.numbered_at < least(v_created_at, p_now) - 2 * v_day;
    select e.occurred_at into v_occurred_at from flowfabric.event e order by e.seq limit 1;
    delete from flowfabric.worker w using (
        select x.ctid as tid from flowfabric.worker x
        where x.numbered_at < p_now - v_day and x.unused_since < coalesce(v_occurred_at, p_now) - v_day
        order by x.numbered_at limit p_limit for update skip locked) old
    where w.ctid = old.tid;
    get diagnostics v_n = row_count;
    return v_n;
end;
$$;
