-- register_consumer: create a durable consumer of the event log, or compare what it takes with what is stored
--
-- Takes    p_position, p_epoch: where a new one begins; null: at the end of the log. Of one that exists they are ignored.
--          p_redefine: store another definition than before, and keep the position.
-- Locks    the consumer, only to redefine it.
-- Returns  new, known, redefined, or the refusal different; and what is stored.
-- Roles    work, operate
create or replace function flowfabric.register_consumer(
    p_name text, p_families integer, p_filter jsonb, p_position bigint, p_epoch bigint, p_redefine boolean)
returns table (code text, families integer, filter jsonb, log_position bigint, log_epoch bigint)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    c flowfabric.consumer;
    v_position bigint;
    v_epoch bigint;
begin
    perform flowfabric.require_read_committed();
    if octet_length(p_name) not between 1 and 256 or octet_length(p_filter::text) > 4096 then
        raise exception 'the name or the filter is out of bounds' using errcode = 'invalid_parameter_value';
    end if;
    code := 'known';
    if not exists (select from flowfabric.consumer x where x.name = p_name) then
        select p.at, p.epoch into v_position, v_epoch from flowfabric.consumer_position(p_position, p_epoch) p;
        -- An insert waits for a transaction that changes the same row, which may be a long one of a function.
        insert into flowfabric.consumer (name, created_at, families, filter, position, epoch)
        values (p_name, flowfabric.now(), p_families, p_filter, v_position, v_epoch)
        on conflict (name) do nothing;
        code := case when found then 'new' else 'known' end;
    end if;
    select x.* into c from flowfabric.consumer x where x.name = p_name;
    if (c.families, c.filter) is distinct from (p_families, p_filter) then
        code := 'different';
        if p_redefine then
            update flowfabric.consumer x set families = p_families, filter = p_filter where x.name = p_name returning x.* into c;
            code := 'redefined';
        end if;
    end if;
    families := c.families; filter := c.filter; log_position := c.position; log_epoch := c.epoch;
    return next;
end;
$$;

-- consumer_position: where a consumer begins: after a cursor, or at the end of the log (null).
--
-- A cursor after which events are missing is refused (check_cursor). The beginning is the oldest event kept now, not the
-- oldest at the first read: a consumer that exists learns of events that are removed before it reads them (take_consumer).
create or replace function flowfabric.consumer_position(p_position bigint, p_epoch bigint, out at bigint, out epoch bigint)
language plpgsql volatile as $$
begin
    if p_position is null then
        select e.seq, e.log_epoch into at, epoch from flowfabric.count_events(null, null) e;
    elsif p_position = 0 then
        select d.event_floor, l.epoch into at, epoch
        from flowfabric.deployment d, flowfabric.log_epoch l where l.last_position is null;
    else
        perform flowfabric.check_cursor(p_position, p_epoch);
        at := p_position; epoch := p_epoch;
    end if;
end;
$$;
