-- take_consumer: hold a consumer to the end of the transaction, which reads events, acts on them and moves the position
--
-- Called by a process that shares the consumer; only the lock of the row says who works. The others can read who was last
-- so that they do not try at every event.
-- Takes    p_ms: for how long the others should not try.
-- Locks    the consumer; skips it if it is locked.
-- A consumer whose events were removed is refused, as by check_cursor.
-- Returns  taken, with the position; held (another process works, for left_ms), busy (its transaction is open) or missing.
-- Roles    work, operate
create or replace function flowfabric.take_consumer(
    p_name text, p_instance uuid, p_ms bigint, p_host text, p_pid integer)
returns table (code text, log_position bigint, log_epoch bigint, left_ms bigint, families integer, filter jsonb)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    c flowfabric.consumer;
    v_now timestamptz;
    v_floor bigint;
begin
    perform flowfabric.require_read_committed();
    select x.* into c from flowfabric.consumer x where x.name = p_name for update skip locked;
    v_now := clock_timestamp();
    if c.name is null then
        code := case when exists (select from flowfabric.consumer x where x.name = p_name) then 'busy' else 'missing' end;
    elsif c.instance <> p_instance and c.until > v_now then
        code := 'held';
        left_ms := ceil(extract(epoch from c.until - v_now) * 1000);
    else
        code := 'taken';
        update flowfabric.consumer x
        set instance = p_instance, until = v_now + flowfabric.ms(least(p_ms, 60000)), host = left(p_host, 200), pid = p_pid
        where x.name = p_name;
        -- Until its transaction ends no other process can work. Its host may vanish meanwhile, which the server would notice
        -- after two hours; now it notices within half a minute.
        perform set_config('tcp_keepalives_idle', '10', true), set_config('tcp_keepalives_interval', '5', true),
                set_config('tcp_keepalives_count', '3', true);
    end if;
    if code = 'taken' and c.position = 0 then
        -- Its cursor is before the first event; the read checks any other cursor.
        select d.event_floor into v_floor from flowfabric.deployment d where d.event_floor > 0;
        if found then
            raise exception 'events up to % were removed', v_floor using errcode = 'FF006', detail = v_floor || ' ' || c.epoch;
        end if;
    end if;
    log_position := c.position; log_epoch := c.epoch; families := c.families; filter := c.filter;
    return next;
end;
$$;
