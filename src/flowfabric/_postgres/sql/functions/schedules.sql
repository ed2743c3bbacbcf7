-- Recurring work. When it fires is computed by the caller; here it is stored, and moved on by exactly one of many.

-- put_schedule: store a schedule under its name; one that is there and unchanged keeps its times.
--
-- Answers  created, changed or unchanged.
create or replace function flowfabric.put_schedule(
    p_name text, p_kind text, p_timing text, p_catch_up text, p_payload bytea, p_payload_encoding text, p_options text,
    p_next_at timestamptz)
returns text
language plpgsql security definer set search_path = flowfabric, pg_temp as $$
declare
    v_now timestamptz := flowfabric.now();
    v_same_timing boolean;
    v_same boolean;
begin
    loop
        insert into flowfabric.schedule
            (name, kind, timing, catch_up, payload, payload_encoding, options, next_at, created_at, updated_at)
        values (p_name, p_kind, p_timing::jsonb, p_catch_up, p_payload, p_payload_encoding, p_options::jsonb, p_next_at,
                v_now, v_now)
        on conflict (name) do nothing;
        if found then
            return 'created';
        end if;
        perform from flowfabric.schedule s where s.name = p_name for update;
        exit when found;   -- else it was deleted since
    end loop;
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

create or replace function flowfabric.list_schedules(p_name text, p_after text, p_limit integer)
returns setof flowfabric.schedule
language sql stable security definer set search_path = flowfabric, pg_temp as $$
    select s.* from flowfabric.schedule s
    where (p_name is null or s.name = p_name) and (p_after is null or s.name > p_after collate "C")
    order by s.name limit p_limit
$$;

-- due_schedules: what should have fired by now, and the time.
create or replace function flowfabric.due_schedules(p_limit integer)
returns table (name text, kind text, timing jsonb, catch_up text, payload bytea, payload_encoding text, options jsonb,
               next_at timestamptz, now timestamptz)
language plpgsql volatile security definer set search_path = flowfabric, pg_temp as $$
#variable_conflict use_column
declare
    v_now timestamptz := flowfabric.now();
begin
    return query
    select s.name, s.kind, s.timing, s.catch_up, s.payload, s.payload_encoding, s.options, s.next_at, v_now
    from flowfabric.schedule s where not s.paused and s.next_at <= v_now order by s.next_at limit p_limit;
end;
$$;

-- next_schedule: seconds until the next schedule fires; null when none will.
create or replace function flowfabric.next_schedule() returns double precision
language sql volatile security definer set search_path = flowfabric, pg_temp as $$
    select extract(epoch from s.next_at - flowfabric.now()) from flowfabric.schedule s
    where not s.paused and s.next_at is not null order by s.next_at limit 1
$$;

-- advance_schedule: one row for the caller that moves the schedule on from the time it read; none for all others.
--
-- For a statement that creates what is due behind this row, in the same transaction.
create or replace function flowfabric.advance_schedule(
    p_name text, p_expected timestamptz, p_next timestamptz, p_last timestamptz)
returns table (moved boolean)
language sql volatile security definer set search_path = flowfabric, pg_temp as $$
    update flowfabric.schedule s
    set next_at = p_next, last_at = coalesce(p_last, s.last_at)
    where s.name = p_name and s.next_at = p_expected and not s.paused
    returning true
$$;

-- schedule_made: what a schedule that was moved on in this transaction has made last.
create or replace function flowfabric.schedule_made(p_name text, p_partition integer, p_id uuid) returns boolean
language sql volatile security definer set search_path = flowfabric, pg_temp as $$
    update flowfabric.schedule s set last_partition = p_partition, last_id = p_id where s.name = p_name returning true
$$;

-- set_schedule_paused: answers whether the schedule exists. Going on begins at p_next_at.
create or replace function flowfabric.set_schedule_paused(p_name text, p_paused boolean, p_next_at timestamptz)
returns boolean
language plpgsql security definer set search_path = flowfabric, pg_temp as $$
begin
    update flowfabric.schedule s
    set paused = p_paused, updated_at = flowfabric.now(),
        next_at = case when s.paused and not p_paused then coalesce(p_next_at, s.next_at) else s.next_at end
    where s.name = p_name;
    return found;
end;
$$;

create or replace function flowfabric.delete_schedule(p_name text) returns boolean
language plpgsql security definer set search_path = flowfabric, pg_temp as $$
begin
    delete from flowfabric.schedule s where s.name = p_name;
    return found;
end;
$$;
