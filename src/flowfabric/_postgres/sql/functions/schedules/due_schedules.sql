-- due_schedules: the schedules that are due, and the time.
--
-- A schedule with the overlap `queue` is not due while its last execution has not ended.
-- Returns  live_id: the last execution of a schedule with an overlap, if that has not ended.
-- Roles    work, operate
create or replace function flowfabric.due_schedules(p_limit integer)
returns table (name text, kind text, timing jsonb, catch_up text, payload bytea, payload_encoding text, options jsonb,
               next_at timestamptz, now timestamptz, live_id uuid)
language plpgsql volatile security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz := flowfabric.now();
begin
    return query
    select s.name, s.kind, s.timing, s.catch_up, s.payload, s.payload_encoding, s.options, s.next_at, v_now, l.id
    from flowfabric.schedule s
    left join lateral (select e.id from flowfabric.execution e
                       where s.options ? 'overlap' and e.partition = s.last_partition and e.id = s.last_id
                         and e.state not in ('completed', 'failed', 'cancelled', 'expired', 'skipped')) l on true
    where not s.paused and s.next_at <= v_now and (l.id is null or s.options ->> 'overlap' <> 'queue')
    order by s.next_at limit p_limit;
end;
$$;
