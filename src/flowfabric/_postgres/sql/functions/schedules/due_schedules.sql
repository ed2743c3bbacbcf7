-- due_schedules: the schedules that are due, and the time.
--
-- Roles    work, operate
create or replace function flowfabric.due_schedules(p_limit integer)
returns table (name text, kind text, timing jsonb, catch_up text, payload bytea, payload_encoding text, options jsonb,
               next_at timestamptz, now timestamptz)
language plpgsql volatile security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz := flowfabric.now();
begin
    return query
    select s.name, s.kind, s.timing, s.catch_up, s.payload, s.payload_encoding, s.options, s.next_at, v_now
    from flowfabric.schedule s where not s.paused and s.next_at <= v_now order by s.next_at limit p_limit;
end;
$$;
