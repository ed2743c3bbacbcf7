-- Schedules. The caller computes when they fire; here they are stored, and exactly one process advances each.

-- put_schedule: store a schedule under its name; an existing, unchanged one keeps its times.
--
-- Takes    p_expected: change nothing unless the schedule was last changed at this time; null: whatever is stored.
-- Returns  created, changed, unchanged or, with p_expected, mismatch.
-- Roles    work, operate
create or replace function flowfabric.put_schedule(
    p_name text, p_kind text, p_timing text, p_catch_up text, p_payload bytea, p_payload_encoding text, p_options text,
    p_next_at timestamptz, p_expected timestamptz)
returns text
language plpgsql security definer as $$
declare
    v_now timestamptz := flowfabric.now();
    v_same_timing boolean;
    v_same boolean;
begin
    perform flowfabric.check_time(p_next_at);
    loop
        exit when p_expected is not null;
        insert into flowfabric.schedule
            (name, kind, timing, catch_up, payload, payload_encoding, options, next_at, created_at, updated_at)
        values (p_name, p_kind, p_timing::jsonb, p_catch_up, p_payload, p_payload_encoding, p_options::jsonb, p_next_at,
                v_now, v_now)
        on conflict (name) do nothing;
        if found then
            return 'created';
        end if;
        perform from flowfabric.schedule s where s.name = p_name for update;
        exit when found;   -- otherwise it was deleted meanwhile
    end loop;
    if p_expected is not null then
        perform from flowfabric.schedule s where s.name = p_name and s.updated_at = p_expected for update;
        if not found then
            return 'mismatch';
        end if;
    end if;
    select s.timing = p_timing::jsonb,
           s.timing = p_timing::jsonb and s.kind = p_kind and s.catch_up = p_catch_up and s.payload = p_payload
           and s.payload_encoding is not distinct from p_payload_encoding and s.options = p_options::jsonb
    into v_same_timing, v_same
    from flowfabric.schedule s where s.name = p_name;
    if v_same then
        return 'unchanged';
    end if;
    update flowfabric.schedule s
    set kind = p_kind, timing = p_timing::jsonb, catch_up = p_catch_up, payload = p_payload,
        payload_encoding = p_payload_encoding, options = p_options::jsonb, updated_at = v_now,
        next_at = case when v_same_timing then s.next_at else p_next_at end
    where s.name = p_name;
    return 'changed';
end;
$$;
