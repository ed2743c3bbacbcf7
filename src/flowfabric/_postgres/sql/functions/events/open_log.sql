-- The event log: numbered by a sequence, and read in that order.
--
-- A number is drawn before its transaction commits, so a reader must not skip one that may still appear. Two rules:
--   * a writer first announces the last number drawn so far, as an advisory lock held to the end of its
--     transaction: every number it draws is larger (open_log);
--   * a reader notes the last number drawn, then reads the announcements, and reads events up to the smallest of them.
--     A writer that is not among them has ended and is visible, or will draw larger numbers (read_events).
-- Numbers are drawn under the execution's lock, so the events of one execution are in the order of its history.

-- open_log: called before events are written; returns the segment they go to.
--
-- In a statement of its own: an insert that calls it may draw the number first, and readers then pass the event over.
-- Never waits: every role that can connect can take an advisory lock, so that an announcement may be taken. An earlier number
-- is as right. The first call of a session checks whether another server writes the log now (begin_epoch): behind a pooler
-- the connections of processes outlive a failover, those of the server do not.
create or replace function flowfabric.open_log(p_at timestamptz) returns smallint
language plpgsql as $$
declare
    v_number bigint;
    v_slot smallint;
    v_is_announced boolean;
begin
    if current_setting('flowfabric.epoch', true) is distinct from 'known' then
        perform flowfabric.begin_epoch();
    end if;
    select n.last_value, flowfabric.slot_of(p_at, d.event_retention) into v_number, v_slot
    from flowfabric.event_number n cross join flowfabric.deployment d;
    for i in 0 .. 99 loop
        v_is_announced := pg_try_advisory_xact_lock_shared(flowfabric.log_key(greatest(v_number - i, 0)));
        exit when v_is_announced;
    end loop;
    -- A session that may only connect holds them all: announce that any number may follow. Readers wait for the end of
    -- this transaction.
    while not v_is_announced loop
        v_is_announced := pg_try_advisory_xact_lock_shared((7084::bigint << 48) | floor(random() * (1::bigint << 48))::bigint);
    end loop;
    -- Notify the processes that follow the log and sleep; under load none does. The clock is read in a subquery, once:
    -- compared with a volatile function, the index would be read from its beginning.
    perform pg_notify('flowfabric_' || f.instance, 'events')
    from flowfabric.follower f where f.until > (select clock_timestamp());
    return v_slot;
end;
$$;

-- log_key: a number as the key of an advisory lock: 16 bits of our own, 48 bits of the number.
create or replace function flowfabric.log_key(p_number bigint) returns bigint
language sql immutable as $$ select (7083::bigint << 48) | p_number $$;
